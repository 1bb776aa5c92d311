"""What two cores do to one HBM tensor without a barrier in between.

Source: NKI 0.6 documentation, `nki.isa.core_barrier`: cores write disjoint parts of a shared
tensor, and read each other's after a barrier on it. A barrier blocks one engine: it orders what
uses its own tensor. An exchange of tiles (`sendrecv`) orders nothing in HBM.

Within a core, engines and queues wait for the data that they share: no order that this allows
changes a value.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from neuroncore.checks.base import note
from neuroncore.memory.indexing import VirtualRegister
from neuroncore.memory.storage import Layout, Storage
from neuroncore.timing.trace import Trace

if TYPE_CHECKING:
    from neuroncore.memory.tensor import NkiTensor

_LARGEST = 1 << 26
"""Bytes of a tensor above which views with gaps are not compared."""


class _Access(NamedTuple):
    region: int
    writes: bool


Place = tuple[str, int]
"""A file and a line of it."""
_Accesses = dict[tuple[Storage, int], dict[_Access, Place]]


def check_races(first: Trace, second: Trace) -> None:
    """Note what `races` finds."""
    for race, place in races(first, second):
        note(race, place)


def races(first: Trace, second: Trace) -> Iterator[tuple[str, Place]]:
    """Parts of HBM tensors that both cores use between two barriers, and one of them writes.

    Each with the place of core 0's use.

    In trace mode, what an index addresses is unknown and left out, loops' variables excepted.
    """
    mine, others = _accesses(first), _accesses(second)
    for key in mine.keys() & others.keys():
        storage = key[0]
        conflict = _conflict(storage.layout, mine[key], others[key])
        if conflict is not None:
            (a, place), (b, other) = conflict
            verbs = ["writes" if access.writes else "reads" for access in (a, b)]
            yield (
                f"core 0 {verbs[0]} {storage.describe()} at line {place[1]} where core 1 "
                f"{verbs[1]} it at line {other[1]} without core_barrier in between; which comes "
                "first is undefined",
                place,
            )


def _accesses(trace: Trace) -> _Accesses:
    """Lines of the regions of HBM tensors that a core uses, by tensor and its barriers passed."""
    accesses: _Accesses = defaultdict(dict)
    passed = Counter[Storage]()
    for number, (template, storages, code, line) in enumerate(trace.records):
        if number in trace.barriers:
            passed.update(storages)
        elif template.hbm_operand >= 0:
            for at, storage in enumerate(storages):
                if not storage.layout.on_chip:
                    for region in _regions(trace, number, at):
                        access = _Access(region, at < template.writes)
                        accesses[storage, passed[storage]].setdefault(
                            access, (code.co_filename, line)
                        )
    return accesses


def _regions(trace: Trace, number: int, at: int) -> Iterable[int]:
    """What an operand touches, in all iterations of the loop that it is in."""
    if (number, at) in trace.indexed:
        return trace.indexed[number, at]
    for move in trace.moves.get(number, ()):
        if move.operand == at:
            return move.regions(move.loop.trips)
    return (trace.records[number][0].regions[at],)


def indexed_regions(t: NkiTensor) -> set[int]:
    """What a view in HBM touches through its index, whose values are known now."""
    geometry, index = t.geometry, t.index
    assert geometry.indirect is not None
    how, _, scale = geometry.indirect
    if how == "vector":
        geometry = geometry.derive((1, *t.shape[1:]), t.strides, t.offset)
    if isinstance(index, VirtualRegister):
        values = np.array([index.value])
    else:
        values = index.geometry.array(index.storage)
    places = [int(value) * scale for value in np.unique(values)]
    return {geometry.moved(place).region for place in places if geometry.holds(place)}


def _conflict(
    layout: Layout, mine: dict[_Access, Place], others: dict[_Access, Place]
) -> tuple[tuple[_Access, Place], tuple[_Access, Place]] | None:
    """The first two uses, one of each core, that share a byte which one of them writes."""
    for a, place in mine.items():
        touching = set(layout.overlaps[a.region])
        for b, other in others.items():
            if (a.writes or b.writes) and b.region in touching and _share(layout, a, b):
                return (a, place), (b, other)
    return None


def _share(layout: Layout, a: _Access, b: _Access) -> bool:
    """Whether two regions whose boxes overlap have a byte in common."""
    if layout.boxes[a.region].exact and layout.boxes[b.region].exact:
        return True
    if layout.bytes > _LARGEST:
        return False
    return bool(np.any(layout.mask([a.region]) & layout.mask([b.region])))
