"""What one core does to memory that the compiler does not see as one, and engines in one bank.

Source: NKI language guide: the compiler keeps the order of operations that depend on each other's
data, so engines and queues do not race for a tensor. What it cannot see: that two arguments are one
memory, and in which order the 16 engines of a DMA move its rows. Banks: Trainium 2 architecture
guide, VectorE and ScalarE reach PSUM at full rate unless they meet in a bank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from neuroncore.checks.base import note
from neuroncore.hardware import PSUM_BANK_BYTES, Engine
from neuroncore.memory.storage import Box, MemoryRegion, Storage
from neuroncore.timing.order import waits_in_queues
from neuroncore.timing.trace import Record, Trace

if TYPE_CHECKING:
    from neuroncore.timing.times import CoreSchedule


class _ArgumentUse(NamedTuple):
    number: int
    storage: Storage
    writes: bool


def check_aliases(trace: Trace) -> None:
    """Note where arguments that share memory are used, one of them written, in no order."""
    inputs = [s for s in trace.storages if s.code is None and s.data is not None]
    for a, b in combinations(inputs, 2):
        if np.may_share_memory(np.asarray(a.data), np.asarray(b.data)):
            _check_order(trace, (a, b))


def _check_order(trace: Trace, pair: tuple[Storage, Storage]) -> None:
    before = waits_in_queues(trace)
    uses: list[_ArgumentUse] = []
    for number, record in enumerate(trace.records):
        for at, storage in enumerate(record[1]):
            if storage in pair:
                use = _ArgumentUse(number, storage, at < record[0].writes)
                others = [u for u in uses if u.storage is not storage and (u.writes or use.writes)]
                behind = _ancestors(before, number, others[0].number) if others else ()
                other = next((u for u in others if u.number not in behind), None)
                if other is not None:
                    verbs = ["writes" if u.writes else "reads" for u in (use, other)]
                    note(
                        f"{record[0].opcode}: {verbs[0]} {storage.describe()} while line "
                        f"{trace.records[other.number][3]} {verbs[1]} {other.storage.describe()}: "
                        "two arguments in one memory, which nothing orders; pass one of them",
                        _place(record),
                    )
                    return
                uses.append(use)


def _ancestors(before: list[set[int]], last: int, first: int) -> set[int]:
    """Instructions from `first` on that one waits for, through others."""
    ancestors, left = set[int](), [last]
    while left:
        new = {i for i in before[left.pop()] if i >= first} - ancestors
        ancestors |= new
        left += new
    return ancestors


def check_overlaps(trace: Trace) -> None:
    """Note DMAs that read what they write, at another place: their rows go in no order."""
    for template, storages, code, line in trace.records:
        if template.engine is not Engine.DMA or storages[0] not in storages[1:]:
            continue
        for at in range(template.writes, len(storages)):
            mine, other = template.regions[0], template.regions[at]
            if storages[at] is storages[0] and other != mine and other in template.overlaps[0]:
                note(
                    f"{template.opcode}: reads {storages[0].describe()} where it also writes it, "
                    "in other places; its rows are moved in no order; copy through another tensor",
                    (code.co_filename, line),
                )


def check_banks(times: CoreSchedule) -> None:
    """Note instructions of VectorE and ScalarE that are in one bank of PSUM at one time."""
    uses: defaultdict[tuple[Storage, int], list[tuple[float, int]]] = defaultdict(list)
    for number, (template, storages, _, _) in enumerate(times.issued):
        if template.on_psum and template.engine in (Engine.VECTOR, Engine.SCALAR):
            for storage, region in zip(storages, template.regions, strict=True):
                if storage.memory is MemoryRegion.psum:
                    for bank in _banks(storage.layout.boxes[region]):
                        uses[storage, bank].append((times.start[number], number))
    for (storage, _), of_bank in uses.items():
        last: dict[Engine, int] = {}
        for start, number in sorted(of_bank):
            record = times.issued[number]
            for engine, other in last.items():
                if engine is not record[0].engine and times.end[other] > start:
                    note(
                        f"{record[0].opcode}: shares a bank of {storage.describe()} with line "
                        f"{times.issued[other][3]} of {engine.name} at one time (modelled, "
                        "without the cost); use a bank for each engine",
                        _place(record),
                    )
            last[record[0].engine] = number


def _banks(box: Box) -> Iterator[int]:
    yield from range(box.byte // PSUM_BANK_BYTES, -(-box.byte_end // PSUM_BANK_BYTES))


def _place(record: Record) -> tuple[str, int]:
    return record[2].co_filename, record[3]
