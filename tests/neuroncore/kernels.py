"""Shared by the tests of the simulated NeuronCore: run instructions, make data, expect errors."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import neuronmm_ops.neuroncore.isa as nisa
import neuronmm_ops.neuroncore.language as nl
from neuronmm_ops import neuroncore as nc

TARGETS = ("trn1", "trn2", "trn3")
FLOATS = (nl.float32, nl.bfloat16, nl.float16, nl.float8_e5m2, nl.float8_e4m3)
INTEGERS = (nl.int8, nl.uint8, nl.int16, nl.uint16, nl.int32, nl.uint32)
bf16 = ml_dtypes.bfloat16


def run(body: Callable[..., Any], *arrays: Any, target: str = "trn2") -> Any:
    """Run `body(*hbm_tensors)` as a kernel and return its outputs."""

    @nc.jit
    def kernel(inputs):
        return body(*inputs)

    return nc.simulate(kernel, tuple(arrays), target=target).outputs


def refused(match: str) -> Any:
    """The kernel breaks a rule, with this text and the line of this kernel."""
    return pytest.raises(nc.NkiValidationError, match=match)


def refuses(match: str, body: Callable[..., Any], *arrays: Any, target: str = "trn2") -> None:
    with refused(match):
        run(body, *arrays, target=target)


def loaded(array: Any, memory: Any = nl.sbuf) -> Any:
    """A tile with an HBM tensor's values."""
    tile = nl.ndarray(array.shape, array.dtype)
    nisa.dma_copy(tile, array)
    if memory is nl.psum:
        in_psum = nl.ndarray(array.shape, array.dtype, nl.psum)
        nisa.tensor_copy(in_psum, tile)
        return in_psum
    return tile


def stored(tile: Any) -> Any:
    """An output in HBM with a tile's values."""
    out = nl.ndarray(tile.shape, tile.dtype, nl.shared_hbm)
    if tile.buffer is nl.psum:
        tile = nl.copy(tile)
    nisa.dma_copy(out, tile)
    return out


def compute(
    body: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: Any,
    *arrays: Any,
    target: str = "trn2",
    memories: tuple[Any, ...] = (),
    into: Any = nl.sbuf,
) -> Any:
    """Run `body(dst, *tiles)` and return what the fresh tile dst [shape] of dtype then holds."""

    def kernel(*inputs):
        where = memories or (nl.sbuf,) * len(inputs)
        tiles = [loaded(x, m) for x, m in zip(inputs, where, strict=True)]
        dst = nl.ndarray(shape, dtype, into)
        body(dst, *tiles)
        return stored(dst)

    return run(kernel, *arrays, target=target)


def data(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0, scale: float = 1) -> Any:
    """Normal values in a dtype; integers over their whole range."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(dtype, "numpy", dtype))
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)
    return (rng.standard_normal(shape) * scale).astype(np.float32).astype(dtype)


def wide(x: Any) -> Any:
    """Values in fp64."""
    return np.asarray(x).astype(np.float64)


def rounded(values: Any, dtype: Any) -> Any:
    """Independent statement of a conversion from fp32: nearest even, saturating to integers."""
    values = np.asarray(values, np.float32)
    target = np.dtype(getattr(dtype, "numpy", dtype))
    if target.kind in "iu":
        bounds = np.iinfo(target)
        whole = np.rint(values.astype(np.float64))
        return np.minimum(np.maximum(whole, bounds.min), bounds.max).astype(target)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(target)


def equal(got: Any, expected: Any) -> None:
    """Bit-equal dtypes and values, NaN equal to NaN."""
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(wide(got), wide(expected).reshape(got.shape))


partitions = st.sampled_from([1, 2, 31, 32, 64, 128])
seeds = st.integers(0, 2**16)
