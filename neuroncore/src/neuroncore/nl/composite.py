"""The other computing functions of `nl`: loads, reductions, matmul, softmax, random numbers.

Each allocates its result and issues the instructions of `nki.isa` that a kernel would write by
hand. The layer is experimental in NKI 0.6; kernels that care for speed use `nki.isa`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from neuroncore import core as running
from neuroncore import isa as nisa
from neuroncore.checks.base import refuse
from neuroncore.checks.operands import trailing_axes
from neuroncore.checks.views import dimension
from neuroncore.dtypes import DType, float32, uint8, uint32
from neuroncore.memory.storage import MemoryRegion
from neuroncore.memory.tensor import NkiTensor
from neuroncore.nl import elementary as nl
from neuroncore.nl.elementary import tile

Axes = int | Sequence[int]


def load(src: NkiTensor, dtype: DType | None = None) -> NkiTensor:
    """A tile in SBUF with the values of an HBM tensor."""
    result = tile(src, dtype)
    nisa.dma_copy(result, src)
    return result


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Write an SBUF tile to an HBM tensor."""
    nisa.dma_copy(dst, value)


def load_transpose2d(src: NkiTensor, dtype: DType | None = None) -> NkiTensor:
    """A tile in SBUF with an HBM matrix transposed."""
    _check_matrix("load_transpose2d", src)
    result = tile(src, shape=(src.shape[1], src.shape[0]))
    nisa.dma_transpose(result, src)
    return _cast(result, dtype)


def transpose(x: NkiTensor, dtype: DType | None = None) -> NkiTensor:
    """x.T of a matrix in SBUF by TensorE; in PSUM, unless a cast brings it to SBUF."""
    _check_matrix("transpose", x)
    result = _psum((x.shape[1], x.shape[0]), x.dtype)
    nisa.nc_transpose(result, x)
    return _cast(result, dtype)


def _check_matrix(name: str, x: NkiTensor) -> None:
    if x.ndim != 2:
        refuse(f"nl.{name}: takes two dimensions; got {x}; reshape it")


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """x.T @ y in PSUM, fp32; needs transpose_x=True."""
    if not transpose_x:
        refuse("nl.matmul: needs transpose_x=True; give x transposed, contraction on partitions")
    result = _psum((x.geometry.elements, y.geometry.elements), float32)
    nisa.nc_matmul(result, x, y)
    return result


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """A view with a new dimension of size 1."""
    return x.expand_dim(axis)


def broadcast_to(x: NkiTensor, shape: tuple[int, ...], dtype: DType | None = None) -> NkiTensor:
    """A tile whose dimensions of size 1 are repeated; partitions by DMA. `x` if nothing changes."""
    shape = tuple(shape)
    if len(shape) != x.ndim or any(a not in (1, b) for a, b in zip(x.shape, shape, strict=True)):
        refuse(f"nl.broadcast_to: {x} does not broadcast to {list(shape)}; only size 1 repeats")
    if shape == x.shape:
        return _cast(x, dtype)
    source = x
    for dim in range(1, x.ndim):
        if shape[dim] != x.shape[dim]:
            source = source.broadcast(dim, shape[dim])
    if shape[0] == x.shape[0]:
        return nl.copy(source, dtype)
    if source.geometry.memory is MemoryRegion.psum:
        source = nl.copy(source)
    result = tile(source, dtype, shape)
    repeated = source.geometry.derive(shape, (0, *source.strides[1:]), source.offset)
    nisa.dma_copy(result, source.with_geometry(repeated, None))
    return result


def where(condition: NkiTensor, x: Any, y: Any, dtype: DType | None = None) -> NkiTensor:
    """x where condition is not 0, else y; x or y may be a number."""
    like = x if isinstance(x, NkiTensor) else y if isinstance(y, NkiTensor) else condition
    dtype = dtype or like.dtype
    result = tile(condition, dtype)
    if isinstance(y, NkiTensor):
        nisa.tensor_copy(result, y)
    else:
        nisa.memset(result, y)
    source = _cast(x, dtype) if isinstance(x, NkiTensor) else x
    nisa.tensor_copy_predicated(result, source, nl.not_equal(condition, 0.0, uint8))
    return result


# reductions over the last free dimensions


def _reduction(name: str, text: str, op: Any) -> Any:
    def function(
        x: NkiTensor, axis: Axes, dtype: DType | None = None, keepdims: bool = False
    ) -> NkiTensor:
        return _reduced(x, op, axis, dtype, keepdims)

    return nl.named(function, name, f"{text} over the last free dimension, or several.")


sum = _reduction("sum", "Sum", nl.add)  # noqa: A001 - NKI's names
prod = _reduction("prod", "Product", nl.multiply)
max = _reduction("max", "Largest element", nl.maximum)  # noqa: A001
min = _reduction("min", "Smallest element", nl.minimum)  # noqa: A001


def all(x: NkiTensor, axis: Axes, dtype: DType | None = None) -> NkiTensor:  # noqa: A001
    """1 where no element over the last free dimension, or several, is 0."""
    return _reduced(x, nl.logical_and, axis, dtype, False)


def mean(x: NkiTensor, axis: Axes, dtype: DType | None = None, keepdims: bool = False) -> NkiTensor:
    """Mean over the last free dimension, or several; fp32 inside."""
    total = _reduced(x, nl.add, axis, float32, keepdims)
    return nl.multiply(total, 1 / _count(x, axis), dtype or x.dtype)


def var(x: NkiTensor, axis: Axes, dtype: DType | None = None, keepdims: bool = False) -> NkiTensor:
    """Variance over the last free dimension, or several; always keeps them, with size 1."""
    centre = _like(mean(x, axis, float32, keepdims=True), x)
    away = nl.subtract(x, centre, float32)
    return mean(nl.square(away), axis, dtype or x.dtype, keepdims=True)


def softmax(x: NkiTensor, axis: Axes = -1, dtype: DType | None = None) -> NkiTensor:
    """exp(x - max) / sum of it, over the last free dimension, or several."""
    top = _reduced(x, nl.maximum, axis, float32, True)
    raised = nl.exp(nl.subtract(x, _like(top, x), float32))
    share = nl.reciprocal(_reduced(raised, nl.add, axis, float32, True))
    return nl.multiply(raised, _like(share, x), dtype or x.dtype)


def rms_norm(
    x: NkiTensor,
    w: NkiTensor,
    axis: Axes,
    n: int,
    epsilon: float = 1e-06,
    dtype: DType | None = None,
    compute_dtype: DType | None = None,
) -> NkiTensor:
    """x / sqrt(sum(x * x) / n + epsilon) * w, over the last free dimension, or several."""
    inside = compute_dtype or float32
    total = _reduced(nl.square(x, inside), nl.add, axis, inside, True)
    inverse = tile(total, inside)
    nisa.tensor_scalar(inverse, total, nl.multiply, 1 / n, op1=nl.add, operand1=epsilon)
    inverse = nl.rsqrt(inverse)
    return nl.multiply(nl.multiply(x, _like(inverse, x), inside), w, dtype or x.dtype)


# random numbers and gathers


def random_seed(seed: NkiTensor) -> None:
    """Seed VectorE's generator with a [1, 1] tile of 32 bits."""
    nisa.set_rng_seed(seed)


def rand(
    shape: tuple[int, ...],
    dtype: DType,
    buffer: MemoryRegion = MemoryRegion.sbuf,
    name: str = "",
) -> NkiTensor:
    """Uniform random numbers in [0, 1)."""
    core = running.active("nl.rand")
    bits = core.allocate(shape, uint32, MemoryRegion.sbuf)
    nisa.rng(bits)
    nisa.tensor_scalar(bits, bits, nl.right_shift, 8)
    result = core.allocate(shape, dtype, buffer, name)
    nisa.tensor_scalar(result, bits, nl.multiply, 2.0**-24)
    return result


def dropout(x: NkiTensor, rate: Any, dtype: DType | None = None) -> NkiTensor:
    """x with elements set to 0 at random, with probability `rate`: a number or a tile [P, 1]."""
    result = tile(x)
    nisa.dropout(result, x, rate)
    return _cast(result, dtype)


def gather_flattened(
    data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: DType | None = None
) -> NkiTensor:
    """Per partition, the elements of the flattened free dimensions that uint32 `indices` name."""
    if axis != 0:
        refuse(f"nl.gather_flattened: axis must be 0; got {axis}")
    result = tile(data, shape=indices.shape)
    nisa.nc_n_gather(result, data, indices)
    return _cast(result, dtype)


def _psum(shape: tuple[int, ...], dtype: DType) -> NkiTensor:
    return running.active("nki.language").allocate(shape, dtype, MemoryRegion.psum)


def _cast(x: NkiTensor, dtype: DType | None) -> NkiTensor:
    return x if dtype is None or dtype == x.dtype else nl.copy(x, dtype)


def _axes(x: NkiTensor, axis: Axes) -> tuple[int, ...]:
    named = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple(sorted([dimension(x, a) for a in named]))
    trailing_axes(x, axes)
    return axes


def _count(x: NkiTensor, axis: Axes) -> int:
    return math.prod([x.shape[a] for a in _axes(x, axis)])


def _reduced(x: NkiTensor, op: Any, axis: Axes, dtype: DType | None, keepdims: bool) -> NkiTensor:
    axes = _axes(x, axis)
    outer = x.shape[: axes[0]]
    ones = len(axes) if keepdims else int(len(outer) == 1)  # a tile has two dimensions at least
    result = tile(x, dtype, (*outer, *[1] * ones))
    nisa.tensor_reduce(result, op, x, axes, keepdims=keepdims)
    return result


def _like(reduced: NkiTensor, x: NkiTensor) -> NkiTensor:
    """A view of a tile with dimensions of size 1, repeated to the shape of `x`."""
    for dim in range(1, x.ndim):
        if reduced.shape[dim] != x.shape[dim]:
            reduced = reduced.broadcast(dim, x.shape[dim])
    return reduced
