"""Instructions by source line and engine: how many ran, and how long at least one of them did."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from neuroncore import Profile

Place = tuple[str, int, str]
"""A source file without its folder, a line of it, and the engine that runs it."""


def of_profile(profile: Profile) -> list[dict[str, Any]]:
    """`gathered` of a simulated kernel; times are modelled, waiting for the other core is none."""
    import numpy as np

    from neuroncore.profile.metrics import ENGINE_NAMES, columns

    size = len(ENGINE_NAMES)
    numbers: dict[tuple[int, CodeType, int], int] = {}
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for k, core in enumerate(profile.schedule.cores):
        sources = [(k, code, line) for _, _, code, line in core.issued]
        source = np.array([numbers.setdefault(s, len(numbers)) for s in sources], np.int64)
        engine, start, end = columns(core)
        for i in core.barriers:
            end[i] = min(end[i], start[i] + core.issued[i][0].ns)
        parts.append((source * size + engine, start, end))
    where = list(numbers)

    def place(group: int) -> Place:
        _, code, line = where[group // size]
        return os.path.basename(code.co_filename), line, ENGINE_NAMES[group % size]

    group, start, end = map(np.concatenate, zip(*parts, strict=True))
    return gathered(group, start, end, place)


def gathered(
    group: np.ndarray, start: np.ndarray, end: np.ndarray, place: Callable[[int], Place]
) -> list[dict[str, Any]]:
    """Instructions by place as `{"file", "line", "engine", "instructions", "busy_ms"}`.

    Longest first; `busy_ms` is the time in which one or more of them run, summed over the cores.

    Args:
        group: a number of each instruction, of its place and core.
        start: of each, ns.
        end: of each, ns.
        place: of a group.
    """
    import numpy as np

    from neuroncore.profile.metrics import covered

    order = np.lexsort((start, group))
    group, start, end = group[order], start[order], end[order]
    by_place: dict[Place, list[float]] = {}
    bounds = np.flatnonzero(np.diff(group, prepend=-1)).tolist()
    for a, b in itertools.pairwise([*bounds, len(group)]):
        entry = by_place.setdefault(place(int(group[a])), [0, 0.0])
        entry[0] += b - a
        entry[1] += covered(start[a:b], end[a:b]) / 1e6
    names = ("file", "line", "engine")
    return [
        {**dict(zip(names, at, strict=True)), "instructions": int(count), "busy_ms": busy_ms}
        for at, (count, busy_ms) in sorted(
            by_place.items(), key=lambda item: (-item[1][1], item[0])
        )
    ]
