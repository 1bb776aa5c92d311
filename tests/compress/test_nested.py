"""The factors that ranks are chosen among: what they need, their losses, their smaller ranks."""

import pytest
import torch
from problems import factored, gradient_of, moment_of, problem
from torch import nn

from neuronmm_ops import SVDConfig
from neuronmm_ops.compress.methods import METHODS
from neuronmm_ops.compress.nested import Nested, gradient_kinds, known_to_all, moment_sides
from neuronmm_ops.nn import DenseLinear

# By [K, N].
LINEARS = {str(shape): DenseLinear(nn.Linear(*shape)) for shape in ((4, 6), (6, 4), (5, 5))}


@pytest.mark.parametrize("method", METHODS)
def test_losses_are_the_factorization_s_per_token(method):
    w, x = problem(9, 6)
    # Drift follows what is compressed before, so that its ranks are chosen by another's losses.
    first = {"drift": "swift", "kfac-drift": "kfac"}.get(method, method)
    moment, gradient = moment_of(first, w, x), gradient_of(method, w)
    nested = Nested.of("name", w, SVDConfig(method=method), moment, gradient, 4)
    expected = factored(first, w, x, moment, 4)
    tokens = 1 if first in ("plain", "kfac") else len(x)
    torch.testing.assert_close(nested.spectrum, expected.spectrum / tokens)
    assert (nested.scores is not None) == (method == "zero-sum")
    for rank in range(1, 5):
        u, v = nested.truncate(rank)
        assert (u.shape, v.shape) == ((6, rank), (rank, 9))
        torch.testing.assert_close(u, expected.u[:, :rank])
        torch.testing.assert_close(v, expected.v[:rank])
        assert nested.relative_loss(rank) == pytest.approx(expected.relative_loss(rank))
    assert nested.relative_loss(None) == 0  # stays dense


def test_factors_have_the_weight_s_dtype():
    w, x = problem(9, 6)
    config = SVDConfig(method="swift")
    nested = Nested.of("name", w.bfloat16(), config, moment_of("swift", w, x), None, 2)
    assert nested.u.dtype == nested.v.dtype == torch.bfloat16


def test_what_is_found_is_in_the_order_of_the_names():
    w, _ = problem(9, 6)
    nested = Nested.of("name", w, SVDConfig(method="plain"), None, None, 2)
    found = known_to_all({"b": nested, "a": nested}, ["a", "b"])
    assert list(found) == ["a", "b"]
    assert all(each.is_here for each in found.values())


def test_what_each_method_needs_of_each_linear():
    sides = {name: moment_sides(SVDConfig(method=name), LINEARS) for name in METHODS}
    assert sides["plain"] == {}
    assert sides["whiten"] == dict.fromkeys(LINEARS, "input")
    smaller = {"(4, 6)": "input", "(6, 4)": "output", "(5, 5)": "output"}
    assert sides["swift"] == sides["drift"] == smaller
    assert sides["kfac"] == sides["kfac-drift"]
    kinds = {name: gradient_kinds(SVDConfig(method=name), LINEARS) for name in METHODS}
    assert kinds["kfac"] == kinds["kfac-drift"] == dict.fromkeys(LINEARS, "moment")
    assert kinds["zero-sum"] == dict.fromkeys(LINEARS, "weight")
    assert kinds["swift"] == kinds["drift"] == dict.fromkeys(LINEARS, "scale")
    by_error = SVDConfig(method="swift", importance="error")
    assert gradient_kinds(by_error, LINEARS) == {}
