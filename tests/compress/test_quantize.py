"""Pairs in one byte: what is stored, and what rounding costs."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import SINGULAR, problem, singular
from torch import Tensor

from neuronmm_ops import SecondMoment, factorize
from neuronmm_ops.compress.quantize import (
    Quantized,
    geometric_mean_turn,
    nearest_pair,
    pair_loss,
    quantize_pair,
)
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.nn import SVDLinear
from neuronmm_ops.storages import STORAGES, pair_shapes

storages = st.sampled_from(list(STORAGES))


def correlated(N: int, K: int, seed: int = 0, decay: float = 1.5) -> tuple[Tensor, Tensor]:
    """Return a weight and inputs whose spectra decay, as those of trained models do."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(N, K, dtype=torch.float64, generator=generator)
    mix = torch.randn(K, K, dtype=torch.float64, generator=generator)
    lengths = torch.arange(1, K + 1).double() ** -decay
    x = torch.randn(4 * K, K, dtype=torch.float64, generator=generator) * lengths @ mix
    return w, x


def metric_of(N: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(4 * N, N, dtype=torch.float64, generator=generator)
    g = g * torch.arange(1, N + 1).double() ** -0.5
    c = g.t() @ g / len(g)
    return c + 0.1 * c.diagonal().mean() * torch.eye(N).double()


def factors_of(w: Tensor, x: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    h = x.t() @ x
    return *factorize(w, "whiten", SecondMoment("input", h, len(x)), rank).truncate(rank), h


def check_stored(pair: Quantized, storage: str, K: int, r: int, N: int) -> None:
    """Check the contract of a stored pair."""
    assert [t.dtype for t in pair] == [STORAGES[storage].torch_dtype] * 2 + [torch.float32] * 2
    shapes = pair_shapes(K, N, r, storage)
    assert [tuple(t.shape) for t in pair] == [shapes[name] for name in Quantized._fields]
    for scale in pair[2:]:
        assert (scale > 0).all()
        assert scale.isfinite().all()
        assert torch.equal(scale, scale.bfloat16().float())
    SVDLinear.from_factors(*pair[:2], None, *pair[2:])  # checks them too


@given(
    storages,
    st.integers(1, 6).map(lambda half: 2 * half),
    st.integers(1, 12),
    st.integers(1, 6).map(lambda half: 2 * half),
    st.integers(0, 99),
    st.sampled_from([1e-30, 1e-6, 1.0, 1e6, 1e30]),
    st.sampled_from([None, "diagonal", "full"]),
)
@settings(max_examples=80, deadline=None)
def test_any_pair_is_stored_as_the_contract_says(storage, K, N, r, seed, size, kind):
    _, x = problem(N, K, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(K, r, dtype=torch.float64, generator=generator)
    v = torch.randn(r, N, dtype=torch.float64, generator=generator) * size
    c = metric_of(N, seed)
    metric = {None: None, "diagonal": c.diagonal(), "full": c}[kind]
    pair = quantize_pair(u, v, storage, u @ v, x.t() @ x, metric)
    check_stored(pair, storage, K, r, N)
    wide = pair.widened(torch.float64)
    energy = pair_loss(torch.zeros_like(u), v, u @ v, x.t() @ x, metric)
    assert (
        pair_loss(*wide, u @ v, x.t() @ x, metric) <= (0.2 if storage == "int4" else 0.05) * energy
    )
    if r <= min(K, N):
        again = quantize_pair(u, v, storage, u @ v, x.t() @ x, metric)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(pair, again, strict=True))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", [(24, 32), (32, 24), (48, 48)])
@given(seed=st.integers(0, 999), decay=st.floats(0, 2.5), rank=st.sampled_from([4, 6, 10, 16]))
@settings(max_examples=25, deadline=None)
def test_feedback_loses_no_more_than_rounding_to_nearest(storage, shape, seed, decay, rank):
    N, K = shape
    w, x = correlated(N, K, seed, decay)
    u, v, h = factors_of(w, x, rank)
    truncated = pair_loss(u, v, w.t(), h, None)
    nearest = pair_loss(*nearest_pair(u, v, storage).widened(torch.float64), w.t(), h, None)
    ours = pair_loss(*quantize_pair(u, v, storage, w.t(), h).widened(torch.float64), w.t(), h, None)
    energy = pair_loss(torch.zeros_like(u), v, w.t(), h, None)
    assert ours - truncated <= (nearest - truncated) * 1.1 + 1e-6 * energy


@pytest.mark.parametrize("storage", STORAGES)
def test_what_feedback_wins_where_spectra_decay(storage):
    w, x = correlated(96, 64)
    u, v, h = factors_of(w, x, 32)
    c = metric_of(96)

    def added(pair):
        wide = pair.widened(torch.float64)
        return pair_loss(*wide, w.t(), h, c) - pair_loss(u, v, w.t(), h, c)

    nearest = added(nearest_pair(u, v, storage))
    assert (
        added(quantize_pair(u, v, storage, w.t(), h))
        < (0.3 if storage == "int4" else 0.2) * nearest
    )
    if storage != "int4":  # whose errors are too large for so few columns
        by_metric = added(quantize_pair(u, v, storage, w.t(), h, c))
        assert by_metric < added(quantize_pair(u, v, storage, w.t(), h))


def test_the_loss_is_that_of_u_s_rounding_and_that_of_v_s():
    w, x = correlated(24, 16)
    u, v, h = factors_of(w, x, 8)
    c = metric_of(24)
    stored_u, stored_v = quantize_pair(u, v, "int8", w.t(), h, c).widened(torch.float64)
    gram = stored_u.t() @ h @ stored_u
    best = torch.linalg.solve(gram, stored_u.t() @ h @ w.t())
    error = stored_v - best
    added = float((error * (gram @ error @ c)).sum())
    found = pair_loss(stored_u, stored_v, w.t(), h, c)
    assert found == pytest.approx(pair_loss(stored_u, best, w.t(), h, c) + added)


@given(st.lists(st.floats(-6, 6), min_size=1, max_size=40))
def test_the_turn_makes_every_pivot_the_geometric_mean(exponents):
    sigma = torch.tensor(exponents, dtype=torch.float64).exp()
    turn = geometric_mean_turn(sigma)
    torch.testing.assert_close(turn.t() @ turn, torch.eye(len(sigma)).double())
    r = torch.linalg.qr(sigma[:, None] * turn).R.diagonal().abs()
    mean = sigma.log().mean().exp()
    torch.testing.assert_close(r, mean.expand_as(r), rtol=1e-6, atol=0)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", SINGULAR)
def test_a_singular_moment(storage, kind):
    w, x = singular(kind, 9, 6)
    h = x.t() @ x
    u, v = factorize(w, "whiten", SecondMoment("input", h, len(x)), 4).truncate(4)
    pair = quantize_pair(u, v, storage, w.t(), h)
    check_stored(pair, storage, 6, 4, 9)
    energy = pair_loss(u, torch.zeros_like(v), w.t(), h, None)
    lost = pair_loss(*pair.widened(torch.float64), w.t(), h, None)
    assert lost <= pair_loss(u, v, w.t(), h, None) + 0.02 * energy + 1e-12
    # Where the inputs say nothing the product stays near what it was.
    product = torch.matmul(*pair.widened(torch.float64))
    assert float((product - u @ v).norm()) <= 0.3 * float((u @ v).norm())


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("what", ["column of u", "row of v", "column of v", "all"])
def test_zeros(storage, what):
    w, x = correlated(24, 16)
    u, v, h = factors_of(w, x, 8)
    {"column of u": u[:, 2], "row of v": v[3], "column of v": v[:, 5], "all": v}[what].zero_()
    target = u @ v
    pair = quantize_pair(u, v, storage, target, h)
    check_stored(pair, storage, 16, 8, 24)
    found = torch.matmul(*pair.widened(torch.float64))
    assert float((found - target).norm()) <= (0.2 if storage == "int4" else 0.1) * float(
        target.norm()
    )
    if what == "column of v":
        assert (found[:, 5] == 0).all()


def test_fp8_keeps_numbers_below_the_smallest_normal():
    u, v = torch.eye(2).double(), torch.tensor([[1.0, 2.0**-14], [0.0, 1.0]]).double()
    pair = nearest_pair(u, v, "fp8")
    wide = torch.matmul(*pair.widened(torch.float64))
    torch.testing.assert_close(wide, v, rtol=0.1, atol=1e-5)
    # 120 is the largest number of a column, 2^-9 the least that is not zero.
    small = quantize_pair(torch.ones(1, 1), torch.ones(1, 1), "fp8", torch.ones(1, 1))
    assert float(small.u.float()) == 120 or float(small.v.float()) == 120


def test_no_moment_is_the_identity():
    w, x = correlated(24, 16)
    u, v, _ = factors_of(w, x, 8)
    same = quantize_pair(u, v, "int8", w.t(), torch.eye(16).double())
    for a, b in zip(same, quantize_pair(u, v, "int8", w.t()), strict=True):
        assert torch.equal(a.float(), b.float())


def test_folded_scales_are_one():
    w, x = correlated(24, 16)
    u, v, h = factors_of(w, x, 8)
    pair = quantize_pair(u, v, "int8", w.t(), h, folded=True)
    assert (pair.u_scale == 1).all()
    kept = quantize_pair(u, v, "int8", w.t(), h)
    lost = [pair_loss(*p.widened(torch.float64), w.t(), h, None) for p in (pair, kept)]
    energy = pair_loss(u, torch.zeros_like(v), w.t(), h, None)
    assert lost[0] - lost[1] < 0.05 * energy


@pytest.mark.parametrize("which", ["u", "v", "weight", "second moment", "metric"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(which, value):
    given = {
        "u": torch.ones(4, 2),
        "v": torch.ones(2, 3),
        "weight": torch.ones(4, 3),
        "second moment": torch.eye(4),
        "metric": torch.eye(3),
    }
    given[which][0, 0] = value
    u, v, *rest = given.values()
    with pytest.raises(NonFiniteError, match=rf"^{which} must be finite to be rounded to fp8"):
        quantize_pair(u, v, "fp8", *rest)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"storage": "fp4"}, "storage must be fp8 or int8 or int4, got 'fp4'"),
        (
            {"storage": "int4", "u": torch.ones(4, 3), "v": torch.ones(3, 3)},
            "int4 packs two rows in a byte: features and ranks must be even, got 3",
        ),
        ({"u": torch.ones(4, 3)}, "u must be [4, r] and v [r, 3], got [4, 3] and [2, 3]"),
        ({"v": torch.ones(2, 4)}, "u must be [4, r] and v [r, 3], got [4, 2] and [2, 4]"),
        ({"moment": torch.eye(3)}, "the moment must be [4, 4], got [3, 3]"),
        ({"metric": torch.ones(4)}, "the metric must be [3, 3] or [3], got [4]"),
    ],
)
def test_what_does_not_fit_is_refused(change, text):
    fine = {"u": torch.ones(4, 2), "v": torch.ones(2, 3), "target": torch.ones(4, 3)}
    with pytest.raises(ValueError, match=re.escape(text)):
        quantize_pair(**{**fine, "storage": "int8", **change})
