"""What the clock says of the programme, kept in `predictions.json` before anybody measures.

`python benchmarks predictions` writes the file. A row has the kernel and its arguments, too: a
device runs what was predicted, whatever a search would find there. All times are modelled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from neuroncore import Profile, simulate
from neuroncore.files import replacing
from neuronmm_ops.device.programme import KernelCase
from neuronmm_ops.kernels.problem import Problem
from neuronmm_ops.kernels.simulated import simulated_kernel
from neuronmm_ops.plan import plan_problem
from neuronmm_ops.plan.cache import fingerprint
from neuronmm_ops.plan.search import descend, knobs_of
from neuronmm_ops.plan.tracing import operands_of, traced

FILE = Path(__file__).with_name("predictions.json")
SPEAKS = 0.03
"""Share of the time that the other end of an uncertainty changes, from which a row speaks of it."""


@dataclass(frozen=True)
class Prediction:
    """Of one row, in us.

    Attributes:
        time_us: modelled.
        range_us: over everything that is not known.
        decides: each uncertainty that the row speaks of, with the time at its other end.
        kernel: name of the kernel of an op; empty where the row is none of an op.
        arguments: its compile-time arguments.
    """

    time_us: float
    range_us: tuple[float, float]
    decides: Mapping[str, float]
    kernel: str = ""
    arguments: Mapping[str, Any] | None = None

    def times(self, count: int) -> Prediction:
        """The prediction of so many launches, one after the other."""
        low, high = self.range_us
        decides = {name: count * us for name, us in self.decides.items()}
        return Prediction(count * self.time_us, (count * low, count * high), decides)


@dataclass(frozen=True)
class Frozen:
    """The file: the source that its times follow from, and rows by target and name."""

    source: str
    commit: str
    rows: Mapping[str, Mapping[str, Prediction]]

    @property
    def is_current(self) -> bool:
        """Whether this package's kernels and clock are those that the times follow from."""
        return self.source == fingerprint()


@cache
def frozen() -> Frozen:
    """The shipped predictions."""
    document = json.loads(FILE.read_bytes())
    rows = {
        target: {
            name: Prediction(range_us=tuple(row.pop("range_us")), **row)
            for name, row in of_target.items()
        }
        for target, of_target in document["targets"].items()
    }
    return Frozen(document["source"], document["commit"], rows)


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
    except (AttributeError, TypeError, AssertionError):  # another kernel, or its arguments
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
