"""What a schedule tells: traffic, busy engines, the critical path, what memories hold.

Each function takes the schedule of a launch, or of one core, and returns plain records.
"""

from __future__ import annotations

import linecache
import os
from dataclasses import dataclass
from itertools import accumulate
from types import CodeType

import numpy as np

from neuroncore.hardware import DMA_ENGINES, DMA_SPREAD_NS, MIN_CYCLES, Engine
from neuroncore.memory import liveness
from neuroncore.memory.storage import MemoryRegion, Storage
from neuroncore.timing.times import CoreSchedule, Schedule, Wait
from neuroncore.timing.trace import InstructionTemplate

ENGINE_NAMES = ("TensorE", "VectorE", "ScalarE", "GpSimdE", "SyncE", "DMA")
WAIT_NAMES = (
    "nothing", "engine", "data", "room", "queue", "DMA engines", "port", "other core"
)  # fmt: skip
"""By `Wait`."""
_LONGEST = 12
"""Lines of a statement that are read."""


@dataclass(frozen=True)
class TensorTraffic:
    """Bytes that the DMAs of all cores read from and wrote to one HBM tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    memory: str
    read_bytes: int
    write_bytes: int


@dataclass(frozen=True)
class RowBucket:
    """Contiguous runs of `row_bytes` up to, but not including, twice as many bytes."""

    row_bytes: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class EngineUse:
    """Busy and idle time of an engine; `share` is busy over the launch's time. DMA: mean of 16."""

    engine: str
    busy_ms: float
    idle_ms: float
    share: float


@dataclass(frozen=True)
class CriticalLine:
    """Steps of the critical path that share a source line, an opcode and a reason to wait."""

    core: int
    file: str
    line: int
    text: str
    opcode: str
    wait: str
    """What each step waited for last before it began."""
    steps: int
    time_ms: float
    """On the path; all lines together make the launch's time."""
    latency_ms: float
    """The part of it in which nothing ran: DMA start, results on their way."""


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that is live at the fullest moment; `size` in the unit of its memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    line: int
    size: int


@dataclass(frozen=True)
class MemoryPeak:
    """The fullest moment of a memory, in bytes per partition (SBUF) or banks (PSUM)."""

    used: int
    """In program order, which is what must fit."""
    limit: int
    scheduled: int
    """In time: double buffering uses what is free."""
    core: int
    live: tuple[LiveTensor, ...]
    """At the moment of `used`, largest first."""


def traffic(schedule: Schedule) -> tuple[TensorTraffic, ...]:
    """Every HBM tensor of the kernel, those never touched included."""
    totals: dict[Storage, list[int]] = {}
    for core in schedule.cores:
        for s in core.trace.storages:
            if not s.memory.on_chip:
                totals.setdefault(s, [0, 0])
        moving: dict[InstructionTemplate, list[tuple[int, int, int]]] = {}
        for template, storages, _, _ in core.issued:
            if template.dma is None:
                continue
            if template not in moving:
                pairs = zip(template.dma.reads, template.dma.writes, strict=True)
                moving[template] = [(i, r, w) for i, (r, w) in enumerate(pairs) if r or w]
            for i, read, write in moving[template]:
                total = totals.setdefault(storages[i], [0, 0])
                total[0] += read
                total[1] += write
    return tuple(
        TensorTraffic(s.name, s.layout.shape, str(s.layout.dtype), s.memory.value, *total)
        for s, total in totals.items()
    )


def busy(core: CoreSchedule, schedule: Schedule) -> tuple[EngineUse, ...]:
    """TensorE, VectorE, ScalarE, GpSimdE and the mean of the DMA engines of one core."""
    engine, start, end = columns(core)
    for i in core.barriers:  # waiting for other cores is idle
        end[i] = min(end[i], start[i] + core.issued[i][0].ns)
    busy_ns = [covered(start[engine == e], end[engine == e]) for e in range(4)]
    for template, *_ in core.issued:
        if template.dma is not None and template.dma.descriptors == "swdge":
            cycles = max(MIN_CYCLES, template.dma.rows)
            busy_ns[3] += schedule.machine.ns(Engine.GPSIMD, cycles)
    busy_ns.append(sum(core.dma_busy_ns) / DMA_ENGINES)
    total = schedule.time_ns
    names = (*ENGINE_NAMES[:4], ENGINE_NAMES[5])
    return tuple(
        EngineUse(name, ns / 1e6, (total - ns) / 1e6, ns / total if total else 0.0)
        for name, ns in zip(names, busy_ns, strict=True)
    )


def active_ns(core: CoreSchedule, engine: Engine) -> float:
    """How long a profiler shows an engine of one core active, or any of the 16 of DMA.

    The union of its instructions, each until its result is there (neuron-explorer; agentic).
    """
    spread = DMA_SPREAD_NS if engine is Engine.DMA else 0.0
    engines, start, end = columns(core)
    of_engine = engines == engine
    results = np.array([template.result_ns or spread for template, *_ in core.issued])[of_engine]
    order = np.argsort(start[of_engine], kind="stable")
    return covered(start[of_engine][order], (end[of_engine] + results)[order])


def critical_path(schedule: Schedule) -> tuple[CriticalLine, ...]:
    """The chain of waits that ends with the last instruction, by source line, longest first."""
    waits: dict[tuple[int, CodeType, int, str, int], list[float]] = {}
    for core, i, own, latency in critical_steps(schedule):
        template, _, code, line = schedule.cores[core].issued[i]
        wait = schedule.cores[core].wait[i]
        entry = waits.setdefault((core, code, line, template.opcode, wait), [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += own + latency
        entry[2] += latency
    lines = [
        CriticalLine(
            core,
            os.path.basename(code.co_filename),
            line,
            statement(code.co_filename, line),
            opcode,
            WAIT_NAMES[wait],
            int(steps),
            ns / 1e6,
            latency / 1e6,
        )
        for (core, code, line, opcode, wait), (steps, ns, latency) in waits.items()
    ]
    return tuple(sorted(lines, key=lambda entry: -entry.time_ms))


def statement(file: str, line: int) -> str:
    """The source from a line on, until its brackets close, as one line; "" without a source."""
    text = linecache.getline(file, line).strip()
    for more in range(line + 1, line + _LONGEST):
        if sum(map(text.count, "([{")) <= sum(map(text.count, ")]}")):
            break
        rest = linecache.getline(file, more).strip()
        gap = "" if text.endswith(("(", "[", "{")) or rest.startswith((")", "]", "}")) else " "
        text = f"{text}{gap}{rest}".rstrip()
    return text


def critical_steps(schedule: Schedule) -> list[tuple[int, int, float, float]]:
    """(core, instruction, ns of its own, ns of latency before it) from the end to the start.

    `now` moves from the end of the launch to 0, so that all parts together make its time.
    """
    cores = schedule.cores
    met = [{number: i for i, number in c.barriers.items()} for c in cores]
    steps: list[tuple[int, int, float, float]] = []
    now = schedule.time_ns
    at = next((k for k, c in enumerate(cores) if c.end and max(c.end) == now), 0)
    i = cores[at].end.index(now) if cores[at].end else -1
    while i >= 0:
        core = cores[at]
        if core.wait[i] == Wait.OTHER_CORE:
            number = core.barriers[i]
            there = [(k, m[number]) for k, m in enumerate(met) if number in m]
            at_other, j = next((k, j) for k, j in there if cores[k].wait[j] != Wait.OTHER_CORE)
            came = min(now, cores[at_other].end[j])
            steps.append((at, i, now - came, 0.0))
            now, at, i = came, at_other, j
            continue
        begin = min(now, core.start[i])
        before = core.cause[i]
        gate = min(begin, core.end[before]) if before >= 0 else 0.0
        if now > gate:  # a cause that ran later than what it is said to have delayed has no part
            steps.append((at, i, now - begin, begin - gate))
        now, i = gate, before
    return steps


def peak(schedule: Schedule, memory: MemoryRegion) -> MemoryPeak:
    """The fullest moment of a memory, on the core where it is fullest."""
    peaks = [liveness.peak(c.trace, memory, schedule.machine) for c in schedule.cores]
    core = max(range(len(peaks)), key=lambda i: peaks[i].used)
    live = [
        LiveTensor(s.name, s.layout.shape, str(s.layout.dtype), s.line, s.layout.size)
        for s in peaks[core].live
    ]
    scheduled = max([n for c in schedule.cores for _, n in occupancy(c, memory)], default=0)
    return MemoryPeak(peaks[core].used, peaks[core].limit, scheduled, core, tuple(live))


def columns(core: CoreSchedule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Engine, start and end of a core's instructions, as arrays."""
    engine = np.array([template.engine for template, *_ in core.issued], np.int8)
    return engine, np.array(core.start, float), np.array(core.end, float)


def disjoint(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Intervals sorted by start, each cut to what those before it leave uncovered."""
    until = np.maximum.accumulate(end)
    begin = np.concatenate([start[:1], np.maximum(start[1:], until[:-1])])
    return begin, np.maximum(begin, end)


def covered(start: np.ndarray, end: np.ndarray) -> float:
    """Length of the union of intervals, which are sorted by their starts."""
    begin, end = disjoint(start, end)
    return float((end - begin).sum())


def occupancy(core: CoreSchedule, memory: MemoryRegion) -> list[tuple[float, int]]:
    """(ns, size in use from then on) of a memory, in time; one entry per moment."""
    changes: dict[float, int] = {}
    for begin, end, s in core.occupied.get(memory, []):
        changes[begin] = changes.get(begin, 0) + s.layout.size
        changes[end] = changes.get(end, 0) - s.layout.size
    moments = sorted(changes)
    return list(zip(moments, accumulate([changes[m] for m in moments]), strict=True))
