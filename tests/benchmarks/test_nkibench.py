"""`python benchmarks nkibench`, on stand-ins of both clones: one operator, its kernel, variants."""

import json
import sys
from pathlib import Path

import pytest
from commands import run

from benchmarks import nkibench

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

REFERENCE = """\
import numpy as np

def get_inputs():
    return [np.ones((256, 512), np.float32)]

def transform_to_nki_inputs(inputs):
    return [inputs[0].reshape(128, 2, 512), 3.0]
"""
KERNEL = """\
import numpy as np
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

@nki.jit
def kernel(x, factor):
    out = nl.ndarray(x.shape, dtype=np.float32, buffer=nl.shared_hbm)
    for i in nl.affine_range(2):
        for start in range(0, 512, STEP):
            tile = nl.load(x[0:128, i, start : start + STEP])
            nl.store(out[0:128, i, start : start + STEP], nl.multiply(tile, factor))
    return out
"""
TIMES = """\
op,candidate,passed,latency_ms,notes
double,runs/wide.py,true,0.0025,"a first run; HBMrd=0.5MB HBMwr=0.5MB"
double,runs/wide.py,true,0.002,again
double,runs/narrow.py,true,0.0025,no counters
double,runs/open.py,true,0.020,above what the core needs
double,runs/narrow.py,true,N/A,a screen of values
double,runs/wrong.py,false,0.001,not compared
double,runs/gone.py,true,0.001,no such file
double,runs/broken.py,true,0.030,stops
double,runs/illegal.py,true,0.030,256 partitions
"""


@pytest.fixture
def clones(tmp_path: Path) -> tuple[Path, Path]:
    variants, nkibench = tmp_path / "kda", tmp_path / "accelopt"
    runs, bench = variants / "workspaces/double/runs", nkibench / "NKIBench"
    for folder in (runs, bench / "kernels", bench / "reference"):
        folder.mkdir(parents=True)
    (bench / "reference/double.py").write_text(REFERENCE)
    (bench / "kernels/double.py").write_text(KERNEL.replace("STEP", "128"))
    files = {"task": "reference/double.py", "kernel": "kernels/double.py"}
    (bench / "summary.json").write_text(
        json.dumps({"double": {"cases": {"0": {"impls": [files]}}}})
    )
    for name, step in (("wide", "512"), ("narrow", "64"), ("wrong", "256"), ("broken", "None")):
        (runs / f"{name}.py").write_text(KERNEL.replace("STEP", step))
    (runs / "open.py").write_text(KERNEL.replace("STEP", "32"))
    (runs / "illegal.py").write_text(KERNEL.replace("0:128", "0:256").replace("STEP", "512"))
    (runs.parent / "benchmark.csv").write_text(TIMES)
    own = {"op": "double", "kernel": "double.py", "baseline_latency_ms": 0.0022}
    (variants / "baselines.json").write_text(json.dumps({"double[case=0]": own}))
    return variants, nkibench


def test_variants_are_put_in_order(clones):
    # in a process of its own, for `neuroncore.install` is for good
    document = json.loads(run(sys.executable, BENCHMARKS, "nkibench", *clones, "--json"))
    kernels = {row["kernel"]: row for row in document["kernels"]}
    stopped = {name for name, row in kernels.items() if row["modelled_ms"] is None}
    assert stopped == {"broken.py", "illegal.py"}
    assert set(kernels) - stopped == {"double.py", "wide.py", "narrow.py", "open.py"}
    assert kernels["wide.py"]["p50_ms"] == 0.002
    assert kernels["wide.py"]["modelled_mb"] == pytest.approx(2 * 256 * 512 * 4 / 1e6)
    assert all(kernels[name]["why"] for name in stopped)
    (row,) = document["operators"]
    assert (row["kernels"], row["halved"], row["not_run"]) == (4, 3, 2)
    assert (row["pairs"], row["in_order"]) == (3, 3)
    assert not kernels["open.py"]["halved"]
    assert row["open_quotient"] == pytest.approx(kernels["open.py"]["modelled_ms"] / 0.040)
    assert row["moved"] == pytest.approx(1.048576)
    assert row["quotient_low"] <= row["quotient"] <= row["quotient_high"]


def test_the_table_counts_the_pairs(clones):
    assert "3 of 3 pairs in the measured order" in run(
        sys.executable, BENCHMARKS, "nkibench", *clones
    )


def test_the_score_leaves_out_what_was_fitted_and_what_is_open():
    row = {"op": "silu", "halved": True, "p50_ms": 1.0, "modelled_ms": 2.2}
    others = [{"op": nkibench.FITTED[0], "modelled_ms": 9.0}, {"modelled_ms": 1.6}]
    kernels = [row, *(row | other for other in others), row | {"halved": False, "modelled_ms": 9.0}]
    assert nkibench.score(kernels) == pytest.approx(
        {"kernels": 2, "mean_error": 0.15, "worst": -0.2}
    )


def test_another_folder_is_refused(clones):
    variants, _ = clones
    with pytest.raises(ValueError, match=r"must be a clone that has NKIBench/summary\.json"):
        nkibench.run(variants, variants)
