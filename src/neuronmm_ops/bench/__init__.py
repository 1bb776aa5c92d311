"""Measured and modelled benchmarks."""
