"""Rules of DMA: copies, transposes, sums, dynamic addresses.

Source: NKI 0.6 documentation, `nki.isa.dma_copy`, `dma_transpose` and `dma_compute`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neuronmm_ops.hardware import Engine, Machine
from neuronmm_ops.neuroncore.checks.base import refuse
from neuronmm_ops.neuroncore.checks.operands import dtype_in, generation, memory
from neuronmm_ops.neuroncore.memory.storage import MemoryRegion

if TYPE_CHECKING:
    from neuronmm_ops.neuroncore.memory.tensor import NkiTensor


def dma_sizes(opcode: str, dst: NkiTensor, src: NkiTensor) -> None:
    """Source and destination have the same number of elements."""
    if dst.size != src.size:
        refuse(f"{opcode}: dst has {dst.size} elements and src {src.size}; slice them alike")


def dma_generation(
    opcode: str, machine: Machine, mode: str, engine: Engine, dst: NkiTensor, src: NkiTensor
) -> None:
    """hwdge: NeuronCore-v3 on, no cast, triggered by sync or scalar engine."""
    if mode == "hwdge":
        generation(opcode, machine, 3, "dge_mode.hwdge", "use dge_mode.unknown")
        if dst.dtype != src.dtype:
            refuse(
                f"{opcode}: dge_mode.hwdge does not cast; dst is {dst.dtype} and src {src.dtype}; "
                "use dge_mode.unknown or cast on an engine"
            )
    elif engine is not Engine.DMA:
        refuse(f"{opcode}: engine is for dge_mode.hwdge only; leave it engine.unknown")


def dma_priority(opcode: str, machine: Machine, priority: int | None) -> None:
    """Priority 0 to 3, NeuronCore-v4."""
    if priority is not None:
        generation(opcode, machine, 4, "priority", "leave it out")
        if priority not in (0, 1, 2, 3):
            refuse(f"{opcode}: priority must be 0 to 3; got {priority}")


def indirect_sides(dst: NkiTensor, src: NkiTensor) -> None:
    """One side of a copy is indirect, not both."""
    if dst.index is not None and src.index is not None:
        refuse("dma_copy: dst and src are both indirect; copy through SBUF in two steps")


def dynamic_bounds(t: NkiTensor, fine: bool) -> None:
    """A dynamic index within bounds, unless oob_mode.skip."""
    if not fine:
        refuse(f"dma_copy: a dynamic index runs out of {t}; check it or use oob_mode.skip")


def dma_transpose_axes(src: NkiTensor, dst: NkiTensor, axes: tuple[int, ...], legal: Any) -> None:
    """Axes (1,0), (2,1,0) or (3,1,2,0); dst has exactly the transposed shape."""
    if legal is None or axes != legal:
        refuse(f"dma_transpose: axes must be (1,0), (2,1,0) or (3,1,2,0) by rank; got {axes}")
    shape = tuple([src.shape[a] for a in axes])
    if dst.shape != shape:
        refuse(f"dma_transpose: dst must be {list(shape)}; got {dst}")


def hwdge_transpose(src: NkiTensor) -> None:
    """Shapes that the hardware transposes: 2 bytes, 16 rows, 128 columns at most."""
    rows = src.shape[0] if src.ndim == 2 else src.shape[0] * src.shape[-2]
    legal_rows = (
        rows == 16 if src.ndim == 2 else src.shape[0] in (1, 2, 4, 8, 16) and rows % 16 == 0
    )
    if src.dtype.itemsize != 2 or src.shape[-1] > 128 or not legal_rows:
        refuse(
            f"dma_transpose: dge_mode.hwdge takes 2-byte src [16, <=128], or [1|2|4|8|16, .., n, "
            f"<=128] with a multiple of 16 rows; got {src}; use dge_mode.unknown"
        )


def indirect_transpose(machine: Machine, src: NkiTensor, index: NkiTensor) -> None:
    """A gathering transpose: 2-byte HBM rows, a multiple of 16 of them, uint32 indices in SBUF."""
    generation("dma_transpose", machine, 3, "an indirect transpose", "gather with dma_copy first")
    memory("dma_transpose", "index", index, MemoryRegion.sbuf)
    dtype_in("dma_transpose", "index", index, "uint32")
    p, columns = index.shape[0], index.size // index.shape[0]
    if src.dtype.itemsize != 2 or src.shape[-1] > 128 or src.geometry.on_chip or src.shape[0] % 16:
        refuse(f"dma_transpose: indirect src must be 2-byte HBM [16n, .., <=128]; got {src}")
    if p % 16 or p > 128 or (columns > 1 and p != 128) or p * columns < src.shape[0]:
        refuse(f"dma_transpose: indices {index} must be [16n <= 128, 1] or [128, n]")


def dma_compute(dst: NkiTensor, srcs: list[NkiTensor], alu: Any, scales: Any) -> None:
    """Sums of at most 16 sources, scales of 1."""
    if alu.name != "add":
        refuse(f"dma_compute: reduce_op nl.{alu.name} is not supported; use nl.add")
    if not 1 <= len(srcs) <= 16:
        refuse(f"dma_compute: takes 1 to 16 sources; got {len(srcs)}")
    if scales is not None and (len(scales) != len(srcs) or any(s != 1.0 for s in scales)):
        refuse(f"dma_compute: scales must be 1.0 for each of {len(srcs)} sources; got {scales}")


def read_modify_write(dst: NkiTensor, srcs: list[NkiTensor], unique: bool) -> None:
    """dma_compute with an index: two sources, one of them where `dst` is, indices unique."""
    if len(srcs) != 2 or not unique:
        refuse(
            "dma_compute: with a dynamic index it takes two sources and unique_indices=True; got "
            f"{len(srcs)} and {unique}"
        )
    if not any(s.storage is dst.storage and s.geometry is dst.geometry for s in srcs):
        refuse(f"dma_compute: with a dynamic index one source must be dst itself, {dst}")


def repeated_indices(unique: bool) -> None:
    """A scatter that adds needs indices without repetition."""
    if not unique:
        refuse(
            "dma_compute: an index occurs twice; the sum would depend on timing; merge rows first"
        )


def index_operand(opcode: str, t: NkiTensor, index: NkiTensor) -> None:
    """An index tile: integers in SBUF, one per row of a vector-indexed view."""
    memory(opcode, "index", index, MemoryRegion.sbuf)
    if not index.dtype.is_integer:
        refuse(f"{opcode}: index must be integers; got {index}")
    indirect = t.geometry.indirect
    if indirect is not None and indirect[0] == "vector" and index.size != t.shape[0]:
        refuse(f"{opcode}: {t} needs {t.shape[0]} indices, one a row; got {index}")


def transpose_mode(mode: str, indirect: bool) -> None:
    """dma_transpose takes dge_mode.unknown, hwdge if direct, swdge if it gathers."""
    if mode not in ("unknown", "swdge" if indirect else "hwdge"):
        refuse(
            f"dma_transpose: dge_mode.{mode} does not {'gather' if indirect else 'transpose'}; "
            "use dge_mode.unknown"
        )
