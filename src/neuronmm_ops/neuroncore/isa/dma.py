"""DMA: copies between HBM and SBUF, transposes on the way, and copies that add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from neuronmm_ops.hardware import DMA_ENGINES, DMA_TRANSPOSE_SHARE, PARTITIONS, Engine
from neuronmm_ops.neuroncore import core as running
from neuronmm_ops.neuroncore import dtypes
from neuronmm_ops.neuroncore.checks import dma as dma_check
from neuronmm_ops.neuroncore.checks import operands as check
from neuronmm_ops.neuroncore.isa.enums import dge_mode, engine, engine_of, oob_mode
from neuronmm_ops.neuroncore.isa.values import SBUF, convert, copy, raw, read, write
from neuronmm_ops.neuroncore.memory.storage import MemoryRegion
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor, VirtualRegister
from neuronmm_ops.neuroncore.nl import operators
from neuronmm_ops.neuroncore.timing.trace import DmaCost, InstructionTemplate, NkiInstruction

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
    indices = _indices(dst, src)
    options = (priority, dge_mode, engine, oob_mode)
    operands = (dst, src, *indices)
    if dst.index is None and src.index is None:
        return core.record(core.template(_copy, operands, options), operands)
    return core.record(core.template(_indirect_copy, operands, options), operands)


def _indices(*tensors: NkiTensor) -> tuple[NkiTensor, ...]:
    """The index tiles of indirect views, which an instruction reads too."""
    return tuple([t.index for t in tensors if isinstance(t.index, NkiTensor)])


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
    dma_check.dma_sizes(opcode, dst, src)
    dma_check.dma_priority(opcode, machine, priority)
    trigger = Engine.DMA if asked is engine.unknown else engine_of(opcode, asked)
    if mode is dge_mode.hwdge and asked is not engine.unknown:
        check.engine_runs(opcode, trigger, Engine.SYNC, Engine.SCALAR)
    dma_check.dma_generation(opcode, machine, mode.name, trigger, dst, src)
    return mode.name if mode in (dge_mode.hwdge, dge_mode.swdge) else "none"


def _copy(dst: NkiTensor, src: NkiTensor, *options: Any) -> InstructionTemplate:
    priority, mode, asked, _ = options
    descriptors = _checked("dma_copy", dst, src, priority, mode, asked)
    return InstructionTemplate(
        Engine.DMA, 0, copy, "dma_copy", dma=copy_cost(dst, src, descriptors)
    )


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
        busiest * running.active().machine.dma_row_ns(run),
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


def _indirect_copy(dst: NkiTensor, src: NkiTensor, *rest: Any) -> InstructionTemplate:
    *indices, priority, mode, asked, oob = rest
    descriptors = _checked("dma_copy", dst, src, priority, mode, asked)
    dma_check.indirect_sides(dst, src)
    indirect = dst if dst.index is not None else src
    for index in indices:
        dma_check.index_operand("dma_copy", indirect, index)
    kind = indirect.geometry.indirect
    # descriptors that depend on data are made on the way: by hardware for one offset, else GpSimdE
    if descriptors == "none":
        vector = kind is not None and kind[0] == "vector"
        machine = running.active().machine
        descriptors = "swdge" if vector or not machine.hardware_dge else "hwdge"
    skip = oob is oob_mode.skip

    def run(dst: NkiTensor, src: NkiTensor, *indices: NkiTensor) -> None:
        values, rows = gathered(src, skip) if src.index is not None else (raw(src), None)
        if raw(dst).dtype != values.dtype:
            values = convert(dst, dtypes.to_fp32(values, src.dtype))
        if src.index is None:
            scatter(dst, values, skip)
            return
        target, values = raw(dst), values.reshape(dst.shape)
        if rows is None:
            target[...] = values
        elif rows.any():
            target[rows] = values[rows]

    cost = copy_cost(dst, src, descriptors)
    return InstructionTemplate(Engine.DMA, 0, run, "dma_copy", dma=cost)


def _places(t: NkiTensor) -> tuple[np.ndarray, np.ndarray]:
    """Element offsets of an indirect view, one per index, and which are within bounds."""
    kind = t.geometry.indirect
    assert kind is not None
    how, _, scale = kind
    if isinstance(t.index, VirtualRegister):
        values = np.array([t.index.value], np.int64)
    else:
        values = raw(t.index).reshape(-1).astype(np.int64)
    offsets = values * scale
    layout = t.geometry.layout
    total = int(np.prod(layout.shape)) * layout.dtype.itemsize // t.dtype.itemsize
    strides = list(t.strides)
    first = 1 if how == "vector" else 0
    reach = sum(s * (c - 1) for s, c in list(zip(strides, t.shape, strict=True))[first:])
    legal = (values >= 0) & (t.offset + offsets + reach < total)
    return offsets, legal


def gathered(t: NkiTensor, skip: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """What an indirect view reads, and with `skip` the rows that were within bounds."""
    kind = t.geometry.indirect
    assert kind is not None
    offsets, legal = _places(t)
    dma_check.dynamic_bounds(t, bool(legal.all()) or skip)
    if kind[0] == "scalar":
        if not legal[0]:
            return np.zeros(t.shape, t.storage.store), np.zeros(t.shape[0], bool)
        return t.geometry.array(t.storage, int(offsets[0])), None
    rows = np.zeros(t.shape, t.storage.store)
    for i, (offset, ok) in enumerate(zip(offsets[: t.shape[0]], legal, strict=False)):
        if ok:
            rows[i] = _row(t, int(offset))
    return rows, None if legal.all() else legal[: t.shape[0]]


def scatter(t: NkiTensor, values: np.ndarray, skip: bool) -> None:
    """Write through an indirect view, in the order of the indices."""
    kind = t.geometry.indirect
    assert kind is not None
    offsets, legal = _places(t)
    dma_check.dynamic_bounds(t, bool(legal.all()) or skip)
    if kind[0] == "scalar":
        if legal[0]:
            target = t.geometry.array(t.storage, int(offsets[0]))
            target[...] = values.reshape(target.shape)
        return
    rows = values.reshape(t.shape)
    for i, (offset, ok) in enumerate(zip(offsets[: t.shape[0]], legal, strict=False)):
        if ok:
            _row(t, int(offset))[...] = rows[i]


def _row(t: NkiTensor, offset: int) -> np.ndarray:
    """Row 0 of a vector-indexed view, `offset` elements further on."""
    row = t.geometry.derive((1, *t.shape[1:]), t.strides, t.offset)
    return row.array(t.storage, offset)[0]


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
    operands = (dst, src, *_indices(src))
    options = (order, priority, dge_mode, oob_mode)
    return core.record(core.template(_transpose, operands, options), operands)


def _transpose(dst: NkiTensor, src: NkiTensor, *rest: Any) -> InstructionTemplate:
    *indices, axes, priority, mode, oob = rest
    opcode = "dma_transpose"
    dma_check.dma_transpose_axes(src, dst, axes, _AXES.get(src.ndim))
    check.memory(opcode, "dst", dst, SBUF)
    check.same_dtype(opcode, dst, src)
    descriptors = _checked(opcode, dst, src, priority, mode, engine.unknown)
    dma_check.transpose_mode(mode.name, bool(indices))
    if mode is dge_mode.hwdge:
        dma_check.hwdge_transpose(src)
    for index in indices:
        dma_check.indirect_transpose(running.active().machine, src, index)

    def run(dst: NkiTensor, src: NkiTensor, *indices: NkiTensor) -> None:
        target, source = raw(dst), raw(src)
        if indices:
            source = _gathered_columns(src, indices[0], oob is oob_mode.skip)
        target[...] = source.transpose(axes).reshape(target.shape)

    cost = _transpose_cost(dst, src, "swdge" if indices else descriptors)
    return InstructionTemplate(Engine.DMA, 0, run, opcode, dma=cost)


def _transpose_cost(dst: NkiTensor, src: NkiTensor, descriptors: str) -> DmaCost:
    """A transpose runs at a share of the DMA rate, whatever its rows (Trainium2 guide)."""
    plain = copy_cost(dst, src, descriptors)
    share = DMA_TRANSPOSE_SHARE["sbuf" if src.geometry.on_chip else "hbm"]
    return replace(
        plain,
        first_engine=0,
        engines=DMA_ENGINES,
        engine_ns=plain.bytes / (running.active().machine.dma_peak_gbps * share),
        run_bytes=src.geometry.run_bytes,
        rows=max(1, plain.bytes // src.geometry.run_bytes),
    )


def _gathered_columns(src: NkiTensor, index: NkiTensor, skip: bool) -> np.ndarray:
    """Rows of `src` in the column-major order of a [P, n] index tile."""
    flat = raw(index).T.reshape(-1)[: src.shape[0]].astype(np.int64)
    kind = src.geometry.indirect
    assert kind is not None
    rows = np.zeros(src.shape, src.storage.store)
    count = src.geometry.layout.shape[kind[1]]
    legal = (flat >= 0) & (flat < count)
    dma_check.dynamic_bounds(src, bool(legal.all()) or skip)
    for i in np.flatnonzero(legal):
        rows[i] = _row(src, int(flat[i]) * kind[2])
    return rows


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
    operands = (dst, *srcs, *_indices(dst, *srcs))
    factors = tuple(scales) if scales is not None else None
    options = (reduce_op, factors, len(srcs), unique_indices, oob_mode)
    return core.record(core.template(_compute, operands, options), operands)


def _compute(dst: NkiTensor, *rest: Any) -> InstructionTemplate:
    *operands, op, scales, count, unique, oob = rest
    opcode, tensors = "dma_compute", (dst, *operands[:count])
    srcs, indices = operands[:count], operands[count:]
    dma_check.dma_compute(dst, srcs, operators.alu(op), scales)
    indirect = any(t.index is not None for t in tensors)
    if indirect:
        dma_check.read_modify_write(dst, srcs, unique)
    for index in indices:
        dma_check.index_operand(opcode, next(t for t in tensors if t.index is index), index)
    skip = oob is oob_mode.skip
    check.memory(opcode, "dst", dst, *_REACHED)
    for src in srcs:
        check.memory(opcode, "srcs", src, *_REACHED)
        dma_check.dma_sizes(opcode, dst, src)

    def run(dst: NkiTensor, *operands: NkiTensor) -> None:
        total = np.zeros(dst.shape, np.float32)
        for src in operands[:count]:
            total = total + _values(src, skip).reshape(dst.shape)
        if dst.index is None:
            write(dst, total)
        else:
            places = _places(dst)[0]
            dma_check.repeated_indices(len(np.unique(places)) == len(places))
            scatter(dst, convert(dst, total), skip)

    costs = [copy_cost(dst, s) for s in srcs]
    busiest = max(costs, key=lambda c: c.engine_ns)
    cost = DmaCost(
        sum(c.bytes for c in costs),
        sum(c.rows for c in costs),
        min(c.run_bytes for c in costs),
        busiest.first_engine,
        busiest.engines,
        sum(c.engine_ns for c in costs),
        busiest.direction,
        "swdge" if indirect else "none",
        (0, *[c.reads[1] for c in costs]),
        (costs[0].writes[0], *[0] * len(costs)),
    )
    return InstructionTemplate(Engine.DMA, 0, run, opcode, dma=cost)


def _values(t: NkiTensor, skip: bool) -> np.ndarray:
    """What an operand of dma_compute reads, in fp32; 0 where an index is out of bounds."""
    return read(t) if t.index is None else dtypes.to_fp32(gathered(t, skip)[0], t.dtype)
