"""The time of a launch at the other ends of what is not known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuroncore.collector import no_collection
from neuroncore.timing.schedule import schedule
from neuroncore.timing.times import Schedule
from neuroncore.uncertainty import UNCERTAINTIES, assuming

if TYPE_CHECKING:
    from neuroncore.core import KernelRun


@dataclass(frozen=True)
class OtherEnd:
    """The launch with the other end of one `uncertainty.Uncertainty`."""

    name: str
    otherwise: str
    time_ms: float


def other_ends(launch: KernelRun, before: Schedule) -> tuple[OtherEnd, ...]:
    """The launch scheduled once for each uncertainty of its machine; what is slowest comes first.

    Those that the machine was given with are left out, and those that change nothing on it.
    """
    found: list[OtherEnd] = []
    for each in UNCERTAINTIES:
        if each.other(before.machine) != before.machine:
            time_ms = _time_ms(launch, before, [each.name])
            found.append(OtherEnd(each.name, each.otherwise, time_ms))
    return tuple(sorted(found, key=lambda end: -end.time_ms))


def together(launch: KernelRun, before: Schedule, ends: Iterable[OtherEnd]) -> tuple[float, float]:
    """The launch, ms, with all ends that make it quicker, and with all that make it slower.

    At least what one of them makes of it alone: ends may work against each other.
    """
    as_is = before.time_ns / 1e6
    quicker = [end for end in ends if end.time_ms < as_is]
    slower = [end for end in ends if end.time_ms > as_is]
    low, high = [
        _time_ms(launch, before, [end.name for end in some]) if len(some) > 1 else as_is
        for some in (quicker, slower)
    ]
    return (
        min([low, as_is, *[end.time_ms for end in quicker]]),
        max([high, as_is, *[end.time_ms for end in slower]]),
    )


def _time_ms(launch: KernelRun, before: Schedule, names: list[str]) -> float:
    with no_collection():
        return schedule(launch, before.model, assuming(before.machine, names)).time_ns / 1e6
