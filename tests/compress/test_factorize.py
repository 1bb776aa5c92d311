"""The closed forms against the published formulas, and their loss against a measured one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_same_in_fp64
from torch import Tensor

from neuronmm_ops import NonFiniteError, SecondMoment, SVDConfig, factorize
from neuronmm_ops.compress.factorize import moment_side
from neuronmm_ops.compress.methods import METHODS

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


def loss_of(method: str, w: Tensor, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    difference = w.t() - u @ v
    return (difference if method == "plain" else x @ difference).square().sum()


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


PUBLISHED = {"plain": published_plain, "whiten": published_whiten, "swift": published_swift}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_the_product_is_the_published_one(method, shape):
    w, x = problem(*shape)
    factors = factorize(w, method, moment_of(method, w, x))
    for rank in range(1, min(shape) + 1):
        u, v = factors.truncate(rank)
        assert_same_in_fp64(u @ v, PUBLISHED[method](w, x, rank))


@pytest.mark.parametrize("method", METHODS)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**20))
@settings(max_examples=30)
def test_the_loss_is_the_discarded_spectrum(method, N, K, seed):
    w, x = problem(N, K, seed=seed)
    factors = factorize(w, method, moment_of(method, w, x))
    assert factors.spectrum.shape == (min(K, N),)
    assert (factors.spectrum.diff() <= 0).all()
    energy = float((w if method == "plain" else x @ w.t()).square().sum())
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
    full = factorize(w, method, moment)
    for rank in (1, 3, 6):
        part = factorize(w, method, moment, max_rank=rank)
        assert (part.u.shape, part.v.shape) == ((shape[1], rank), (rank, shape[0]))
        u, v = full.truncate(rank)
        assert_same_in_fp64(part.u @ part.v, u @ v)
        assert_same_in_fp64(part.spectrum, full.spectrum)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_full_rank_is_the_dense_weight(method, shape):
    w, x = problem(*shape)
    factors = factorize(w, method, moment_of(method, w, x))
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
    u, v = factorize(w, method, moment_of(method, w, x)).truncate(2)
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
        factors = factorize(w, method, moment_of(method, w.double(), x))
        u, v = factors.truncate(2)
        assert (u @ v).abs().max() == 0
        assert factors.relative_loss(2) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_float_weight_is_factored_in_fp64(dtype):
    w, x = problem(9, 6)
    w = w.to(dtype)
    for method in METHODS:
        factors = factorize(torch.nn.Parameter(w), method, moment_of(method, w.double(), x))
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
        factorize(w, method, moment)


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
    with pytest.raises(ValueError, match="method must be one of plain, whiten, swift; got 'asvd'"):
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
    assert [SVDConfig(method=name).needs_calibration for name in METHODS] == [False, True, True]
