"""The closed forms against the published formulas, and their loss against a measured one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import SHAPES, damped_gradient, factored, loss_of, moment_of, problem, ridge_of
from tolerances import assert_same_in_fp64
from torch import Tensor

from neuronmm_ops import SVDConfig
from neuronmm_ops.compress.factorize import moment_side
from neuronmm_ops.compress.methods import METHODS


def published_plain(w: Tensor, x: Tensor, rank: int) -> Tensor:
    p, sigma, qh = torch.linalg.svd(w)
    return (p[:, :rank] @ torch.diag(sigma[:rank]) @ qh[:rank]).t()


def published_whiten(w: Tensor, x: Tensor, rank: int) -> Tensor:
    """SVD-LLM, algorithm 1: S from Cholesky of X Xᵀ, SVD of W S, times S⁻¹."""
    s = torch.linalg.cholesky(x.t() @ x)
    p, sigma, qh = torch.linalg.svd(w @ s)
    return (p[:, :rank] @ torch.diag(sigma[:rank]) @ qh[:rank] @ torch.linalg.inv(s)).t()


def published_swift(w: Tensor, x: Tensor, rank: int) -> Tensor:
    """Swift-SVD: project the outputs on the top eigenvectors of their covariance."""
    _, vectors = torch.linalg.eigh(w @ (x.t() @ x) @ w.t())
    top = vectors[:, -rank:]
    return (top @ top.t() @ w).t()


def published_kfac(w: Tensor, x: Tensor, rank: int) -> Tensor:
    """W_r = R⁻ᵀ [Rᵀ W L]_r L⁻¹."""
    r, s = torch.linalg.cholesky(damped_gradient(w)), torch.linalg.cholesky(x.t() @ x)
    p, sigma, qh = torch.linalg.svd(r.t() @ w @ s)
    middle = p[:, :rank] @ torch.diag(sigma[:rank]) @ qh[:rank]
    return (torch.linalg.inv(r.t()) @ middle @ torch.linalg.inv(s)).t()


def published_drift(w: Tensor, x: Tensor, rank: int) -> Tensor:
    """Reduced-rank ridge regression: the least-squares fit, projected on its top directions."""
    K = x.shape[1]
    rows = torch.cat([x, ridge_of(x).sqrt() * torch.eye(K).double()])
    fit = rows @ torch.linalg.lstsq(rows, rows @ w.t()).solution
    _, _, vh = torch.linalg.svd(fit)
    return w.t() @ vh[:rank].t() @ vh[:rank]


def published_kfac_drift(w: Tensor, x: Tensor, rank: int) -> Tensor:
    """The same with the ridge of `drift`: where nothing drifted, its regression is W."""
    rows = torch.cat([x, ridge_of(x).sqrt() * torch.eye(x.shape[1]).double()])
    return published_kfac(w, rows, rank)


PUBLISHED = {
    "plain": published_plain,
    "whiten": published_whiten,
    "swift": published_swift,
    "drift": published_drift,
    "kfac": published_kfac,
    "kfac-drift": published_kfac_drift,
    "zero-sum": published_whiten,
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_the_product_is_the_published_one(method, shape):
    w, x = problem(*shape)
    factors = factored(method, w, x)
    for rank in range(1, min(shape) + 1):
        u, v = factors.truncate(rank)
        assert_same_in_fp64(u @ v, PUBLISHED[method](w, x, rank))


@pytest.mark.parametrize("method", METHODS)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**20))
@settings(max_examples=30)
def test_the_loss_is_the_discarded_spectrum(method, N, K, seed):
    w, x = problem(N, K, seed=seed)
    factors = factored(method, w, x)
    assert factors.spectrum.shape == (min(K, N),)
    assert (factors.spectrum.diff() <= 0).all()
    energy = float(loss_of(method, w, x, torch.zeros(K, 1).double(), torch.zeros(1, N).double()))
    assert float(factors.spectrum.sum()) == pytest.approx(energy, rel=1e-9)
    for rank in range(1, min(K, N) + 1):
        measured = float(loss_of(method, w, x, *factors.truncate(rank)))
        assert factors.loss(rank) == pytest.approx(measured, rel=1e-7, abs=1e-9 * energy)
        assert factors.relative_loss(rank) == pytest.approx(factors.loss(rank) / energy)
        assert 0 <= factors.relative_loss(rank) <= 1
    assert factors.relative_loss(min(N, K)) == 0


@pytest.mark.parametrize("shape", [(9, 6), (6, 9)])
@pytest.mark.parametrize("method", METHODS)
def test_factors_are_nested(method, shape):
    w, x = problem(*shape)
    moment = moment_of(method, w, x)
    full = factored(method, w, x, moment)
    for rank in (1, 3, 6):
        part = factored(method, w, x, moment, rank)
        assert (part.u.shape, part.v.shape) == ((shape[1], rank), (rank, shape[0]))
        u, v = full.truncate(rank)
        assert_same_in_fp64(part.u @ part.v, u @ v)
        assert_same_in_fp64(part.spectrum, full.spectrum)


@pytest.mark.parametrize("method", ["whiten", "swift", "drift"])
def test_a_shared_moment_is_decomposed_once(monkeypatch, method):
    calls = []
    cholesky = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda m: calls.append(1) or cholesky(m))
    (gate, x), (up, _) = problem(9, 6), problem(9, 6, seed=1)
    moment = moment_of(method, gate, x)
    for w in (gate, up):
        u, v = factored(method, w, x, moment).truncate(3)
        assert_same_in_fp64(u @ v, PUBLISHED[method](w, x, 3))
    assert len(calls) == 1
    moment.add(torch.eye(6), 6)
    factored(method, gate, x, moment)
    assert len(calls) == 2


def test_weights_of_zero_have_no_loss():
    w, x = torch.zeros(4, 6), torch.ones(8, 6, dtype=torch.float64)
    for method in METHODS:
        factors = factored(method, w, x)
        u, v = factors.truncate(2)
        assert (u @ v).abs().max() == 0
        assert factors.relative_loss(2) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_float_weight_is_factored_in_fp64(dtype):
    w, x = problem(9, 6)
    w = w.to(dtype)
    for method in METHODS:
        factors = factored(method, torch.nn.Parameter(w), x)
        assert {factors.u.dtype, factors.v.dtype, factors.spectrum.dtype} == {torch.float64}
        assert not factors.u.requires_grad
        assert_same_in_fp64(factors.u @ factors.v, w.double().t())


def test_the_smaller_side_is_measured():
    assert [moment_side("swift", K, N) for K, N in ((6, 4), (5, 5), (4, 6))] == [
        "output",
        "output",
        "input",
    ]
    assert {moment_side("whiten", K, N) for K, N in ((6, 4), (4, 6))} == {"input"}
    assert moment_side("plain", 4, 6) is None


def test_the_registry_is_the_methods_with_a_published_formula():
    assert list(METHODS) == list(PUBLISHED)
    needed = [SVDConfig(method=name).needs_calibration for name in METHODS]
    assert needed == [name != "plain" for name in METHODS]
