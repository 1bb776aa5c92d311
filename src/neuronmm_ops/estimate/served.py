"""Decode as served: modelled launches, and what each of them costs where a model is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class LaunchCost(NamedTuple):
    """Microseconds that a launch or a collective costs beyond its modelled time."""

    low: float
    middle: float
    high: float


LAUNCH_US = LaunchCost(6.7, 10.0, 23.4)
"""What AWS's published times per token exceed our dense model by, for each of its launches.

Lowest, median and highest of the 16 "bound" rows of decode that `python benchmarks published` has
(docs/results/published.json): 24 to 64 ranks of trn1, inf2 and trn2, batch 1. The kernels, the
sampling and the server differ too, and longer caches ask for more, so it is an upper bound of the
launch alone. Prefill has none: in the same runs its rest by launch is two to four times that of
decode at 128 tokens, and more than a hundred times at 8192, so it is not the launches'.
"""


def as_served(decode: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Times of a token in ms, and tokens per second: at `LAUNCH_US`, and their range.

    Args:
        decode: as `passes.pass_of` returns it: `launches`, and `times_ms` by DMA model.
        batch: sequences.

    Returns:
        `time_ms` and `tokens_per_s` are under the first DMA model at the middle cost; those with
        `_low` and `_high` are over the DMA models and the costs.
    """
    times = _times_ms(decode)
    found = {"": times[0], "_low": min(times), "_high": max(times)}
    rates = {"": times[0], "_low": max(times), "_high": min(times)}
    return {
        **{f"time{end}_ms": ms for end, ms in found.items()},
        **{f"tokens_per_s{end}": 1e3 * batch / ms for end, ms in rates.items()},
    }


def speedup_as_served(of: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, float]:
    """The time of `over` over that of `of`, each a decode phase: every launch costs both the same.

    Returns:
        `middle` under the first DMA model at the middle cost; `low` and `high` over the DMA models
        and the costs.
    """
    ratios = [b / a for a, b in zip(_times_ms(of), _times_ms(over), strict=True)]
    return {"middle": ratios[0], "low": min(ratios), "high": max(ratios)}


def _times_ms(decode: Mapping[str, Any]) -> list[float]:
    """Under each DMA model at each cost; the first model at the middle cost is first."""
    costs = LAUNCH_US.middle, LAUNCH_US.low, LAUNCH_US.high
    added = [decode["launches"] * us / 1e3 for us in costs]
    return [ms + more for ms in decode["times_ms"].values() for more in added]
