"""`predictions`: the programme of `neuronmm device-check`, predicted before anybody measures."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from neuroncore import simulate
from neuroncore.calibration import cases as microkernels
from neuroncore.calibration.published import Profiled, published
from neuroncore.hardware import MACHINES
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.device import predictions
from neuronmm_ops.device.predictions import Prediction
from neuronmm_ops.device.programme import kernel_cases


def run(progress: Progress | None = None) -> dict[str, Any]:
    """Predict all rows and write them; arguments of kernels are kept where they still fit.

    Args:
        progress: called with (target, rows done, rows in all).

    Returns:
        How many `rows` of each target there are, and how many have `moved` since.
    """
    before = predictions.frozen().rows if predictions.FILE.exists() else {}
    found: dict[str, dict[str, Prediction]] = {}
    for target in MACHINES:
        known, cases = before.get(target, {}), kernel_cases(target)
        small = [*published(target), *microkernels.cases(target)]
        own = found[target] = {each.name: _of(each, target) for each in small}
        for done, case in enumerate(cases, 1):
            own[case.name] = predictions.predict(case, known.get(case.name))
            if progress is not None:
                progress(target, done, len(cases))
    predictions.write(found, _commit())
    rows = {target: len(own) for target, own in found.items()}
    moved = {
        target: sum([before.get(target, {}).get(name) != row for name, row in own.items()])
        for target, own in found.items()
    }
    return {"file": str(predictions.FILE), "rows": rows, "moved": moved}


def _of(case: Profiled | microkernels.Case, target: str) -> Prediction:
    options: dict[str, Any] = {**case.arguments, "target": target, "mode": "trace"}
    return predictions.of_profile(simulate(case.simulated, *case.operands, **options).profile)


def _commit() -> str:
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout.strip()
