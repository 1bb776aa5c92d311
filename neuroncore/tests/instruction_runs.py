"""Shared by the tests of the simulated NeuronCore: run instructions, expect errors."""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import neuroncore as nc
from neuroncore import core as running
from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.dtypes import DType, dtype_of, from_numpy
from neuroncore.timing.trace import InstructionTemplate

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


def refusals(*cases: tuple[Any, ...], target: str = "trn2") -> Any:
    """Parametrize a test by text, body and target, that of all cases which name none."""
    rows = [(text, body, *(own or [target])) for text, body, *own in cases]
    return pytest.mark.parametrize(("text", "body", "target"), rows)


def new(*shape: int, dtype: Any = nl.float32, buffer: Any = nl.sbuf, **options: Any) -> Any:
    """A tensor that nothing has written."""
    return nl.ndarray(shape, dtype_of(dtype), buffer, **options)


def full(value: Any, *shape: int, dtype: Any = nl.float32, buffer: Any = nl.sbuf) -> Any:
    return nl.full(shape, value, dtype_of(dtype), buffer)


zeros = functools.partial(full, 0)


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
    memories: Any = nl.sbuf,
    into: Any = None,
    step: int = 1,
) -> Any:
    """Run `body(dst, *tiles)` and return what the fresh tile dst [shape] of dtype then holds.

    `memories` is that of all tiles, and of dst where `into` does not say, or those of each.
    """

    def kernel(*inputs):
        where = memories if isinstance(memories, tuple) else (memories,) * len(inputs)
        tiles = [loaded(x, m, step) for x, m in zip(inputs, where, strict=True)]
        own = into or (nl.sbuf if isinstance(memories, tuple) else memories)
        dst = _tile(shape, dtype_of(dtype), own, step)
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
