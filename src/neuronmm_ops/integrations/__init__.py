"""Compressed checkpoints in the engines that serve them. No engine is imported here."""
