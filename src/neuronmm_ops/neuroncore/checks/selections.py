"""Rules of selections, gathers, random numbers and exchanges.

Source: NKI 0.6 documentation, `nki.isa`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from neuronmm_ops.neuroncore.checks.base import refuse
from neuronmm_ops.neuroncore.memory.storage import MemoryRegion

if TYPE_CHECKING:
    from neuronmm_ops.neuroncore.memory.tensor import NkiTensor
    from neuronmm_ops.neuroncore.nl.operators import AluOp


FP32_MIN = -3.4028234663852886e38


def affine_pattern(opcode: str, pattern: tuple[tuple[int, int], ...], elements: int) -> None:
    """One to four pairs [step, count] whose counts multiply to the elements per partition."""
    if not 1 <= len(pattern) <= 4 or any(n < 1 for _, n in pattern):
        refuse(f"{opcode}: pattern is one to four [step, count] pairs; got {list(pattern)}")
    total = prod([n for _, n in pattern])
    if total != elements:
        refuse(
            f"{opcode}: pattern {list(pattern)} has {total} elements and dst {elements} per "
            "partition; make them equal"
        )


def int32(opcode: str, **values: Any) -> None:
    """Compile-time integers of 32 bits."""
    for name, value in values.items():
        if not isinstance(value, int) or not -(2**31) <= value < 2**31:
            refuse(f"{opcode}: {name} must be an int32; got {value!r}")


def comparison(opcode: str, operand: str, alu: AluOp, *allowed: str) -> None:
    """The operator compares."""
    if alu.name not in allowed:
        names = ", ".join([f"nl.{n}" for n in allowed])
        refuse(f"{opcode}: {operand} must be one of {names}; got nl.{alu.name}")


def number(opcode: str, operand: str, value: Any) -> None:
    """A compile-time number."""
    if not isinstance(value, int | float):
        refuse(f"{opcode}: {operand} must be a number; got {value!r}")


def float_dtype(opcode: str, operand: str, t: NkiTensor) -> None:
    """Floats only."""
    if not t.dtype.is_float:
        refuse(f"{opcode}: {operand} must be of a float type; {t} is {t.dtype}")


def range_fill(value: Any) -> None:
    """The hardware fills with the lowest float32."""
    if value != FP32_MIN:
        refuse(
            f"range_select: on_false_value must be {FP32_MIN!r}, the lowest float32; got {value!r}"
        )


def range_indices(start: Any, elements: int) -> None:
    """Indices are compared in float32, exact below 2**24."""
    if not isinstance(start, int) or abs(start) + elements > 2**24:
        refuse(
            f"range_select: range_start {start!r} plus {elements} elements must be ints within "
            "2**24; compare against shifted bounds"
        )


def dtype_not_in(opcode: str, operand: str, t: NkiTensor, *excluded: str) -> None:
    """Any dtype but some."""
    if t.dtype in excluded:
        refuse(f"{opcode}: {operand} must not be {', '.join(excluded)}; {t} is {t.dtype}")


def shuffle_mask(mask: tuple[Any, ...]) -> None:
    """32 source partitions, 255 for "leave as it is"."""
    if len(mask) != 32 or not all(isinstance(m, int) and (0 <= m < 32 or m == 255) for m in mask):
        refuse(f"nc_stream_shuffle: shuffle_mask is 32 numbers, 0 to 31 or 255; got {list(mask)}")


def shuffle_source(mask: tuple[int, ...], partition: int, src: NkiTensor) -> None:
    """Each partition copies from one that the source has, in the same quadrant."""
    source = partition // 32 * 32 + mask[partition % 32]
    if mask[partition % 32] != 255 and source >= src.geometry.partitions:
        refuse(
            f"nc_stream_shuffle: partition {partition} of dst copies partition {source}, which "
            f"{src} lacks; a shuffle stays within each 32 partitions"
        )


def shuffle_start(operand: str, t: NkiTensor, active: int) -> None:
    """96 and 128 active partitions start at 0, 64 at 0 or 64, 32 at a quadrant."""
    legal = (0,) if active > 64 else (0, 64) if active > 32 else (0, 32, 64, 96)
    if t.geometry.start not in legal:
        refuse(
            f"nc_stream_shuffle: {operand} {t} starts at partition {t.geometry.start}; {active} "
            f"active partitions start at {' or '.join(map(str, legal))}"
        )


def gather_run(count: Any) -> None:
    """Elements read per index."""
    if count not in (1, 2, 4, 8, 16, 32):
        refuse(f"local_gather: num_elem_per_idx must be 1, 2, 4, 8, 16 or 32; got {count!r}")


def gather_indices(count: Any, available: int) -> None:
    """No more valid indices than there are, and 4096 per GpSimd core at most."""
    if not isinstance(count, int) or not 1 <= count <= min(available, 4096):
        refuse(
            f"local_gather: {count!r} valid indices per core; each 16 partitions of index hold "
            f"{available}, and a core takes 4096 at most; set num_valid_indices"
        )


def in_bounds(opcode: str, indices: Any, low: int, high: int) -> None:
    """Data-dependent: indices stay in the source; `indices` is an array."""
    if indices.size and (int(indices.min()) < low or int(indices.max()) >= high):
        refuse(
            f"{opcode}: indices run from {int(indices.min())} to {int(indices.max())} and must be "
            f"{low} to {high - 1}"
        )


def probability(value: Any) -> None:
    """A drop probability."""
    number("dropout", "prob", value)
    if not 0 <= value <= 1:
        refuse(f"dropout: prob must be 0 to 1; got {value!r}")


def thirty_two_bits(opcode: str, operand: str, t: NkiTensor) -> None:
    """A 32-bit dtype."""
    if t.dtype.itemsize != 4:
        refuse(f"{opcode}: {operand} must be of a 32-bit type; {t} is {t.dtype}")


def ordered_bounds(low: Any, high: Any) -> None:
    """Numbers, min < max."""
    number("rand2", "min", low)
    number("rand2", "max", high)
    if not low < high:
        refuse(f"rand2: min must be below max; got {low!r} and {high!r}")


def two_cores(opcode: str, cores: int) -> None:
    """Exchanges need the second core."""
    if cores != 2:
        refuse(f"{opcode}: needs two cores and the launch has {cores}; call kernel[2](...)")


def barrier_cores(cores: Any) -> None:
    """All cores of the launch."""
    if tuple(cores) != (0, 1):
        refuse(f"core_barrier: cores must be (0, 1); got {cores!r}")


def shared(opcode: str, data: Any) -> None:
    """A tensor that both cores see."""
    if getattr(data, "buffer", None) is not MemoryRegion.shared_hbm:
        refuse(f"{opcode}: data must be a tensor in shared_hbm; got {data!r}")


def ranks(send: Any, receive: Any) -> None:
    """Ranks of the two cores."""
    if send not in (0, 1) or receive not in (0, 1):
        refuse(f"sendrecv: ranks must be 0 or 1; got send_to {send!r} and recv_from {receive!r}")


def same_shape(opcode: str, dst: NkiTensor, src: NkiTensor) -> None:
    """Both sides have one shape."""
    if dst.shape != src.shape:
        refuse(f"{opcode}: src and dst must have one shape; got {src} and {dst}")


def gpsimd_bytes(t: NkiTensor) -> None:
    """Limits of GpSimd's own DMA, per partition: 1024, 512 and 256 bytes by element size."""
    size, limit = t.geometry.elements * t.dtype.itemsize, 256 * t.dtype.itemsize
    if size > limit:
        refuse(
            f"sendrecv: dma_engine.gpsimd_dma moves {limit} bytes per partition of {t.dtype}; {t} "
            f"has {size}; use dma_engine.dma"
        )


def counterparts(mine: Sequence[Any], other: Sequence[Any]) -> None:
    """Both cores come to the same instruction with matching operands."""
    if tuple(mine) != tuple(other):
        refuse(
            f"core_barrier/sendrecv: {tuple(mine)} meets the other core's {tuple(other)}; both "
            "cores must issue the same exchanges in one order"
        )


def delivered(rank: int, sent_to: int) -> None:
    """What a core receives was sent to it."""
    if sent_to != rank:
        refuse(
            f"sendrecv: core {rank} receives from a core that sends to {sent_to}; ranks must match"
        )
