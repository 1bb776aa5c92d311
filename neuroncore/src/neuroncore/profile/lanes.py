"""Where the instructions of a core are drawn: a lane per engine and DMA queue, in rows."""

from __future__ import annotations

import heapq

from neuroncore.hardware import Engine
from neuroncore.profile.metrics import ENGINE_NAMES
from neuroncore.timing.times import CoreSchedule


def lane_of(core: CoreSchedule, instruction: int) -> str:
    """The queue of a DMA, the engine of anything else."""
    engine = core.issued[instruction][0].engine
    if engine is Engine.DMA and instruction in core.queue:
        return core.queue[instruction]
    return ENGINE_NAMES[engine]


class LaneRows:
    """Rows of the lanes: where two events of a lane overlap, the later gets another row."""

    def __init__(self) -> None:
        self._free: dict[str, list[tuple[int, int]]] = {}
        """(free from, row) of the rows of each lane, earliest first."""

    def take(self, lane: str, start: int, end: int) -> int:
        """The row of an event, from 0; events come sorted by their starts."""
        free = self._free.setdefault(lane, [])
        row = heapq.heappop(free)[1] if free and free[0][0] <= start else len(free)
        heapq.heappush(free, (end, row))
        return row
