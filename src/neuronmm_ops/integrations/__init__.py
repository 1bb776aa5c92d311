"""Engines that serve compressed checkpoints, a package each. None is imported before it is used."""
