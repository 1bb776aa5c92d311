"""Kernels and tests that others published, run unmodified on the simulated core."""
