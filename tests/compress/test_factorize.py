"""The closed forms against the published formulas, and their loss against a measured one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_same_in_fp64
from torch import Tensor

from neuronmm_ops import Factorization, NonFiniteError, SecondMoment, SVDConfig, factorize
from neuronmm_ops.compress.factorize import moment_side
from neuronmm_ops.compress.methods import METHODS, drift, kfac

SHAPES = {"tall": (9, 6), "wide": (6, 9), "square": (7, 7), "row": (1, 5), "column": (5, 1)}


def problem(N: int, K: int, tokens: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a weight and correlated inputs, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(N, K, dtype=torch.float64, generator=generator)
    mix = torch.randn(K, K, dtype=torch.float64, generator=generator)
    x = torch.randn(tokens, K, dtype=torch.float64, generator=generator) @ mix
    return w, x


def moment_of(method: str, w: Tensor, x: Tensor) -> SecondMoment | None:
    side = moment_side(method, w.shape[1], w.shape[0])
    if side is None:
        return None
    rows = x if side == "input" else x @ w.t()
    return SecondMoment(side, rows.t() @ rows, len(rows))


def gradient_of(method: str, w: Tensor) -> Tensor | None:
    """Return output gradients' mean outer product [N, N] for kfac, [N, K] for zero-sum."""
    generator = torch.Generator().manual_seed(3)
    N, K = w.shape
    if method == "kfac":
        g = torch.randn(50, N, dtype=torch.float64, generator=generator)
        return g.t() @ g / 50
    return torch.randn(N, K, dtype=torch.float64, generator=generator)


def factored(
    method: str, w: Tensor, x: Tensor, moment: SecondMoment | None = None, rank: int | None = None
) -> Factorization:
    """Factor by any method with what it needs; for `drift` there is none."""
    moment = moment_of(method, w.double(), x) if moment is None else moment
    gradient = gradient_of(method, w) if METHODS[method].gradient else None
    cross = x.t() @ x if METHODS[method].follows_drift else None
    return factorize(w, method, moment, rank, gradient=gradient, cross=cross)


def loss_of(method: str, w: Tensor, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    difference = w.t() - u @ v
    lost = (difference if method == "plain" else x @ difference).square().sum()
    if method == "drift":
        return lost + ridge_of(x) * difference.square().sum()
    if method == "kfac":
        c = damped_gradient(w)
        return torch.trace(difference.t() @ (x.t() @ x) @ difference @ c) / len(x)
    return lost


def damped_gradient(w: Tensor) -> Tensor:
    c = gradient_of("kfac", w)
    assert c is not None
    return c + kfac.GRADIENT_DAMPING * c.diagonal().mean() * torch.eye(len(c)).double()


def ridge_of(x: Tensor) -> Tensor:
    return drift.RIDGE * (x.t() @ x).diagonal().mean()


# --- the published formulas ----------------------------------------------------------------------


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


PUBLISHED = {
    "plain": published_plain,
    "whiten": published_whiten,
    "swift": published_swift,
    "drift": published_drift,
    "kfac": published_kfac,
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


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_full_rank_is_the_dense_weight(method, shape):
    w, x = problem(*shape)
    factors = factored(method, w, x)
    assert_same_in_fp64(factors.u @ factors.v, w.t())
    assert factors.relative_loss(min(shape)) == 0


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_whiten_and_swift_agree(shape):
    w, x = problem(*shape)
    whiten, swift = (factorize(w, m, moment_of(m, w, x)) for m in ("whiten", "swift"))
    assert_same_in_fp64(whiten.spectrum, swift.spectrum)
    for rank in range(1, min(shape) + 1):
        a, b = whiten.truncate(rank), swift.truncate(rank)
        assert_same_in_fp64(a[0] @ a[1], b[0] @ b[1])


@pytest.mark.parametrize("method", ["whiten", "swift"])
def test_activations_matter(method):
    # One input channel is 100 times larger than the others; `plain` does not take that in.
    w, x = problem(8, 8)
    x[:, 0] *= 100
    u, v = factored(method, w, x).truncate(2)
    plain = factorize(w, "plain").truncate(2)
    assert loss_of(method, w, x, u, v) < 0.2 * loss_of(method, w, x, *plain)


def singular(kind: str, N: int, K: int) -> tuple[Tensor, Tensor]:
    w, x = problem(N, K)
    if kind == "dead channels":
        x[:, 1] = x[:, 3] = 0
    elif kind == "few tokens":
        x = x[:3]
    elif kind == "one token":
        x = x[:1]
    elif kind == "repeated channel":
        x[:, 1] = x[:, 0]
    else:
        x = torch.zeros_like(x)
    return w, x


SINGULAR = ("dead channels", "few tokens", "one token", "repeated channel", "no signal")


@pytest.mark.parametrize("shape", [(9, 6), (6, 9)])
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


@pytest.mark.parametrize("shape", [(9, 6), (6, 9)])
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


@pytest.mark.parametrize("method", ["whiten", "swift"])
def test_a_shared_moment_is_decomposed_once(monkeypatch, method):
    calls = []
    cholesky = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda m: calls.append(1) or cholesky(m))
    (gate, x), (up, _) = problem(9, 6), problem(9, 6, seed=1)
    moment = moment_of(method, gate, x)
    for w in (gate, up):
        u, v = factorize(w, method, moment).truncate(3)
        assert_same_in_fp64(u @ v, PUBLISHED[method](w, x, 3))
    assert len(calls) == 1
    moment.add(torch.eye(6), 6)
    factorize(gate, method, moment)
    assert len(calls) == 2


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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_weight_is_refused(method, value):
    w, x = problem(4, 6)
    moment = moment_of(method, w, x)
    w[1, 2] = value
    with pytest.raises(NonFiniteError, match="weight must be finite"):
        factored(method, w, x, moment)


@pytest.mark.parametrize("method", ["whiten", "swift"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_moment_is_refused(method, value):
    w, x = problem(4, 6)
    moment = moment_of(method, w, x)
    moment.matrix[0, 1] = value
    with pytest.raises(NonFiniteError, match="second moment must be finite"):
        factorize(w, method, moment)


@pytest.mark.parametrize(
    ("method", "shape", "side", "size", "message"),
    [
        ("whiten", (4, 6), None, 0, "method whiten needs the input second moment; got none"),
        ("swift", (4, 6), None, 0, "method swift needs the output second moment; got none"),
        ("swift", (6, 4), None, 0, "method swift needs the input second moment; got none"),
        ("whiten", (4, 6), "output", 4, r"needs the input .* \[6, 6\] .* got output \[4, 4\]"),
        ("swift", (4, 6), "input", 6, r"needs the output .* \[4, 4\] .* got input \[6, 6\]"),
        ("swift", (4, 6), "output", 6, r"needs the output .* \[4, 4\] .* got output \[6, 6\]"),
    ],
)
def test_the_moment_must_fit(method, shape, side, size, message):
    moment = None if side is None else SecondMoment(side, torch.eye(size, dtype=torch.float64), 1)
    with pytest.raises(ValueError, match=message):
        factorize(torch.zeros(shape), method, moment)


@pytest.mark.parametrize("rank", [0, 5, -1])
def test_ranks_are_checked(rank):
    w, _ = problem(4, 6)
    with pytest.raises(ValueError, match=rf"max_rank must be in 1..min\(K, N\) = 4, got {rank}"):
        factorize(w, "plain", max_rank=rank)
    with pytest.raises(ValueError, match=rf"rank must be in 1..4, got {rank}"):
        factorize(w, "plain").truncate(rank)


def test_an_unknown_method_is_refused():
    w, x = problem(6, 4)
    with pytest.raises(ValueError, match=r"method must be one of plain, .*; got 'asvd'"):
        factorize(w, "asvd", moment_of("whiten", w, x))


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


# --- what the methods that need more do with it --------------------------------------------------


@pytest.mark.parametrize("shape", [(9, 6), (6, 9)])
def test_drift_regresses_from_the_inputs_that_are_there(shape):
    w, x = problem(*shape, tokens=60)
    seen = x + 0.3 * torch.randn(x.shape, dtype=torch.float64)
    moment = SecondMoment("input", seen.t() @ seen, len(seen))
    factors = factorize(w, "drift", moment, cross=x.t() @ seen)
    ridge = float(ridge_of(seen))

    def objective(u: Tensor, v: Tensor) -> float:
        fit = (x @ w.t() - seen @ u @ v).square().sum() + ridge * (w.t() - u @ v).square().sum()
        return float(fit)

    best = objective(factors.u, factors.v)
    for rank in range(1, min(shape)):
        u, v = factors.truncate(rank)
        assert objective(u, v) - best == pytest.approx(factors.loss(rank), rel=1e-6)
        other = factorize(w, "swift", moment_of("swift", w, seen)).truncate(rank)
        assert objective(u, v) < objective(*other)


@pytest.mark.parametrize("shape", [(9, 6), (6, 9)])
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


@pytest.mark.parametrize("shape", [(9, 6), (6, 9)])
@pytest.mark.parametrize("kind", SINGULAR)
@pytest.mark.parametrize("method", ["kfac", "drift", "zero-sum"])
def test_every_method_is_finite_on_singular_inputs(method, kind, shape):
    w, x = singular(kind, *shape)
    factors = factored(method, w, x)
    lost = [float((x @ (w.t() - factors.u @ factors.v)).norm())]
    assert lost[0] <= 1e-3 * float((x @ w.t()).norm()) + 1e-9
    for factor in (factors.u, factors.v, factors.spectrum):
        assert factor.isfinite().all()


@pytest.mark.parametrize(
    ("method", "extra", "message"),
    [
        ("kfac", {}, r"method kfac needs a gradient \[4, 4\]; got none"),
        ("kfac", {"gradient": torch.eye(6)}, r"needs a gradient \[4, 4\]; got \[6, 6\]"),
        ("zero-sum", {"gradient": torch.eye(4)}, r"needs a gradient \[4, 6\]; got \[4, 4\]"),
        ("drift", {"cross": torch.eye(4)}, r"needs a cross \[6, 6\]; got \[4, 4\]"),
    ],
)
def test_the_other_statistics_must_fit(method, extra, message):
    w, x = problem(4, 6)
    with pytest.raises(ValueError, match=message):
        factorize(w, method, moment_of(method, w, x), **extra)


def test_a_broken_gradient_is_refused():
    w, x = problem(4, 6)
    gradient = torch.full((4, 4), float("nan"))
    with pytest.raises(NonFiniteError, match="gradient must be finite"):
        factorize(w, "kfac", moment_of("kfac", w, x), gradient=gradient)


@pytest.mark.parametrize("shape", [(9, 6), (6, 9)])
def test_kfac_s_factors_are_of_one_scale(shape):
    w, x = problem(*shape)
    moment = moment_of("kfac", w, x)
    small = 1e-8 * gradient_of("kfac", w)  # as those of a trained model
    factors = factorize(w, "kfac", moment, gradient=small)
    assert_same_in_fp64(factors.u.norm(dim=0), factors.v.norm(dim=1))
    assert_same_in_fp64(factors.u @ factors.v, w.t())
