"""The unfused dense MLP of the published setting computes what it should, at any size."""

import numpy as np
import pytest
from arrays import bf16, close, exact

import neuroncore as nc
from benchmarks.baselines.matmul import tutorial_blocked_k
from neuronmm_ops.estimate.baselines import elementwise, matmul


@pytest.mark.parametrize(
    ("M", "K", "N"), [(1, 256, 512), (1, 200, 700), (40, 1100, 1300), (300, 130, 600)]
)
def test_the_fitted_matmul(M, K, N):
    rng = np.random.default_rng(M)
    lhsT, rhs = bf16(rng, K, M), bf16(rng, K, N)
    out = nc.simulate(matmul.tutorial_fitted, lhsT, rhs, target="trn1").outputs
    close(out, exact(lhsT.T, rhs))


def test_the_fitted_matmul_is_the_tutorials_where_its_blocks_fit():
    shapes = [nc.TensorSpec((2048, n), nc.language.bfloat16) for n in (2048, 1024)]
    fitted, tutorials = (
        nc.simulate(kernel, *shapes, target="trn1", mode="trace").profile
        for kernel in (matmul.tutorial_fitted, tutorial_blocked_k)
    )
    assert (fitted.flops, fitted.hbm_bytes) == (tutorials.flops, tutorials.hbm_bytes)
    assert fitted.time_ms == pytest.approx(tutorials.time_ms, rel=0.02)


@pytest.mark.parametrize(("M", "I", "lnc"), [(1, 512, 1), (3, 100, 1), (1, 97, 2), (130, 8192, 2)])
def test_the_gated_product(M, I, lnc):  # noqa: E741
    rng = np.random.default_rng(I)
    gate, up = bf16(rng, M, I), bf16(rng, M, I)
    kernel = elementwise.gated_product[lnc]
    out = nc.simulate(kernel, gate, up, target="trn2").outputs
    wide = gate.astype(np.float64)
    exact = wide / (1 + np.exp(-wide)) * up.astype(np.float64)
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize(
    ("M", "K", "parts", "lnc"), [(1, 512, 4, 2), (3, 100, 3, 1), (9, 97, 1, 2)]
)
def test_a_ranks_columns(M, K, parts, lnc):
    x = bf16(np.random.default_rng(K), M, K)
    out = nc.simulate(elementwise.own_columns[lnc], x, parts=parts, target="trn2").outputs
    np.testing.assert_array_equal(out, x[:, : -(-K // parts)])


def test_the_strict_front_end_takes_it():
    assert nc.lint(elementwise.__file__) == []
