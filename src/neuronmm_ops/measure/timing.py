"""Paired, interleaved timing: a drift of the machine's speed meets every candidate alike."""

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

Name = TypeVar("Name")
COLD_BYTES = 512 * 2**20
"""More than a CPU's caches: weights that are read again after this many bytes come from memory."""
MIN_ROUNDS = 3
"""Rounds that are timed even if they take longer than the time limit."""


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
        return statistics.median(self._speedups(name, baseline))

    def speedup_quartiles(self, name: str, baseline: str) -> tuple[float, ...]:
        """Return the quartiles over rounds of `baseline`'s time divided by `name`'s."""
        speedups = self._speedups(name, baseline)
        return tuple(statistics.quantiles(speedups * 2, n=4, method="inclusive"))  # one has none

    def _speedups(self, name: str, baseline: str) -> list[float]:
        pairs = zip(self.rounds_ms[baseline], self.rounds_ms[name], strict=True)
        return [base / candidate for base, candidate in pairs]


def copies_for(weight_bytes: int, cold_bytes: int = COLD_BYTES) -> int:
    """Return how many copies of weights of that size fill `cold_bytes`, so that none is cached."""
    return max(1, -(-cold_bytes // weight_bytes))


def in_turn(
    names: Sequence[Name], rounds: int, limit_s: float, warmup: int = 0
) -> Iterator[tuple[int, list[Name]]]:
    """Yield each round's number and its candidates in order: every round starts at another one.

    Rounds of a warm-up have numbers below 0. After `limit_s` seconds no further round starts, once
    there were `MIN_ROUNDS`.
    """
    start = time.perf_counter()
    for index in range(-warmup, rounds):
        if index >= MIN_ROUNDS and time.perf_counter() - start > limit_s:
            return
        shift = index % len(names)
        yield index, [*names[shift:], *names[:shift]]


def time_paired(
    candidates: Mapping[str, Callable[[int], object]],
    rounds: int = 30,
    warmup: int = 3,
    calls: int = 1,
    mode: Callable[[], AbstractContextManager[object]] = torch.inference_mode,
    limit_s: float = 60.0,
) -> PairedTimes:
    """Time the candidates `in_turn`.

    Args:
        candidates: name to a function of the round's number, which chooses the copy of the
            weights.
        rounds: timed rounds.
        warmup: rounds before them, not timed.
        calls: calls of a candidate in one timing, for those near the clock's resolution.
        mode: context in which they run.
        limit_s: as `in_turn` takes it.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    with mode():
        for index, order in in_turn(list(candidates), rounds, limit_s, warmup):
            for name in order:
                function = candidates[name]
                called = time.perf_counter()
                for _ in range(calls):
                    function(index)
                elapsed = time.perf_counter() - called
                if index >= 0:
                    times[name].append(elapsed * 1e3 / calls)
    return PairedTimes({name: tuple(values) for name, values in times.items()})


def cpu_name() -> str:
    """Return the CPU's name, where the system says it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
