"""What the compiler of the Beta dialect does with tiles: its tensors are values.

What is overwritten whole is a new tile, so a loop that loads into one runs ahead as if each
iteration had its own: a convolution that its author timed on trn2 at 3.83 ms in fp32 and 0.82 in
fp16 is modelled at 11.2 and 6.3 without this. And what is loaded stays as long as SBUF has room:
MLPs in bf16 did the program's loads of 176 MB at 610 GB/s, which no DMA engines carry, where all
fits, and those of 688 MB at 440 where the weights do not (docs/benchmarks.md, "Students' kernels on
the simulated core").
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import accumulate
from typing import Any

from neuroncore.hardware import Machine
from neuroncore.memory.storage import MemoryRegion, Storage
from neuroncore.timing.trace import Record, Trace


def as_values(trace: Trace, machine: Machine) -> None:
    """Rename tiles that are overwritten whole; drop what nothing reads, and repeated loads."""
    renamed = _read(_renamed(trace.records))
    loads = _loads(renamed)
    room = machine.usable_sbuf_bytes - _peak(renamed, {*loads})
    again = _repeated(loads, room)
    records: list[Record] = []
    for template, storages, code, line in renamed:
        if storages[0] not in again:  # else it is the load, which alone writes the tile
            moved = tuple([again.get(s, s) for s in storages])
            records.append((template, moved, code, line))
    if _peak(records, set()) > machine.usable_sbuf_bytes:
        records = renamed
    known = {*trace.storages}
    for _, storages, _, _ in records:
        for s in storages:
            s.first = s.last = -1
            if s not in known:
                known.add(s)
                trace.storages.append(s)
    for number, (_, storages, _, _) in enumerate(records):
        for s in storages:
            s.first, s.last = (number if s.first < 0 else s.first), number
    trace.records[:] = records


def _renamed(records: list[Record]) -> list[Record]:
    """The records where what is overwritten whole, on chip, has memory of its own from there on."""
    now: dict[Storage, Storage] = {}
    touched: set[Storage] = set()
    copied: list[Record] = []
    for template, storages, code, line in records:
        renamed = [now.get(s, s) for s in storages]
        for at in range(template.writes):
            old = storages[at]
            kept = template.reads_dst or template.dynamic or old.address or not old.memory.on_chip
            if template.regions[at] == 0 and not kept and renamed[at] in touched:
                renamed[at] = now[old] = fresh = Storage(old.layout, old.name)
                fresh.code, fresh.line, fresh.store = old.code, old.line, old.store
                fresh.initialised = True
        touched.update(renamed)
        copied.append((template, tuple(renamed), code, line))
    return copied


def _read(records: list[Record]) -> list[Record]:
    """The records without those of which nothing reads a result."""
    needed: set[Storage] = set()
    kept: list[Record] = []
    for record in reversed(records):
        template, storages, _, _ = record
        if any(not s.memory.on_chip or s in needed for s in storages[: template.writes]):
            needed.update(storages[template.writes :])
            kept.append(record)
    return kept[::-1]


def _loads(records: list[Record]) -> dict[Storage, Any]:
    """Tiles that a load alone fills, with what it loads; from what nothing writes."""
    writes = Counter(s for template, storages, _, _ in records for s in storages[: template.writes])
    loads: dict[Storage, Any] = {}
    for template, storages, _, _ in records:
        if template.dma is None or template.dynamic or len(storages) != 2:
            continue
        tile, source = storages
        if tile.memory is not MemoryRegion.sbuf or source.memory.on_chip or template.regions[0]:
            continue
        if writes[tile] == 1 and not writes[source]:
            loads[tile] = source, template.regions[1], tile.layout, template.dma
    return loads


def _repeated(loads: dict[Storage, Any], room: int) -> dict[Storage, Storage]:
    """Tiles whose contents another one still has, with that one.

    So many bytes of a partition have room; what was used longest ago goes first.
    """
    kept: OrderedDict[Any, Storage] = OrderedDict()
    repeated: dict[Storage, Storage] = {}
    for tile, contents in loads.items():
        if contents in kept:
            repeated[tile] = kept[contents]
            kept.move_to_end(contents)
            continue
        kept[contents] = tile
        room -= tile.bytes
        while kept and room < 0:
            room += kept.popitem(last=False)[1].bytes
    return repeated


def _peak(records: list[Record], without: set[Storage]) -> int:
    """Most bytes of a partition that tiles in SBUF take at once, some left out."""
    ends: dict[Storage, tuple[int, int]] = {}
    for number, (_, storages, _, _) in enumerate(records):
        for s in storages:
            if s.memory is MemoryRegion.sbuf and s not in without:
                ends[s] = ends.get(s, (number, number))[0], number
    change = Counter[int]()
    for s, (begin, end) in ends.items():
        change[begin] += s.bytes
        change[end + 1] -= s.bytes
    return max(accumulate(change[n] for n in sorted(change)), default=0)
