"""Paired, interleaved timing: what drifts (clock, neighbours, heat) drifts for every candidate."""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

# More than the caches a core can keep for itself: weights that are met again after this many other
# bytes come from memory, as they do in a model's forward.
COLD_BYTES = 512 * 2**20
# Enough for a median, where a round takes so long that the time limit ends the measurement.
MIN_ROUNDS = 3


@dataclass(frozen=True)
class PairedTimes:
    """Times of candidates that were called in turn, round by round.

    Attributes:
        rounds_ms: milliseconds of every round, by candidate.
    """

    rounds_ms: Mapping[str, tuple[float, ...]]

    def median_ms(self, name: str) -> float:
        """Return the median time of a candidate in milliseconds."""
        return statistics.median(self.rounds_ms[name])

    def speedup(self, name: str, baseline: str) -> float:
        """Return the median over rounds of `baseline`'s time divided by `name`'s."""
        pairs = zip(self.rounds_ms[baseline], self.rounds_ms[name], strict=True)
        return statistics.median(base / candidate for base, candidate in pairs)


def copies_for(weight_bytes: int, cold_bytes: int = COLD_BYTES) -> int:
    """Return how many copies of weights of that size are needed to meet each one cold."""
    return max(1, -(-cold_bytes // weight_bytes))


def time_paired(
    candidates: Mapping[str, Callable[[int], object]],
    rounds: int = 30,
    warmup: int = 3,
    calls: int = 1,
    mode: Callable[[], AbstractContextManager[object]] = torch.inference_mode,
    limit_s: float = 60.0,
) -> PairedTimes:
    """Time the candidates in turn, starting each round at another one.

    Args:
        candidates: name to a function of the round's number, which chooses the copy of the
            weights.
        rounds: timed rounds.
        warmup: rounds before them, not timed.
        calls: calls of a candidate in one timing, for those near the clock's resolution.
        mode: context in which they run.
        limit_s: seconds after which no further round starts, `MIN_ROUNDS` being timed.
    """
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    with mode():
        for turn in range(-warmup, rounds):
            if turn >= MIN_ROUNDS and time.perf_counter() - start > limit_s:
                break
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                elapsed = _seconds(candidates[name], turn, calls)
                if turn >= 0:
                    times[name].append(elapsed * 1e3 / calls)
    return PairedTimes({name: tuple(values) for name, values in times.items()})


def _seconds(function: Callable[[int], object], turn: int, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function(turn)
    return time.perf_counter() - start
