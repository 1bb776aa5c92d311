"""What two cores do to one HBM tensor without a barrier in between.

Source: NKI 0.6 documentation, `nki.isa.core_barrier`: cores write disjoint parts of a shared
tensor, and read each other's after a barrier.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from neuroncore.checks.base import note
from neuroncore.memory.storage import Layout, Storage
from neuroncore.timing.trace import Trace

_LARGEST = 1 << 26
"""Bytes of a tensor above which views with gaps are not compared."""


class _Access(NamedTuple):
    region: int
    writes: bool


_Accesses = dict[tuple[Storage, int], dict[_Access, int]]


def check_races(first: Trace, second: Trace) -> None:
    """Note parts of HBM tensors that both cores use between two barriers, and one of them writes.

    What a dynamic index addresses is known when it runs, and is left out.
    """
    mine, others = _accesses(first), _accesses(second)
    for key in mine.keys() & others.keys():
        storage = key[0]
        found = _conflict(storage.layout, mine[key], others[key])
        if found is not None:
            (a, line), (b, other) = found
            verbs = ["writes" if access.writes else "reads" for access in (a, b)]
            note(
                f"core 0 {verbs[0]} {storage.describe()} at line {line} where core 1 {verbs[1]} it "
                f"at line {other} without core_barrier in between; which comes first is undefined"
            )


def _accesses(trace: Trace) -> _Accesses:
    """Lines of the regions of HBM tensors that a core uses, by tensor and barriers passed."""
    found: _Accesses = defaultdict(dict)
    passed = 0
    for number, (template, storages, _, line) in enumerate(trace.records):
        if number in trace.barriers:
            passed += 1
        elif template.hbm_operand >= 0 and not template.dynamic:
            for at, storage in enumerate(storages):
                if not storage.layout.on_chip:
                    access = _Access(template.regions[at], at < template.writes)
                    found[storage, passed].setdefault(access, line)
    return found


def _conflict(
    layout: Layout, mine: dict[_Access, int], others: dict[_Access, int]
) -> tuple[tuple[_Access, int], tuple[_Access, int]] | None:
    """The first two uses, one of each core, that share a byte which one of them writes."""
    for a, line in mine.items():
        touching = set(layout.overlaps[a.region])
        for b, other in others.items():
            if (a.writes or b.writes) and b.region in touching and _share(layout, a, b):
                return (a, line), (b, other)
    return None


def _share(layout: Layout, a: _Access, b: _Access) -> bool:
    """Whether two regions whose boxes overlap have a byte in common."""
    if layout.boxes[a.region].exact and layout.boxes[b.region].exact:
        return True
    if layout.bytes > _LARGEST:
        return False
    return bool(np.any(layout.mask([a.region]) & layout.mask([b.region])))
