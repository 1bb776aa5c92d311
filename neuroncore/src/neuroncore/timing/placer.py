"""Places the instructions of one core in time, in program order.

Each starts when its engine is free, what it reads is written, what it overwrites is read, and, for
the first write of a tensor, when enough tensors before it have had their last use. That last wait
is what double buffering is: a tile allocated in a loop may be loaded ahead as far as the memory
has capacity.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from neuroncore.core import KernelRun
from neuroncore.hardware import (
    DMA_DONE_NS,
    DMA_QUEUES,
    DMA_START_NS,
    HWDGE_NS,
    MIN_CYCLES,
    TABLE_LOAD_NS,
    Engine,
    Machine,
    Model,
)
from neuroncore.memory import liveness
from neuroncore.memory.storage import MemoryRegion, Storage
from neuroncore.timing.resources import (
    Capacity,
    DmaEngines,
    RecentUse,
    pe_cells,
    shared_ports_of,
)
from neuroncore.timing.steady import Iterations, Loops
from neuroncore.timing.times import CoreSchedule, Wait
from neuroncore.timing.trace import (
    InstructionTemplate,
    Loop,
    Move,
    Record,
    Trace,
    on_grid,
)
from neuroncore.turns import Meeting


class _Uses:
    """What one core's instructions have done with a tensor so far, by their numbers."""

    __slots__ = ("begun", "last", "latest", "latest_engine", "read_by", "written_by")

    def __init__(self) -> None:
        self.begun = self.last = -1
        # the last instruction by region, and when the latest of all is visible
        self.written_by: dict[int, int] = {}
        self.read_by: dict[int, int] = {}
        self.latest = 0.0
        self.latest_engine = -1


class Placer:
    """Places the instructions of one core."""

    def __init__(self, trace: Trace, launch: KernelRun, machine: Machine, model: Model) -> None:
        self.trace, self.machine = trace, machine
        self.times = CoreSchedule(trace)
        self.engine_free = [0.0] * 6
        self.engine_last = [-1] * 6
        self.overhead_ns = 0.0 if model == "documented" else on_grid(machine.matmul_overhead_ns)
        self.issue_ns = on_grid(machine.ns(Engine.TENSOR, MIN_CYCLES)) + self.overhead_ns
        issue = machine.engine_issue_cycles if model != "documented" else 0.0
        self.after_ns = [
            on_grid(machine.ns(engine, issue)) if engine in (Engine.VECTOR, Engine.SCALAR) else 0.0
            for engine in Engine
            if engine is not Engine.DMA
        ]
        self.reuses = model == "stationary_reuse"
        # the stationary operand in TensorE: storage, region, and who wrote it
        self.loaded: tuple[Storage, int, int] | None = None
        self.table = ""
        self.dma = DmaEngines()
        self.interval_ns = on_grid(machine.dma.interval_ns)
        self.dma_ns: dict[InstructionTemplate, float] = {}
        # name, when it can start another transfer, its last instruction
        self.queues: dict[Any, list[Any]] = {}
        self.dge_free = [0.0, 0.0]
        self.cells = [0.0] * 16
        throttle = None if model == "documented" else machine.throttle
        self.recent = RecentUse(throttle) if throttle else None
        self.pe_issue = self.pe_full = 0.0
        self.ports = {"sbuf": [0.0, -1, 0.0, -1], "psum": [0.0, -1, 0.0, -1]}
        # when another engine may use an instruction's result
        self.visible: list[float] = []
        self.barrier: tuple[int, Record] | None = None
        self.barrier_end = 0.0
        self.uses: defaultdict[Storage, _Uses] = defaultdict(_Uses)
        self.capacity: dict[MemoryRegion, Capacity] = {}
        for memory, limit in liveness.check_fits(trace, machine, launch.capacity).items():
            self.capacity[memory] = Capacity(limit)
            self.times.occupied[memory] = self.capacity[memory].occupied
        # of tensors with an address: what each takes and gives back
        self.shares = liveness.shares_of(trace.storages)
        self.loops = Loops(trace)
        # no DMA starts before: what follows a loop is not triggered before its last iteration
        self.floor = 0.0
        self.producers = {p: -1 for producers in trace.edges.values() for p in producers}
        self.iterations: dict[Loop, int] = {}
        self.steps = self._run(0, len(trace.records), self.loops.inside(None))

    def advance(self) -> Meeting | None:
        """Place instructions up to and with the next one that waits for other cores."""
        self.barrier, self.barrier_end = None, 0.0
        return next(self.steps, None)

    def _run(self, begin: int, end: int, loops: list[Loop]) -> Iterator[Meeting]:
        """Place the records [begin, end) and the loops among them; yields at each barrier."""
        for loop in loops:
            yield from self._place(begin, loop.start)
            yield from self._repeat(loop)
            begin = loop.end
        yield from self._place(begin, end)

    def _repeat(self, loop: Loop) -> Iterator[Meeting]:
        """Place a loop of the device, as far as its iterations differ."""
        inner = self.loops.inside(loop)
        iterations = Iterations(self, loop)
        at = 0
        while at < loop.trips:
            self.iterations[loop] = at
            yield from self._run(loop.start, loop.end, inner)
            at += 1 + iterations.skip(at)
        self.floor = max(self.floor, iterations.floor)
        self.engine_free[:] = [max(free, self.floor) for free in self.engine_free]
        self.pe_full = max(self.pe_full, self.floor)
        for s in self.loops.held[loop]:
            self._release(s, len(self.times.start) - 1)

    def _place(self, begin: int, end: int) -> Iterator[Meeting]:
        """Place the records [begin, end), which have no loop.

        One long loop: at a few us an instruction, calls for its parts would double the time.
        """
        records, edges, moves = self.trace.records, self.trace.edges, self.trace.moves
        barriers, producers = self.trace.barriers, self.producers
        times = self.times
        start, end_of, cause, wait = times.start, times.end, times.cause, times.wait
        visible = self.visible
        engine_free, engine_last = self.engine_free, self.engine_last
        shared_ports = self.machine.shared_ports
        uses_of = self.uses.__getitem__
        special = {*moves, *edges, *producers, *barriers}
        late, recent, overhead_ns = self.loops.late, self.recent, self.overhead_ns
        after_ns = self.after_ns
        issued = times.issued
        issued.extend(records[begin:end])
        i, r = len(start) - 1, begin - 1
        for template, storages, _, _ in records[begin:end]:
            i += 1
            r += 1
            regions, overlaps = template.regions, template.overlaps
            is_special = r in special
            if is_special and r in moves:
                regions, overlaps = self._moved(template, moves[r])
            engine: int = template.engine
            if engine == 5:
                ready, why, who = self.floor, 0, -1
            elif template.pe_tile is None:
                ready, who = engine_free[engine], engine_last[engine]
                why = 1
            else:
                ready, why, who = self._tile_free(template), 1, engine_last[0]
            writes = template.writes
            used = [*map(uses_of, storages)]
            for operand, use in enumerate(used):
                writing = operand < writes
                if writing and (s := storages[operand]).first == r and s.layout.on_chip:
                    when, by = self._allocate(s, use, i)
                    if when > ready:
                        ready, why, who = when, 3, by
                written_by = use.written_by
                if not (writing or written_by):  # an input holds nobody up
                    continue
                if use.latest > ready and not (engine == 0 and use.latest_engine == 0):
                    read_by = use.read_by
                    for region in overlaps[operand]:
                        other = written_by.get(region)
                        if other is not None:
                            t = visible[other]
                            # an engine overwrites its own result without waiting to see it
                            if writing and t > ready and (engine == 0 or not template.reads_dst):
                                t = end_of[other] if issued[other][0].engine == engine else t
                            if t > ready:
                                ready, why, who = t, 2, other
                        if writing:
                            other = read_by.get(region)
                            if other is not None and end_of[other] > ready:
                                ready, why, who = end_of[other], 2, other
            if is_special and r in edges:
                for other in map(producers.__getitem__, edges[r]):
                    if visible[other] > ready:
                        ready, why, who = visible[other], 2, other
            if engine == 5:
                begin_ns, done, why, who = self._transfer(i, template, storages, ready, why, who)
                seen = done + DMA_DONE_NS
            else:
                if shared_ports and 0 < engine <= 3:
                    ready, why, who = self._port(template, ready, why, who)
                begin_ns = ready
                if engine == 0:
                    issue_ns = self._issue(template, storages) if self.reuses else overhead_ns
                    if recent is None:
                        own_ns = template.ns + issue_ns
                    else:
                        own_ns = recent.slowed(begin_ns, template.ns, issue_ns)
                    done = begin_ns + own_ns
                    if template.pe_tile is None:
                        engine_free[0] = done
                        self.pe_full = done
                    else:
                        self._occupy_tile(template, begin_ns, done)
                else:
                    done = begin_ns + template.ns
                    if template.table and template.table != self.table:
                        self.table = template.table
                        done += TABLE_LOAD_NS
                    engine_free[engine] = done + after_ns[engine]
                    if shared_ports:
                        self._occupy_port(i, template, done)
                engine_last[engine] = i
                seen = done + template.result_ns
            start.append(begin_ns)
            end_of.append(done)
            visible.append(seen)
            cause.append(who)
            wait.append(why)
            for operand, use in enumerate(used):
                region = regions[operand]
                if operand < writes:
                    use.written_by[region] = i
                    visible_from = seen
                else:
                    known = use.read_by.get(region)
                    if known is None or end_of[known] < done:
                        use.read_by[region] = i
                    visible_from = done
                if visible_from > use.latest:
                    use.latest, use.latest_engine = visible_from, engine
                # once, where an instruction names a tensor twice
                s = storages[operand]
                if s.last == r and s not in late and s not in storages[operand + 1 :]:
                    self._release(s, i)
            if is_special and r in producers:
                producers[r] = i
            if is_special and r in barriers:
                self.barrier, self.barrier_end = (i, records[r]), done
                yield barriers[r]

    def add_up(self) -> None:
        """Sum up the busy time of the DMA engines."""
        issued = Counter(map(itemgetter(0), self.times.issued))
        for template, engine_ns in self.dma_ns.items():
            cost = template.dma
            assert cost is not None
            for engine in range(cost.first_engine, cost.first_engine + cost.engines):
                self.times.dma_busy_ns[engine] += issued[template] * engine_ns

    def pass_barrier(self, number: int, latest: float, ns: float) -> None:
        """All have come: the instruction ends `ns` after the latest of them came."""
        assert self.barrier is not None
        last, (template, storages, _, _) = self.barrier
        if template.opcode in ("core_barrier", "sendrecv"):
            ns += self.machine.meeting_ns
        when = latest + ns
        self.times.barriers[last] = number
        if latest > self.times.end[last]:
            self.times.wait[last], self.times.cause[last] = Wait.OTHER_CORE, -1
        self.times.end[last] = when
        self.visible[last] = max(self.visible[last], when)
        for use in map(self.uses.__getitem__, storages):
            if when > use.latest:
                use.latest, use.latest_engine = when, template.engine
        # a barrier holds all engines, a collective its own, an exchange by DMA none
        if template.engine is not Engine.DMA:
            for engine in range(4) if template.opcode == "core_barrier" else (template.engine,):
                if self.engine_free[engine] < when:
                    self.engine_free[engine], self.engine_last[engine] = when, last

    # capacity

    def _allocate(self, s: Storage, use: _Uses, i: int) -> tuple[float, int]:
        """When a tensor's place is free for its first write, and the instruction that frees it."""
        # it entered by another operand, or in an iteration before
        if use.begun == i or (use.begun >= 0 and s in self.loops.early):
            return 0.0, -1
        use.begun = i
        capacity = self.capacity[s.layout.memory]
        if s.address is None:
            return capacity.take(s.layout.size)
        when, who = capacity.take(self.shares[s][0])
        for other in self.shares:
            if other is s or other.memory is not s.memory or other not in self.uses:
                continue
            latest, last = self.uses[other].latest, self.uses[other].last
            if latest > when and liveness.overlap(s, other):
                when, who = latest, last
        return when, who

    def _release(self, s: Storage, i: int) -> None:
        layout = s.layout
        if not layout.on_chip:
            return
        capacity, use = self.capacity[layout.memory], self.uses[s]
        use.last = i
        capacity.occupied.append((self.times.start[use.begun], use.latest, s))
        size = layout.size if s.address is None else self.shares[s][1]
        capacity.release(use.latest, size, i)

    def _moved(
        self, template: InstructionTemplate, moves: list[Move]
    ) -> tuple[list[int], list[list[int]]]:
        """Regions and overlaps of an instruction's operands in the iterations that run."""
        regions, overlaps = list(template.regions), list(template.overlaps)
        for move in moves:
            region = move.region(self.iterations[move.loop])
            regions[move.operand] = region
            overlaps[move.operand] = move.geometry.layout.overlaps[region]
        return regions, overlaps

    def _issue(self, template: InstructionTemplate, storages: tuple[Storage, ...]) -> float:
        """Issue overhead of a TensorE instruction: none for a stationary operand that is loaded."""
        before, self.loaded = self.loaded, None
        if template.opcode == "nc_matmul":
            stationary = storages[1]
            writers = [
                self.uses[stationary].written_by.get(region, -1) for region in template.overlaps[1]
            ]
            self.loaded = (stationary, template.regions[1], max(writers))
        return 0.0 if before and before == self.loaded else self.overhead_ns

    # PE tiles

    def _tile_free(self, template: InstructionTemplate) -> float:
        assert template.pe_tile is not None
        cells = pe_cells(template.pe_tile, self.machine.serial_columns)
        return max(self.pe_issue, self.pe_full, *map(self.cells.__getitem__, cells))

    def _occupy_tile(self, template: InstructionTemplate, begin: float, done: float) -> None:
        assert template.pe_tile is not None
        for c in pe_cells(template.pe_tile):
            self.cells[c] = done
        # instructions are issued one after another: at least MIN_II apart
        self.pe_issue = begin + self.issue_ns
        self.engine_free[0] = max(self.engine_free[0], done)

    # ports that engines share on gen2

    def _port(
        self, template: InstructionTemplate, ready: float, why: int, who: int
    ) -> tuple[float, int, int]:
        for port, other in shared_ports_of(template):
            slots = self.ports[port]
            if slots[2 * other] > ready:
                ready, why, who = slots[2 * other], Wait.PORT, int(slots[2 * other + 1])
        return ready, why, who

    def _occupy_port(self, i: int, template: InstructionTemplate, done: float) -> None:
        for port, other in shared_ports_of(template):
            mine = 1 - other
            self.ports[port][2 * mine : 2 * mine + 2] = [done, i]

    # DMA

    def _transfer(
        self,
        i: int,
        template: InstructionTemplate,
        storages: tuple[Storage, ...],
        ready: float,
        why: int,
        who: int,
    ) -> tuple[float, float, int, int]:
        cost = template.dma
        assert cost is not None
        # one queue per HBM tensor and direction: what a compiler's DMA rings come to
        is_own = template.hbm_operand >= 0 and not self.machine.shared_queues
        hbm = id(storages[template.hbm_operand]) if is_own else 0
        key = (cost.direction, hbm)
        queue = self.queues.get(key)
        if queue is None:
            name = f"q{len(self.queues) % DMA_QUEUES} {cost.direction}"
            queue = self.queues[key] = [name, 0.0, -1]
        if queue[1] > ready:
            ready, why, who = queue[1], 4, queue[2]  # Wait.QUEUE
        queue[1], queue[2] = ready + self.interval_ns, i
        self.times.queue[i] = queue[0]
        trigger = ready
        if cost.descriptors == "hwdge":
            unit = 0 if self.dge_free[0] <= self.dge_free[1] else 1
            trigger = max(trigger, self.dge_free[unit]) + HWDGE_NS
            self.dge_free[unit] = trigger
        elif cost.descriptors == "swdge":
            cycles = max(MIN_CYCLES, cost.rows)
            trigger = max(trigger, self.engine_free[3])
            trigger += on_grid(self.machine.ns(Engine.GPSIMD, cycles))
            self.engine_free[3], self.engine_last[3] = trigger, i
        first = trigger + DMA_START_NS
        engine_ns = self.dma_ns.get(template)
        if engine_ns is None:
            engine_ns = self.dma_ns[template] = on_grid(cost.engine_ns(self.machine))
        done = self.dma.take(cost, engine_ns, first)
        begin = max(first, done - engine_ns)
        if begin > first + 1 and self.engine_last[5] >= 0:
            why, who = 5, self.engine_last[5]  # Wait.DMA_ENGINES
        self.engine_last[5] = i
        return begin, done, why, who
