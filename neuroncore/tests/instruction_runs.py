"""Shared by the tests of the simulated NeuronCore: run instructions, make data, expect errors."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import neuroncore as nc
from neuroncore import core as running
from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.dtypes import DType, dtype_of, from_fp32, from_numpy
from neuroncore.timing.trace import InstructionTemplate

TARGETS = ("trn1", "trn2", "trn3")
FLOATS = (nl.float32, nl.bfloat16, nl.float16, nl.float8_e5m2, nl.float8_e4m3)
INTEGERS = (nl.int8, nl.uint8, nl.int16, nl.uint16, nl.int32, nl.uint32)
bf16 = ml_dtypes.bfloat16
partitions = st.sampled_from([1, 2, 31, 32, 64, 128])
seeds = st.integers(0, 2**16)

OPERATORS: dict[str, Any] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "maximum": max,
    "minimum": min,
}
"""Operators of reductions, on Python numbers."""
START = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -math.inf, "minimum": math.inf}

Body = Callable[[list[nl.NkiTensor], list[nl.NkiTensor]], Any]


def run(body: Callable[..., Any], *arrays: Any, target: str = "trn2") -> Any:
    """Run `body(*hbm_tensors)` as a kernel and return its outputs."""

    @nc.jit
    def kernel(inputs):
        return body(*inputs)

    return nc.simulate(kernel, tuple(arrays), target=target).outputs


@contextmanager
def refused(text: str, placed: bool = True) -> Iterator[None]:
    """The block raises NkiValidationError with this text, on one line, and the kernel's place.

    `.*` stands for anything. What is found after the kernel has run has no place.
    """
    pattern = ".*".join(map(re.escape, text.split(".*")))
    with pytest.raises(nc.NkiValidationError, match=pattern) as raised:
        yield
    assert "\n" not in str(raised.value)
    assert placed == bool(re.search(r"\[\w+\.py:\d+\]$", str(raised.value)))


def noted(text: str) -> Any:
    """The block warns with an NkiWarning that matches a regular expression."""
    return pytest.warns(nc.NkiWarning, match=text)


def refuses(
    text: str, body: Callable[..., Any], *arrays: Any, target: str = "trn2", placed: bool = True
) -> None:
    with refused(text, placed):
        run(body, *arrays, target=target)


def _tile(shape: tuple[int, ...], dtype: DType, memory: nl.MemoryRegion, step: int) -> nl.NkiTensor:
    whole = nl.ndarray((*shape[:-1], shape[-1] * step), dtype, buffer=memory)
    return whole[..., ::step] if step > 1 else whole


def _load(array: nl.NkiTensor, tile: nl.NkiTensor) -> None:
    if tile.buffer is nl.psum:
        staged = nl.ndarray(array.shape, array.dtype)
        nisa.dma_copy(staged, array)
        nisa.tensor_copy(tile, staged, engine=nisa.vector_engine)
    else:
        nisa.dma_copy(tile, array)


def loaded(array: nl.NkiTensor, memory: nl.MemoryRegion = nl.sbuf, step: int = 1) -> nl.NkiTensor:
    """A tile with an HBM tensor's values, in each `step`-th place of the last axis."""
    tile = _tile(array.shape, array.dtype, memory, step)
    _load(array, tile)
    return tile


def stored(tile: nl.NkiTensor) -> nl.NkiTensor:
    """An output in HBM with a tile's values."""
    result = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
    if tile.buffer is nl.psum:
        staged = nl.ndarray(tile.shape, tile.dtype)
        nisa.tensor_copy(staged, tile, engine=nisa.vector_engine)
        tile = staged
    nisa.dma_copy(result, tile)
    return result


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


@dataclass(frozen=True)
class Out:
    """A destination: its shape and dtype, and what it holds before, if anything."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    initial: np.ndarray | None = None


@dataclass(frozen=True)
class Result:
    outputs: tuple[Any, ...]
    templates: list[InstructionTemplate]
    """Of the instructions that the body issued."""

    @property
    def output(self) -> Any:
        assert len(self.outputs) == 1
        return self.outputs[0]


def call(
    body: Body,
    *arrays: np.ndarray,
    outs: list[Out],
    target: str = "trn2",
    memory: nl.MemoryRegion = nl.sbuf,
    step: int = 1,
    mode: str = "execute",
    seed: int = 0,
) -> Result:
    """Run body(dsts, srcs) on tiles of `memory` that take each `step`-th element of the last axis.

    In trace mode the arrays give only shapes and dtypes, and the outputs are specs.
    """
    issued: list[int] = []

    def kernel(arrays: tuple[nl.NkiTensor, ...], initials: tuple[nl.NkiTensor, ...]):
        sources = [loaded(a, memory, step) for a in arrays]
        targets = [_tile(o.shape, dtype_of(o.dtype), memory, step) for o in outs]
        left = list(initials)
        for t, o in zip(targets, outs, strict=True):
            if o.initial is not None:
                _load(left.pop(0), t)
        core = running.active()
        issued.append(len(core.trace.records))
        body(targets, sources)
        issued.append(len(core.trace.records))
        return tuple([stored(t) for t in targets])

    inputs, initials = arrays, tuple([o.initial for o in outs if o.initial is not None])
    if mode == "trace":
        inputs, initials = (
            tuple([nc.TensorSpec(a.shape, from_numpy(a.dtype)) for a in group])
            for group in (inputs, initials)
        )
    done = nc.simulate(kernel, inputs, initials, target=target, mode=mode, seed=seed)
    records = done.profile.launch.cores[0].trace.records[issued[0] : issued[1]]
    return Result(done.outputs, [record[0] for record in records])


def data(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0, scale: float = 1) -> Any:
    """Normal values in a dtype; integers over their whole range."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(dtype, "numpy", dtype))
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)
    return (rng.standard_normal(shape) * scale).astype(np.float32).astype(dtype)


def values(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Random eighths from -8 to 8 (bytes from 0 in unsigned types): many ties, exact sums."""
    kind = dtype_of(dtype)
    low = 0 if kind.kind == "uint" else -64
    drawn = np.random.default_rng(seed).integers(low, 64, shape)
    return (drawn / 8 if kind.is_float else drawn).astype(kind.numpy)


def as_stored(expected: Any, dtype: str) -> np.ndarray:
    """A reference in float64 as an engine writes it: through float32."""
    with np.errstate(all="ignore"):
        wide = np.atleast_1d(np.asarray(expected, np.float64)).astype(np.float32)
        return from_fp32(wide, dtype_of(dtype))


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


def rows_of(array: np.ndarray) -> list[list[float]]:
    """The elements of each partition as Python numbers."""
    return array.reshape(len(array), -1).astype(np.float64).tolist()
