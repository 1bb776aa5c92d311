"""Times of a launch's instructions, as the scheduler found them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from neuroncore.hardware import DMA_ENGINES, Machine, Model
from neuroncore.memory.storage import MemoryRegion, Storage
from neuroncore.timing.trace import Record, Trace


class Wait(IntEnum):
    """What an instruction waited for last."""

    NOTHING = 0
    ENGINE = 1
    DATA = 2
    CAPACITY = 3
    QUEUE = 4
    DMA_ENGINES = 5
    PORT = 6
    OTHER_CORE = 7


@dataclass
class CoreSchedule:
    """Times of one core's instructions, ns from the start, by instruction number."""

    trace: Trace
    issued: list[Record] = field(default_factory=list[Record])
    """The instructions that ran: the trace's, the bodies of its loops as often as they ran."""
    barriers: dict[int, int] = field(default_factory=dict[int, int])
    """Instructions that met others: index -> number of the meeting."""
    start: list[float] = field(default_factory=list[float])
    end: list[float] = field(default_factory=list[float])
    cause: list[int] = field(default_factory=list[int])
    """The instruction that was waited for last, or -1."""
    wait: list[int] = field(default_factory=list[int])
    """A `Wait` each."""
    queue: dict[int, str] = field(default_factory=dict[int, str])
    """Queue of each DMA."""
    dma_busy_ns: list[float] = field(default_factory=lambda: [0.0] * DMA_ENGINES)
    occupied: dict[MemoryRegion, list[tuple[float, float, Storage]]] = field(
        default_factory=dict[MemoryRegion, list[tuple[float, float, Storage]]]
    )
    """(from, to, tensor) of each tensor on chip."""


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
