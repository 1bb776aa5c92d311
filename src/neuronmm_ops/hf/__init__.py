"""Transformers: which modules, saving and loading, generation."""
