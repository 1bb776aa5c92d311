"""Decode as served: modelled launches, and what each of them costs where a model is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from neuronmm_ops.estimate.ends import compared, spread


class LaunchCost(NamedTuple):
    """Microseconds that a launch or a collective costs beyond its modelled time."""

    low: float
    middle: float
    high: float


LAUNCH_US = LaunchCost(6.2, 9.3, 19.1)
"""What AWS's published times per token exceed our dense model by, for each of its launches.

Lowest, median and highest of the 16 "bound" rows of decode that `python benchmarks published` has
(docs/results/published.json): 24 to 64 ranks of trn1, inf2 and trn2, batch 1. The kernels, the
sampling and the server differ too, and longer caches ask for more, so it is an upper bound of the
launch alone. Prefill has none: in the same runs its rest by launch is two to five times that of
decode at 128 tokens, and more than a hundred times at 8192, so it is not the launches'.
"""


def as_served(decode: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Times of a token in ms, and tokens per second: at `LAUNCH_US`, and their range.

    Args:
        decode: as `passes.pass_of` returns it: `launches`, and `times_ms` by end.
        batch: sequences.

    Returns:
        `time_ms` and `tokens_per_s` are at the first end and the middle cost; those with `_low` and
        `_high` are over the ends and the costs.
    """
    low, middle, high = ([*_times_ms(decode, us).values()] for us in LAUNCH_US)
    ends = middle[0], spread(low)[0], spread(high)[1]
    return {
        **{f"time{end}_ms": ms for end, ms in zip(("", "_low", "_high"), ends, strict=True)},
        **{
            f"tokens_per_s{end}": 1e3 * batch / ms
            for end, ms in zip(("", "_high", "_low"), ends, strict=True)
        },
    }


def speedup_as_served(of: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, float]:
    """The time of `over` over that of `of`, each a decode phase: every launch costs both the same.

    Returns:
        `middle` as `ends.compared` at the middle cost; `low` and `high` over the ends and the
        costs.
    """
    speedups = [compared(_times_ms(of, us), _times_ms(over, us)) for us in LAUNCH_US]
    return {
        "middle": speedups[1]["middle"],
        "low": min([each["low"] for each in speedups]),
        "high": max([each["high"] for each in speedups]),
    }


def _times_ms(decode: Mapping[str, Any], us: float) -> dict[str, float]:
    """By end, where every launch costs so much more."""
    return {end: ms + decode["launches"] * us / 1e3 for end, ms in decode["times_ms"].items()}
