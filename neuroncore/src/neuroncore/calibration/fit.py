"""Constants and ends of uncertainties by measured times.

Each launch has a constant cost that the clock leaves out, so each series of cases is compared up to
one constant of its own: only slopes count. Errors are relative.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from neuroncore.calibration.cases import Case, cases
from neuroncore.calibration.constants import PSUM_RESULT, STEPS, Clock, Step
from neuroncore.calibration.measurements import Measurements
from neuroncore.calibration.solve import Estimate, LeastSquares, rms, solve
from neuroncore.core import KernelRun
from neuroncore.hardware import Machine, resolve_target
from neuroncore.kernel import simulate
from neuroncore.profile.profile import Profile
from neuroncore.timing.schedule import schedule
from neuroncore.uncertainty import UNCERTAINTIES, Uncertainty

DECIDED = 2.0
"""An end is decided for where the error of the other is so many times its own, or more,"""
FITS = 0.1
"""and its own is not above this."""


@dataclass(frozen=True)
class FittedConstant:
    """One constant.

    Attributes:
        name: with its unit.
        meaning: for people.
        before: what the clock has.
        after, plus_minus: by the times, and its standard error; None where they do not decide it.
        reason: why it is not decided, such as the constant that times do not tell it from.
    """

    name: str
    meaning: str
    before: float
    after: float | None
    plus_minus: float | None
    reason: str


@dataclass(frozen=True)
class Verdict:
    """Which end of an uncertainty the times speak for.

    Attributes:
        name: of the `uncertainty.Uncertainty`.
        assumed, otherwise: its two ends.
        decided: "assumed", "otherwise", or None.
        error_assumed, error_otherwise: of the times at either end, root of the mean square; None
            where none were measured.
        reason: why it is not decided.
    """

    name: str
    assumed: str
    otherwise: str
    decided: str | None
    error_assumed: float | None
    error_otherwise: float | None
    reason: str


@dataclass(frozen=True)
class Slope:
    """ns per count of a series: measured, and modelled before and after the fit."""

    series: str
    measured_ns: float
    before_ns: float
    after_ns: float


@dataclass(frozen=True)
class Calibration:
    """What a file of measurements says of a target; `launch_us` is the median of the launches."""

    target: str
    versions: dict[str, str]
    launch_us: float
    constants: list[FittedConstant]
    uncertainties: list[Verdict]
    slopes: list[Slope]


def calibrate(measurements: Measurements, path: Path) -> Calibration:
    """Fit the clock of the measurements' target.

    Args:
        measurements: of a device.
        path: their file, which errors name.

    Raises:
        ValueError: a case is unknown, or no series has two times.
    """
    times = _Times(measurements, path)
    machine = resolve_target(measurements.target)
    known = {each.name: each for each in UNCERTAINTIES}
    clock, constants = Clock(machine), dict[str, FittedConstant]()
    verdicts: dict[str, Verdict] = {}
    for step in STEPS:
        start = clock
        uncertainty = known.get(step.decides)
        if uncertainty and (other := uncertainty.other(clock.machine)) != clock.machine:
            verdict = _decide(times, step, uncertainty, clock, other)
            verdicts[step.decides] = verdict
            if verdict.decided == "otherwise":
                start = Clock(other, clock.waits)
        before = clock if step.by_value else start
        clock, estimates = _fit(times, step, start)
        for each in _fitted(times, step, before, clock, estimates):
            first = constants.setdefault(each.name, each)
            constants[each.name] = replace(each, before=first.before)
    for each in UNCERTAINTIES:
        if each.name not in verdicts and each.other(machine) != machine:
            reason = _WHY_NOT.get(each.name, "no case is about it")
            verdicts[each.name] = _verdict(each, None, None, reason)
    slopes = [
        Slope(series, *[round(ns, 3) for ns in times.slopes(series, Clock(machine), clock)])
        for series in times.series
    ]
    decided = [verdicts[each.name] for each in UNCERTAINTIES if each.name in verdicts]
    versions = dict(measurements.versions)
    launch_us = round(times.launch_us(clock), 3)
    fitted = [*constants.values()]
    return Calibration(measurements.target, versions, launch_us, fitted, decided, slopes)


_WHY_NOT = {"hbm": "one core's kernel cannot tell: all cores of the chip must be busy"}


class _Times:
    """Measured times by series, and modelled ones on any clock."""

    def __init__(self, measurements: Measurements, path: Path) -> None:
        known = {case.name: case for case in cases(measurements.target)}
        if unknown := [row.case for row in measurements.rows if row.case not in known]:
            raise ValueError(
                f"{path} has cases that {measurements.target} does not have in this version: "
                f"{', '.join(sorted(unknown))}; measure with this version"
            )
        self.missing: defaultdict[str, dict[str, None]] = defaultdict(dict)
        """Why cases were not measured, each reason once, by what they decide."""
        self.series: dict[str, list[tuple[Case, float]]] = {}
        for row in measurements.rows:
            case = known[row.case]
            if row.time_us is None:
                self.missing[case.decides][f"{case.series} was {row.status}: {row.reason}"] = None
            else:
                self.series.setdefault(case.series, []).append((case, row.time_us))
        self.series = {name: some for name, some in self.series.items() if len(some) > 1}
        if not self.series:
            raise ValueError(
                f"{path} has too few rows: no series has two measured cases, such as loads-256/32 "
                "and loads-256/256; measure more of them"
            )
        self.target = measurements.target
        self._profiles: dict[str, Profile] = {}
        self._retimed: dict[str, tuple[Any, KernelRun]] = {}
        self._modelled: dict[tuple[str, Machine, float], float] = {}

    def of(self, step: Step) -> list[str]:
        """The series that a step is about."""
        about = step.decides, *step.also
        return [name for name, some in self.series.items() if some[0][0].decides in about]

    def why_none(self, step: Step) -> str:
        """Why a step has no series."""
        return "; ".join(self.missing[step.decides]) or "no case was measured"

    def _us(self, case: Case, clock: Clock) -> float:
        """The modelled time; a launch is traced once and scheduled on each machine."""
        key = case.name, clock.machine, clock.wait_ns(PSUM_RESULT)
        if key not in self._modelled:
            profile = self._profiles.get(case.name)
            if profile is None:
                run = simulate(
                    case.simulated,
                    *case.operands,
                    **case.arguments,
                    target=self.target,
                    mode="trace",
                )
                profile = self._profiles[case.name] = run.profile
            latencies = clock.machine.result_ns, clock.wait_ns(PSUM_RESULT)
            if self._retimed.get(case.name, (None,))[0] != latencies:
                self._retimed[case.name] = latencies, clock.retimed(profile.launch)
            launch = self._retimed[case.name][1]
            again = schedule(launch, "calibrated", clock.machine)
            self._modelled[key] = again.time_ns / 1e3
        return self._modelled[key] + case.count * clock.beyond_ns(case.waits) / 1e3

    def _compared(self, series: str, clock: Clock) -> tuple[np.ndarray, np.ndarray, float]:
        """Measured and modelled times, and the launch between them, us."""
        some = self.series[series]
        measured = np.array([time for _, time in some])
        modelled = np.array([self._us(case, clock) for case, _ in some])
        launch = np.average(measured - modelled, weights=measured**-2)
        return measured, modelled, float(launch)

    def errors(self, series: Sequence[str], clock: Clock) -> np.ndarray:
        """Of each time, relative, the launch left out."""
        parts: list[np.ndarray] = []
        for name in series:
            measured, modelled, launch = self._compared(name, clock)
            parts.append((modelled + launch - measured) / measured)
        return np.concatenate(parts)

    def launch_us(self, clock: Clock) -> float:
        """What a launch costs beyond the clock: the median of all series."""
        return float(np.median([self._compared(name, clock)[2] for name in self.series]))

    def slopes(self, series: str, *clocks: Clock) -> list[float]:
        """ns per count, measured and then on each clock, between the least and most counts."""
        some = sorted(self.series[series], key=lambda item: item[0].count)
        (first, _), (last, _) = some[0], some[-1]
        per = 1e3 / (last.count - first.count)
        measured = (some[-1][1] - some[0][1]) * per
        return [measured, *[(self._us(last, c) - self._us(first, c)) * per for c in clocks]]


def _decide(
    times: _Times, step: Step, uncertainty: Uncertainty, clock: Clock, other: Machine
) -> Verdict:
    """Compare the two ends, each with its constants fitted unless they are what differs."""
    series = times.of(step)
    if not series:
        return _verdict(uncertainty, None, None, times.why_none(step))
    ends = [clock, Clock(other, clock.waits)]
    if not step.by_value:
        ends = [_fit(times, step, end)[0] for end in ends]
    one, two = [rms(times.errors(series, end)) for end in ends]
    best, worst = sorted((one, two))
    if math.isclose(one, two, rel_tol=1e-3, abs_tol=1e-6):
        return _verdict(uncertainty, one, two, "the times of both ends are the same here")
    if best > FITS:
        return _verdict(uncertainty, one, two, "neither end fits; see the constants")
    if worst < DECIDED * best:
        return _verdict(uncertainty, one, two, "both ends fit about as well")
    return _verdict(uncertainty, one, two, "")


def _verdict(
    uncertainty: Uncertainty, one: float | None, two: float | None, reason: str
) -> Verdict:
    decided = None
    if not reason and one is not None and two is not None:
        decided = "assumed" if one < two else "otherwise"
    ends = uncertainty.assumed, uncertainty.otherwise
    return Verdict(uncertainty.name, *ends, decided, one, two, reason)


def _fit(times: _Times, step: Step, clock: Clock) -> tuple[Clock, dict[str, Estimate]]:
    """The clock with a step's constants of least error, and what the times say of each."""
    series = times.of(step)
    constants = [each for each in step.constants if each.of(clock.machine)]
    if not series or not constants:
        return clock, {}
    scales = [each.scale or each.get(clock) for each in constants]

    def at(values: np.ndarray) -> Clock:
        made = clock
        for each, scale, value in zip(constants, scales, values, strict=True):
            made = each.put(made, float(value * scale))
        return made

    count = sum([len(times.series[name]) for name in series])
    problem = LeastSquares(
        [each.name for each in constants],
        lambda values: times.errors(series, at(values)),
        *np.array([(each.least, each.most) for each in constants]).T,
        free=count - len(series) - len(constants),
        moves=step.moves if len(constants) == len(step.constants) else (),
    )
    start = np.array([each.get(clock) for each in constants]) / scales
    solved = solve(problem, start)
    estimates = {
        each.name: replace(some, plus_minus=some.plus_minus * scale)
        for each, some, scale in zip(constants, solved, scales, strict=True)
    }
    return at(np.array([each.value for each in solved])), estimates


def _fitted(
    times: _Times, step: Step, before: Clock, clock: Clock, estimates: dict[str, Estimate]
) -> list[FittedConstant]:
    """A step's constants as they are reported."""
    fitted: list[FittedConstant] = []
    for each in step.constants:
        if not each.of(clock.machine):
            continue
        estimate = estimates.get(each.name)
        reason = estimate.reason if estimate else times.why_none(step)
        after = plus_minus = None
        if estimate and not reason:
            after, plus_minus = each.get(clock), estimate.plus_minus
        start = each.name, each.meaning, each.get(before)
        fitted.append(FittedConstant(*start, after, plus_minus, reason))
    return fitted
