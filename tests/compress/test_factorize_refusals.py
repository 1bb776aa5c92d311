"""What `factorize` refuses: values that are not finite, statistics and ranks that do not fit."""

import pytest
import torch
from problems import factored, moment_of, problem

from neuronmm_ops import NonFiniteError, SecondMoment, factorize
from neuronmm_ops.compress.methods import METHODS


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


def test_a_broken_gradient_is_refused():
    w, x = problem(4, 6)
    gradient = torch.full((4, 4), float("nan"))
    with pytest.raises(NonFiniteError, match="gradient must be finite"):
        factorize(w, "kfac", moment_of("kfac", w, x), gradient=gradient)


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
