"""An order of a core's instructions in which its tensors fit, where program order has none.

Engines and DMA queues run in their own program order, and wait for each other's data alone. So an
eviction that stands after many matmuls in the program runs as soon as its own matmuls are done, and
gives its PSUM bank to those that come. A compiler allocates tensors in the order that it has
scheduled; this is one such order, and none that moves an instruction before another of its engine.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable

from neuroncore.hardware import Engine, Machine
from neuroncore.memory import liveness
from neuroncore.memory.storage import MemoryRegion, Storage
from neuroncore.timing.trace import Record, Trace


def order_to_fit(trace: Trace, machine: Machine) -> None:
    """Put a trace's instructions in an order that fits, if there is one; not with loops.

    One that leaves the plans' reserve, or one that does not.
    """
    if trace.loops:
        return
    waits = waits_in_queues(trace)
    for room_of in (liveness.room_of, liveness.limit_of):
        order = _fitting(Room(trace, machine, room_of), waits)
        if order is not None:
            in_order(trace, order)
            return


class Room:
    """What tensors take of SBUF and PSUM from their first use, and give back after their last.

    Those with addresses take the bytes that no other of them holds.
    """

    def __init__(
        self, trace: Trace, machine: Machine, room_of: Callable[[MemoryRegion, Machine], int]
    ) -> None:
        self.records = trace.records
        memories = (MemoryRegion.sbuf, MemoryRegion.psum)
        self.left = {memory: room_of(memory, machine) for memory in memories}
        self.placed: dict[MemoryRegion, list[Storage]] = {memory: [] for memory in memories}
        self.uses: defaultdict[Storage, int] = defaultdict(int)
        for _, storages, _, _ in trace.records:
            for s in {s for s in storages if s.memory in self.left}:
                self.uses[s] += 1
        self.total = dict(self.uses)

    def take(self, i: int) -> bool:
        """Take room for all tensors that an instruction uses first, or for none."""
        fresh = [s for s in self._of(i) if self.uses[s] == self.total[s]]
        for s in fresh:
            self._take(s)
        if all(value >= 0 for value in self.left.values()):
            return True
        for s in fresh:
            self._give_back(s)
        return False

    def release(self, i: int) -> bool:
        """Give back what it used last; say whether that was anything."""
        mine = self._of(i)
        for s in mine:
            self.uses[s] -= 1
        freed = [s for s in mine if not self.uses[s]]
        for s in freed:
            self._give_back(s)
        return bool(freed)

    def _of(self, i: int) -> set[Storage]:
        return {s for s in self.records[i][1] if s in self.total}

    def _take(self, s: Storage) -> None:
        if s.address is None:
            self.left[s.memory] -= s.layout.size
        else:
            self._hold(s.memory, [*self.placed[s.memory], s])

    def _give_back(self, s: Storage) -> None:
        if s.address is None:
            self.left[s.memory] += s.layout.size
        else:
            self._hold(s.memory, [other for other in self.placed[s.memory] if other is not s])

    def _hold(self, memory: MemoryRegion, placed: list[Storage]) -> None:
        self.left[memory] += liveness.covered(self.placed[memory]) - liveness.covered(placed)
        self.placed[memory] = placed


def _placed(trace: Trace) -> list[Storage]:
    return [s for s in trace.storages if s.address is not None and s.first >= 0]


def _shared_bytes(trace: Trace) -> dict[Storage, int]:
    """A number for each tensor with an address, the same for those that share bytes."""
    placed = _placed(trace)
    numbers: dict[Storage, int] = {}
    number, end, memory = 0, 0, None
    for s in sorted(placed, key=lambda s: (s.memory.value, s.address[1] if s.address else 0)):
        start = s.address[1] if s.address else 0
        if s.memory is not memory or start >= end:
            number, end, memory = number + 1, 0, s.memory
        numbers[s] = number
        end = max(end, start + s.bytes)
    return numbers


def waits_of(trace: Trace) -> list[set[int]]:
    """The instructions that each waits for: of its data, by region, and barriers."""
    shared = _shared_bytes(trace)
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


def waits_in_queues(trace: Trace) -> list[set[int]]:
    """The same, and of its engine or queue."""
    waits = waits_of(trace)
    last: dict[object, int] = {}
    for i, record in enumerate(trace.records):
        queue = _queue(record)
        if queue in last:
            waits[i].add(last[queue])
        last[queue] = i
    return waits


def _queue(record: Record) -> object:
    """What runs an instruction in order: an engine, or a DMA queue (one per HBM tensor and way)."""
    template, storages = record[0], record[1]
    if template.engine is not Engine.DMA or template.dma is None:
        return template.engine
    return template.dma.direction, storages[max(0, template.hbm_operand)]


def followers_of(waits: list[set[int]]) -> list[list[int]]:
    """The instructions that wait for each."""
    then: list[list[int]] = [[] for _ in waits]
    for i, before in enumerate(waits):
        for j in before:
            then[j].append(i)
    return then


def _fitting(room: Room, waits: list[set[int]]) -> list[int] | None:
    """Numbers of the instructions in an order that fits, the earliest in the program first."""
    left, then = [len(w) for w in waits], followers_of(waits)
    ready = [i for i, count in enumerate(left) if not count]
    full: list[int] = []
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        if not room.take(i):
            full.append(i)
            continue
        order.append(i)
        if room.release(i):
            for j in full:
                heapq.heappush(ready, j)
            full.clear()
        for j in then[i]:
            left[j] -= 1
            if not left[j]:
                heapq.heappush(ready, j)
    return order if len(order) == len(waits) else None


def in_order(trace: Trace, order: list[int]) -> None:
    """Renumber a trace's instructions, and what names them."""
    number = {old: new for new, old in enumerate(order)}
    trace.records[:] = [trace.records[old] for old in order]
    edges = {number[i]: [number[j] for j in producers] for i, producers in trace.edges.items()}
    barriers = {number[i]: barrier for i, barrier in trace.barriers.items()}
    trace.edges.clear()
    trace.edges.update(edges)
    trace.barriers.clear()
    trace.barriers.update(barriers)
    for name, numbers in trace.names.items():
        trace.names[name] = [number[i] for i in numbers]
    for storage in trace.storages:
        storage.first = storage.last = -1
    for new, (_, storages, _, _) in enumerate(trace.records):
        for storage in storages:
            if storage.first < 0:
                storage.first = new
            storage.last = new
