"""The paper's figures: kernels right, cases of the paper's sizes, ratios, refusals, the table."""

import json

import numpy as np
import pytest
from arrays import bf16, close, exact
from outcomes import Run

import neuroncore as nc
from benchmarks import paper
from benchmarks.baselines import matmul
from benchmarks.baselines.spilled import tutorial_spilled
from benchmarks.cases import paper as cases
from neuroncore.hardware import DMA_MODELS
from neuronmm_ops.estimate.baselines import neuronmm

FULL = {(case.section, case.name): case for case in cases.cases()}


def test_sums_go_through_hbm():
    rng = np.random.default_rng(0)
    lhsT, rhs = bf16(rng, 2048, 2048), bf16(rng, 2048, 1024)
    runs = [
        nc.simulate(kernel, lhsT, rhs, target="trn1")
        for kernel in (tutorial_spilled, matmul.tutorial_blocked_k)
    ]
    close(runs[0].outputs, exact(lhsT.T, rhs))
    spilled, kept = [run.profile.hbm_bytes for run in runs]
    # one block of the two of K: out and back
    assert spilled - kept == 2 * runs[0].outputs.nbytes


@pytest.mark.parametrize("case", FULL.values(), ids=map("/".join, FULL))
def test_a_case_covers_its_sizes(case):
    assert (case.section, case.against) in FULL
    M, K, r, N = case.sizes
    if case.run and case.run.kernel is neuronmm.neuronmm_xuv:
        (tokens, _), _, (_, columns) = case.run.shapes
        assert case.run.shapes == ((tokens, K), (K, r), (r, columns))
        assert tokens * columns * case.run.launches == M * N


def test_published_traffic_of_blocks_is_that_of_the_loop_nest():
    def bytes_of(M, K, r, N):
        return 2 * M * (K + N) * (1 + r / 512)

    M, K, r, N = 1024, 512, 1024, 512
    blocks = neuronmm.UP_DEFAULTS._replace(tiles_m=1)
    specs = [nc.TensorSpec(shape, nc.language.bfloat16) for shape in ((M, K), (K, r), (r, N))]
    options = {"target": "trn1", "mode": "trace", "blocks": blocks}
    found = nc.simulate(neuronmm.neuronmm_xuv, *specs, **options).profile
    assert found.hbm_bytes == bytes_of(M, K, r, N)
    of_512 = FULL[cases.BLOCKS, "512 tokens"]
    assert of_512.published.hbm_bytes == bytes_of(*of_512.sizes)


def test_rows_and_table(run: Run, monkeypatch):
    sizes, fused = (512, 512, 1024, 1024), cases._fused
    large = fused((8192, 512, 8192, 512), tiles_m=16)
    runs = {
        "whole": (fused(sizes, 1), cases.Published(2.0)),
        "twice": (fused((512, 512, 1024, 512), 1, 2), cases.Published(8.0, dma_ratio=1.5)),
        "large": (large,),
        "ours": (None,),
    }
    few = [cases.Figure(cases.FUSION, name, "whole", sizes, *of) for name, of in runs.items()]
    monkeypatch.setattr(cases, "cases", lambda: few)
    outcome = run("paper", "--json")
    assert outcome.code == 0, outcome.err
    whole, twice, large, ours = rows = json.loads(outcome.out)
    assert [tuple(row) for row in rows] == [paper.FIELDS] * 4
    # x and u are loaded for each half
    assert twice["hbm_bytes"] - whole["hbm_bytes"] == 2 * (512 * 512 + 512 * 1024)
    assert list(twice["time_ratios"]) == list(DMA_MODELS)
    assert min(twice["time_ratios"].values()) > 1
    assert (twice["published_time_ratio"], twice["published_dma_ratio"]) == (4, 1.5)
    assert ours["hbm_ratio"] > 0
    assert "does not fit" in large["refused"]
    assert large["time_ms"] is large["hbm_ratio"] is None

    out = " ".join(run("paper").out.split())
    for words in ("Modelled", "over whole", "(2)", "(4.00)", "(1.50)", "large: refused"):
        assert words in out
    assert whole["note"][:30] in out
