"""What was executed: one record per instruction, and the templates that records share.

A template holds what an instruction costs and touches. It depends on the geometries of its
operands and on its options only, so it is checked and built once and then shared by every
instruction of its kind: a loop of a million matmuls has a handful of templates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import NamedTuple

from neuroncore.hardware import Engine, Machine
from neuroncore.memory.geometry import Geometry
from neuroncore.memory.storage import Box, Storage
from neuroncore.turns import Meeting

_GRID = 2.0**20


def on_grid(ns: float) -> float:
    """A duration in whole 2**-20 ns, so that sums and differences of times are exact.

    Below 2**33 ns, 8.6 s, an fp64 number has room for them. A loop whose iterations take equally
    long can so be told from one whose iterations nearly do.
    """
    return round(ns * _GRID) / _GRID


@dataclass(frozen=True, slots=True)
class DmaCost:
    """What one DMA moves, `rows` contiguous runs of `run_bytes`, and the engines that do."""

    bytes: int
    rows: int
    run_bytes: int
    first_engine: int
    engines: int
    """How many of the 16 engines, from the first, share the rows evenly."""
    runs: tuple[tuple[int, float], ...]
    """(bytes, how many the fullest of those engines carries) of contiguous runs."""
    direction: str
    """"load" (from HBM), "store" (to HBM), "hbm" (within HBM) or "sbuf" (within SBUF)."""
    transposes: str = ""
    """"hbm" or "sbuf", where a transpose reads; "" of a copy."""
    descriptors: str = "none"
    """Who makes them: "none" (before the run), "hwdge" or "swdge"."""
    reads: tuple[int, ...] = ()
    """Bytes read from HBM, one number per operand of the instruction."""
    writes: tuple[int, ...] = ()
    """Bytes written to HBM, one number per operand."""

    def engine_ns(self, machine: Machine) -> float:
        """Busy time of each of the engines; a transpose goes at a share of the rate (arch)."""
        if self.transposes:
            return self.bytes / machine.dma_transpose_gbps(self.transposes)
        return sum([count * machine.dma_run_ns(size) for size, count in self.runs])


@dataclass(slots=True, eq=False)
class InstructionTemplate:
    """An instruction with its engine, cost and regions: the same for all its occurrences."""

    engine: Engine
    cycles: float
    """Occupancy of the engine in its own cycles, without the fitted overhead."""
    run: Callable[..., None]
    """Computes the result; called in execute mode only."""
    opcode: str = ""
    writes: int = 1
    """How many of the operands, from the first, are written; the rest are read."""
    reads_dst: bool = False
    """The destination is read too: the instruction adds to it or leaves parts as they are."""
    row_step: int = 1
    """Of the operands that are read, each so many-th partition counts, from a multiple of it."""
    scales: tuple[int, ...] = ()
    """Operands that are scales, whose first two dimensions are partitions: quadrants and rows."""
    flops: int = 0
    dma: DmaCost | None = None
    pe_tile: tuple[int, int, int, int] | None = None
    """(row, rows, column, columns) of the PE array that a tiled matmul takes."""
    ns: float = 0.0
    result_ns: float = 0.0
    table: str = ""
    """Activation function whose table ScalarE needs; "" of those that need none."""
    regions: tuple[int, ...] = ()
    overlaps: tuple[list[int], ...] = ()
    dynamic: bool = False
    """An operand's place depends on an index that is known when the instruction runs."""
    hbm_operand: int = -1
    """The first operand in HBM, if any."""
    on_sbuf: bool = False
    on_psum: bool = False
    skips: bool = False
    """An index out of bounds moves nothing, and is no error."""


class Loop:
    """A loop that runs on the device: the records [start, end) of a trace, `trips` times.

    `outer` are the tensors from outside the body that it uses; those that it allocates are
    `Trace.storages[first_storage:end_storage]`, which every iteration uses again.
    """

    __slots__ = ("end", "end_storage", "first_storage", "outer", "start", "step", "trips")

    def __init__(self, start: int, first_storage: int, step: int, trips: int) -> None:
        self.start = self.end = start
        self.first_storage = self.end_storage = first_storage
        self.step, self.trips = step, trips
        self.outer: set[Storage] = set()


class Move(NamedTuple):
    """An operand of a loop's body whose place follows the variable of the loop."""

    operand: int
    loop: Loop
    geometry: Geometry
    """In the first iteration."""
    elements: int
    """How much further on it is in each iteration."""

    def region(self, iteration: int) -> int:
        """What it touches in an iteration, counted from 0."""
        return self.geometry.moved(iteration * self.elements).region

    def regions(self, iterations: int) -> list[int]:
        """What it touches in so many iterations: one region where they lie side by side."""
        if iterations == 1:
            return [self.region(0)]
        layout = self.geometry.layout
        first, second, last = [layout.boxes[self.region(i)] for i in (0, 1, iterations - 1)]
        same_columns = (first.byte, first.byte_end) == (last.byte, last.byte_end)
        same_rows = (first.row, first.row_end) == (last.row, last.row_end)
        below = same_columns and second.row == first.row_end
        adjacent = same_rows and second.byte == first.byte_end
        if first.exact and (below or adjacent):
            return [layout.region(Box(first.row, last.row_end, first.byte, last.byte_end))]
        return [self.region(i) for i in range(iterations)]


Record = tuple[InstructionTemplate, tuple[Storage, ...], CodeType, int]


@dataclass(slots=True)
class Trace:
    """The instructions of one core, in program order, with the tensors they touch."""

    records: list[Record] = field(default_factory=list[Record])
    storages: list[Storage] = field(default_factory=list[Storage])
    edges: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Extra dependencies from `instruction.depends_on`: consumer -> producers."""
    barriers: dict[int, Meeting] = field(default_factory=dict[int, Meeting])
    """Instructions that wait for other cores, by index."""
    names: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Instructions by the `name=` they were issued with."""
    loops: list[Loop] = field(default_factory=list[Loop])
    """Loops of the device by their starts, outer ones first. Their bodies are recorded once."""
    moves: dict[int, list[Move]] = field(default_factory=dict[int, list[Move]])
    """Operands that loop variables move, by record."""
    indexed: defaultdict[tuple[int, int], set[int]] = field(
        default_factory=lambda: defaultdict[tuple[int, int], set[int]](set)
    )
    """Regions that operands in HBM touched through an index: record and operand -> regions."""


class NkiInstruction:
    """Handle of an issued instruction."""

    __slots__ = ("index", "trace")

    def __init__(self, trace: Trace, index: int) -> None:
        self.trace, self.index = trace, index

    def named(self, name: str | None) -> NkiInstruction:
        """Note the name that `Kernel.with_schedule` knows this instruction by. Returns self."""
        if name is not None and self.index not in (known := self.trace.names.setdefault(name, [])):
            known.append(self.index)
        return self

    def depends_on(self, *producers: NkiInstruction) -> NkiInstruction:
        """Run this instruction after each of `producers`. Returns self."""
        for producer in producers:
            if producer.trace is self.trace and producer.index < self.index:
                edges = self.trace.edges.setdefault(self.index, [])
                if producer.index not in edges:  # the body of a loop comes here every time
                    edges.append(producer.index)
            elif producer.index >= self.index:
                raise ValueError(
                    f"depends_on: instruction {self.index} cannot wait for instruction "
                    f"{producer.index}, which comes later; engines run in program order"
                )
        return self
