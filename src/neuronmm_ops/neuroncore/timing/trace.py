"""What was executed: one record per instruction, and the templates that records share.

A template holds what an instruction costs and touches. It depends on the geometries of its
operands and on its options only, so it is checked and built once and then shared by every
instruction of its kind: a loop of a million matmuls has a handful of templates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType

from neuronmm_ops.hardware import Engine
from neuronmm_ops.neuroncore.memory.storage import Storage
from neuronmm_ops.neuroncore.turns import Meeting


@dataclass(frozen=True, slots=True)
class DmaCost:
    """What one DMA moves, `rows` contiguous runs of `run_bytes`, and the engines that do."""

    bytes: int
    rows: int
    run_bytes: int
    first_engine: int
    engines: int
    """How many of the 16 engines, from the first, share the rows evenly."""
    engine_ns: float
    """Busy time of each of those engines."""
    direction: str
    """"load" (from HBM), "store" (to HBM), "hbm" (within HBM) or "sbuf" (within SBUF)."""
    descriptors: str = "none"
    """Who makes them: "none" (before the run), "hwdge" or "swdge"."""
    reads: tuple[int, ...] = ()
    """Bytes read from HBM, one number per operand of the instruction."""
    writes: tuple[int, ...] = ()
    """Bytes written to HBM, likewise."""


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
    flops: int = 0
    dma: DmaCost | None = None
    pe_tile: tuple[int, int, int, int] | None = None
    """(row, rows, column, columns) of the PE array that a tiled matmul takes."""
    ns: float = 0.0
    result_ns: float = 0.0
    regions: tuple[int, ...] = ()
    overlaps: tuple[list[int], ...] = ()
    hbm_operand: int = -1
    """The first operand in HBM, if any."""
    on_sbuf: bool = False
    on_psum: bool = False


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
                self.trace.edges.setdefault(self.index, []).append(producer.index)
            elif producer.index >= self.index:
                raise ValueError(
                    f"depends_on: instruction {self.index} cannot wait for instruction "
                    f"{producer.index}, which comes later; engines run in program order"
                )
        return self
