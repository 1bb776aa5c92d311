"""Variants of NKIBench's kernels that others timed on a device, next to their modelled times.

KDA for Trainium (github.com/Jerry2423/kda-for-trainium) wrote them for AccelOpt's NKIBench
(github.com/zhang677/AccelOpt) and measured each on "trn2, single-core", p50. That p50 is half a
run's time where half of the samples are of nothing (evidence: neuroncore/docs/modelled.md, "Kernels
that others timed"). So a kernel whose p50 is less than one NeuronCore-v3 needs at its documented
rates ran for twice as long; any other may have, or not. They are in the Beta dialect, and run as
migrated.
"""

import csv
import importlib.util
import json
import re
import types
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

import neuroncore
from neuroncore import dtypes
from neuroncore.hardware import Engine
from neuroncore.migrate import migrate
from neuronmm_ops.compress.calibrate import Progress

TARGET = "trn2"
APART = 0.05
"""By how much two measured times differ at least that are compared."""
FITTED = ("adamw", "rope_single_freq_apply")
"""Operators whose told shares of VectorE's time fixed what an instruction of two inputs takes."""
_POSSIBLE = 0.9
"""Of the time that a core needs at its documented rates: a p50 below is half a run's."""
_STOPS = (
    *(ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError),
    neuroncore.NkiValidationError,
)
"""What a kernel that does not run may raise."""
_MB = re.compile(r"HBMrd=([\d.]+)MB HBMwr=([\d.]+)MB")


class TimedKernel(NamedTuple):
    """A kernel that was measured: its file, and what was seen."""

    op: str
    kernel: Path
    reference: Path
    ms: float
    mb: float | None


def run(
    variants: Path, nkibench: Path, progress: Progress | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Trace all kernels with a measured time.

    Args:
        variants: a clone of kda-for-trainium.
        nkibench: a clone of AccelOpt. Python of both is run.
        progress: called with ("trace", done, in all).

    Returns:
        A row for each operator with `op`, `kernels`, `halved` (those whose p50 is half a run's
        time), of them `quotient`, `quotient_low` and `quotient_high` (modelled time over twice the
        p50: median, least and greatest), `pairs` that differ by 5 % and more as measured and
        `in_order` (how many of them the model puts in that order); `open_quotient` (the same
        median of the other kernels: it, or twice as much), `moved` (bytes over measured ones,
        median; None where none are told) and `not_run`; and a row for each kernel.

    Raises:
        ValueError: a clone lacks its files.
    """
    for folder, name in ((variants, "baselines.json"), (nkibench, "NKIBench/summary.json")):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} must be a clone that has {name}; clone it again")
    neuroncore.install()
    kernels: list[dict[str, Any]] = []
    cases = list(measured(variants, nkibench / "NKIBench"))
    for case in cases:
        row = modelled(case)
        halved = row["why"] is None and case.ms < _POSSIBLE * row["bound_ms"]
        seen = {"p50_ms": case.ms, "halved": halved, "measured_mb": case.mb}
        kernels.append({"op": case.op, "kernel": case.kernel.name} | seen | row)
        if progress is not None:
            progress("trace", len(kernels), len(cases))
    by_op: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in kernels:
        by_op[row["op"]].append(row)
    return [_summary(op, rows) for op, rows in sorted(by_op.items())], kernels


def measured(variants: Path, nkibench: Path) -> Iterator[TimedKernel]:
    """All kernels with a time on the device: NKIBench's own, and the variants that passed."""
    baselines = json.loads((variants / "baselines.json").read_text())
    for op, entry in json.loads((nkibench / "summary.json").read_text()).items():
        (case,) = entry["cases"].values()
        (files,) = case["impls"]
        reference = nkibench / files["task"]
        for baseline in baselines.values():
            if baseline["op"] == op:
                own = nkibench / "kernels" / baseline["kernel"]
                yield TimedKernel(op, own, reference, baseline["baseline_latency_ms"], None)
        times: dict[str, list[tuple[float, str]]] = defaultdict(list)
        table = variants / "workspaces" / op / "benchmark.csv"
        with table.open(newline="") as lines:
            for row in csv.DictReader(lines):
                is_timed = row["latency_ms"].replace(".", "").isdigit()
                if is_timed and row["passed"] == "true" and row["candidate"].startswith("runs/"):
                    times[row["candidate"]].append((float(row["latency_ms"]), row["notes"]))
        for name, each in times.items():
            if (kernel := table.parent / name).is_file():
                notes = next((m for _, note in each if (m := _MB.search(note))), None)
                mb = None if notes is None else float(notes[1]) + float(notes[2])
                yield TimedKernel(op, kernel, reference, min(ms for ms, _ in each), mb)


def modelled(case: TimedKernel) -> dict[str, Any]:
    """`modelled_ms`, `modelled_mb` and `bound_ms` of a kernel, or why it did not run.

    The bound: its matmuls on TensorE, or its HBM bytes at the peak of the DMA engines.
    """
    reference = module_of(case.reference)
    inputs = reference.transform_to_nki_inputs(reference.get_inputs())
    operands = [
        neuroncore.TensorSpec(x.shape, dtypes.from_numpy(x.dtype)) if np.ndim(x) else x
        for x in inputs
    ]
    with TemporaryDirectory() as folder:
        new = Path(folder, case.kernel.name)
        new.write_text(migrate(case.kernel.read_text())[0])
        try:
            profile = neuroncore.simulate(
                module_of(new).kernel,
                *operands,
                target=TARGET,
                mode="trace",
                uninitialised="warn",
                capacity="warn",
            ).profile
        except _STOPS as error:
            return {
                **dict.fromkeys(("modelled_ms", "modelled_mb", "bound_ms")),
                "why": str(error)[:200],
            }
    issued = profile.schedule.cores[0].issued
    # without issue and throttling, which are no documented rates
    matmuls_ms = sum([each.ns for each, *_ in issued if each.engine is Engine.TENSOR]) / 1e6
    return {
        "modelled_ms": profile.time_ms,
        "modelled_mb": profile.dma_bytes / 1e6,
        "bound_ms": max(matmuls_ms, profile.hbm_bytes / profile.dma_peak_gbps / 1e6),
        "why": None,
    }


def quotient(row: dict[str, Any]) -> float:
    """Modelled time over twice the p50."""
    return row["modelled_ms"] / (2 * row["p50_ms"])


def score(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """`kernels`, `mean_error` and `worst` of those that are halved and of no `FITTED` operator."""
    errors = [quotient(k) - 1 for k in kernels if k["halved"] and k["op"] not in FITTED]
    return {
        "kernels": len(errors),
        "mean_error": mean(map(abs, errors)),
        "worst": max(errors, key=abs),
    }


def module_of(path: Path) -> types.ModuleType:
    """A file, run as a module of its name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _summary(op: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    ran = [row for row in rows if row["modelled_ms"] is not None]
    halved = [row for row in ran if row["halved"]]
    quotients = [quotient(row) for row in halved]
    open_quotients = [quotient(row) for row in ran if not row["halved"]]
    moved = [row["modelled_mb"] / row["measured_mb"] for row in ran if row["measured_mb"]]
    pairs = [
        (a["p50_ms"] < b["p50_ms"]) == (a["modelled_ms"] < b["modelled_ms"])
        for a, b in combinations(halved, 2)
        if abs(a["p50_ms"] / b["p50_ms"] - 1) > APART
    ]
    return {
        "op": op,
        "kernels": len(ran),
        "halved": len(halved),
        "quotient": median(quotients) if quotients else None,
        "quotient_low": min(quotients, default=None),
        "quotient_high": max(quotients, default=None),
        "pairs": len(pairs),
        "in_order": sum(pairs),
        "open_quotient": median(open_quotients) if open_quotients else None,
        "moved": median(moved) if moved else None,
        "not_run": len(rows) - len(ran),
    }
