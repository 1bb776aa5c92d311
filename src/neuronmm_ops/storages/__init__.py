"""How factors are stored where that is not the model's dtype: a file a storage.

To add one: a file as `int8.py`, its line in `STORAGES`, and what loads its tiles in
`kernels/stages/weights.py`, unless a DMA can. Imports torch only where it computes: the kernels
read this table, too.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from neuronmm_ops.storages.fp8 import Fp8
from neuronmm_ops.storages.int4 import Int4
from neuronmm_ops.storages.int8 import Int8
from neuronmm_ops.storages.storage import WeightStorage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STORAGES: dict[str, WeightStorage] = {storage.name: storage for storage in (Fp8(), Int8(), Int4())}
BY_DTYPE = {storage.dtype: storage for storage in STORAGES.values()}
# Filled by the first call that brings a torch dtype. Not functools.cache: each call of an op asks,
# and torch.compile warns of a cached function in what it traces.
_BY_TORCH_DTYPE: dict[torch.dtype, WeightStorage] = {}
COMPUTES = tuple(dict.fromkeys(name for each in STORAGES.values() for name in each.computes))
"""What products may be computed in: the dtype of x, or e4m3 where the factors are that, too."""
SCALE_BYTES = 4
# The names of a layer's tensors that are moved but never cast.
FACTORS = ("u", "v")
SCALES = ("u_scale", "v_scale")


def checked(name: str | None, option: str = "storage") -> str | None:
    """Return a storage's name, or None, which is the model's dtype; ValueError names the option."""
    if name is not None and name not in STORAGES:
        raise ValueError(f"{option} must be {' or '.join(STORAGES)}, got {name!r}")
    return name


def storage_of(dtype: torch.dtype) -> WeightStorage | None:
    """Return the storage whose tensors have that dtype; None for floats, which need no scale."""
    if not _BY_TORCH_DTYPE:
        _BY_TORCH_DTYPE.update({each.torch_dtype: each for each in STORAGES.values()})
    return _BY_TORCH_DTYPE.get(dtype)


def tensor_dtype(storage: str | None, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of factors in a storage; None is the model's `dtype`."""
    return dtype if storage is None else STORAGES[storage].torch_dtype


def dtype_name(storage: str | None) -> str | None:
    """Return what JSON calls a storage: its numbers' dtype, as torch and torchao name it."""
    return None if storage is None else STORAGES[storage].dtype


def storage_named(name: object) -> str:
    """Return the storage that `dtype_name` calls so; ValueError where there is none."""
    if not isinstance(name, str) or name not in BY_DTYPE:
        raise ValueError(f"storage must be {' or '.join(BY_DTYPE)}, or null; got {name!r}")
    return BY_DTYPE[name].name


def size_of(matrix: Tensor) -> tuple[int, ...]:
    """Return `[K, N]` of a stored matrix; the shape of any other tensor."""
    storage = storage_of(matrix.dtype)
    return tuple(matrix.shape) if storage is None else storage.size(*matrix.shape)


def dequantized(matrix: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a stored matrix `[K, N]`, rounded once to `dtype`; without scales what is given."""
    storage = storage_of(matrix.dtype)
    return matrix if storage is None or scale is None else storage.dequantize(matrix, scale, dtype)


def pair_shapes(K: int, N: int, r: int, storage: str | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a pair's tensors by name: u `[K, r]`, v `[r, N]` and their scales."""
    if storage is None:
        return {"u": (K, r), "v": (r, N)}
    (u, u_scale), (v, v_scale) = STORAGES[storage].shapes(K, r), STORAGES[storage].shapes(r, N)
    return {"u": u, "v": v, "u_scale": u_scale, "v_scale": v_scale}


def matrix_bytes(shape: tuple[int, ...], itemsize: int, stored: str | None = None) -> int:
    """Return the bytes of a matrix `[K, N]` and its scales.

    `stored` is what `dtype_name` calls its storage; without one its elements have `itemsize` bytes.
    """
    if not stored:
        return prod(shape) * itemsize
    tensor, scale = BY_DTYPE[stored].shapes(*shape)
    return prod(tensor) + SCALE_BYTES * prod(scale)


def factor_bytes(K: int, N: int, r: int, itemsize: int, storage: str | None = None) -> int:
    """Return the bytes of u `[K, r]`, v `[r, N]` and their scales, as `matrix_bytes`."""
    stored = dtype_name(storage)
    return matrix_bytes((K, r), itemsize, stored) + matrix_bytes((r, N), itemsize, stored)
