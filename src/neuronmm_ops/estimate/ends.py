"""Modelled times at both ends of what is not known, and the range of what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod, sqrt
from typing import TYPE_CHECKING

from neuroncore.hardware import DMA_MODELS
from neuroncore.uncertainty import UNCERTAINTIES

if TYPE_CHECKING:  # commands that say what they can do import no NumPy
    from neuroncore import Profile

OTHERS = [each.name for each in UNCERTAINTIES if each.name != "dma"]
ENDS: tuple[str, ...] = (*DMA_MODELS, *OTHERS)
"""Both DMA models, then the other end of each other uncertainty under the first of them."""

_RIVALS_DIFFER_IN = (DMA_MODELS[1], "instruction-order")


def times_at(profile: Profile) -> tuple[float, ...]:
    """A launch's time at each of `ENDS`, ms, of a profile with the ends that are assumed."""
    others = {end.name: end.time_ms for end in profile.uncertainties}
    return profile.time_ms, *[others.get(name, profile.time_ms) for name in ("dma", *OTHERS)]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The range of a time or a ratio, from its values at `ENDS`.

    With all ends that make it less, and with all that make it more; what each does alone is taken
    to multiply.
    """
    shares = [value / values[0] for value in values]
    return (
        values[0] * prod([min(1.0, share) for share in shares]),
        values[0] * prod([max(1.0, share) for share in shares]),
    )


def middle(ratios: Mapping[str, float]) -> float:
    """Between both ends of what rivals differ in, geometrically: small DMAs and order."""
    first = ratios[ENDS[0]]
    return first * prod([sqrt(ratios[end] / first) for end in _RIVALS_DIFFER_IN])


def compared(of: Mapping[str, float], over: Mapping[str, float]) -> dict[str, float]:
    """The time of `over` over that of `of`, from both times by end: `middle`, `low` and `high`."""
    ratios = ratios_of(of, over)
    low, high = spread([*ratios.values()])
    return {"middle": middle(ratios), "low": low, "high": high}


def ratios_of(of: Mapping[str, float], over: Mapping[str, float]) -> dict[str, float]:
    """The time of `over` over that of `of`, by end."""
    return {end: over[end] / ms for end, ms in of.items()}
