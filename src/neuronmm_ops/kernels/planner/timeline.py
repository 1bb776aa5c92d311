"""The resources that a kernel's steps compete for, as the simulator schedules them, but coarsely.

A `Step` is one group of PSUM tiles summed over a contraction, or one stream of weight tiles. A
`Timeline` runs steps in program order on: the DMA engines, which fetch ahead as far as SBUF has
room; TensorE; the engines that evict PSUM; and the PSUM banks. All times are modelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from neuronmm_ops.hardware import DMA_START_NS, PSUM_BANKS, Engine, Machine
from neuronmm_ops.kernels.planner.instructions import result_ns


@dataclass(slots=True)
class Step:
    """One group of PSUM tiles over a contraction. Times in ns, SBUF in bytes per partition.

    Attributes:
        work_ns: of TensorE.
        load_ns: DMA time of the step's loads.
        head_ns: of `load_ns`, what TensorE waits for before it may begin.
        tail_ns: of `work_ns`, what is left to do when the last byte has come.
        store_ns: DMA time of stores that follow the evictions.
        tiles: PSUM tiles, each of `banks` banks; 0 where nothing is evicted.
        banks: see `tiles`.
        first_ns: TensorE's time of one matmul: the tiles' first matmuls follow one another so.
        last_ns: from the last matmul of one tile to that of the next.
        scalar_ns: of ScalarE to evict a tile; 0 where it evicts none.
        vector_ns: of VectorE. The two take turns where both evict.
        waits: it reads what the steps before have evicted.
        waits_ns: of `work_ns`, what is left to do after the last of that.
        fills: SBUF that its loads and results take.
        needs: of `fills`, what must fit at once.
        frees: SBUF that has its last use in this step.
        stored: SBUF that is free when its stores are done.
        hbm_bytes: moved by its loads and stores.
        instructions: issued.
    """

    work_ns: float
    load_ns: float = 0.0
    head_ns: float = 0.0
    tail_ns: float = 0.0
    store_ns: float = 0.0
    tiles: int = 0
    banks: int = 1
    first_ns: float = 0.0
    last_ns: float = 0.0
    scalar_ns: float = 0.0
    vector_ns: float = 0.0
    waits: bool = False
    waits_ns: float = 0.0
    fills: int = 0
    needs: int = 0
    frees: int = 0
    stored: int = 0
    hbm_bytes: int = 0
    instructions: int = 0


class Timeline:
    """Time of the resources of one core while steps run on it.

    Attributes:
        now: when TensorE is free.
        end_ns: when the last byte is stored and the last result evicted.
        work_ns, transfer_ns: busy time of TensorE and of DMA.
        sbuf_bytes: peak per partition.
        hbm_bytes, instructions: sums over the steps.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.room = machine.usable_sbuf_bytes
        self.now = self.end_ns = 0.0
        self.work_ns = self.transfer_ns = 0.0
        self.live = self.sbuf_bytes = self.hbm_bytes = self.instructions = 0
        self._dma = DMA_START_NS
        self._stores: deque[tuple[float, float]] = deque()
        self._stored = 0.0
        self._scalar = self._vector = 0.0
        self._banks = [0.0] * PSUM_BANKS
        self._results = [0.0, 0.0]
        self._latency = {e: result_ns(machine, e) for e in (Engine.TENSOR, Engine.SCALAR)}
        self._latency[Engine.VECTOR] = result_ns(machine, Engine.VECTOR)
        # SBUF: bytes taken and freed so far, and (freed before, from when, to when) of each step
        self._taken = self._freed = self._at = 0
        self._marks: list[tuple[int, float, float]] = [(0, 0.0, 0.0)]

    def run(self, steps: Iterable[Step]) -> float:
        """Let steps pass; returns when everything so far has ended."""
        for step in steps:
            self._run(step)
        return self.end_ns

    def _run(self, s: Step) -> None:
        self.sbuf_bytes = max(self.sbuf_bytes, self.live + s.needs)
        self.live += s.fills - s.frees - s.stored
        self.hbm_bytes += s.hbm_bytes
        self.instructions += s.instructions
        self.work_ns += s.work_ns
        self.transfer_ns += s.load_ns + s.store_ns
        start = self.now
        if s.load_ns:
            start = max(start, self._load(s))
        elif s.fills:
            self._taken += s.fills
        if s.waits:
            start = max(start, self._results[0])
        work = self._first_matmuls(s, start) + s.work_ns
        done = max(work, self._dma + s.tail_ns) if s.load_ns else work
        if s.waits:
            done = max(done, self._results[1] + s.waits_ns)
        if s.tiles:
            self._evict(s, done)
        if s.frees:
            self._free(s.frees, start, done)
        self.now = done
        if s.store_ns:
            self._store(s)
        self.end_ns = max(self.end_ns, done, self._stored)

    def _load(self, s: Step) -> float:
        """Let the loads of a step pass; returns when TensorE may begin."""
        head = s.head_ns or s.load_ns
        share = round(s.fills * head / s.load_ns)
        begin = max(self._dma, self._room_at(self._taken + share - self.room))
        first = self._transfer(begin, head)
        self._taken += s.fills
        if head < s.load_ns:
            room = self._room_at(self._taken - self.room)
            self._transfer(first, s.load_ns - head)
            self._dma = max(self._dma, room + head)
        return first

    def _transfer(self, begin: float, ns: float) -> float:
        """Keep the DMA engines busy from `begin`, stores that come in between included."""
        end = begin + ns
        stores = self._stores
        while stores and stores[0][0] < end:
            ready, size = stores.popleft()
            end += max(0.0, min(size, ready + size - begin))
        self._dma = end
        return end

    def _store(self, s: Step) -> None:
        begin = max(self._results[1] + DMA_START_NS, self._stored)
        self._stored = begin + s.store_ns
        self._stores.append((begin, s.store_ns))
        if s.stored:
            self._free(s.stored, begin, self._stored)

    def _first_matmuls(self, s: Step, start: float) -> float:
        """When the tiles' first matmuls would have begun, had they not waited for banks."""
        wanted = s.tiles * s.banks
        if not wanted:
            return start
        at = start
        for free in self._banks[: wanted : s.banks]:
            at = max(at, free) + s.first_ns
        del self._banks[:wanted]
        return at - s.tiles * s.first_ns

    def _evict(self, s: Step, done: float) -> None:
        """Evict the tiles in order, each after its last matmul; their banks are free then."""
        shared = self.machine.shared_ports
        matmul = self._latency[Engine.TENSOR]
        seen = end = 0.0
        for i in range(s.tiles):
            ready = done - (s.tiles - 1 - i) * s.last_ns + matmul
            by_vector = s.vector_ns and (i % 2 or not s.scalar_ns)
            if by_vector:
                ready = max(ready, self._vector, self._scalar if shared else 0.0)
                self._vector = end = ready + s.vector_ns
                seen = max(seen, end + self._latency[Engine.VECTOR])
            else:
                ready = max(ready, self._scalar, self._vector if shared else 0.0)
                self._scalar = end = ready + s.scalar_ns
                seen = max(seen, end + self._latency[Engine.SCALAR])
            if i == 0:
                self._results[0] = seen
            self._banks.extend([end] * s.banks)
        self._banks.sort()
        self._results[1] = seen
        self.end_ns = max(self.end_ns, end)

    def _free(self, amount: int, begin: float, end: float) -> None:
        self._marks.append((self._freed, begin, end))
        self._freed += amount

    def _room_at(self, amount: int) -> float:
        """When DMA may begin to fill SBUF of which so many bytes must have been freed."""
        if amount <= 0:
            return 0.0
        marks = self._marks
        while self._at + 1 < len(marks) and marks[self._at + 1][0] < amount:
            self._at += 1
        before, begin, end = marks[self._at]
        after = marks[self._at + 1][0] if self._at + 1 < len(marks) else self._freed
        share = min(1.0, (amount - before) / max(1, after - before))
        return begin + (end - begin) * share + DMA_START_NS
