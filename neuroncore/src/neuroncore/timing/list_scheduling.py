"""Orders that list scheduling gives a launch's instructions: as a compiler may have them.

Of those whose data are there and whose tensors fit, each engine takes the one with the longest way
to the end of the kernel (Adam, Chandy and Dickson 1974, "critical path"), among the next so many in
the program: what takes all it can has no room in SBUF and PSUM for what comes first.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterator
from dataclasses import replace

from neuroncore.core import KernelRun
from neuroncore.hardware import DMA_DONE_NS, DMA_ENGINES, DMA_START_NS, Engine, Machine
from neuroncore.memory import liveness
from neuroncore.timing.order import Room, followers_of, in_order, waits_of
from neuroncore.timing.trace import InstructionTemplate, Trace

MOST = 100_000
"""Instructions of a core, beyond which they stay in program order."""
WINDOWS = (MOST, 256, 64)


def list_scheduled(launch: KernelRun, machine: Machine) -> Iterator[KernelRun]:
    """The launch in other orders, one for each of `WINDOWS` in which its tensors fit.

    None with loops of the device, whose bodies keep their order.
    """
    traces = [core.trace for core in launch.cores]
    longest = max([len(trace.records) for trace in traces])
    if longest > MOST or any(trace.loops for trace in traces):
        return
    listings = [_Listing(trace, machine) for trace in traces]
    for window in sorted({min(window, longest) for window in WINDOWS}, reverse=True):
        orders = [listing.order(window) for listing in listings]
        pairs = zip(traces, orders, strict=True)
        ordered = [_in_order(trace, order) for trace, order in pairs if order is not None]
        if len(ordered) == len(traces):
            yield launch.with_traces(ordered)


def _in_order(trace: Trace, order: list[int]) -> Trace:
    """A copy of a trace in another order."""
    touched = {s for _, used, _, _ in trace.records for s in used}
    copies = {s: copy.copy(s) for s in touched.union(trace.storages)}
    copied = replace(
        trace,
        records=[
            (template, tuple([copies[s] for s in used]), code, line)
            for template, used, code, line in trace.records
        ],
        storages=[copies[s] for s in trace.storages],
        edges=dict(trace.edges),
        barriers=dict(trace.barriers),
        names=dict(trace.names),
    )
    in_order(copied, order)
    return copied


class _Listing:
    """What an order follows from: what each instruction costs, and which others wait for it."""

    def __init__(self, trace: Trace, machine: Machine) -> None:
        self.trace, self.machine = trace, machine
        self.waits = waits_of(trace)
        self.then = followers_of(self.waits)
        costs = {template: self._cost(template) for template, *_ in trace.records}
        self.costs = [costs[template] for template, *_ in trace.records]
        self.engines = [template.engine for template, *_ in trace.records]
        # ns from its start to the end of the kernel
        self.way = [0.0] * len(self.waits)
        for i in reversed(range(len(self.waits))):
            rest = max([self.way[j] for j in self.then[i]], default=0.0)
            self.way[i] = self.costs[i][1] + rest

    def _cost(self, template: InstructionTemplate) -> tuple[float, float]:
        """How long its engine is busy, and until others may use the result."""
        if template.dma is None:
            return template.ns, template.ns + template.result_ns
        ns = template.dma.engine_ns(self.machine)
        return ns * template.dma.engines / DMA_ENGINES, DMA_START_NS + ns + DMA_DONE_NS

    def order(self, window: int) -> list[int] | None:
        """Numbers of the instructions; None where none of those that could run fits."""
        taking = _Taking(self, window)
        order: list[int] = []
        while len(order) < len(self.waits):
            i = taking.next()
            if i is None:
                return None
            order.append(i)
        return order


class _Taking:
    """The instructions as the engines take them."""

    def __init__(self, listing: _Listing, window: int) -> None:
        self.of, self.window = listing, window
        self.left = [len(before) for before in listing.waits]
        self.seen = [0.0] * len(self.left)
        self.room = Room(listing.trace, listing.machine, liveness.room_of)
        self.free = dict.fromkeys(Engine, 0.0)
        # by the time that their data are there; by the way that is left
        self.coming: dict[Engine, list[tuple[float, int]]] = {engine: [] for engine in Engine}
        self.ready: dict[Engine, list[tuple[float, int]]] = {engine: [] for engine in Engine}
        self.later: list[int] = []  # beyond the window
        self.full: list[tuple[float, int]] = []  # without room
        self.freed = False
        self.taken = [False] * len(self.left)
        self.first = 0
        """The first in the program that is not taken."""
        for i, count in enumerate(self.left):
            if not count:
                self._comes(i)

    def next(self) -> int | None:
        """Take the next instruction; None where none fits."""
        while True:
            engine = self._engine()
            if engine is not None:
                i = heapq.heappop(self.ready[engine])[1]
                if self.room.take(i):
                    self._take(i)
                    return i
                heapq.heappush(self.full, (-self.of.way[i], i))
            elif self.freed and self.full:
                self.freed = False
                for _ in range(len(self.full)):
                    self._again()
            else:
                return None

    def _engine(self) -> Engine | None:
        """The engine that can start first, with all that is ready by then."""
        starts = [
            (self.free[e] if self.ready[e] else max(self.free[e], self.coming[e][0][0]), e)
            for e in Engine
            if self.ready[e] or self.coming[e]
        ]
        if not starts:
            return None
        start, engine = min(starts)
        self.free[engine] = start
        coming = self.coming[engine]
        while coming and coming[0][0] <= start:
            i = heapq.heappop(coming)[1]
            heapq.heappush(self.ready[engine], (-self.of.way[i], i))
        return engine

    def _take(self, i: int) -> None:
        busy, until = self.of.costs[i]
        engine = self.of.engines[i]
        start = self.free[engine]
        self.free[engine] = start + busy
        if self.room.release(i):
            self.freed = True
            if self.full:  # all of them each time would take their number squared
                self._again()
        for j in self.of.then[i]:
            self.seen[j] = max(self.seen[j], start + until)
            self.left[j] -= 1
            if not self.left[j]:
                self._comes(j)
        self.taken[i] = True
        while self.first < len(self.taken) and self.taken[self.first]:
            self.first += 1
        while self.later and self.later[0] < self.first + self.window:
            self._comes(heapq.heappop(self.later))

    def _comes(self, i: int) -> None:
        if i < self.first + self.window:
            heapq.heappush(self.coming[self.of.engines[i]], (self.seen[i], i))
        else:
            heapq.heappush(self.later, i)

    def _again(self) -> None:
        way, i = heapq.heappop(self.full)
        heapq.heappush(self.ready[self.of.engines[i]], (way, i))
