"""Decode as served: modelled launches, and what they and a token cost where a model is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from neuronmm_ops.estimate.ends import compared, spread


class ServingCost(NamedTuple):
    """Microseconds beyond a modelled time."""

    low: float
    middle: float
    high: float


LAUNCH_US = ServingCost(6.2, 9.3, 19.1)
"""What AWS's published times per token exceed our dense model by, for each of its launches.

Lowest, median and highest of the 16 "bound" rows of decode that `python benchmarks published` has
(docs/results/published.json): 24 to 64 ranks of trn1, inf2 and trn2, batch 1. The kernels, the
sampling and the server differ too, and longer caches ask for more, so it is an upper bound of the
launch alone. Prefill has none: in the same runs its rest by launch is two to five times that of
decode at 128 tokens, and more than a hundred times at 8192, so it is not the launches'.
"""

TOKEN_US = ServingCost(0.0, 1500.0, 3000.0)
"""What a token costs, however few its launches.

github.com/KevGomes1403/nki-moe-megakernel (621932e) runs all 48 layers of Qwen3-30B-A3B in one
launch on trn3: 8.15 ms a token, of which its profile gives 6.45 to the layers; our head takes 0.17.
Least squares over the rows of `LAUNCH_US` give 1.7 ms a token, and 7.3 us a launch. The high end is
of its gpt-oss-20B, up to 5.88 ms a token, without a profile: its layers are modelled 2.66, the head
0.28. At the low end launches alone cost.
"""

FURTHER_US = ServingCost(LAUNCH_US.low, 6.8, 14.3)
"""What each launch and collective of a token costs with `TOKEN_US`, end by end, by the same rows.

Without `TOKEN_US` the lowest is that of `LAUNCH_US`.
"""

_COSTS = (*zip(TOKEN_US, FURTHER_US, strict=True),)


def as_served(decode: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Times of a token in ms, and tokens per second: with `TOKEN_US` and `FURTHER_US`.

    Args:
        decode: as `passes.pass_of` returns it: `launches`, and `times_ms` by end.
        batch: sequences.

    Returns:
        `time_ms` and `tokens_per_s` are at the first end and the middle cost; those with `_low` and
        `_high` are over the ends and the costs.
    """
    low, middle, high = ([*_times_ms(decode, *us).values()] for us in _COSTS)
    ends = middle[0], spread(low)[0], spread(high)[1]
    return {
        **{f"time{end}_ms": ms for end, ms in zip(("", "_low", "_high"), ends, strict=True)},
        **{
            f"tokens_per_s{end}": 1e3 * batch / ms
            for end, ms in zip(("", "_high", "_low"), ends, strict=True)
        },
    }


def speedup_as_served(of: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, float]:
    """The time of `over` over that of `of`, each a decode phase, at the same costs.

    Returns:
        `middle` as `ends.compared` at the middle cost; `low` and `high` over the ends and the
        costs.
    """
    speedups = [compared(_times_ms(of, *us), _times_ms(over, *us)) for us in _COSTS]
    return {
        "middle": speedups[1]["middle"],
        "low": min([each["low"] for each in speedups]),
        "high": max([each["high"] for each in speedups]),
    }


def _times_ms(decode: Mapping[str, Any], token_us: float, launch_us: float) -> dict[str, float]:
    """By end, where a token and each of its launches cost so much more."""
    more_ms = (token_us + decode["launches"] * launch_us) / 1e3
    return {end: ms + more_ms for end, ms in decode["times_ms"].items()}
