"""Rounding a matrix to the numbers of a storage, each to the nearest."""

import torch
from torch import Tensor

from neuronmm_ops.storages import WeightStorage

# Scales are normal bfloat16 numbers, and their products with 240 finite.
MIN_SCALE, MAX_SCALE = 2.0**-120, 2.0**120


def scales_of(matrix: Tensor, storage: WeightStorage) -> Tensor:
    """Return scales such that the largest number of each is the storage's; 1 for zeros."""
    largest = storage.magnitudes(matrix)
    return bfloat16(torch.where(largest > 0, largest / storage.full, 1.0), up=True)


def bfloat16(scale: Tensor, up: bool = False) -> Tensor:
    """Round to bfloat16 numbers, in the values' own dtype: to nearest, or never to less."""
    scale = scale.clamp(MIN_SCALE, MAX_SCALE)
    rounded = scale.bfloat16().to(scale)
    return (
        torch.where(rounded < scale, rounded * (1 + 2**-7), rounded).bfloat16().to(scale)
        if up
        else rounded
    )


def nearest(matrix: Tensor, storage: WeightStorage) -> tuple[Tensor, Tensor]:
    """Return a matrix `[K, N]` rounded to nearest, as the storage holds it, and its scales."""
    storage.shapes(*matrix.shape)  # or it says why it has none
    wide = matrix.double()
    scale = scales_of(wide, storage)
    numbers = storage.nearest(wide / storage.spread(scale, len(wide)))
    return storage.encode(numbers), scale.float()
