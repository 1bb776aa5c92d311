"""`predictions`: the programme of `neuronmm device-check`, predicted before anybody measures."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neuroncore import Profile, simulate
from neuroncore.calibration import cases as microkernels
from neuroncore.calibration.published import Profiled, published
from neuroncore.files import replacing
from neuroncore.hardware import MACHINES
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.device.predictions import FILE, Prediction, frozen
from neuronmm_ops.device.programme import KernelCase, kernel_cases
from neuronmm_ops.kernels.problem import Problem
from neuronmm_ops.kernels.simulated import simulated_kernel
from neuronmm_ops.plan import plan_problem
from neuronmm_ops.plan.cache import fingerprint
from neuronmm_ops.plan.search import descend, knobs_of
from neuronmm_ops.plan.tracing import operands_of, traced

SPEAKS = 0.03
"""Share of the time that the other end of an uncertainty changes, from which a row speaks of it."""


def run(progress: Progress | None = None) -> dict[str, Any]:
    """Predict all rows and write them; arguments of kernels are kept where they still fit.

    Args:
        progress: called with (target, rows done, rows in all).

    Returns:
        How many `rows` of each target there are, and how many have `moved` since.
    """
    before = frozen().rows if FILE.exists() else {}
    predictions: dict[str, dict[str, Prediction]] = {}
    for target in MACHINES:
        known, cases = before.get(target, {}), kernel_cases(target)
        small = [*published(target), *microkernels.cases(target)]
        own = predictions[target] = {each.name: _of(each, target) for each in small}
        for done, case in enumerate(cases, 1):
            own[case.name] = predict(case, known.get(case.name))
            if progress is not None:
                progress(target, done, len(cases))
    write(predictions, _commit())
    rows = {target: len(own) for target, own in predictions.items()}
    moved = {
        target: sum([before.get(target, {}).get(name) != row for name, row in own.items()])
        for target, own in predictions.items()
    }
    return {"file": str(FILE), "rows": rows, "moved": moved}


def _of(case: Profiled | microkernels.Case, target: str) -> Prediction:
    options: dict[str, Any] = {**case.arguments, "target": target, "mode": "trace"}
    return of_profile(simulate(case.simulated, *case.operands, **options).profile)


def _commit() -> str:
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout.strip()


def predict(case: KernelCase, kept: Prediction | None = None) -> Prediction:
    """What is modelled of a kernel's launch.

    Args:
        case: what is launched: with one token the decode kernel, otherwise that of prefill.
        kept: an earlier prediction, whose arguments are taken where they still fit.

    Raises:
        ValueError: no arguments fit.
    """
    problem = case.problem
    name, arguments = (kept and _fitting(problem, kept)) or _planned(case)
    kernel = simulated_kernel(problem.op, name, problem.lnc)
    specs = operands_of(problem, kernel)
    options: dict[str, Any] = {**arguments, "target": problem.target, "mode": "trace"}
    return of_profile(simulate(kernel, *specs, **options).profile, name, arguments)


def of_profile(
    profile: Profile, kernel: str = "", arguments: Mapping[str, Any] | None = None
) -> Prediction:
    """The prediction of a launch that was simulated."""
    low, high = profile.time_range_ms
    others = {
        end.name: _us(end.time_ms)
        for end in profile.uncertainties
        if abs(end.time_ms / profile.time_ms - 1) >= SPEAKS
    }
    return Prediction(_us(profile.time_ms), (_us(low), _us(high)), others, kernel, arguments)


def _fitting(problem: Problem, kept: Prediction) -> tuple[str, dict[str, Any]] | None:
    """A prediction's kernel and arguments; None where they are no longer those of a kernel."""
    arguments = dict(kept.arguments or {})
    try:
        return (kept.kernel, arguments) if traced(problem, kept.kernel, arguments) else None
    except (AttributeError, IndexError, TypeError, AssertionError):  # others by now
        return None


def _planned(case: KernelCase) -> tuple[str, dict[str, Any]]:
    problem, phase = case.problem, "decode" if case.problem.M == 1 else "prefill"
    plan = plan_problem(problem)
    if plan.phase == phase:
        return plan.kernel, plan.arguments
    fitting = [each for knobs in knobs_of(problem, phase) for each in descend(problem, knobs)]
    if not fitting:
        raise ValueError(f"{case.name}: no {phase} kernel fits; take smaller sizes")
    best = min(fitting, key=lambda candidate: candidate.rank)
    return best.kernel, dict(best.arguments)


def write(rows: Mapping[str, Mapping[str, Prediction]], commit: str) -> None:
    """Write the file, a line a row."""
    targets = ",\n".join(
        [
            f"{json.dumps(target)}: {{\n"
            + ",\n".join([f"{json.dumps(n)}: {json.dumps(asdict(p))}" for n, p in own.items()])
            + "\n}"
            for target, own in rows.items()
        ]
    )
    head = f'"source": {json.dumps(fingerprint())}, "commit": {json.dumps(commit)}'
    with replacing(FILE) as temporary:
        temporary.write_text(f'{{{head}, "targets": {{\n{targets}\n}}}}\n', encoding="utf-8")


def _us(ms: float) -> float:
    return round(1e3 * ms, 3)
