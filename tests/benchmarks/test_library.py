"""What others published, run from a shell: outcomes are told apart, and the table is kept."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import neuroncore as nc
from benchmarks.library import plugin
from neuroncore.dtypes import DTYPES, array_dtype

ROOT = Path(__file__).parents[2]
KERNEL = """\
import nki, nki.isa as nisa, nki.language as nl, numpy as np
@nki.jit
def same(x):
    tile = nl.ndarray((PARTITIONS, 4), x.dtype)
    nisa.dma_copy(tile, x)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, tile)
    return out
x = np.ones((PARTITIONS, 4), np.float32)
# SUBSTITUTE HERE
print("NKI and NumPy", "match" if (same(x) == x + PLUS).all() else "differ")
"""


def _commit(clone):
    empty = ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "c", "--allow-empty"]
    for command in (["init", "-q"], empty):
        subprocess.run(["git", "-C", str(clone), *command], check=True)


@pytest.mark.slow
def test_cases_after_an_error_of_pytest_run_too(tmp_path):
    clone = tmp_path / "published"
    (clone / "test/utils").mkdir(parents=True)
    for package in ("test", "test/utils"):
        (clone / package / "__init__.py").touch()
    (clone / "test/utils/test_orchestrator.py").write_text("class Orchestrator: pass\n")
    late = "import pytest, test.utils.test_orchestrator\n@pytest.mark.parametrize('n', range(4))\n"
    late += "def test_late(n):\n    while n == 1: pass\n"
    (clone / "test/test_late.py").write_text(late)
    stop = "def pytest_runtest_logreport(report):\n    if report.failed: raise RuntimeError\n"
    (clone / "conftest.py").write_text(stop)
    _commit(clone)
    command = [sys.executable, "-m", "benchmarks.library", str(clone), "test/test_late.py"]
    command += ["--seconds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "INTERNALERROR" in done.stderr
    assert json.loads(done.stdout)["outcomes"] == {"refused as expected": 3, "too big": 1}


@pytest.mark.slow
def test_outcomes_of_scripts_and_their_row(tmp_path):
    clone = tmp_path / "published"
    clone.mkdir()
    scripts = {"right": (128, 0), "wrong": (128, 1), "refused": (256, 0)}
    for name, (partitions, plus) in scripts.items():
        text = f"PARTITIONS, PLUS = {partitions}, {plus}\n{KERNEL}"
        (clone / f"{name}.py").write_text(text)
    (clone / "other.py").write_text("raise KeyError('x')\n")
    (clone / "solution.py").write_text("PLUS = 0\n")
    _commit(clone)
    table = tmp_path / "table.json"
    names = [*(f"{name}.py" for name in (*scripts, "other")), "wrong.py+solution.py"]
    key = {"repository": "published", "target": "trn2"}
    table.write_text(json.dumps([{**key, "paths": names}, {**key, "paths": ["a"]}]))
    command = [sys.executable, "-m", "benchmarks.library", str(clone), "--scripts", *names]
    command += ["--table", str(table)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr  # a value is wrong
    before, row = json.loads(table.read_text())
    assert before["paths"] == ["a"]
    assert row["outcomes"] == {"right": 2, "wrong": 1, "refused": 1, "other": 1}
    assert row["cases"] == 5
    assert len(row["commit"]) == 40
    why = {reason["outcome"]: reason["why"] for reason in row["reasons"]}
    assert why["wrong"] == "NKI and NumPy differ"
    assert "partition" in why["refused"]
    assert why["other"].startswith("KeyError")


@pytest.mark.slow
def test_no_case_is_no_row_and_a_copy_has_no_commit(tmp_path):
    """Without a package that conftest.py imports a row of 0 cases had our own commit beside it."""
    clone = tmp_path / "around/published"
    clone.mkdir(parents=True)
    (clone / "conftest.py").write_text("import nowhere\n")
    (clone / "right.py").write_text("print('right')\n")
    _commit(clone.parent)
    command = [sys.executable, "-m", "benchmarks.library", str(clone)]
    run = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    none = subprocess.run([*command, "test"], **run)
    assert (none.returncode, none.stdout) == (1, "")
    assert none.stderr.endswith("no case ran; what pytest printed says why\n")
    one = subprocess.run([*command, "--scripts", "right.py"], **run)
    assert json.loads(one.stdout)["commit"] is None


@pytest.mark.parametrize("name", ["float8_e4m3fn_x4", "float8_e5m2_x4", "float4_e2m1fn_x4"])
def test_four_values_are_packed_as_the_simulator_reads_them(name):
    kind = np.dtype(getattr(ml_dtypes, name.removesuffix("_x4")))
    values = np.array([[0.5, 1, 1.5, -2, 3, 4, -6, 0]], np.float32)
    packed = plugin.static_cast(values, array_dtype(DTYPES[name]))
    assert packed.shape == (1, 2)
    np.testing.assert_array_equal(plugin.static_cast(packed, np.float32), values)
    bits = values.astype(kind).view(np.uint8).astype(np.uint64).reshape(2, 4)
    width = 4 if "float4" in name else 8
    words = sum(bits[:, i] << np.uint64(width * i) for i in range(4))
    np.testing.assert_array_equal(packed.view(DTYPES[name].numpy)[0], words)


def test_outcomes_of_tests(monkeypatch):
    def outcome(error, stage="none", may_fail=False):
        monkeypatch.setitem(plugin._run, "stage", stage)
        return plugin._outcome(error, may_fail)

    assert outcome(None) == "refused as expected"
    assert outcome(None, "values") == "right"
    assert outcome(None, "reference") == "no values"
    wrong = AssertionError("wrong values: ['out']")
    assert outcome(wrong, "values") == "wrong"
    assert outcome(wrong, "values", may_fail=True) == "fails as marked"
    assert outcome(None, "values", may_fail=True) == "right"
    assert outcome(nc.NkiValidationError("start partition 5")) == "refused"
    assert outcome(nc.NkiValidationError("... or a larger budget (--max-seconds)")) == "too big"
    assert outcome(AssertionError("[NCC_INKI016] H must be a multiple")) == "refused"
    assert outcome(AssertionError("Test case was expected to fail, but it hasn't!")) == "accepted"
    assert outcome(KeyError("x")) == "other"


def test_arguments_of_ranks_lose_what_says_that_they_change():
    class PerRank:
        def for_rank(self, rank):
            return {"x": np.full(2, rank), "cache.must_alias_input": np.full(3, rank), "tp": 2}

    found = plugin._arguments(PerRank(), 2)
    assert (sorted(found), found["tp"]) == (["cache", "tp", "x"], 2)
    assert [list(value) for value in found["cache"].values] == [[0] * 3, [1] * 3]
