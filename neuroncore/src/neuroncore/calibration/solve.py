"""Least squares on the clock itself, and which constants its times decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

NOISE = 0.01
"""Of a time, at least: standard errors are no less than it makes them."""
KNOWN = 0.05
"""A constant is decided where its standard error is at most this share of it."""
_TRIES, _DIFFERENCE, _SETTLED, _NO_EFFECT = 20, 1e-3, 1e-5, 1e-4
_TOGETHER = 0.5
"""Correlation from which a constant is a partner of another."""
_STARTS, _FITS, _MISFIT = 4, 1.1, 1.3
"""Of a search: how many, as long as the error is so many times the noise; of what is no fit."""
_WIDE = np.geomspace(0.4, 2.5, 31)
_NARROW = (np.geomspace(0.84, 1.19, 13), np.geomspace(0.95, 1.05, 9), np.geomspace(0.985, 1.015, 7))

Values = np.ndarray
"""Constants, each over its scale."""
Move = Callable[[Values, float], Values]
"""Values, with one of them times a ratio."""


@dataclass(frozen=True)
class LeastSquares:
    """Errors that constants are to make small.

    Attributes:
        names: of the constants.
        errors: of each time, relative, by the constants' values.
        low, high: their bounds.
        free: how many more times than unknowns there are, the constants included.
        moves: where times jump, along which it is searched.
    """

    names: Sequence[str]
    errors: Callable[[Values], np.ndarray]
    low: Values
    high: Values
    free: int
    moves: Sequence[Move] = ()


@dataclass(frozen=True)
class Estimate:
    """Of one constant: its value, its standard error, and why it is not decided, or nothing."""

    value: float
    plus_minus: float
    reason: str


def solve(problem: LeastSquares, start: Values) -> list[Estimate]:
    """The constants of least error, within their bounds."""
    values = _searched(problem, start) if problem.moves else _descended(problem, start)
    now = problem.errors(values)
    spread = max(NOISE, rms(now) * math.sqrt(len(now) / max(1, problem.free)))
    by = _jacobian(problem, values) / spread
    mute = [_without_effect(problem, values, i, spread) for i in range(len(values))]
    by *= [not reason for reason in mute]
    least = 1e-6 * np.eye(len(values))  # of what times do not tell at all
    covariance = np.linalg.inv(by.T @ by + least)
    plus_minus = np.sqrt(np.diag(covariance))
    together = np.abs(covariance / np.outer(plus_minus, plus_minus))
    np.fill_diagonal(together, 0.0)
    estimates: list[Estimate] = []
    for i, (value, reason) in enumerate(zip(values, mute, strict=True)):
        if problem.moves and rms(now) > _MISFIT * NOISE:
            reason = f"no values fit better than {rms(now):.1%}"
        elif value in (problem.low[i], problem.high[i]):
            reason = "times ask for more or less than is tried"
        elif not reason and plus_minus[i] > KNOWN * value:
            k = int(np.argmax(together[i]))
            reason = f"its error would be {plus_minus[i] / value:.0%}"
            if together[i, k] > _TOGETHER:
                reason = f"times tell it only together with {problem.names[k]}"
        estimates.append(Estimate(float(value), float(plus_minus[i]), reason))
    return estimates


def rms(values: np.ndarray) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.mean(values**2)))


def _descended(problem: LeastSquares, values: Values) -> Values:
    """By Gauss and Newton's method."""
    now = problem.errors(values)
    for _ in range(_TRIES):
        step_by = np.linalg.lstsq(_jacobian(problem, values), -now, rcond=1e-6)[0]
        tried = [
            np.clip(values + share * step_by, problem.low, problem.high)
            for share in 0.5 ** np.arange(8)
        ]
        better = next((some for some in tried if rms(problem.errors(some)) < rms(now)), None)
        if better is None:
            break
        before, values, now = rms(now), better, problem.errors(better)
        if rms(now) > (1 - _SETTLED) * before:
            break
    return values


def _searched(problem: LeastSquares, values: Values) -> Values:
    """By trying all of the range of the first move, then in its valleys, until one fits."""

    def error(some: Values) -> float:
        return rms(problem.errors(some))

    wide = _moved(problem, values, problem.moves[0], _WIDE)
    errors = [math.inf, *map(error, wide), math.inf]
    valleys = [i for i in range(len(wide)) if errors[i] > errors[i + 1] <= errors[i + 2]]
    minima: list[Values] = []
    for start in [wide[i] for i in sorted(valleys, key=lambda i: errors[i + 1])[:_STARTS]]:
        near = start
        for ratios in _NARROW:
            near = _descended(problem, near)
            for move in problem.moves:
                near = min([near, *_moved(problem, near, move, ratios)], key=error)
        minima.append(near)
        if error(near) < _FITS * NOISE:
            break
    return min(minima, key=error)


def _moved(problem: LeastSquares, values: Values, move: Move, ratios: np.ndarray) -> list[Values]:
    tried = [move(values, ratio) for ratio in ratios]
    return [v for v in tried if np.all((problem.low <= v) & (v <= problem.high))]


def _jacobian(problem: LeastSquares, values: Values) -> np.ndarray:
    """Of the errors [times, constants]; by differences to both sides: some times have kinks."""
    step = KNOWN if problem.moves else _DIFFERENCE
    ahead = step * np.eye(len(values))
    both = [problem.errors(values + some) - problem.errors(values - some) for some in ahead]
    return np.stack(both, 1) / (2 * step)


def _without_effect(problem: LeastSquares, values: Values, i: int, spread: float) -> str:
    """Why times do not tell a constant from a much larger or smaller one; empty where they do."""
    visible = 2 * spread
    mute = [ratio for ratio in _MUCH if _effect(problem, values, i, ratio) < visible]
    if not mute:
        return ""
    others = [
        (_effect(problem, values * np.where(np.arange(len(values)) == k, far, 1.0), i, mute[0]), k)
        for k in range(len(values))
        for far in _FAR
        if k != i
    ]
    most, k = max(others, default=(0.0, i))
    if most < visible:
        return "no time depends on it"
    return f"times do not change where it is {_MUCH[mute[0]]}: {problem.names[k]} binds"


_MUCH = {1 - 2 * KNOWN: "less", 1 + 2 * KNOWN: "more"}
_FAR = (0.7, 1.4)


def _effect(problem: LeastSquares, values: Values, i: int, ratio: float) -> float:
    """How far all times move with a constant times a ratio."""
    moved = values.copy()
    moved[i] *= ratio
    return float(np.linalg.norm(problem.errors(moved) - problem.errors(values)))
