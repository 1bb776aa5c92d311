"""Engines that serve compressed checkpoints, a package each, with the core's dependencies only.

Importing one imports no engine: that happens in the functions that the engine calls.
"""
