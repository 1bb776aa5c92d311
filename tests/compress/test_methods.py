"""What single methods do: singular inputs, and what only some of them are given."""

import pytest
import torch
from problems import (
    SINGULAR,
    factored,
    gradient_of,
    loss_of,
    moment_of,
    problem,
    ridge_of,
    singular,
)
from tolerances import assert_same_in_fp64

from neuronmm_ops import SecondMoment, factorize
from neuronmm_ops.compress.methods import kfac

WIDE_AND_TALL = pytest.mark.parametrize("shape", [(9, 6), (6, 9)])


@WIDE_AND_TALL
@pytest.mark.parametrize("kind", SINGULAR)
def test_swift_is_optimal_on_singular_inputs(kind, shape):
    w, x = singular(kind, *shape)
    factors = factorize(w, "swift", moment_of("swift", w, x))
    y = x @ w.t()
    best = torch.linalg.svdvals(y).square()
    for rank in range(1, min(shape) + 1):
        u, v = factors.truncate(rank)
        assert u.isfinite().all()
        assert v.isfinite().all()
        measured = float(loss_of("swift", w, x, u, v))
        scale = 1e-9 * float(best.sum())
        assert measured == pytest.approx(float(best[rank:].sum()), rel=1e-6, abs=scale)
        assert factors.loss(rank) == pytest.approx(measured, rel=1e-6, abs=scale)


@WIDE_AND_TALL
@pytest.mark.parametrize("kind", SINGULAR)
def test_whiten_is_damped_on_singular_inputs(kind, shape):
    w, x = singular(kind, *shape)
    factors = factorize(w, "whiten", moment_of("whiten", w, x))
    best = torch.linalg.svdvals(x @ w.t()).square()
    energy = float(best.sum())
    for rank in range(1, min(shape) + 1):
        u, v = factors.truncate(rank)
        assert u.isfinite().all()
        assert v.isfinite().all()
        measured = float(loss_of("whiten", w, x, u, v))
        assert measured <= factors.loss(rank) + 1e-6 * energy
        assert measured <= float(best[rank:].sum()) + 1e-4 * energy


@WIDE_AND_TALL
@pytest.mark.parametrize("kind", SINGULAR)
@pytest.mark.parametrize("method", ["kfac", "kfac-drift", "drift", "zero-sum"])
def test_every_method_is_finite_on_singular_inputs(method, kind, shape):
    w, x = singular(kind, *shape)
    factors = factored(method, w, x)
    lost = float((x @ (w.t() - factors.u @ factors.v)).norm())
    assert lost <= 1e-3 * float((x @ w.t()).norm()) + 1e-9
    for factor in (factors.u, factors.v, factors.spectrum):
        assert factor.isfinite().all()


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-8])
def test_eigenvectors_are_taken_only_where_the_moment_is_nearly_singular(monkeypatch, scale):
    w, x = problem(9, 6)
    x[:, 1] = x[:, 0] + scale * x[:, 1]
    sizes, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: sizes.append(1) or eigh(m))
    factors = factorize(w, "swift", moment_of("swift", w, x))
    assert len(sizes) == (2 if scale == 1e-8 else 1)
    best = torch.linalg.svdvals(x @ w.t()).square()
    for rank in range(1, 7):
        measured = float(loss_of("swift", w, x, *factors.truncate(rank)))
        scale = 1e-9 * float(best.sum())
        assert measured == pytest.approx(float(best[rank:].sum()), rel=1e-6, abs=scale)


@WIDE_AND_TALL
def test_drift_regresses_from_the_inputs_that_are_there(shape):
    w, x = problem(*shape, tokens=60)
    seen = x + 0.3 * torch.randn(x.shape, dtype=torch.float64)
    moment = SecondMoment("input", seen.t() @ seen, len(seen))
    factors = factorize(w, "drift", moment, cross=x.t() @ seen)
    ridge = float(ridge_of(seen))

    def objective(u, v):
        fit = (x @ w.t() - seen @ u @ v).square().sum() + ridge * (w.t() - u @ v).square().sum()
        return float(fit)

    best = objective(factors.u, factors.v)
    for rank in range(1, min(shape)):
        u, v = factors.truncate(rank)
        assert objective(u, v) - best == pytest.approx(factors.loss(rank), rel=1e-6)
        other = factorize(w, "swift", moment_of("swift", w, seen)).truncate(rank)
        assert objective(u, v) < objective(*other)


@WIDE_AND_TALL
@pytest.mark.parametrize("is_wide", [False, True])
def test_kfac_drift_is_the_svd_in_both_metrics(monkeypatch, shape, is_wide):
    """W_r = R⁻ᵀ [Rᵀ B]_r L⁻¹, B = W (XᵀX̂ + ridge) L⁻ᵀ."""
    w, x = problem(*shape, tokens=60)
    seen = x + 0.3 * torch.randn(x.shape, dtype=torch.float64)
    moment, gradient = SecondMoment("input", seen.t() @ seen, len(seen)), gradient_of("kfac", w)
    if is_wide and shape[0] > shape[1]:
        monkeypatch.setattr(kfac, "MAX_FULL", 4)
        gradient = gradient.diagonal()
    factors = factorize(w, "kfac-drift", moment, cross=x.t() @ seen, gradient=gradient)
    ridge, c = ridge_of(seen) * torch.eye(shape[1]).double(), kfac.damped(gradient)
    left = torch.linalg.cholesky(seen.t() @ seen + ridge)
    right = torch.linalg.cholesky(c if c.dim() == 2 else torch.diag(c))
    b = w @ (x.t() @ seen + ridge) @ torch.linalg.inv(left).t()
    p, sigma, qh = torch.linalg.svd(right.t() @ b, full_matrices=False)
    assert_same_in_fp64(factors.spectrum, sigma.square() / len(x))
    for rank in range(1, min(shape) + 1):
        middle = p[:, :rank] @ torch.diag(sigma[:rank]) @ qh[:rank]
        expected = torch.linalg.inv(right.t()) @ middle @ torch.linalg.inv(left)
        u, v = factors.truncate(rank)
        assert_same_in_fp64(u @ v, expected.t())


@WIDE_AND_TALL
def test_the_scores_are_first_order_changes_of_the_loss(shape):
    w, x = problem(*shape)
    gradient = gradient_of("zero-sum", w)
    factors = factored("zero-sum", w, x)
    for index in range(min(shape)):
        dropped = torch.outer(factors.u[:, index], factors.v[index]).t()
        assert float(factors.scores[index]) == pytest.approx(-float((gradient * dropped).sum()))


def test_a_wide_output_is_whitened_by_the_diagonal(monkeypatch):
    monkeypatch.setattr(kfac, "MAX_FULL", 4)
    w, x = problem(9, 6)
    c = gradient_of("kfac", w).diagonal()
    factors = factorize(w, "kfac", moment_of("kfac", w, x), gradient=c)
    metric = torch.diag(c + kfac.GRADIENT_DAMPING * c.mean())
    for rank in range(1, 7):
        u, v = factors.truncate(rank)
        d = w.t() - u @ v
        lost = float(torch.trace(d.t() @ (x.t() @ x) @ d @ metric)) / len(x)
        assert factors.loss(rank) == pytest.approx(lost, rel=1e-7, abs=1e-12)
    assert_same_in_fp64(factors.u @ factors.v, w.t())


@WIDE_AND_TALL
def test_kfac_s_factors_are_of_one_scale(shape):
    w, x = problem(*shape)
    moment = moment_of("kfac", w, x)
    small = 1e-8 * gradient_of("kfac", w)  # as those of a trained model
    factors = factorize(w, "kfac", moment, gradient=small)
    assert_same_in_fp64(factors.u.norm(dim=0), factors.v.norm(dim=1))
    assert_same_in_fp64(factors.u @ factors.v, w.t())
