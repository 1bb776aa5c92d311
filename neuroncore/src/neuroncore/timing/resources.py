"""What instructions compete for: DMA engines, PE tiles, ports, the capacity of a memory."""

from __future__ import annotations

import heapq
from collections import deque
from functools import lru_cache
from itertools import pairwise
from typing import Any

from neuroncore.hardware import DMA_ENGINES, PARTITIONS, Engine, Throttle
from neuroncore.memory.storage import Storage
from neuroncore.timing.trace import DmaCost, InstructionTemplate, on_grid


class FreeTime:
    """Free time of DMA engines that carry the same load; transfers share it by interleaving."""

    __slots__ = ("busy_until", "gaps")

    def __init__(self, gaps: list[tuple[float, float]], busy_until: float) -> None:
        self.gaps, self.busy_until = gaps, busy_until

    def take(self, ready: float, ns: float) -> float:
        """Use `ns` of free time from `ready` on; returns when it is used up."""
        gaps = self.gaps
        if gaps and gaps[-1][1] > ready:
            first = len(gaps) - 1
            while first and gaps[first - 1][1] > ready:
                first -= 1
            left: list[tuple[float, float]] = []
            end, at = ready, first
            while ns > 0 and at < len(gaps):
                low, high = gaps[at]
                begin = max(low, ready)
                used = min(ns, high - begin)
                if low < begin:
                    left.append((low, begin))
                ns -= used
                end = begin + used
                if end < high:
                    left.append((end, high))
                at += 1
            gaps[first:at] = left
            if ns <= 0:
                return end
        if ready > self.busy_until:
            self.gaps.append((self.busy_until, ready))
            if len(self.gaps) > 256:
                del self.gaps[:128]
            self.busy_until = ready
        self.busy_until += ns
        return self.busy_until

    def forget(self, before: float) -> None:
        """Drop free time that nothing to come can use."""
        self.gaps = [(max(low, before), high) for low, high in self.gaps if high > before]
        self.busy_until = max(self.busy_until, before)

    def since(self, start: float) -> Any:
        """All of it, counted from a time."""
        return [(low - start, high - start) for low, high in self.gaps], self.busy_until - start

    def shift(self, ns: float) -> None:
        """Let so much time pass in which it is used as before."""
        self.gaps = [(low + ns, high + ns) for low, high in self.gaps]
        self.busy_until += ns


class DmaEngines:
    """The 16 DMA engines, in groups that have carried the same load so far."""

    def __init__(self) -> None:
        self.groups = [(0, DMA_ENGINES, FreeTime([], 0.0))]
        self._cuts = {0, DMA_ENGINES}

    def take(self, cost: DmaCost, engine_ns: float, ready: float) -> float:
        """Carry one DMA, which keeps each of its engines busy; returns when the last is done."""
        first, last = cost.first_engine, cost.first_engine + cost.engines
        if first not in self._cuts or last not in self._cuts:
            self._split(first, last)
        if len(self.groups) == 1:
            return self.groups[0][2].take(ready, engine_ns)
        end = ready
        for low, high, line in self.groups:
            if first <= low and high <= last:
                end = max(end, line.take(ready, engine_ns))
        return end

    def _split(self, first: int, last: int) -> None:
        self._cuts |= {first, last}
        groups: list[tuple[int, int, FreeTime]] = []
        for low, high, line in self.groups:
            cuts = [low, *[c for c in (first, last) if low < c < high], high]
            groups.extend(
                [(a, b, FreeTime(list(line.gaps), line.busy_until)) for a, b in pairwise(cuts)]
            )
        self.groups = groups

    def forget(self, before: float) -> None:
        """As `FreeTime.forget`, of all engines."""
        for _, _, line in self.groups:
            line.forget(before)

    def since(self, start: float) -> Any:
        """As `FreeTime.since`, of all engines."""
        return [(low, high, line.since(start)) for low, high, line in self.groups]

    def shift(self, ns: float) -> None:
        """As `FreeTime.shift`, of all engines."""
        for _, _, line in self.groups:
            line.shift(ns)


class Capacity:
    """The bytes or banks of one memory: handed out in program order, freed at last uses."""

    def __init__(self, limit: int) -> None:
        # (free from, size, instruction whose end freed it), earliest first
        self.free = [(0.0, limit, -1)]
        self.occupied: list[tuple[float, float, Storage]] = []
        """(from, to, tensor) of the tensors that have been here."""

    def take(self, size: int) -> tuple[float, int]:
        """(when so much is free, instruction whose end frees it) for a tensor of this size."""
        when, who = 0.0, -1
        while size > 0:  # liveness.check_fits has shown that enough will be freed
            when, free, who = heapq.heappop(self.free)
            if free > size:
                heapq.heappush(self.free, (when, free - size, who))
            size -= free
        return when, who

    def release(self, when: float, size: int, who: int) -> None:
        """Give back what a tensor took, after its last use."""
        heapq.heappush(self.free, (when, size, who))

    def forget(self, before: float) -> None:
        """Make one of all that is free already by a time."""
        old = sum([size for when, size, _ in self.free if when <= before])
        self.free = [entry for entry in self.free if entry[0] > before]
        if old:
            self.free.append((0.0, old, -1))
        heapq.heapify(self.free)

    def since(self, start: float, number: int) -> Any:
        """What is free from when, counted from a time and an instruction."""
        return sorted(
            [(when - start, size, who - number) if when else (when, size, who)
             for when, size, who in self.free]
        )  # fmt: skip

    def shift(self, ns: float, instructions: int) -> None:
        """Let so much time and so many instructions pass in which it is used as before."""
        self.free = [
            (when + ns, size, who + instructions) if when else (when, size, who)
            for when, size, who in self.free
        ]


class RecentUse:
    """What TensorE did of late, which its rate follows: `Throttle.use` of its window."""

    def __init__(self, throttle: Throttle) -> None:
        self.throttle = throttle
        # (from, to, rate) when it was busy, earliest first; those that overlap are one
        self.counted: deque[tuple[float, float, float]] = deque()
        self.recent: deque[tuple[float, float, float]] = deque()
        """Those that end within the delay."""
        self.used = 0.0  # sum of `counted`, in ns at the full rate

    def slowed(self, begin: float, ns: float, issue_ns: float) -> float:
        """What an instruction of `ns` takes that begins now, beyond its issue or during it."""
        throttle, recent = self.throttle, self.recent
        full = self._used_before(begin - throttle.delay_ns) >= throttle.use * throttle.window_ns
        rate = 1.0 if full else throttle.rate
        # at half the rate the next is issued while columns wait (traces: 512 columns in 427 ns)
        streams = ns
        ns = ns + issue_ns if full else max(ns + issue_ns, on_grid(ns / rate))
        # columns count, and not their issue
        rate = streams / ns if ns else rate
        end, start = begin + ns, begin
        if recent and begin <= recent[-1][1]:
            first, last, before = recent[-1]
            if end <= last:
                return ns
            start = last
            if rate == before:
                start = first
                recent.pop()
        recent.append((start, end, rate))
        return ns

    def _used_before(self, until: float) -> float:
        """What was done in the window that ends then, in ns at the full rate."""
        counted, recent = self.counted, self.recent
        since = until - self.throttle.window_ns
        while recent and recent[0][1] <= until:
            start, end, rate = recent.popleft()
            counted.append((start, end, rate))
            self.used += (end - start) * rate
        while counted and counted[0][1] <= since:
            start, end, rate = counted.popleft()
            self.used -= (end - start) * rate
        used = self.used
        if counted and counted[0][0] < since:
            start, _, rate = counted[0]
            used -= (since - start) * rate
        if recent and recent[0][0] < until:
            start, _, rate = recent[0]
            used += (until - max(start, since)) * rate
        return used

    def since(self, start: float) -> Any:
        """What still counts from a time on, counted from it."""
        first = start - self.throttle.delay_ns - self.throttle.window_ns
        spans = [*self.counted, *self.recent]
        return [(max(a, first) - start, b - start, rate) for a, b, rate in spans if b > first]

    def shift(self, ns: float) -> None:
        """Let so much time pass in which it is used as before."""
        for spans in (self.counted, self.recent):
            for i, (start, end, rate) in enumerate(spans):
                spans[i] = start + ns, end + ns, rate


@lru_cache(maxsize=256)
def pe_cells(tile: tuple[int, int, int, int], serial_columns: bool = False) -> tuple[int, ...]:
    """Cells of the PE array, 4 x 4 of 32 x 32, that a tile covers, or all columns of its rows."""
    row, rows, column, columns = tile
    if serial_columns:
        column, columns = 0, PARTITIONS
    return tuple(
        [
            4 * r + c
            for r in range(row // 32, (row + rows) // 32)
            for c in range(column // 32, (column + columns) // 32)
        ]
    )


def shared_ports_of(template: InstructionTemplate) -> list[tuple[str, int]]:
    """Ports that an instruction takes on gen2, and the side that excludes it there.

    Side 0 of each is VectorE; side 1 is GpSimdE on SBUF and ScalarE on PSUM.
    """
    if template.engine is Engine.VECTOR:
        return [("sbuf", 1)] * template.on_sbuf + [("psum", 1)] * template.on_psum
    if template.engine is Engine.GPSIMD and template.on_sbuf:
        return [("sbuf", 0)]
    if template.engine is Engine.SCALAR and template.on_psum:
        return [("psum", 0)]
    return []
