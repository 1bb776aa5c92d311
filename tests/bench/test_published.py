"""The rewritten kernels compute what they should, and their predictions stay where they were."""

import ml_dtypes
import numpy as np
import pytest

from neuronmm_ops import neuroncore as nc
from neuronmm_ops.bench import published
from neuronmm_ops.bench.baselines import matmul, neuronmm
from neuronmm_ops.bench.cases import published as cases

FIELDS = (
    "name", "target", "published_ms", "modelled_ms", "documented_ms", "error", "calibration",
    "published_bytes", "modelled_bytes", "source", "engine", "published_share", "modelled_share",
    "refused",
)  # fmt: skip
QUICK = ("lhs@rhs", "lhsT@rhs", "M=1K")


def bf16(rng, *shape):
    return (rng.standard_normal(shape) / 8).astype(ml_dtypes.bfloat16)


def close(values, exact):
    """Within the rounding of bf16 partial sums, which the published kernels keep."""
    error = np.abs(values.astype(np.float64) - exact).max()
    assert error <= 0.03 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("kernel", "blocks"),
    [
        (matmul.tutorial_tiled, ()),
        (matmul.tutorial_hoisted, ()),
        (matmul.tutorial_blocked, ()),
        (matmul.tutorial_blocked_k, (2, 2, 2)),
    ],
)
def test_tutorial_kernels(kernel, blocks):
    rng = np.random.default_rng(0)
    lhsT, rhs = bf16(rng, 256, 256), bf16(rng, 256, 1024)
    exact = lhsT.astype(np.float64).T @ rhs.astype(np.float64)
    close(nc.simulate(kernel, lhsT, rhs, *blocks, target="trn1").outputs, exact)


@pytest.mark.slow
def test_hand_tuned_kernels():
    rng = np.random.default_rng(1)
    lhs, rhs = bf16(rng, 1024, 1024), bf16(rng, 1024, 512)
    exact = lhs.astype(np.float64) @ rhs.astype(np.float64)
    close(nc.simulate(matmul.autotune_lhs_rhs, lhs, rhs, target="trn2").outputs, exact)
    lhsT = np.ascontiguousarray(lhs.T)
    close(nc.simulate(matmul.autotune_transposed_lhs, lhsT, rhs, target="trn2").outputs, exact)


@pytest.mark.slow
def test_fused_and_unfused_low_rank():
    rng = np.random.default_rng(2)
    x, u, v = bf16(rng, 1024, 512), bf16(rng, 512, 1024), bf16(rng, 1024, 512)
    exact = x.astype(np.float64) @ u.astype(np.float64) @ v.astype(np.float64)
    out = nc.simulate(neuronmm.neuronmm_xuv, x, u, v, target="trn1").outputs
    close(out.T, exact)
    wide = bf16(rng, 2048, 1024), bf16(rng, 1024, 1024), bf16(rng, 1024, 1024)
    exact = wide[0].astype(np.float64) @ wide[1].astype(np.float64) @ wide[2].astype(np.float64)
    close(nc.simulate(matmul.unfused_xuv, *wide, target="trn1").outputs, exact)


def test_rows_of_quick_cases(monkeypatch):
    quick = [case for case in cases.cases() if any(q in case.name for q in QUICK)]
    monkeypatch.setattr(cases, "cases", lambda: quick)
    seen: list[tuple[str, int, int]] = []
    rows = published.run(lambda *step: seen.append(step))
    assert [tuple(row) for row in rows] == [FIELDS] * len(quick)
    assert seen == [("published", i + 1, len(quick)) for i in range(len(quick))]
    by_name = {row["name"]: row for row in rows}
    fused = by_name["NeuronMM X U V, M=1K"]
    assert abs(fused["error"]) < 0.12
    assert fused["modelled_bytes"] == pytest.approx(fused["published_bytes"], rel=0.03)
    assert fused["documented_ms"] < fused["modelled_ms"]
    assert published.mean_error(rows) == pytest.approx(abs(fused["error"]))


def test_calibration_is_two_rows_and_the_share_rows_have_no_times():
    found = cases.cases()
    assert [case.target for case in found if case.calibration] == ["trn1", "trn2"]
    assert all((case.published_ms is None) == (case.engine is not None) for case in found)
    assert {case.engine for case in found} == {None, "MFU", "DMA", "TensorE", "VectorE"}
