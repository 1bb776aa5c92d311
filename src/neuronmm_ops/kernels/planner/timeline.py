"""The resources that a kernel's steps compete for, as the simulator schedules them, but coarsely.

A `Step` is one group of PSUM tiles summed over a contraction, or one stream of weight tiles. A
`Timeline` runs steps in program order on: the DMA engines, which fetch ahead as far as SBUF has
room; TensorE; the engines that evict PSUM; and the PSUM banks. All times are modelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from neuronmm_ops.hardware import DMA_DONE_NS, DMA_START_NS, PSUM_BANKS, Engine, Machine
from neuronmm_ops.kernels.planner.instructions import result_ns

PARTS = 8
"""Of a step's loads, each of which waits for SBUF by itself."""
SETTLED = 1.01
"""Repeats within this factor take as long as each other."""


class RowLoads(NamedTuple):
    """Loads of rows that VectorE multiplies results by.

    They are on a DMA queue of their own and take `ns` each; before them GpSimdE needs `before_ns`
    and after them VectorE `after_ns`.
    """

    queue: str
    transfers: int
    ns: float
    before_ns: float
    after_ns: float


@dataclass(slots=True)
class Step:
    """One group of PSUM tiles over a contraction. Times in ns, SBUF in bytes per partition.

    Attributes:
        work_ns: of TensorE.
        load_ns: DMA time of the step's loads.
        head_ns: of `load_ns`, what TensorE waits for before it may begin.
        queues: (name, transfers) of each DMA queue that the loads are on.
        tail_ns: of `work_ns`, what is left to do when the last byte has come.
        store_ns: DMA time of stores that follow the evictions.
        stores: how many, on one queue.
        tiles: PSUM tiles, each of `banks` banks; 0 where nothing is evicted.
        banks: see `tiles`.
        bank_tiles: tiles that share a bank, in partitions of their own.
        first_ns: TensorE's time of what a tile does before the next tile begins.
        last_ns: from the last matmul of one tile to that of the next.
        scalar_ns: of ScalarE to evict a tile; 0 where it evicts none.
        vector_ns: of VectorE. The two take turns where both evict.
        fresh: a step that waits next reads its results, not those of steps before.
        rows: rows of PSUM tiles, each a contraction tile of a step that reads them.
        waits: it is the first to read a stage's results: those of the step so many before it are
            the last; 0 if it is not.
        waits_ns: of `work_ns`, one contraction tile's, if it reads the last results; else 0.
        fills: SBUF that its loads and results take.
        needs: of `fills`, what must fit at once.
        frees: SBUF that has its last use in this step.
        stored: SBUF that is free when its stores are done.
        hbm_bytes: moved by its loads and stores.
        instructions: issued.
        row_loads: of what its results are multiplied by.
        cast_ns: what the engines that evict do before it begins.
    """

    work_ns: float
    load_ns: float = 0.0
    head_ns: float = 0.0
    queues: tuple[tuple[str, int], ...] = ()
    tail_ns: float = 0.0
    store_ns: float = 0.0
    stores: int = 1
    tiles: int = 0
    banks: int = 1
    bank_tiles: int = 1
    first_ns: float = 0.0
    last_ns: float = 0.0
    scalar_ns: float = 0.0
    vector_ns: float = 0.0
    fresh: bool = False
    rows: int = 1
    waits: int = 0
    waits_ns: float = 0.0
    fills: int = 0
    needs: int = 0
    frees: int = 0
    stored: int = 0
    hbm_bytes: int = 0
    instructions: int = 0
    row_loads: RowLoads | None = None
    cast_ns: float = 0.0


Section = tuple[list[Step], int]
"""Steps, and how often they run in a row."""


class Program:
    """Steps in program order, in sections.

    Attributes:
        held: SBUF that is taken while they run, beside what they count.
    """

    def __init__(self, held: int = 0) -> None:
        self.held = held
        self.sections: list[Section] = []
        self._key: object = None

    def again(self, key: object) -> bool:
        """Begin the next section, or let the last run once more where `key` is equal to its."""
        if self.sections and key == self._key:
            steps, times = self.sections[-1]
            self.sections[-1] = steps, times + 1
            return True
        self._key = key
        self.sections.append(([], 1))
        return False

    def add(self, step: Step) -> None:
        """Append a step to the last section."""
        self.sections[-1][0].append(step)

    def total(self, name: str) -> int:
        """Sum of an attribute of all steps."""
        return sum([n * sum([getattr(s, name) for s in steps]) for steps, n in self.sections])


def sbuf_peak(programs: Iterable[Program], live: int = 0) -> int:
    """SBUF per partition that programs take at their peak, beside `live` bytes."""
    peak = live
    for program in programs:
        for steps, times in program.sections:
            live += (times - 1) * _kept(steps)
            for step in steps:
                peak = max(peak, live + program.held + step.needs)
                live += step.fills - step.frees - step.stored
    return peak


def _kept(steps: Iterable[Step]) -> int:
    """SBUF that steps fill and do not free."""
    return sum([s.fills - s.frees - s.stored for s in steps])


class Timeline:
    """Time of the resources of one core while steps run on it.

    Attributes:
        now: when TensorE is free.
        work_ns, transfer_ns: busy time of TensorE and of DMA.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.room = machine.usable_sbuf_bytes
        self.now = self._end = self._skipped = 0.0
        self.work_ns = self.transfer_ns = 0.0
        self._dma = DMA_START_NS
        self._interval = machine.dma.interval_ns
        # when the next transfer of a queue may begin, and when SBUF had room for the last loads
        self._queues: dict[str, float] = {}
        self._room_first = self._room_last = 0.0
        self._stores: deque[tuple[float, float]] = deque()
        self._stored = self._store_queue = 0.0
        self._scalar = self._vector = self._rows_there = 0.0
        self._banks = [0.0] * PSUM_BANKS
        # when others may read the first result since a step that waited, and of the last two
        # steps the first and the last, in so many rows
        self._oldest = 0.0
        self._results = deque([(0.0, 0.0, 1)] * 2, maxlen=2)
        engines = (Engine.TENSOR, Engine.SCALAR, Engine.VECTOR)
        self._latencies = [result_ns(machine, engine) for engine in engines]
        # SBUF: bytes taken and freed so far, and (freed before, from when, to when) of each step
        self._taken = self._freed = self._at = 0
        self._marks: list[tuple[int, float, float]] = [(0, 0.0, 0.0)]

    def repeat(self, programs: Sequence[Program], times: int) -> None:
        """Run programs one after the other, all of them `times` over."""

        def once() -> None:
            for program in programs:
                for steps, often in program.sections:
                    self._repeat(steps, often)

        self._settle(once, times)

    def _repeat(self, steps: Sequence[Step], times: int) -> None:
        def once() -> None:
            for step in steps:
                self._run(step)

        more = self._settle(once, times)
        self._taken += more * _kept(steps)
        self.work_ns += more * sum([s.work_ns for s in steps])
        self.transfer_ns += more * sum([s.load_ns + s.store_ns for s in steps])

    def _settle(self, once: Callable[[], None], times: int) -> int:
        """Run `once` until each further time takes as long; returns how many were skipped.

        That is so when TensorE took as long twice, and no load or store falls behind it.
        """
        period = 0.0
        for n in range(times):
            now, dma, stored = self.now + self._skipped, self._dma, self._stored
            before, pending = period, len(self._stores)
            once()
            period = self.now + self._skipped - now
            slowest = max(self._dma - dma, self._stored - stored, before)
            steady = slowest <= SETTLED * period and period <= SETTLED * before
            if n and steady and len(self._stores) <= pending:
                self._skipped += (times - 1 - n) * period
                return times - 1 - n
        return 0

    @property
    def end_ns(self) -> float:
        """When the last byte is stored and the last result evicted, repeats included."""
        return self._end + self._skipped

    def _run(self, s: Step) -> None:
        self.work_ns += s.work_ns
        self.transfer_ns += s.load_ns + s.store_ns
        start = self.now
        arrived = 0.0
        if s.row_loads is not None:
            self._load_rows(s.row_loads)
        if s.load_ns:
            first, arrived = self._load(s), self._dma
            if self._interval:
                first, arrived = self._start_transfers(s, first)
            start = max(start, first + DMA_DONE_NS + s.cast_ns)
        elif s.fills:
            self._taken += s.fills
        if s.waits:
            start = max(start, self._oldest)
            self._oldest = 0.0
        if s.cast_ns:
            start = max(start, max(self._scalar, self._vector) + s.cast_ns)
        begun = self._first_matmuls(s, start)
        work = (begun[-1] - len(begun) * s.first_ns if begun else start) + s.work_ns
        done = max(work, arrived + DMA_DONE_NS + s.tail_ns) if s.load_ns else work
        if s.waits_ns:
            first, last, rows = self._results[-s.waits]
            done = max(done, last + s.waits_ns, first + rows * s.waits_ns)
        if s.tiles:
            self._evict(s, begun, done)
        if s.frees:
            self._free(s.frees, start, done)
        self.now = done
        if s.store_ns:
            self._store(s)
        self._end = max(self._end, done, self._stored)

    def _load_rows(self, rows: RowLoads) -> None:
        """Let rows come; what VectorE evicts next waits for them."""
        begin = max(self._queues.get(rows.queue, 0.0), DMA_START_NS + rows.before_ns)
        last = begin + (rows.transfers - 1) * self._interval
        self._queues[rows.queue] = last + self._interval
        self._rows_there = max(last, self._dma) + rows.ns + DMA_DONE_NS + rows.after_ns

    def _load(self, s: Step) -> float:
        """Let the loads of a step pass, part by part; returns when TensorE may begin."""
        head = min(s.load_ns, s.head_ns or s.load_ns)
        arrived, left, taken = 0.0, s.load_ns, self._taken
        self._taken += s.fills
        part = max(head, (s.load_ns - head) / PARTS)
        while left > 0.0:
            ns = min(left, part if arrived else head)
            if arrived and self._fits(self._taken):  # so all that is left has room
                ns = left
            left -= ns
            needed = taken + round(s.fills * (1.0 - left / s.load_ns))
            room = self._room_at(needed - self.room)
            self._transfer(max(self._dma, room), ns)
            self._room_first = self._room_first if arrived else room
            self._room_last = room
            arrived = arrived or self._dma
        return arrived

    def _start_transfers(self, s: Step, first: float) -> tuple[float, float]:
        """Let the queues start the loads of a step; returns when the first and the last are there.

        A queue starts one transfer an interval, as soon as SBUF has room for it.
        """
        last = self._dma
        for queue, transfers in s.queues:
            begin = max(self._queues.get(queue, DMA_START_NS), self._room_first)
            end = max(begin + (transfers - 1) * self._interval, self._room_last)
            self._queues[queue] = end + self._interval
            first = max(first, begin + s.head_ns)
            last = max(last, end + s.head_ns)
        return first, last

    def _fits(self, taken: int) -> bool:
        """Whether there is room for so many bytes in all as soon as DMA is free."""
        amount = taken - self.room
        if amount > self._freed:
            return False
        at = self._at
        fits = self._room_at(amount) <= self._dma
        self._at = at  # less is asked for next
        return fits

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
        begin = max(self._results[-1][1] + DMA_START_NS, self._store_queue)
        self._store_queue = begin + s.stores * self._interval
        last = self._store_queue - self._interval + s.store_ns / s.stores
        self._stored = max(max(begin, self._stored) + s.store_ns, last)
        self._stores.append((begin, s.store_ns))
        if s.stored:
            self._free(s.stored, begin, self._stored)

    def _first_matmuls(self, s: Step, start: float) -> list[float]:
        """When what each tile does first is done; each waits for its banks."""
        wanted = s.tiles * s.banks // s.bank_tiles
        found: list[float] = []
        for free in self._banks[: wanted : s.banks]:
            start = max(start, free) + s.first_ns
            found.append(start)
        del self._banks[:wanted]
        return found

    def _evict(self, s: Step, begun: list[float], done: float) -> None:
        """Evict the tiles in order, each after its last matmul; their banks are free then."""
        shared = self.machine.shared_ports
        matmul, scalar, vector = self._latencies
        first = seen = end = 0.0
        late = done - begun[-1]
        at_once = s.tiles * s.first_ns > 0.999 * s.work_ns  # what a tile does first is all it does
        for i in range(s.tiles):
            last = (
                begun[i // s.bank_tiles] + late if at_once else done - (s.tiles - 1 - i) * s.last_ns
            )
            ready = last + matmul
            if s.vector_ns and (i % 2 or not s.scalar_ns):
                ready = max(ready, self._vector, self._scalar if shared else 0.0)
                ready = max(ready, self._rows_there)
                self._vector = end = ready + s.vector_ns
                seen = max(seen, end + vector)
            else:
                ready = max(ready, self._scalar, self._vector if shared else 0.0)
                self._scalar = end = ready + s.scalar_ns
                seen = max(seen, end + scalar)
            if i == 0:
                first = seen
            if i % s.bank_tiles == s.bank_tiles - 1:
                self._banks.extend([end] * s.banks)
        self._banks.sort()
        self._oldest = first if s.fresh else self._oldest or first
        self._results.append((first, seen, s.rows))
        self._end = max(self._end, end)

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

    # --- decode

    def run(self, steps: Iterable[Step]) -> None:
        """Run steps once."""
        for step in steps:
            self._run(step)

    def hold(self, size: int) -> None:
        """Take SBUF for what stays; a negative size gives it back."""
        if size > 0:
            self._taken += size
        else:
            self._free(-size, self.now, self.now)

    def exchange(self, ns: float, transfers: int, add_ns: float) -> None:
        """Let the last results go to the other core by DMA, and VectorE add what comes from it."""
        first, last, _ = self._results[-1]
        begin = max(first + DMA_START_NS, self._queues.get("exchange", 0.0))
        queued = begin + (transfers - 1) * self._interval
        self._queues["exchange"] = queued + self._interval
        self._stores.append((last + DMA_START_NS, ns))
        self.transfer_ns += ns
        end = max(last + DMA_START_NS + ns, queued + ns / transfers)
        # what comes first is added while the last is on its way
        early = add_ns * (transfers - 1) / transfers if queued > last + DMA_START_NS else 0.0
        self._vector = max(self._vector + early, end + DMA_DONE_NS) + add_ns - early
        self._arrive(self._vector + self._latencies[2])

    def reload(self, ns: float, before_ns: float = 0.0) -> None:
        """Let what was stored come back from HBM as results; so long before, others are used."""
        back = self._stored + DMA_START_NS + ns + DMA_DONE_NS
        self._arrive(max(self._results[-1][1], back - before_ns))

    def wait(self, ns: float) -> None:
        """Let the last results be used no sooner than so long after they were evicted."""
        self._arrive(self._results[-1][1] + ns)

    def _arrive(self, when: float) -> None:
        self._oldest = when
        self._results.append((when, when, 1))
