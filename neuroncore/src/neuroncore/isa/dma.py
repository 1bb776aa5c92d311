"""DMA: copies between HBM and SBUF, transposes on the way, and copies that add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from neuroncore import core as running
from neuroncore import dtypes
from neuroncore.checks import operands as check
from neuroncore.checks.base import note, refuse
from neuroncore.hardware import DMA_ENGINES, PARTITIONS, Engine
from neuroncore.isa.enums import dge_mode, engine, engine_of, oob_mode, option
from neuroncore.isa.indirect import (
    check_index,
    gathered,
    gathered_columns,
    index_tiles,
    places,
    scatter,
    values_of,
)
from neuroncore.isa.values import SBUF, convert, copy, raw, write
from neuroncore.memory.storage import MemoryRegion
from neuroncore.memory.tensor import NkiTensor
from neuroncore.nl import operators
from neuroncore.timing.trace import DmaCost, InstructionTemplate, NkiInstruction

_REACHED = (SBUF, MemoryRegion.private_hbm, MemoryRegion.shared_hbm)


def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: oob_mode = oob_mode.error,
    dge_mode: dge_mode = dge_mode.unknown,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """dst = src between HBM and SBUF, any dtypes; shapes may differ, element counts may not.

    One of the two may be indirect (`.ap(vector_offset=)`, `.ap(scalar_offset=)`, `select`).
    """
    core = running.active("nki.isa.dma_copy")
    operands = (dst, src)
    if dst.index is not None or src.index is not None:
        operands += index_tiles(dst, src)
    options = (priority, dge_mode, engine, oob_mode)
    done = core.record(core.template(_copy, operands, options), operands)
    return done if name is None else done.named(name)


def _checked(
    opcode: str,
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None,
    mode: dge_mode,
    asked: engine,
) -> str:
    """Rules of every DMA; returns who generates its descriptors."""
    machine = running.active().machine
    check.memory(opcode, "dst", dst, *_REACHED)
    check.memory(opcode, "src", src, *_REACHED)
    _check_sizes(opcode, dst, src)
    if priority is not None:
        check.feature(opcode, machine, "priority", "priority", "leave it out")
        if priority not in (0, 1, 2, 3):
            refuse(f"{opcode}: priority must be 0 to 3; got {priority}")
    trigger = Engine.DMA if asked is engine.unknown else engine_of(opcode, asked)
    if mode is dge_mode.hwdge:
        if asked is not engine.unknown:
            check.engine_runs(opcode, trigger, Engine.SYNC, Engine.SCALAR)
        check.feature(opcode, machine, "hardware_dge", "dge_mode.hwdge", "use dge_mode.unknown")
        if dst.dtype != src.dtype:
            refuse(
                f"{opcode}: dge_mode.hwdge does not cast; dst is {dst.dtype} and src {src.dtype}; "
                "use dge_mode.unknown or cast on an engine"
            )
    elif trigger is not Engine.DMA:
        refuse(f"{opcode}: engine is for dge_mode.hwdge only; leave it engine.unknown")
    return mode.name if mode in (dge_mode.hwdge, dge_mode.swdge) else "none"


def _check_sizes(opcode: str, dst: NkiTensor, src: NkiTensor) -> None:
    if dst.size != src.size:
        refuse(f"{opcode}: dst has {dst.size} elements and src {src.size}; slice them alike")


def copy_cost(dst: NkiTensor, src: NkiTensor, descriptors: str = "none") -> DmaCost:
    """What a copy moves: runs are as long as both sides are contiguous."""
    read_run = src.geometry.run_bytes * dst.dtype.itemsize // src.dtype.itemsize
    run = max(1, min(dst.geometry.run_bytes, read_run))
    moved = max(dst.size * dst.dtype.itemsize, src.size * src.dtype.itemsize)
    rows = max(1, moved // run)
    first, engines, busiest = _shares(rows, *_partitions(dst, src))
    return DmaCost(
        moved,
        rows,
        run,
        first,
        engines,
        ((run, busiest),),
        direction=_direction(dst, src),
        descriptors=descriptors,
        reads=(0, 0 if src.geometry.on_chip else src.size * src.dtype.itemsize),
        writes=(0 if dst.geometry.on_chip else dst.size * dst.dtype.itemsize, 0),
    )


def _shares(rows: int, start: int, count: int) -> tuple[int, int, float]:
    """First engine and number of engines that carry the rows, and the rows of the fullest.

    Engine e serves partitions 8e to 8e+7 (DMA overview); without partitions (HBM to HBM) the
    rows are spread over all engines.
    """
    if not count:
        engines = min(DMA_ENGINES, rows)
        return 0, engines, rows / engines
    each = PARTITIONS // DMA_ENGINES
    first = start // each
    # whole partitions, each with rows/count runs
    return first, (start + count - 1) // each - first + 1, min(count, each) * rows / count


def _partitions(dst: NkiTensor, src: NkiTensor) -> tuple[int, int]:
    for t in (dst, src):
        if t.geometry.on_chip:
            return t.geometry.start, t.geometry.partitions
    return 0, 0


def _direction(dst: NkiTensor, src: NkiTensor) -> str:
    if dst.geometry.on_chip:
        return "sbuf" if src.geometry.on_chip else "load"
    return "store" if src.geometry.on_chip else "hbm"


def _copy(dst: NkiTensor, src: NkiTensor, *rest: Any) -> InstructionTemplate:
    *indices, priority, mode, asked, oob = rest
    oob = option("dma_copy", "oob_mode", oob_mode, oob)
    mode = option("dma_copy", "dge_mode", dge_mode, mode)
    descriptors = _checked("dma_copy", dst, src, priority, mode, asked)
    if dst.index is None and src.index is None:
        cost = copy_cost(dst, src, descriptors)
        return InstructionTemplate(Engine.DMA, 0, copy, "dma_copy", dma=cost)
    if dst.index is not None and src.index is not None:
        refuse("dma_copy: dst and src are both indirect; copy through SBUF in two steps")
    indirect = dst if dst.index is not None else src
    for index in indices:
        check_index("dma_copy", indirect, index)
    if descriptors == "none":
        descriptors = _dynamic_descriptors(indirect)
    skip = oob is oob_mode.skip

    def run(dst: NkiTensor, src: NkiTensor, *indices: NkiTensor) -> None:
        moved = src.index is not None
        values, rows = gathered("dma_copy", src, skip) if moved else (raw(src), None)
        if raw(dst).dtype != values.dtype:
            values = convert(dst, dtypes.to_fp32(values, src.dtype))
        if src.index is None:
            scatter("dma_copy", dst, values, skip)
            return
        target, values = raw(dst), values.reshape(dst.shape)
        if rows is None:
            target[...] = values
        elif rows.any():
            target[rows] = values[rows]

    cost = copy_cost(dst, src, descriptors)
    return InstructionTemplate(Engine.DMA, 0, run, "dma_copy", dma=cost, skips=skip)


def _dynamic_descriptors(t: NkiTensor) -> str:
    """Who makes descriptors that depend on an index: hardware for one offset, else GpSimdE."""
    vector = t.geometry.indirect is not None and t.geometry.indirect[0] == "vector"
    return "swdge" if vector or not running.active().machine.has("hardware_dge") else "hwdge"


_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: tuple[int, ...] | None = None,
    priority: int | None = None,
    dge_mode: dge_mode = dge_mode.unknown,
    oob_mode: oob_mode = oob_mode.error,
    name: str | None = None,
) -> NkiInstruction:
    """dst = src transposed by `axes` on the way to SBUF: (1,0), (2,1,0) or (3,1,2,0)."""
    core = running.active("nki.isa.dma_transpose")
    order = tuple(axes) if axes is not None else _AXES.get(src.ndim, ())
    operands = (dst, src, *index_tiles(src))
    options = (order, priority, dge_mode, oob_mode)
    return core.record(core.template(_transpose, operands, options), operands).named(name)


def _transpose(dst: NkiTensor, src: NkiTensor, *rest: Any) -> InstructionTemplate:
    *indices, axes, priority, mode, oob = rest
    opcode = "dma_transpose"
    oob = option(opcode, "oob_mode", oob_mode, oob)
    mode = option(opcode, "dge_mode", dge_mode, mode)
    if mode is dge_mode.none:
        note(
            f"{opcode}: dge_mode.none is taken as dge_mode.unknown; the documentation names both "
            "as legal and unknown, hwdge and swdge as the only valid ones (nki.isa.dma_transpose)"
        )
        mode = dge_mode.unknown
    if axes != _AXES.get(src.ndim):
        refuse(f"{opcode}: axes must be (1,0), (2,1,0) or (3,1,2,0) by rank; got {axes}")
    shape = tuple([src.shape[a] for a in axes])
    if dst.shape != shape:
        refuse(f"{opcode}: dst must be {list(shape)}; got {dst}")
    check.memory(opcode, "dst", dst, SBUF)
    check.same_dtype(opcode, dst, src)
    if src.dtype.itemsize == 1:  # Trainium2 guide, DMA transpose
        remedy = "view two bytes as one element, or use nc_transpose"
        refuse(f"{opcode}: moves elements of 2 or 4 bytes; got {src}; {remedy}")
    descriptors = _checked(opcode, dst, src, priority, mode, engine.unknown)
    if mode not in (dge_mode.unknown, dge_mode.swdge if indices else dge_mode.hwdge):
        problem = f"dge_mode.{mode.name} does not {'gather' if indices else 'transpose'}"
        refuse(f"{opcode}: {problem}; use dge_mode.unknown")
    if mode is dge_mode.hwdge:
        _check_hwdge_transpose(src)
    for index in indices:
        _check_indirect_transpose(src, index)

    def run(dst: NkiTensor, src: NkiTensor, *indices: NkiTensor) -> None:
        target, skip = raw(dst), oob is oob_mode.skip
        if indices:
            source = gathered_columns(opcode, src, indices[0], skip)
        else:
            source = raw(src) if src.index is None else gathered(opcode, src, skip)[0]
        target[...] = source.transpose(axes).reshape(target.shape)

    if indices:
        descriptors = "swdge"
    elif src.index is not None and descriptors == "none":
        descriptors = _dynamic_descriptors(src) if _hwdge_transposes(src) else "swdge"
    cost = _transpose_cost(dst, src, descriptors)
    return InstructionTemplate(Engine.DMA, 0, run, opcode, dma=cost, skips=oob is oob_mode.skip)


def _hwdge_transposes(src: NkiTensor) -> bool:
    """Shapes that the hardware transposes: 2 bytes, 16 rows, 128 columns at most."""
    rows = src.shape[0] if src.ndim == 2 else src.shape[0] * src.shape[-2]
    legal_rows = (
        rows == 16 if src.ndim == 2 else src.shape[0] in (1, 2, 4, 8, 16) and rows % 16 == 0
    )
    return src.dtype.itemsize == 2 and src.shape[-1] <= 128 and legal_rows


def _check_hwdge_transpose(src: NkiTensor) -> None:
    if not _hwdge_transposes(src):
        refuse(
            f"dma_transpose: dge_mode.hwdge takes 2-byte src [16, <=128], or [1|2|4|8|16, .., n, "
            f"<=128] with a multiple of 16 rows; got {src}; use dge_mode.unknown"
        )


def _check_indirect_transpose(src: NkiTensor, index: NkiTensor) -> None:
    """A gathering transpose: 2-byte HBM rows, a multiple of 16 of them, uint32 indices in SBUF."""
    opcode, machine = "dma_transpose", running.active().machine
    check.feature(
        opcode,
        machine,
        "indirect_transposes",
        "an indirect transpose",
        "gather with dma_copy first",
    )
    check.memory(opcode, "index", index, SBUF)
    check.dtype_in(opcode, "index", index, "uint32")
    p, columns = index.shape[0], index.size // index.shape[0]
    if src.dtype.itemsize != 2 or src.shape[-1] > 128 or src.geometry.on_chip or src.shape[0] % 16:
        refuse(f"{opcode}: indirect src must be 2-byte HBM [16n, .., <=128]; got {src}")
    if p % 16 or p > 128 or (columns > 1 and p != 128) or p * columns < src.shape[0]:
        refuse(f"{opcode}: indices {index} must be [16n <= 128, 1] or [128, n]")


def _transpose_cost(dst: NkiTensor, src: NkiTensor, descriptors: str) -> DmaCost:
    """A transpose keeps all engines busy, whatever its rows (Trainium2 guide)."""
    plain = copy_cost(dst, src, descriptors)
    return replace(
        plain,
        first_engine=0,
        engines=DMA_ENGINES,
        transposes="sbuf" if src.geometry.on_chip else "hbm",
        run_bytes=src.geometry.run_bytes,
        rows=max(1, plain.bytes // src.geometry.run_bytes),
    )


def dma_compute(
    dst: NkiTensor,
    srcs: Sequence[NkiTensor],
    reduce_op: Any,
    scales: Sequence[float] | None = None,
    unique_indices: bool = True,
    oob_mode: oob_mode = oob_mode.error,
    name: str | None = None,
) -> NkiInstruction:
    """dst = reduce_op over (srcs * scales), element by element, on the DMA engines."""
    core = running.active("nki.isa.dma_compute")
    operands = (dst, *srcs, *index_tiles(dst, *srcs))
    factors = tuple(scales) if scales is not None else None
    options = (reduce_op, factors, len(srcs), unique_indices, oob_mode)
    return core.record(core.template(_compute, operands, options), operands).named(name)


def _compute(dst: NkiTensor, *rest: Any) -> InstructionTemplate:
    *operands, op, scales, count, unique, oob = rest
    opcode, tensors = "dma_compute", (dst, *operands[:count])
    oob = option(opcode, "oob_mode", oob_mode, oob)
    srcs, indices = operands[:count], operands[count:]
    alu = operators.alu(op)
    if alu.name != "add":
        refuse(f"{opcode}: reduce_op nl.{alu.name} is not supported; use nl.add")
    if not 1 <= count <= 16:
        refuse(f"{opcode}: takes 1 to 16 sources; got {count}")
    if scales is not None and (len(scales) != count or any(s != 1.0 for s in scales)):
        refuse(f"{opcode}: scales must be 1.0 for each of {count} sources; got {scales}")
    indirect = any(t.index is not None for t in tensors)
    if indirect and (count != 2 or not unique):
        problem = "with a dynamic index it takes two sources and unique_indices=True"
        refuse(f"{opcode}: {problem}; got {count} and {unique}")
    if indirect and not any(s.storage is dst.storage and s.geometry is dst.geometry for s in srcs):
        refuse(f"{opcode}: with a dynamic index one source must be dst itself, {dst}")
    for index in indices:
        check_index(opcode, next(t for t in tensors if t.index is index), index)
    skip = oob is oob_mode.skip
    check.memory(opcode, "dst", dst, *_REACHED)
    for src in srcs:
        check.memory(opcode, "srcs", src, *_REACHED)
        _check_sizes(opcode, dst, src)

    def run(dst: NkiTensor, *operands: NkiTensor) -> None:
        total = np.zeros(dst.shape, np.float32)
        for src in operands[:count]:
            total = total + values_of(opcode, src, skip).reshape(dst.shape)
        if dst.index is None:
            write(dst, total)
        else:
            rows = places(opcode, dst, skip)[1]
            if len(np.unique(rows)) != len(rows):
                problem = "an index occurs twice; the sum would depend on timing"
                refuse(f"{opcode}: {problem}; merge rows first")
            scatter(opcode, dst, convert(dst, total), skip)

    costs = [copy_cost(dst, s) for s in srcs]
    busiest = max(costs, key=lambda c: c.rows)
    cost = replace(
        busiest,
        bytes=sum(c.bytes for c in costs),
        rows=sum(c.rows for c in costs),
        run_bytes=min(c.run_bytes for c in costs),
        runs=tuple([run for c in costs for run in c.runs]),
        descriptors="swdge" if indirect else "none",
        reads=(0, *[c.reads[1] for c in costs]),
        writes=(costs[0].writes[0], *[0] * len(costs)),
    )
    return InstructionTemplate(Engine.DMA, 0, run, opcode, dma=cost, skips=skip)
