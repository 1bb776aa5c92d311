"""Where tensors lie on chip over time: what the timeline page draws by address.

The schedule counts bytes and banks, and a compiler chooses addresses. Here each tensor takes the
lowest bytes that are free for it, at its modelled time, unless the kernel gives its address: one
legal placement, not the compiler's.
"""

from __future__ import annotations

import re
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from neuroncore.hardware import PSUM_BANK_BYTES, PSUM_BANKS
from neuroncore.memory.storage import MemoryRegion, Storage
from neuroncore.profile.metrics import statement
from neuroncore.timing.times import CoreSchedule, Schedule


class TensorPlace(NamedTuple):
    """One life of a tensor: from its first write to its last use, ns; its partitions and bytes."""

    storage: Storage
    start: float
    end: float
    partition: int
    partition_end: int
    byte: int
    byte_end: int
    """After its last byte in each partition; a tensor of PSUM fills banks."""


def places(core: CoreSchedule, memory: MemoryRegion) -> list[TensorPlace]:
    """Every life of every tensor of a memory, by its start; no two share a byte at once."""
    lives = sorted(core.occupied.get(memory, []), key=itemgetter(0, 1))
    fixed = [_at(s, start, end, *s.address) for start, end, s in lives if s.address]
    live: list[TensorPlace] = []
    placed: list[TensorPlace] = []
    for start, end, s in lives:
        live = [place for place in live if place.end > start]
        if s.address:
            placed.append(_at(s, start, end, *s.address))
            continue
        fixed = [place for place in fixed if place.end > start]
        there = sorted([*live, *[place for place in fixed if place.start < end]], key=_BYTE)
        # 33 to 64 partitions start at 0 or 64, up to 32 at a multiple of 32; a bank is whole
        count = 128 if memory is MemoryRegion.psum else s.layout.shape[0]
        starts = range(0, 128, 128 if count > 64 else 64 if count > 32 else 32)
        choices = [_lowest(_at(s, start, end, partition), there) for partition in starts]
        placed.append(min(choices, key=_BYTE))
        live.append(placed[-1])
    return placed


_BYTE = attrgetter("byte")


def _at(s: Storage, start: float, end: float, partition: int = 0, byte: int = 0) -> TensorPlace:
    in_banks = s.memory is MemoryRegion.psum
    size = s.layout.size * PSUM_BANK_BYTES if in_banks else s.bytes
    return TensorPlace(s, start, end, partition, partition + s.layout.shape[0], byte, byte + size)


def _lowest(place: TensorPlace, others: list[TensorPlace]) -> TensorPlace:
    """A tensor moved to the lowest bytes that others, by their bytes, leave in its partitions."""
    size, byte = place.byte_end, 0
    for other in others:
        if other.partition < place.partition_end and place.partition < other.partition_end:
            if other.byte - byte >= size:
                break
            byte = max(byte, other.byte_end)
    return place._replace(byte=byte, byte_end=byte + size)


def name_of(storage: Storage) -> str:
    """The name that a kernel gives a tensor: by `name=`, its variable there, or who makes it."""
    numbered = re.fullmatch(rf"{storage.memory.label}\d+", storage.name)
    if not numbered or storage.code is None:
        return storage.name
    text = statement(storage.code.co_filename, storage.line)
    assigned = re.match(r"(\w+)\s*(?::[^=]+)?=[^=]", text)
    made = f"{storage.code.co_name}()" if text else storage.name
    return assigned[1] if assigned else made


def tables(schedule: Schedule) -> dict[str, list[dict[str, Any]]]:
    """Rows of SbufAllocation and PsumUsage of AWS's profile schema reference.

    Times in ns, the last address within, and shares as fractions of 1.
    """
    allocations = [
        {
            "start_ts": round(place.start),
            "end_ts": round(place.end),
            "start_address": place.byte,
            "end_address": place.byte_end - 1,
            "partition": quadrant,
            "tensor_name": name_of(place.storage),
            "pcore_idx": number,
        }
        for number, core in enumerate(schedule.cores)
        for place in places(core, MemoryRegion.sbuf)
        for quadrant in range(place.partition // 32 * 32, place.partition_end, 32)
    ]
    usage: list[dict[str, Any]] = []
    for number, core in enumerate(schedule.cores):
        used = [0] * PSUM_BANKS
        held = places(core, MemoryRegion.psum)
        changes = [(p.start, 1, p) for p in held] + [(p.end, -1, p) for p in held]
        for ns, group in groupby(sorted(changes, key=itemgetter(0)), itemgetter(0)):
            for _, more, place in group:
                for bank in range(place.byte // PSUM_BANK_BYTES, place.byte_end // PSUM_BANK_BYTES):
                    used[bank] += more
            row = {f"bank_{bank}_util_percent": share for bank, share in enumerate(used)}
            average = sum(used) / PSUM_BANKS
            sample = {"timestamp": round(ns), "avg_util_percent": average, **row}
            usage.append({**sample, "pcore_idx": number})
    return {"SbufAllocation": allocations, "PsumUsage": usage}
