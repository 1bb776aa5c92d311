"""The time of a launch at the other ends of what is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from neuroncore.hardware import Machine
from neuroncore.uncertainty import UNCERTAINTIES, assuming

TimeOn = Callable[[Machine], float]
"""ms of the launch on a machine."""


@dataclass(frozen=True)
class OtherEnd:
    """The launch with the other end of one `uncertainty.Uncertainty`."""

    name: str
    otherwise: str
    time_ms: float


def other_ends(machine: Machine, time_on: TimeOn) -> tuple[OtherEnd, ...]:
    """The launch at each other end of a machine's uncertainties; what is slowest comes first.

    Those that the machine was given with are left out, and those that change nothing on it.
    """
    others = {each: each.other(machine) for each in UNCERTAINTIES}
    ends = [
        OtherEnd(each.name, each.otherwise, time_on(other))
        for each, other in others.items()
        if other != machine
    ]
    return tuple(sorted(ends, key=lambda end: -end.time_ms))


def together(machine: Machine, time_on: TimeOn, ends: Iterable[OtherEnd]) -> tuple[float, float]:
    """The launch, ms, with all ends that make it quicker, and with all that make it slower.

    Also with those that alone change nothing, which others may let bind; and at least what one of
    them makes of it alone: ends may work against each other.
    """
    as_is = time_on(machine)
    quicker = [end for end in ends if end.time_ms < as_is]
    slower = [end for end in ends if end.time_ms > as_is]
    hidden = [end for end in ends if end.time_ms == as_is]
    quicker_only = {each.name for each in UNCERTAINTIES if each.only_quicker}
    may_slow = [end for end in hidden if end.name not in quicker_only]

    def times(some: list[OtherEnd], others: list[OtherEnd]) -> list[float]:
        sets = (some, some + others)
        at = [time_on(assuming(machine, [end.name for end in each])) for each in sets]
        return [as_is, *at, *[end.time_ms for end in some]]

    return min(times(quicker, hidden)), max(times(slower, may_slow))
