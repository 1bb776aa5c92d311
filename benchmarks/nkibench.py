"""Variants of NKIBench's kernels that others timed on a device, beside their modelled times.

KDA for Trainium (github.com/Jerry2423/kda-for-trainium) wrote them for AccelOpt's NKIBench
(github.com/zhang677/AccelOpt) and measured each on "trn2, single-core", p50. Its rates, 152 TFLOP/s
in bf16 and 800 GB/s, are twice what AWS documents for one NeuronCore-v3, so a quotient of times is
no error of the model; which of two variants is quicker, and what they move, can be compared.
Nothing here was fitted to these kernels. They are in the Beta dialect, and run as migrated.
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
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

import neuroncore
from neuroncore import dtypes
from neuroncore.migrate import migrate
from neuronmm_ops.compress.calibrate import Progress

TARGET = "trn2"
APART = 0.05
"""By how much two measured times differ at least that are compared."""
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
        A row for each operator with `op`, `kernels`, `quotient`, `quotient_low` and
        `quotient_high` (modelled time over measured: median, least and greatest), `pairs` of
        kernels that differ by 5 % and more as measured, `in_order` (how many of them the model puts
        in that order), `moved` (bytes over measured ones, median; None where none are told) and
        `not_run`; and a row for each kernel.

    Raises:
        ValueError: a clone lacks its files.
    """
    for folder, name in ((variants, "baselines.json"), (nkibench, "NKIBench/summary.json")):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} must be a clone that has {name}; clone it again")
    neuroncore.install()
    found: list[dict[str, Any]] = []
    cases = list(measured(variants, nkibench / "NKIBench"))
    for case in cases:
        row = {"op": case.op, "kernel": case.kernel.name, "measured_ms": case.ms}
        found.append(row | {"measured_mb": case.mb} | modelled(case))
        if progress is not None:
            progress("trace", len(found), len(cases))
    by_op: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        by_op[row["op"]].append(row)
    return [_summary(op, rows) for op, rows in sorted(by_op.items())], found


def measured(variants: Path, nkibench: Path) -> Iterator[TimedKernel]:
    """All kernels with a time on the device: NKIBench's own, and the variants that passed."""
    baselines = json.loads((variants / "baselines.json").read_text())
    for op, entry in json.loads((nkibench / "summary.json").read_text()).items():
        (case,) = entry["cases"].values()
        (files,) = case["impls"]
        reference = nkibench / files["task"]
        for found in baselines.values():
            if found["op"] == op:
                own = nkibench / "kernels" / found["kernel"]
                yield TimedKernel(op, own, reference, found["baseline_latency_ms"], None)
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
    """`modelled_ms` and `modelled_mb` of a kernel, or why it did not run."""
    reference = _module(case.reference)
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
                _module(new).kernel,
                *operands,
                target=TARGET,
                mode="trace",
                uninitialised="warn",
                capacity="warn",
            ).profile
        except _STOPS as error:
            return {"modelled_ms": None, "modelled_mb": None, "why": str(error)[:200]}
    return {"modelled_ms": profile.time_ms, "modelled_mb": profile.dma_bytes / 1e6, "why": None}


def _module(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _summary(op: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    ran = [row for row in rows if row["modelled_ms"] is not None]
    quotients = [row["modelled_ms"] / row["measured_ms"] for row in ran]
    moved = [row["modelled_mb"] / row["measured_mb"] for row in ran if row["measured_mb"]]
    pairs = [
        (a["measured_ms"] < b["measured_ms"]) == (a["modelled_ms"] < b["modelled_ms"])
        for a, b in combinations(ran, 2)
        if abs(a["measured_ms"] / b["measured_ms"] - 1) > APART
    ]
    return {
        "op": op,
        "kernels": len(ran),
        "quotient": median(quotients) if quotients else None,
        "quotient_low": min(quotients, default=None),
        "quotient_high": max(quotients, default=None),
        "pairs": len(pairs),
        "in_order": sum(pairs),
        "moved": median(moved) if moved else None,
        "not_run": len(rows) - len(ran),
    }
