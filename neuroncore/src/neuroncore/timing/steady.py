"""The steady state of a loop of the device: iterations that repeat exactly are not placed again.

After an iteration, all that later instructions can wait for is compared with what it was after the
iterations before, counted from a time before which nothing to come can start. Where it is equal,
the iterations between will repeat as often as there are some left. Times are on a grid
(`trace.on_grid`), so equal means equal, and the result is what placing each iteration gives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from neuroncore.checks.base import NkiValidationError
from neuroncore.hardware import Engine
from neuroncore.memory.storage import Box, Layout, Storage
from neuroncore.timing.trace import Loop, Trace

if TYPE_CHECKING:
    from neuroncore.timing.placer import Placer

LONGEST_PERIOD = 8
"""Iterations that may repeat together: units that take turns make more than one."""


class Loops:
    """The loops of a trace, as the placer asks for them.

    Attributes:
        held: by loop, the tensors from outside whose last use is in it: free when it ends.
        late: the same tensors, of all loops.
        early: tensors from outside whose first use is in a loop: they enter in one iteration.
    """

    def __init__(self, trace: Trace) -> None:
        self._loops = trace.loops
        self.held: dict[Loop, list[Storage]] = {loop: [] for loop in trace.loops}
        self.late: set[Storage] = set()
        self.early: set[Storage] = set()
        for loop in trace.loops:  # outer ones first
            for s in loop.outer:
                if s.last == loop.end - 1 and s not in self.late:
                    self.held[loop].append(s)
                    self.late.add(s)
                if s.first >= loop.start:
                    self.early.add(s)

    def inside(self, outer: Loop | None) -> list[Loop]:
        """The loops directly in another, or in none."""
        loops: list[Loop] = []
        first, end = (outer.start, outer.end) if outer else (0, float("inf"))
        for loop in self._loops:
            inner = loop is not outer and first <= loop.start and loop.end <= end
            if outer and self._loops.index(loop) <= self._loops.index(outer):
                inner = False
            if inner and loop.end > loop.start and not (loops and loop.end <= loops[-1].end):
                loops.append(loop)
        return loops


def check_bodies(trace: Trace) -> None:
    """Refuse tensors and dependencies that lead out of the body of a loop (migration guide)."""
    if not trace.loops:
        return
    known = set(trace.storages)
    used = {s for _, storages, _, _ in trace.records for s in storages}
    for loop in trace.loops:
        late = [
            s for s in trace.storages[loop.first_storage : loop.end_storage] if s.last >= loop.end
        ]
        for s in [*late, *(used - known)]:
            raise NkiValidationError(
                f"{s.describe()} is allocated in the body of a loop and used after it; allocate it "
                "before the loop"
            )
        body = range(loop.start, loop.end)
        for consumer, producers in trace.edges.items():
            for producer in producers:
                if producer in body and consumer not in body:
                    raise NkiValidationError(
                        f"depends_on: instruction {producer} is in a loop that instruction "
                        f"{consumer} is not in; let both be in one body"
                    )


class Mark(NamedTuple):
    """What a core's schedule had come to after an iteration."""

    instructions: int
    floor: float
    occupied: list[int]
    state: Any


class Iterations:
    """The iterations of one loop while they are placed.

    Attributes:
        floor: a time before which no instruction to come can start, of the loop or after it.
    """

    def __init__(self, placer: Placer, loop: Loop) -> None:
        self.placer, self.loop, self.floor = placer, loop, placer.floor
        trace = placer.trace
        records = trace.records[loop.start : loop.end]
        self._engines = {template.engine for template, *_ in records}
        self._tiled = any(template.pe_tile is not None for template, *_ in records)
        self._first = len(placer.times.start)
        steps = _steps(trace, loop)
        self._storages = {s: min(at_steps) for s, at_steps in steps.items()}
        recorded = range(loop.start, loop.end)
        waits = any(number in recorded for number in trace.barriers)
        self._repeats = not waits and all(len(at_steps) == 1 for at_steps in steps.values())
        self._repeats &= _lie_in_line(trace, loop)
        self._marks: list[Mark] = []

    def skip(self, at: int) -> int:
        """How many iterations after number `at`, which is placed, need not be placed; adds them."""
        self._forget()
        left = self.loop.trips - 1 - at
        if not self._repeats or not left:
            return 0
        now = self._mark(at)
        for period, mark in enumerate(reversed(self._marks), 1):
            if mark.state == now.state and left >= period:
                times = left // period
                self._extend(mark, now, times)
                self._shift(now, times * (now.floor - mark.floor), times, mark, times * period)
                self._marks.clear()
                return times * period
        self._marks = [*self._marks[1 - LONGEST_PERIOD :], now]
        return 0

    def _forget(self) -> None:
        """Raise the floor, and drop what ended before it."""
        placer, before = self.placer, self._first
        self._first = len(placer.times.start)
        bounds = [after for _, after, last in placer.queues.values() if last >= before]
        bounds += [placer.engine_free[e] for e in self._engines if 0 < e < Engine.DMA]
        if Engine.TENSOR in self._engines:
            issue = max(placer.pe_issue, placer.pe_full)
            bounds.append(issue if self._tiled else placer.engine_free[Engine.TENSOR])
        floor = self.floor = max(self.floor, min(bounds, default=0.0))
        placer.dma.forget(floor)
        placer.dge_free = [max(free, floor) for free in placer.dge_free]
        for capacity in placer.capacity.values():
            capacity.forget(floor)
        visible, end = placer.visible, placer.times.end
        for s in self._storages:
            use = placer.uses[s]
            use.written_by = {r: i for r, i in use.written_by.items() if visible[i] > floor}
            use.read_by = {r: i for r, i in use.read_by.items() if end[i] > floor}

    def _mark(self, at: int) -> Mark:
        """All that instructions to come depend on, counted from the floor and the last number."""
        placer, floor = self.placer, self.floor
        number = len(placer.times.start)

        def since(when: float, who: int = number) -> Any:
            return (when - floor, who - number) if when >= floor else None

        last_dma = placer.engine_last[Engine.DMA]
        state = (
            [since(*pair) for pair in zip(placer.engine_free, placer.engine_last, strict=True)],
            last_dma - number if Engine.DMA in self._engines else None,
            [since(when) for when in (placer.pe_issue, placer.pe_full, *placer.cells)],
            [(since(p[0], int(p[1])), since(p[2], int(p[3]))) for p in placer.ports.values()],
            {key: since(after, last) for key, (_, after, last) in placer.queues.items()},
            [since(free) for free in placer.dge_free],
            placer.dma.since(floor),
            [capacity.since(floor, number) for capacity in placer.capacity.values()],
            {s: self._use(s, at, since) for s in self._storages},
            self._loaded(at, number),
            placer.table,
            placer.recent and placer.recent.since(floor),
        )
        occupied = [len(intervals) for intervals in placer.times.occupied.values()]
        return Mark(number, floor, occupied, state)

    def _use(self, s: Storage, at: int, since: Any) -> Any:
        use, visible, end = self.placer.uses[s], self.placer.visible, self.placer.times.end
        step = at * self._storages[s]

        def iterations_of(by: dict[int, int]) -> Any:
            boxes = s.layout.boxes
            return {
                _shifted(s.layout, boxes[r], -step): (since(visible[i], i), since(end[i], i))
                for r, i in by.items()
            }

        latest = use.latest - self.floor, use.latest_engine
        return latest, iterations_of(use.written_by), iterations_of(use.read_by)

    def _loaded(self, at: int, number: int) -> Any:
        if self.placer.loaded is None:
            return None
        s, region, writer = self.placer.loaded
        box = _shifted(s.layout, s.layout.boxes[region], -at * self._storages.get(s, 0))
        return s, box, writer - number

    def _extend(self, mark: Mark, now: Mark, times: int) -> None:
        """Let what ran between two marks run so many times more."""
        placer, out = self.placer, self.placer.times
        first, end = mark.instructions, now.instructions
        period, count = now.floor - mark.floor, end - first
        turns = np.arange(1, times + 1)[:, None]
        for column in (out.start, out.end, placer.visible):
            column.extend((np.array(column[first:end]) + period * turns).ravel().tolist())
        cause = np.array(out.cause[first:end])
        out.cause.extend(np.where(cause < 0, -1, cause + count * turns).ravel().tolist())
        out.wait.extend(out.wait[first:end] * times)
        out.issued.extend(out.issued[first:end] * times)
        names = [(i, out.queue[i]) for i in range(first, end) if i in out.queue]
        for turn in range(1, times + 1):
            out.queue.update({i + turn * count: name for i, name in names})
        for number, intervals in enumerate(out.occupied.values()):
            new = intervals[mark.occupied[number] :]
            for turn in range(1, times + 1):
                intervals.extend([(a + turn * period, b + turn * period, s) for a, b, s in new])

    def _shift(self, now: Mark, ns: float, times: int, mark: Mark, iterations: int) -> None:
        """Bring the state of all resources to the end of what was added."""
        placer, floor = self.placer, self.floor
        count = times * (now.instructions - mark.instructions)

        def moved(when: float) -> float:
            return when + ns if when >= floor else when

        def later(number: int) -> int:
            return number + count if number >= mark.instructions else number

        frees = placer.engine_free
        last = [
            later(n) if f >= floor else n for f, n in zip(frees, placer.engine_last, strict=True)
        ]
        last[Engine.DMA] = later(placer.engine_last[Engine.DMA])
        placer.engine_free[:], placer.engine_last[:] = map(moved, frees), last
        placer.pe_issue, placer.pe_full = moved(placer.pe_issue), moved(placer.pe_full)
        placer.cells = [moved(when) for when in placer.cells]
        for slots in placer.ports.values():
            slots[:] = [
                moved(slots[0]),
                later(int(slots[1])),
                moved(slots[2]),
                later(int(slots[3])),
            ]
        for key, (name, after, number) in placer.queues.items():
            placer.queues[key] = [name, moved(after), later(number)]
        placer.dge_free = [moved(free) for free in placer.dge_free]
        placer.dma.shift(ns)
        if placer.recent is not None:
            placer.recent.shift(ns)
        for capacity in placer.capacity.values():
            capacity.shift(ns, count)
        for s, step in self._storages.items():
            use = placer.uses[s]
            use.latest, use.begun, use.last = use.latest + ns, later(use.begun), later(use.last)
            for by in (use.written_by, use.read_by):
                shifted = [
                    (_moved_region(s.layout, r, iterations * step), i) for r, i in by.items()
                ]
                by.clear()
                by.update({region: later(i) for region, i in shifted})
        if placer.loaded is not None:
            s, region, writer = placer.loaded
            region = _moved_region(s.layout, region, iterations * self._storages.get(s, 0))
            placer.loaded = s, region, later(writer)
        for producer, number in placer.producers.items():
            placer.producers[producer] = later(number)
        self.floor += ns
        self._first = len(placer.times.start)


def _steps(trace: Trace, loop: Loop) -> dict[Storage, set[int]]:
    """By tensor of a body, how many bytes further on its operands are in each iteration."""
    by_storage: defaultdict[Storage, set[int]] = defaultdict(set)
    for record in range(loop.start, loop.end):
        _, storages, _, _ = trace.records[record]
        steps = [0] * len(storages)
        for move in trace.moves.get(record, ()):
            if move.loop is loop:
                steps[move.operand] = move.elements * move.geometry.dtype.itemsize
        for s, step in zip(storages, steps, strict=True):
            by_storage[s].add(step)
    return by_storage


def _lie_in_line(trace: Trace, loop: Loop) -> bool:
    """Whether the regions of all iterations are those of the first, so many rows or bytes on."""
    moves: Iterable[Any] = [
        m for r in range(loop.start, loop.end) for m in trace.moves.get(r, ()) if m.loop is loop
    ]
    last = loop.trips - 1
    for move in moves:
        layout, bytes_on = move.geometry.layout, move.elements * move.geometry.dtype.itemsize
        box = layout.boxes[move.region(0)]
        if layout.boxes[move.region(last)] != _shifted(layout, box, last * bytes_on):
            return False
    return True


def _shifted(layout: Layout, box: Box, bytes_on: int) -> Box:
    """A region so many bytes further on: by whole rows, or within them."""
    if not bytes_on:
        return box
    rows, rest = divmod(bytes_on, layout.row_elements * layout.dtype.itemsize)
    if rest:
        rows, rest = 0, bytes_on
    pattern = box.pattern
    if pattern is not None:
        pattern = (pattern[0] + bytes_on, *pattern[1:])
    edges = box.row + rows, box.row_end + rows, box.byte + rest, box.byte_end + rest
    return Box(*edges, pattern)


def _moved_region(layout: Layout, region: int, bytes_on: int) -> int:
    return layout.region(_shifted(layout, layout.boxes[region], bytes_on)) if bytes_on else region
