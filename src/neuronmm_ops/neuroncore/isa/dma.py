"""DMA: copies between HBM and SBUF, transposes on the way, and copies that add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from neuronmm_ops.hardware import DMA_ENGINES, DMA_TRANSPOSE_SHARE, PARTITIONS, Engine
from neuronmm_ops.neuroncore import checks, dtypes
from neuronmm_ops.neuroncore import core as running
from neuronmm_ops.neuroncore.core import Core
from neuronmm_ops.neuroncore.isa.common import (
    SBUF,
    convert,
    dge_mode,
    engine,
    engine_of,
    oob_mode,
    raw,
    read,
    write,
)
from neuronmm_ops.neuroncore.memory.storage import MemoryRegion
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor, VirtualRegister
from neuronmm_ops.neuroncore.nl import operators
from neuronmm_ops.neuroncore.timing.trace import DmaCost, Form, NkiInstruction

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
    if dst.index is None and src.index is None:
        return core.issue(_copy, (dst, src), (priority, dge_mode, engine), name)
    indices = tuple([t.index for t in (dst, src) if isinstance(t.index, NkiTensor)])
    options = (priority, dge_mode, engine, oob_mode)
    return core.issue(_indirect_copy, (dst, src, *indices), options, name)


def _checked(
    core: Core,
    opcode: str,
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None,
    mode: dge_mode,
    asked: engine,
) -> str:
    """Rules of every DMA; returns who generates its descriptors."""
    checks.memory(opcode, "dst", dst, *_REACHED)
    checks.memory(opcode, "src", src, *_REACHED)
    checks.dma_sizes(opcode, dst, src)
    checks.dma_priority(opcode, core.machine, priority)
    trigger = engine_of(asked, Engine.DMA)
    if mode is dge_mode.hwdge and asked is not engine.unknown:
        checks.engine_runs(opcode, trigger, Engine.SYNC, Engine.SCALAR)
    checks.dma_generation(opcode, core.machine, mode.name, trigger, dst, src)
    return mode.name if mode in (dge_mode.hwdge, dge_mode.swdge) else "none"


def _copy(
    core: Core,
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None,
    mode: dge_mode,
    asked: engine,
) -> Form:
    descriptors = _checked(core, "dma_copy", dst, src, priority, mode, asked)

    def run(dst: NkiTensor, src: NkiTensor) -> None:
        target, source = raw(dst), raw(src)
        if target.dtype == source.dtype:
            target[...] = source.reshape(target.shape)
        else:
            write(dst, read(src))

    return Form("dma_copy", Engine.DMA, 0, run=run, dma=copy_cost(core, dst, src, descriptors))


def copy_cost(core: Core, dst: NkiTensor, src: NkiTensor, descriptors: str = "none") -> DmaCost:
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
        busiest * core.machine.dma_row_ns(run),
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


def _indirect_copy(core: Core, dst: NkiTensor, src: NkiTensor, *rest: Any) -> Form:
    *indices, priority, mode, asked, oob = rest
    descriptors = _checked(core, "dma_copy", dst, src, priority, mode, asked)
    checks.indirect_sides(dst, src)
    for index in indices:
        checks.index_operand("dma_copy", dst if dst.index is not None else src, index)
    kind = (dst if dst.index is not None else src).geometry.indirect
    # descriptors that depend on data are made on the way: by hardware for one offset, else GpSimdE
    if descriptors == "none":
        vector = kind is not None and kind[0] == "vector"
        descriptors = "swdge" if vector or not core.machine.hardware_dge else "hwdge"

    def run(dst: NkiTensor, src: NkiTensor, *indices: NkiTensor) -> None:
        skip = oob is oob_mode.skip
        if src.index is not None:
            found, rows = gathered(src, skip)
            target = raw(dst)
            if rows is not None and not rows.any():
                return
            values = found.reshape(target.shape)
            if target.dtype != found.dtype:
                values = _through_fp32(dst, src, found).reshape(target.shape)
            if rows is None:
                target[...] = values
            else:
                target[rows] = values[rows]
        else:
            source = raw(src)
            values = source if raw(dst).dtype == source.dtype else _through_fp32(dst, src, source)
            scatter(dst, values, skip)

    return Form("dma_copy", Engine.DMA, 0, run=run, dma=copy_cost(core, dst, src, descriptors))


def _through_fp32(dst: NkiTensor, src: NkiTensor, values: np.ndarray) -> np.ndarray:
    return convert(dst, dtypes.to_fp32(values, src.dtype))


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
    checks.dynamic_bounds(t, bool(legal.all()) or skip)
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
    checks.dynamic_bounds(t, bool(legal.all()) or skip)
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
    indices = (src.index,) if isinstance(src.index, NkiTensor) else ()
    return core.issue(_transpose, (dst, src, *indices), (order, priority, dge_mode, oob_mode), name)


def _transpose(core: Core, dst: NkiTensor, src: NkiTensor, *rest: Any) -> Form:
    *indices, axes, priority, mode, oob = rest
    opcode = "dma_transpose"
    checks.dma_transpose_axes(src, dst, axes, _AXES.get(src.ndim), bool(indices))
    checks.memory(opcode, "dst", dst, SBUF)
    checks.same_dtype(opcode, dst, src)
    descriptors = _checked(core, opcode, dst, src, priority, mode, engine.unknown)
    checks.transpose_mode(mode.name, bool(indices))
    if mode is dge_mode.hwdge:
        checks.hwdge_transpose(src)
    for index in indices:
        checks.indirect_transpose(core.machine, src, index)

    def run(dst: NkiTensor, src: NkiTensor, *indices: NkiTensor) -> None:
        target = raw(dst)
        source = raw(src)
        if indices:
            source = _gathered_columns(src, indices[0], oob is oob_mode.skip)
        target[...] = source.transpose(axes).reshape(target.shape)

    return Form(
        opcode,
        Engine.DMA,
        0,
        run=run,
        dma=_transpose_cost(core, dst, src, "swdge" if indices else descriptors),
    )


def _transpose_cost(core: Core, dst: NkiTensor, src: NkiTensor, descriptors: str) -> DmaCost:
    """A transpose runs at a share of the DMA rate, whatever its rows (Trainium2 guide)."""
    plain = copy_cost(core, dst, src, descriptors)
    share = DMA_TRANSPOSE_SHARE["sbuf" if src.geometry.on_chip else "hbm"]
    return replace(
        plain,
        first_engine=0,
        engines=DMA_ENGINES,
        engine_ns=plain.bytes / (core.machine.dma_peak_gbps * share),
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
    checks.dynamic_bounds(src, bool(legal.all()) or skip)
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
    indices = tuple([t.index for t in (dst, *srcs) if isinstance(t.index, NkiTensor)])
    factors = tuple(scales) if scales is not None else None
    options = (reduce_op, factors, len(srcs), unique_indices, oob_mode)
    return core.issue(_compute, (dst, *srcs, *indices), options, name)


def _compute(core: Core, dst: NkiTensor, *rest: Any) -> Form:
    *operands, op, scales, count, unique, oob = rest
    srcs, indices = operands[:count], operands[count:]
    checks.dma_compute(dst, srcs, operators.alu(op), scales)
    indirect = any(t.index is not None for t in (dst, *srcs))
    if indirect:
        checks.read_modify_write(dst, srcs, unique)
    for index in indices:
        checks.index_operand(
            "dma_compute", next(t for t in (dst, *srcs) if t.index is index), index
        )
    skip = oob is oob_mode.skip
    checks.memory("dma_compute", "dst", dst, *_REACHED)
    for src in srcs:
        checks.memory("dma_compute", "srcs", src, *_REACHED)
        checks.dma_sizes("dma_compute", dst, src)

    def run(dst: NkiTensor, *operands: NkiTensor) -> None:
        total = np.zeros(dst.shape, np.float32)
        for src in operands[:count]:
            total = total + _values(src, skip).reshape(dst.shape)
        if dst.index is None:
            write(dst, total)
        else:
            checks.repeated_indices(len(np.unique(_places(dst)[0])) == len(_places(dst)[0]))
            scatter(dst, convert(dst, total), skip)

    costs = [copy_cost(core, dst, s) for s in srcs]
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
    return Form("dma_compute", Engine.DMA, 0, run=run, dma=cost)


def _values(t: NkiTensor, skip: bool) -> np.ndarray:
    """What an operand of dma_compute reads, in fp32; 0 where an index is out of bounds."""
    return read(t) if t.index is None else dtypes.to_fp32(gathered(t, skip)[0], t.dtype)
