"""When each instruction runs: engines in order, DMA queues, dependencies, room in SBUF and PSUM.

The instructions of a core are placed in program order. Each starts when its engine is free, what
it reads is written, what it overwrites is read, and, for the first write of a tensor, when
enough tensors before it have had their last use. That last wait is what double buffering is:
a tile allocated in a loop may be loaded ahead as far as there is room.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from neuronmm_ops.hardware import (
    DMA_ENGINES,
    DMA_QUEUES,
    DMA_START_NS,
    HWDGE_NS,
    MIN_CYCLES,
    Engine,
    Machine,
    Model,
)
from neuronmm_ops.neuroncore.core import KernelRun
from neuronmm_ops.neuroncore.memory import liveness
from neuronmm_ops.neuroncore.memory.storage import MemoryRegion, Storage
from neuronmm_ops.neuroncore.timing.resources import DmaEngines, Room
from neuronmm_ops.neuroncore.timing.trace import InstructionTemplate, Trace


class Wait(IntEnum):
    """What an instruction waited for last."""

    NOTHING = 0
    ENGINE = 1
    DATA = 2
    ROOM = 3
    QUEUE = 4
    DMA_ENGINES = 5
    PORT = 6
    OTHER_CORE = 7


@dataclass
class CoreSchedule:
    """Times of one core's instructions, ns from the start, by instruction number."""

    trace: Trace
    start: list[float] = field(default_factory=list[float])
    end: list[float] = field(default_factory=list[float])
    cause: list[int] = field(default_factory=list[int])
    """The instruction that was waited for last, or -1."""
    wait: list[int] = field(default_factory=list[int])
    """A `Wait` each."""
    queue: dict[int, str] = field(default_factory=dict[int, str])
    """Queue of each DMA."""
    dma_busy_ns: list[float] = field(default_factory=lambda: [0.0] * DMA_ENGINES)
    room: dict[MemoryRegion, list[tuple[float, float, int]]] = field(
        default_factory=dict[MemoryRegion, list[tuple[float, float, int]]]
    )
    """(from, to, size) of each tensor on chip."""


@dataclass
class Schedule:
    """All cores of a launch under one cost model."""

    machine: Machine
    model: Model
    cores: list[CoreSchedule]

    @property
    def time_ns(self) -> float:
        """When the last instruction ends."""
        return max([max(c.end, default=0.0) for c in self.cores])


def schedule(launch: KernelRun, model: Model = "calibrated") -> Schedule:
    """Place every instruction in time. Raises NkiValidationError where tensors do not fit."""
    for core in launch.cores:
        liveness.check_fits(core.trace, launch.machine)
        for storage in core.trace.storages:
            storage.written_by.clear()
            storage.read_by.clear()
            storage.latest, storage.latest_engine = 0.0, -1
    placers = [_Placer(core.trace, launch.machine, model) for core in launch.cores]
    if len(placers) > 1:
        for placer in placers:
            placer.share([s for s in placer.trace.storages if not s.layout.on_chip])
    meetings = max([len(core.trace.barriers) for core in launch.cores])
    for number in range(meetings + 1):
        for placer in placers:
            with placer.turn():
                placer.advance(number)
        if number < meetings:
            met = max([p.meeting_end for p in placers])
            for placer in placers:
                with placer.turn():
                    placer.meet(met)
    return Schedule(launch.machine, model, [p.times for p in placers])


_Notes = tuple[dict[int, int], dict[int, int], float, int]


class _Placer:
    """Places the instructions of one core."""

    def __init__(self, trace: Trace, machine: Machine, model: Model) -> None:
        self.trace, self.machine = trace, machine
        self.times = CoreSchedule(trace)
        self.engine_free = [0.0] * 6
        self.engine_last = [-1] * 6
        self.overhead_ns = 0.0 if model == "documented" else machine.matmul_overhead_ns
        self.reuses = model == "stationary_reuse"
        # what TensorE holds as its stationary operand: storage, region, and who wrote it
        self.loaded: tuple[Storage, int, int] | None = None
        self.dma = DmaEngines()
        self.queues: dict[Any, tuple[str, float, int]] = {}
        self.dge_free = [0.0, 0.0]
        self.cells = [0.0] * 16
        self.pe_issue = self.pe_full = 0.0
        self.ports = {"sbuf": [0.0, -1, 0.0, -1], "psum": [0.0, -1, 0.0, -1]}
        # when another engine may use an instruction's result
        self.visible: list[float] = []
        self.at = 0
        self.meeting_end = 0.0
        self.room: dict[MemoryRegion, Room] = {}
        for memory in (MemoryRegion.sbuf, MemoryRegion.psum):
            placed = [s for s in trace.storages if s.memory is memory and s.address]
            limit = liveness.limit_of(memory, machine) - liveness.covered(placed)
            self.room[memory] = Room(limit)
            self.times.room[memory] = self.room[memory].held
        self.placed = [s for s in trace.storages if s.address and s.first >= 0]
        self.shared: list[tuple[Storage, _Notes]] = []

    def share(self, storages: list[Storage]) -> None:
        """Keep own notes on tensors that the other core may use too: indices are a core's."""
        self.shared = [(s, ({}, {}, 0.0, -1)) for s in storages]

    @contextmanager
    def turn(self) -> Generator[None]:
        """Put this core's notes on the shared tensors in place while the block runs."""
        for s, notes in self.shared:
            s.written_by, s.read_by, s.latest, s.latest_engine = notes
        yield
        self.shared = [
            (s, (s.written_by, s.read_by, s.latest, s.latest_engine)) for s, _ in self.shared
        ]

    def advance(self, meeting: int) -> None:
        """Place instructions up to and with the one that is the meeting of this number.

        One long loop: at 10 us an instruction, calls for its parts would double the time.
        """
        records, barriers, edges = self.trace.records, self.trace.barriers, self.trace.edges
        times = self.times
        start, end, cause, wait = times.start, times.end, times.cause, times.wait
        visible = self.visible
        engine_free, engine_last = self.engine_free, self.engine_last
        shared_ports = self.machine.shared_ports
        self.meeting_end = 0.0
        i = self.at
        for template, storages, _, _ in records[i:]:
            engine: int = template.engine
            if engine == 5:
                ready, why, who = 0.0, 0, -1
            elif template.pe_tile is None:
                ready, who = engine_free[engine], engine_last[engine]
                why = 1
            else:
                ready, why, who = self._tile_free(template), 1, engine_last[0]
            writes = template.writes
            for operand, s in enumerate(storages):
                writing = operand < writes
                if writing and s.first == i and s.layout.on_chip:
                    when, by = self._take_room(s)
                    if when > ready:
                        ready, why, who = when, 3, by
                latest = s.latest
                if latest > ready and not (engine == 0 and s.latest_engine == 0):
                    written_by, read_by = s.written_by, s.read_by
                    for region in template.overlaps[operand]:
                        other = written_by.get(region)
                        if other is not None:
                            t = visible[other]
                            # an engine overwrites its own result without waiting to see it
                            if writing and t > ready and (engine == 0 or not template.reads_dst):
                                t = end[other] if records[other][0].engine == engine else t
                            if t > ready:
                                ready, why, who = t, 2, other
                        if writing:
                            other = read_by.get(region)
                            if other is not None and end[other] > ready:
                                ready, why, who = end[other], 2, other
            if i in edges:
                for other in edges[i]:
                    if visible[other] > ready:
                        ready, why, who = visible[other], 2, other
            if engine == 5:
                begin, done, why, who = self._transfer(i, template, storages, ready, why, who)
                seen = done
            else:
                if shared_ports and engine <= 3:
                    ready, why, who = self._port(i, template, ready, why, who)
                begin = ready
                if engine == 0:
                    done = begin + template.ns + self._issue(template, storages)
                    if template.pe_tile is None:
                        engine_free[0] = done
                        self.pe_full = done
                    else:
                        self._occupy_tile(template, begin, done)
                else:
                    done = begin + template.ns
                    engine_free[engine] = done
                    if shared_ports:
                        self._hold_port(i, template, done)
                engine_last[engine] = i
                seen = done + template.result_ns
            start.append(begin)
            end.append(done)
            visible.append(seen)
            cause.append(who)
            wait.append(why)
            for operand, s in enumerate(storages):
                region = template.regions[operand]
                if operand < writes:
                    s.written_by[region] = i
                    if seen > s.latest:
                        s.latest, s.latest_engine = seen, engine
                else:
                    known = s.read_by.get(region)
                    if known is None or end[known] < done:
                        s.read_by[region] = i
                    if done > s.latest:
                        s.latest, s.latest_engine = done, engine
                if s.last == i:
                    self._release(s, i)
            i += 1
            if i - 1 in barriers:
                self.meeting_end = done
                break
        self.at = i

    def meet(self, when: float) -> None:
        """Both cores have come to a meeting: its instruction ends when the later one does."""
        last = self.at - 1
        if last not in self.trace.barriers:
            return
        template, storages, _, _ = self.trace.records[last]
        if when > self.times.end[last]:
            self.times.end[last] = when
            self.times.wait[last], self.times.cause[last] = Wait.OTHER_CORE, -1
        self.visible[last] = max(self.visible[last], when)
        for s in storages:
            if when > s.latest:
                s.latest, s.latest_engine = when, template.engine
        if template.opcode == "core_barrier":
            for engine in range(4):
                if self.engine_free[engine] < when:
                    self.engine_free[engine], self.engine_last[engine] = when, last

    # rooms

    def _take_room(self, s: Storage) -> tuple[float, int]:
        if s.address is None:
            when, who = self.room[s.layout.memory].take(s.layout.size)
        else:
            when, who = 0.0, -1
            before = [o for o in self.placed if o.last < s.first and o.memory is s.memory]
            for other in before:
                if other.latest > when and liveness.overlap(s, other):
                    when, who = other.latest, other.last
        return when, who

    def _release(self, s: Storage, i: int) -> None:
        layout = s.layout
        if not layout.on_chip:
            return
        room, size = self.room[layout.memory], layout.size
        room.held.append((self.times.start[s.first], s.latest, size))
        if s.address is None:
            room.release(s.latest, size, i)

    def _issue(self, template: InstructionTemplate, storages: tuple[Storage, ...]) -> float:
        """Issue overhead of a TensorE instruction: none for a stationary operand that is loaded."""
        if not self.reuses:
            return self.overhead_ns
        before, self.loaded = self.loaded, None
        if template.opcode == "nc_matmul":
            stationary = storages[1]
            writers = [stationary.written_by.get(region, -1) for region in template.overlaps[1]]
            self.loaded = (stationary, template.regions[1], max(writers))
        return 0.0 if before and before == self.loaded else self.overhead_ns

    # PE tiles

    def _tile_free(self, template: InstructionTemplate) -> float:
        assert template.pe_tile is not None
        return max(
            [self.pe_issue, self.pe_full, *[self.cells[c] for c in _cells(template.pe_tile)]]
        )

    def _occupy_tile(self, template: InstructionTemplate, begin: float, done: float) -> None:
        assert template.pe_tile is not None
        for c in _cells(template.pe_tile):
            self.cells[c] = done
        # instructions are issued one after another: at least MIN_II apart
        self.pe_issue = begin + self.machine.ns(Engine.TENSOR, MIN_CYCLES) + self.overhead_ns
        self.engine_free[0] = max(self.engine_free[0], done)

    # gen2 exclusions

    def _port(
        self, i: int, template: InstructionTemplate, ready: float, why: int, who: int
    ) -> tuple[float, int, int]:
        for port, other in _others(template):
            slots = self.ports[port]
            if slots[2 * other] > ready:
                ready, why, who = slots[2 * other], Wait.PORT, int(slots[2 * other + 1])
        return ready, why, who

    def _hold_port(self, i: int, template: InstructionTemplate, done: float) -> None:
        for port, other in _others(template):
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
        key = (
            cost.direction,
            id(storages[template.hbm_operand]) if template.hbm_operand >= 0 else 0,
        )
        found = self.queues.get(key)
        name, after, last = found or (_queue_name(key, len(self.queues)), 0.0, -1)
        if after > ready:
            ready, why, who = after, Wait.QUEUE, last
        self.queues[key] = (name, ready, i)
        self.times.queue[i] = name
        trigger = ready
        if cost.descriptors == "hwdge":
            unit = 0 if self.dge_free[0] <= self.dge_free[1] else 1
            trigger = max(trigger, self.dge_free[unit]) + HWDGE_NS
            self.dge_free[unit] = trigger
        elif cost.descriptors == "swdge":
            cycles = max(MIN_CYCLES, cost.rows)
            trigger = max(trigger, self.engine_free[3]) + self.machine.ns(Engine.GPSIMD, cycles)
            self.engine_free[3], self.engine_last[3] = trigger, i
        first = trigger + DMA_START_NS
        done = self.dma.take(cost, first)
        for engine in range(cost.first_engine, cost.first_engine + cost.engines):
            self.times.dma_busy_ns[engine] += cost.engine_ns
        begin = max(first, done - cost.engine_ns)
        if begin > first + 1 and self.engine_last[5] >= 0:
            why, who = Wait.DMA_ENGINES, self.engine_last[5]
        self.engine_last[5] = i
        return begin, done, why, who


def _cells(tile: tuple[int, int, int, int]) -> list[int]:
    """Cells of the PE array, 4 x 4 of 32 x 32, that a tile covers."""
    row, rows, column, columns = tile
    return [
        4 * r + c
        for r in range(row // 32, (row + rows) // 32)
        for c in range(column // 32, (column + columns) // 32)
    ]


def _others(template: InstructionTemplate) -> list[tuple[str, int]]:
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


def _queue_name(key: tuple[str, int], number: int) -> str:
    return f"q{number % DMA_QUEUES} {key[0]}"
