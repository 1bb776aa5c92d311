"""How instructions read, compute and write values; accumulators of engines; common costs."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuroncore import dtypes
from neuroncore.core import SimulatedCore
from neuroncore.hardware import MIN_CYCLES, PARTITIONS, Engine
from neuroncore.memory.storage import MemoryRegion
from neuroncore.memory.tensor import NkiTensor
from neuroncore.nl import operators

SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum
SIXTEEN_BIT = ("bfloat16", "float16")

_IDENTITY = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}


def read(t: NkiTensor) -> np.ndarray:
    """Values of an operand in fp32, in its shape."""
    array = t.geometry.array(t.storage)
    return array if array.dtype == np.float32 else dtypes.to_fp32(array, t.dtype)


def raw(t: NkiTensor) -> np.ndarray:
    """An operand as it is stored."""
    return t.geometry.array(t.storage)


def flat(values: np.ndarray) -> np.ndarray:
    """[P, elements per partition]."""
    return values.reshape(len(values), -1)


def scalar(value: Any, like: np.ndarray) -> Any:
    """A number, or a tile [P, 1] shaped to broadcast against `like`."""
    if isinstance(value, NkiTensor):
        return read(value).reshape(-1, *([1] * (like.ndim - 1)))
    return np.float32(value)


def write(t: NkiTensor, values: np.ndarray) -> None:
    """Convert fp32 values to the destination's dtype: nearest even, saturating to integers."""
    target = t.geometry.array(t.storage)
    target[...] = convert(t, values.reshape(target.shape))


def convert(t: NkiTensor, values: np.ndarray) -> np.ndarray:
    """fp32 values as what the destination stores."""
    itself = t.dtype is t.storage.layout.dtype
    if itself and t.storage.store == np.float32 and t.dtype != "tfloat32":
        return values
    return dtypes.from_fp32(values, t.dtype)


def write_bits(t: NkiTensor, values: np.ndarray) -> None:
    """Write integers of any width as they are, wrapping where the destination is narrower."""
    target = raw(t)
    target[...] = values.astype(target.dtype).reshape(target.shape)


def write_integers(dst: NkiTensor, values: np.ndarray) -> None:
    """Convert int64 values to the destination's dtype: exact or saturated, floats through fp32."""
    if dst.dtype.is_integer:
        bounds = np.iinfo(dst.dtype.numpy)
        write_bits(dst, values.clip(bounds.min, bounds.max))
    else:
        write(dst, values.astype(np.float32))


def copy(dst: NkiTensor, src: NkiTensor) -> None:
    """Copy values: bit exact where the dtypes agree, else through fp32."""
    target, source = raw(dst), raw(src)
    if target.dtype == source.dtype:
        target[...] = source.reshape(target.shape)
    else:
        write(dst, read(src))


def registers(core: SimulatedCore, data: NkiTensor, engine: str = "vector") -> np.ndarray:
    """An engine's fp32 accumulators of the partitions of `data`, NaN where undefined; a view."""
    accumulators = core.state.setdefault(engine, np.full(PARTITIONS, np.nan, np.float32))
    start = data.geometry.start
    return accumulators[start : start + data.geometry.partitions]


def started(
    core: SimulatedCore, data: NkiTensor, command: str, alu: operators.AluOp, initial: Any = None
) -> np.ndarray:
    """The accumulators [P] after what a reduce command does first: reset, load or leave them."""
    sums = registers(core, data)
    if command == "reset_reduce":
        sums[:] = _IDENTITY[alu.name]
    elif command == "load_reduce":
        sums[:] = np.reshape(scalar(initial, sums[:, None]), -1)
    elif command == "idle":
        sums[:] = np.nan
    return sums


def write_reduced(
    core: SimulatedCore,
    dst: NkiTensor,
    result: NkiTensor | None,
    data: NkiTensor,
    command: str,
    alu: operators.AluOp,
    values: np.ndarray,
    initial: Any = None,
    negate: bool = False,
) -> None:
    """Write fp32 values to dst, and their reduction over the free dimensions to result [P, 1]."""
    sums = started(core, data, command, alu, initial)
    if command != "idle":
        sums[:] = alu.apply(sums, operators.reduce(alu, flat(values), (1,)))
    write(dst, values)
    if result is not None:
        write(result, -sums if negate else sums)


def free_cycles(*operands: NkiTensor) -> int:
    """max(64, elements per partition): the cost of most instructions (SDK 2.26 `nki.isa`)."""
    return max(MIN_CYCLES, *[t.geometry.elements for t in operands])


def copy_cycles(fast: bool, dst: NkiTensor, src: NkiTensor, chosen: Engine) -> float:
    """Cycles of tensor_copy and tensor_scalar, with VectorE's 16-bit modes (Trainium2 guide).

    4x where both are 16-bit, contiguous and in SBUF; 2x in SBUF but strided, or contiguous with
    one side in PSUM.
    """
    n = free_cycles(dst, src)
    if not (fast and chosen is Engine.VECTOR):
        return n
    if dst.dtype not in SIXTEEN_BIT or src.dtype not in SIXTEEN_BIT:
        return n
    in_psum = (dst.geometry.memory is PSUM) + (src.geometry.memory is PSUM)
    contiguous = dst.geometry.unit_stride and src.geometry.unit_stride
    speed = {0: 4 if contiguous else 2, 1: 2 if contiguous else 1}.get(in_psum, 1)
    return max(MIN_CYCLES, src.geometry.elements / speed)
