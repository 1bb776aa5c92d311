"""The order that list scheduling gives a core's instructions: as a compiler may have them.

Of those whose data are there and whose tensors fit, each engine takes the one with the longest way
to the end of the kernel (Adam, Chandy and Dickson 1974, "critical path").
"""

from __future__ import annotations

import copy
import heapq
from collections import defaultdict
from dataclasses import replace

from neuroncore.hardware import DMA_DONE_NS, DMA_ENGINES, DMA_START_NS, Engine, Machine
from neuroncore.memory import liveness
from neuroncore.timing.order import Room, followers_of, in_order, shared_bytes
from neuroncore.timing.trace import InstructionTemplate, Trace


def list_scheduled(trace: Trace, machine: Machine) -> Trace:
    """A copy of a trace without loops, in that order; in its own, where tensors then do not fit."""
    touched = {s for _, used, _, _ in trace.records for s in used}
    copies = {s: copy.copy(s) for s in touched.union(trace.storages)}
    records = [
        (template, tuple([copies[s] for s in used]), code, line)
        for template, used, code, line in trace.records
    ]
    copied = replace(
        trace,
        records=records,
        storages=[copies[s] for s in trace.storages],
        edges=dict(trace.edges),
        barriers=dict(trace.barriers),
        names=dict(trace.names),
    )
    order = _Listing(copied, machine).order()
    if order is not None:
        in_order(copied, order)
    return copied


def _waits(trace: Trace) -> list[set[int]]:
    """The instructions that each waits for: of its data, by region, and barriers."""
    shared = shared_bytes(trace)
    before: list[set[int]] = []
    written: defaultdict[object, dict[int, int]] = defaultdict(dict)
    read: defaultdict[object, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    barrier = -1
    for i, (template, storages, _, _) in enumerate(trace.records):
        waits = {*trace.edges.get(i, ()), barrier}
        touched: list[tuple[object, int, bool]] = []
        for operand, storage in enumerate(storages):
            resource, writes = shared.get(storage, storage), operand < template.writes
            # tensors that share bytes are one region
            own = resource is storage
            touched.append((resource, template.regions[operand] if own else 0, writes))
            for region in template.overlaps[operand] if own else (0,):
                waits.add(written[resource].get(region, -1))
                if writes:
                    waits.update(read[resource].get(region, ()))
        for resource, region, writes in touched:
            if writes:
                written[resource][region] = i
                read[resource].pop(region, None)
            else:
                read[resource][region].append(i)
        if i in trace.barriers:
            waits.update(range(barrier + 1, i))
            barrier = i
        before.append(waits - {-1, i})
    return before


class _Listing:
    """The instructions as they are taken, engine by engine."""

    def __init__(self, trace: Trace, machine: Machine) -> None:
        self.trace, self.machine = trace, machine
        waits = _waits(trace)
        self.left = [len(before) for before in waits]
        self.then = followers_of(waits)
        costs = {template: self._cost(template) for template, *_ in trace.records}
        self.costs = [costs[template] for template, *_ in trace.records]
        # ns from its start to the end of the kernel
        self.way = [0.0] * len(waits)
        for i in reversed(range(len(waits))):
            rest = max([self.way[j] for j in self.then[i]], default=0.0)
            self.way[i] = self.costs[i][1] + rest
        self.seen = [0.0] * len(waits)
        self.room = Room(trace, machine, liveness.room_of)

    def _cost(self, template: InstructionTemplate) -> tuple[float, float]:
        """How long its engine is busy, and until others may use the result."""
        if template.dma is None:
            return template.ns, template.ns + template.result_ns
        ns = template.dma.engine_ns(self.machine)
        return ns * template.dma.engines / DMA_ENGINES, DMA_START_NS + ns + DMA_DONE_NS

    def order(self) -> list[int] | None:
        """Numbers of the instructions; None where none of those that could run fits."""
        free = dict.fromkeys(Engine, 0.0)
        # by the time that its data are there, by the way that is left, and those that do not fit
        coming: dict[Engine, list[tuple[float, int]]] = {engine: [] for engine in Engine}
        ready: dict[Engine, list[tuple[float, int]]] = {engine: [] for engine in Engine}
        full: list[tuple[float, int]] = []
        freed = False
        for i, count in enumerate(self.left):
            if not count:
                coming[self._engine(i)].append((0.0, i))
        order: list[int] = []
        while len(order) < len(self.left):
            starts = [
                (free[e] if ready[e] else max(free[e], coming[e][0][0]), e)
                for e in Engine
                if ready[e] or coming[e]
            ]
            if not starts:
                if not freed:
                    return None
                for way, j in full:
                    heapq.heappush(ready[self._engine(j)], (way, j))
                full.clear()
                freed = False
                continue
            start, engine = min(starts)
            while coming[engine] and coming[engine][0][0] <= start:
                i = heapq.heappop(coming[engine])[1]
                heapq.heappush(ready[engine], (-self.way[i], i))
            i = heapq.heappop(ready[engine])[1]
            if not self.room.take(i):
                heapq.heappush(full, (-self.way[i], i))
                continue
            order.append(i)
            free[engine] = start + self.costs[i][0]
            if self.room.release(i):
                freed = True
                if full:  # all of them each time would take their number squared
                    way, j = heapq.heappop(full)
                    heapq.heappush(ready[self._engine(j)], (way, j))
            for j in self.then[i]:
                self.seen[j] = max(self.seen[j], start + self.costs[i][1])
                self.left[j] -= 1
                if not self.left[j]:
                    heapq.heappush(coming[self._engine(j)], (self.seen[j], j))
        return order

    def _engine(self, i: int) -> Engine:
        return self.trace.records[i][0].engine
