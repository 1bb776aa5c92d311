"""Published figures of NKI kernels beside what the simulated core predicts."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.bench.cases import published
from neuronmm_ops.bench.runner import run_all, traced
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.neuroncore import NkiValidationError, Profile

FIELDS = (
    "name", "target", "published_ms", "modelled_ms", "documented_ms", "error", "calibration",
    "published_bytes", "modelled_bytes", "source", "engine", "published_share", "modelled_share",
    "refused",
)  # fmt: skip


def run(progress: Progress | None = None) -> list[dict[str, Any]]:
    """Predict every published figure under both cost models; a minute on one core.

    Args:
        progress: called with ("published", launches done, launches in all).

    Returns:
        One row a figure: `name`, `target`, `published_ms`, `modelled_ms` (calibrated),
        `documented_ms`, `error` (relative, of the calibrated model), `calibration`,
        `published_bytes`, `modelled_bytes`, `source`, and where a busy share was published instead
        of a time, `engine`, `published_share` and `modelled_share`. `refused` says why a kernel
        does not run here; its numbers are then None.
    """
    found = published.cases()
    # Several shares are published of one run.
    launches = {(case.kernel, case.arguments, case.target): case for case in found}
    outcomes = run_all("published", _simulated, list(launches.values()), progress)
    of_launch = dict(zip(launches, outcomes, strict=True))
    return [_row(case, of_launch[case.kernel, case.arguments, case.target]) for case in found]


def mean_error(rows: list[dict[str, Any]]) -> float:
    """Mean absolute relative error of the times that were predicted, not fitted."""
    times = [r for r in rows if r["published_ms"] and not r["calibration"]]
    return sum([abs(r["error"]) for r in times]) / len(times)


def _simulated(case: published.Case) -> Profile | str:
    """The profile of a case, or why the simulated core refuses it."""
    try:
        return traced(case.kernel, case.arguments, case.target)
    except NkiValidationError as error:
        return str(error).partition(";")[0]


def _row(case: published.Case, outcome: Profile | str) -> dict[str, Any]:
    row: dict[str, Any] = {field: getattr(case, field, None) for field in FIELDS}
    if isinstance(outcome, str):
        return row | {"refused": outcome}
    row["modelled_ms"] = outcome.time_ms
    row["documented_ms"] = outcome.documented_ms
    row["modelled_bytes"] = outcome.hbm_bytes
    if case.published_ms is not None:
        row["error"] = outcome.time_ms / case.published_ms - 1
    if case.published_share is not None:
        row["modelled_share"] = _share(outcome, case.engine)
        row["error"] = row["modelled_share"] / case.published_share - 1
    return row


def _share(profile: Profile, engine: str | None) -> float:
    """Busy share of an engine, or "MFU"."""
    if engine == "MFU":
        return profile.mfu
    (core,) = profile.engines
    return next(use.share for use in core if use.engine == engine)
