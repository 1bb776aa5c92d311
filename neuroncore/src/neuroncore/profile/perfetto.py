"""Chrome trace-event files of a profile: a process per core, a track per engine, queue and tensor.

Perfetto (ui.perfetto.dev) and chrome://tracing open them. Times are modelled, in microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from neuroncore.files import replacing
from neuroncore.memory.storage import MemoryRegion
from neuroncore.profile.lanes import LaneRows, lane_of
from neuroncore.profile.metrics import WAIT_NAMES, occupancy
from neuroncore.profile.places import name_of, places
from neuroncore.timing.times import CoreSchedule

if TYPE_CHECKING:
    from neuroncore.profile.profile import Profile

_COUNTERS = (
    (MemoryRegion.sbuf, "SBUF bytes per partition", "bytes"),
    (MemoryRegion.psum, "PSUM banks", "banks"),
)


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write the file, event by event; it appears under its name when it is complete."""
    about = {
        "modelled": True,
        "kernel": profile.kernel_name,
        "target": profile.target,
        "model": profile.model,
        "time_ms": profile.time_ms,
    }
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(
            f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(about)}, "traceEvents": [\n'
        )
        for number, core in enumerate(profile.schedule.cores):
            name = f"core {number} of {profile.kernel_name} on {profile.target} (modelled)"
            file.write(_metadata("process_name", number, 0, {"name": name}))
            for line in _instructions(core, number):
                file.write(",\n" + line)
            for line in (*_counters(core, number), *_tensors(core, number)):
                file.write(",\n" + line)
            file.write(",\n" if number < profile.lnc - 1 else "\n")
        file.write("]}\n")


class _Tracks:
    """Track numbers of the rows of each engine and queue, with the events that name them."""

    def __init__(self, process: int) -> None:
        self.process = process
        self.new: list[str] = []
        self._rows = LaneRows()
        self._numbers: dict[tuple[str, int], int] = {}

    def take(self, name: str, order: int, start: int, end: int) -> int:
        """The track of an event; events come sorted by their starts."""
        row = self._rows.take(name, start, end)
        if (name, row) not in self._numbers:
            track = self._numbers[name, row] = len(self._numbers) + 1
            label = name if row == 0 else f"{name} ({row + 1})"
            self.new.append(_metadata("thread_name", self.process, track, {"name": label}))
            place = {"sort_index": 1000 * order + row + 1}
            self.new.append(_metadata("thread_sort_index", self.process, track, place))
        return self._numbers[name, row]


def _instructions(core: CoreSchedule, process: int) -> Iterator[str]:
    """Complete events by start, each track's names before its first event."""
    tracks = _Tracks(process)
    records = core.issued
    queues = {name: 10 + i for i, name in enumerate(dict.fromkeys(core.queue.values()))}
    quoted: dict[Any, str] = {}
    for i in np.argsort(np.array(core.start, float), kind="stable").tolist():
        template, storages, code, line = records[i]
        start, end = _picoseconds(core.start[i]), _picoseconds(core.end[i])
        lane = lane_of(core, i)
        track = tracks.take(lane, queues.get(lane, int(template.engine)), start, end)
        yield from tracks.new
        tracks.new.clear()
        if code not in quoted:
            quoted[code] = json.dumps(os.path.basename(code.co_filename))[1:-1]
        names = [json.dumps(s.name) for s in storages]
        facts = f'"writes": [{", ".join(names[: template.writes])}], '
        facts += f'"reads": [{", ".join(names[template.writes :])}], '
        if template.dma is not None:
            facts += f'"bytes": {template.dma.bytes}, "row_bytes": {template.dma.run_bytes}, '
        elif template.flops:
            facts += f'"flops": {template.flops}, '
        cause = core.cause[i]
        waited = f'"waited_for": "{WAIT_NAMES[core.wait[i]]}"'
        if cause >= 0:
            waited += f', "waited_for_instruction": {cause}'
        yield (
            f'{{"ph": "X", "pid": {process}, "tid": {track}, "ts": {_us(start)}, '
            f'"dur": {_us(end - start)}, "name": "{template.opcode}", '
            f'"args": {{"instruction": {i}, "opcode": "{template.opcode}", '
            f'"source": "{quoted[code]}:{line}", {facts}{waited}}}}}'
        )


def _counters(core: CoreSchedule, process: int) -> Iterator[str]:
    for memory, name, unit in _COUNTERS:
        for ns, size in occupancy(core, memory):
            yield (
                f'{{"ph": "C", "pid": {process}, "ts": {_us(_picoseconds(ns))}, '
                f'"name": "{name}", "args": {{"{unit}": {size}}}}}'
            )


def _tensors(core: CoreSchedule, process: int) -> Iterator[str]:
    """Asynchronous events, which Perfetto shows in a track for each name."""
    for memory, name, _ in _COUNTERS:
        for number, place in enumerate(places(core, memory)):
            about = {
                "tensor": place.storage.describe(),
                "partitions": f"{place.partition} to {place.partition_end - 1}",
                "bytes": f"{place.byte} to {place.byte_end - 1} of each partition",
            }
            event = {"cat": f"{name.split()[0]} tensors", "id": f"{process}.{name[:4]}.{number}"}
            event |= {"pid": process, "name": name_of(place.storage), "args": about}
            for phase, ns in (("b", place.start), ("e", place.end)):
                shared = json.dumps({"ph": phase, **event})
                yield f'{shared[:-1]}, "ts": {_us(_picoseconds(ns))}}}'


def _metadata(kind: str, process: int, track: int, facts: dict[str, Any]) -> str:
    event = {"ph": "M", "pid": process, "tid": track, "name": kind, "args": facts}
    return json.dumps(event)


def _picoseconds(ns: float) -> int:
    """Whole picoseconds: ends and starts that touch stay touching."""
    return round(ns * 1000)


def _us(picoseconds: int) -> str:
    whole, rest = divmod(picoseconds, 1_000_000)
    return f"{whole}.{rest:06d}"
