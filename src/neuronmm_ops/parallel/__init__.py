"""Tensor parallelism of low-rank layers: each rank of a group holds a part of the factors."""
