"""`python benchmarks stored`: times of a clone's tests next to modelled ones; a stand-in's here."""

import json
import os
import sys
from pathlib import Path

import pytest
from commands import run

from benchmarks import stored
from benchmarks.cli import main

ROOT = Path(__file__).parents[2]

KERNELS = {
    "core/mlp/mlp": """\
import nki.isa as nisa
import nki.language as nl

def mlp(hidden_tensor, gate_w):
    out = nl.ndarray(hidden_tensor.shape, dtype=hidden_tensor.dtype, buffer=nl.shared_hbm)
    rows, columns = gate_w.shape
    for start in range(0, rows, 128):
        tile = nl.ndarray((128, columns), dtype=gate_w.dtype)
        nisa.dma_copy(tile, gate_w[start : start + 128])
    if nl.program_id(0) == 0:
        nisa.dma_copy(out, hidden_tensor)
    return out
""",
    "core/attention/attention_cte": """\
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def attention_cte(q):
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, q)
    return out
""",
}
TESTS = {
    "mlp/test_mlp_common": """\
def build_fused_norm_mlp(
    batch, seqlen, hidden, intermediate, dtype, quant_dtype, tensor_generator, **options
):
    assert options["norm_type"] == "norm"
    return {
        "hidden_tensor.must_alias_input": tensor_generator((batch * seqlen, hidden), dtype, "x"),
        "gate_w": tensor_generator((hidden, intermediate), quant_dtype or dtype, "w"),
    }
""",
    "mlp/test_mlp_tkg": """\
from enum import Enum
from allpairspy import AllPairs
import nki.language as nl

Kind = Enum("Kind", "NONE ROW MX")
ENDS = ["norm", False, False, "silu", *[False] * 8]
unit = [
    [1, 1, 4, 256, 512, nl.bfloat16, None, Kind.NONE, 11_000_001, *ENDS],
    [1, 1, 4, 256, 512, nl.bfloat16, None, Kind.NONE, 11_000_001, *ENDS],
    [2, 1, 4, 256, 2048, nl.bfloat16, nl.float8_e4m3, Kind.ROW, 30_000_000, *ENDS],
    [1, 1, 4, 256, 512, nl.bfloat16, None, Kind.MX, 12_000_000, *ENDS],
    [1, 1, 4, 256, 512, nl.bfloat16, None, Kind.NONE, None, *ENDS],
]
""",
    "mlp/test_mlp_cte": """\
import nki.language as nl
from .test_mlp_tkg import ENDS, Kind

LIMITS = [
    [1, 1, size, 256, 512, 99_000_000, 0.1, "norm", Kind.NONE, False, False, False, "silu",
     *[False] * 4]
    for size in (8, 16)
]
""",
    "attention/test_attention_cte": """\
import nki.language as nl
import numpy as np

def build_attention_cte_input(bs, bs_kv, seqlen_q, d, dtype, is_prefix_caching, **others):
    assert (bs_kv, is_prefix_caching, others["use_cp"]) == (bs, False, False)
    return {"q": np.zeros((seqlen_q, d), np.float32)}, None

class Tests:
    a_unit_params = "bs, seqlen_q, d, dtype, tpbSgCyclesSum"
    a_unit_perms = [[1, 128, 64, nl.float32, 9e6], [1, 256, 64, nl.float32, (10e6, None)]]
    b_params = "bs, tpbSgCyclesSum"
""",
}
# In a process of its own: what imports nki there finds the simulated core's.
CALL = """\
import json, sys
from pathlib import Path
from benchmarks import stored
print(json.dumps(stored.run(Path(sys.argv[1]))))
"""


@pytest.mark.slow
def test_each_launch_is_timed_once(tmp_path):
    for folder, sources in (
        ("src/nkilib_src/nkilib", KERNELS),
        ("test/integration/nkilib/core", TESTS),
    ):
        for name, source in sources.items():
            path = tmp_path / folder / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
    (tmp_path / "test/__init__.py").touch()
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    rows = json.loads(run(sys.executable, "-c", CALL, tmp_path, PYTHONPATH=path))
    assert [(row["kernel"], row["lnc"], row["us"]) for row in rows] == [
        ("MLP, few tokens", 1, 11.000001),
        ("MLP, few tokens", 2, 30.0),
        ("attention, many tokens", 1, 9.0),
        ("attention, many tokens", 1, 10.0),
    ]
    bf16, fp8, *_ = rows
    assert (bf16["sizes"], fp8["sizes"]) == (
        [1, 4, 256, 512, "NONE"],
        [1, 4, 256, 2048, "ROW"],
    )
    assert rows[3]["sizes"] == [1, 0, 256, 0, 64, 0, 0]
    for row in rows:
        low, high = row["range_us"]
        assert 0 < low <= row["modelled_us"] <= high
    assert {row["exchanges"] for row in rows} == {0}
    # each of both cores loads all of it
    assert fp8["modelled_us"] > 256 * 2048 / 415e3
    assert fp8["modelled_us"] > bf16["modelled_us"]


def timed(us, modelled_us, lnc=1, exchanges=0):
    return {
        "exchanges": exchanges,
        "kernel": "MLP, few tokens",
        "lnc": lnc,
        "us": us,
        "modelled_us": modelled_us,
        "range_us": [modelled_us - 2, modelled_us + 2],
    }


def test_launches_of_a_kind_cost_one_constant():
    launch, errors, inside = stored.with_launch([timed(30, 10), timed(120, 100)])
    assert (launch, errors) == (pytest.approx(20), pytest.approx([0, 0]))
    assert inside == [True, True]
    launch, errors, inside = stored.with_launch([timed(30, 10), timed(125, 100)])
    assert 20 < launch < 20.5, "the longer one's error is relative"
    assert errors[0] > 0 > errors[1]
    assert inside == [True, False]
    long = timed(120, 100) | {"range_us": None}
    assert stored.with_launch([timed(30, 10), long])[2] == [True]


def test_the_score_is_of_kinds():
    rows = [timed(30, 10), timed(125, 100), timed(50, 10, 2), timed(140, 100, 2)]
    score = stored.summary(rows)
    assert [*stored.by_kind(rows)] == [("MLP, few tokens", 1), ("MLP, few tokens", 2)]
    _, errors, _ = stored.with_launch(rows[:2])
    assert score["launches"] == 4
    assert score["mean_error"] == pytest.approx((abs(errors[0]) + abs(errors[1])) / 4)
    assert score["worst"] == max(errors, key=abs)
    assert (score["inside"], score["ranged"]) == (3, 4)
    whole = (20 / 30 + 25 / 125) / 2, (40 / 50 + 40 / 140) / 2
    assert score["whole_error"] == pytest.approx(sum(whole) / 2)


def test_the_cost_of_an_exchange_is_told_from_that_of_a_launch():
    rows = [timed(20 + time + 0.5 * n, time, 2, n) for time in (10, 50, 200) for n in (2, 4, 6)]
    assert stored.exchange_cost([*rows, timed(900, 1)]) == pytest.approx((0.5, 0), abs=1e-6)
    noise = (1.05, 0.96, 0.97, 1.01, 0.99, 1.02, 1.05, 0.98, 1.0)
    for row, share in zip(rows, noise, strict=True):
        row["us"] *= share
    cost, error = stored.exchange_cost(rows)
    assert 0 < error < 2
    assert abs(cost - 0.5) < 2 * error


def test_the_table(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(stored, "run", lambda clone, progress: [timed(30, 10), timed(120, 100)])
    assert main(["stored", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "MLP, few tokens" in out
    assert "2/2" in out


def test_a_clone_without_tests_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="must be a clone of aws-neuron/nki-library with its tests"
    ):
        stored.run(tmp_path)
