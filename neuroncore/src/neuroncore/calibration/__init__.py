"""Kernels that measure what the clock assumes, the file of their times, and what follows."""
