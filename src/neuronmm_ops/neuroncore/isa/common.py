"""What instructions share: enums, reading and writing operands, choice of engine, costs."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from neuronmm_ops.hardware import MIN_CYCLES, Engine
from neuronmm_ops.neuroncore import checks, dtypes
from neuronmm_ops.neuroncore.memory.storage import MemoryRegion
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor

SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum
SIXTEEN_BIT = ("bfloat16", "float16")

Scalar = float | int | NkiTensor
"""An operand that is a number, or a tile [P, 1] with one number a partition."""


class engine(Enum):  # noqa: N801 - NKI's name
    """Engine of an instruction; `unknown` leaves the choice to the compiler."""

    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    dma = 4
    sync = 6
    unknown = 0


class reduce_cmd(Enum):  # noqa: N801 - NKI's name
    """What happens to the accumulator registers of a reduction."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):  # noqa: N801 - NKI's name
    """Who generates DMA descriptors."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):  # noqa: N801 - NKI's name
    """What an out-of-bounds dynamic index does."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):  # noqa: N801 - NKI's name
    """Performance mode of TensorE."""

    none = "none"
    double_row = "double_row"


class nc_version(Enum):  # noqa: N801 - NKI's name
    """NeuronCore generations."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(Enum):  # noqa: N801 - NKI's name
    """DMA engine of `sendrecv`."""

    dma = 1
    gpsimd_dma = 2


_ENGINES = {
    engine.tensor: Engine.TENSOR,
    engine.vector: Engine.VECTOR,
    engine.scalar: Engine.SCALAR,
    engine.gpsimd: Engine.GPSIMD,
    engine.dma: Engine.DMA,
    engine.sync: Engine.SYNC,
}


def engine_of(asked: engine, default: Engine) -> Engine:
    """The engine asked for, or the default where the choice is left open."""
    if asked is engine.unknown:
        return default
    found = _ENGINES.get(asked)
    if found is None:
        checks.refuse(f"engine must be a member of nki.isa.engine; got {asked!r}")
    return found


def read(t: NkiTensor) -> np.ndarray:
    """Values of an operand in fp32, in its shape."""
    array = t.geometry.array(t.storage)
    return array if array.dtype == np.float32 else dtypes.to_fp32(array, t.dtype)


def raw(t: NkiTensor) -> np.ndarray:
    """An operand as it is stored."""
    return t.geometry.array(t.storage)


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


def scalar(value: Any, like: np.ndarray) -> Any:
    """A number, or a tile [P, 1] shaped to broadcast against `like`."""
    if isinstance(value, NkiTensor):
        return read(value).reshape(-1, *([1] * (like.ndim - 1)))
    return np.float32(value)


def free_cycles(*operands: NkiTensor) -> int:
    """max(64, elements per partition): the cost of most instructions (SDK 2.26 `nki.isa`)."""
    return max(MIN_CYCLES, *[t.geometry.elements for t in operands])


def on_chip(opcode: str, **operands: NkiTensor) -> None:
    """All operands lie in SBUF or PSUM and start on legal partitions."""
    for name, t in operands.items():
        checks.memory(opcode, name, t, SBUF, PSUM)
        checks.start_partition(opcode, name, t)


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
