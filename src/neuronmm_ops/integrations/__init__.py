"""Engines that serve compressed checkpoints. Each imports its package here, never the reverse."""
