"""SVDLinear: construction, storage, conversion and gradients."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nn.layers import is_contiguous
from operands import doubled, plain_xuv
from tolerances import assert_close_to_oracle, assert_same_in_fp64
from torch import nn

from neuronmm_ops import SVDLinear
from neuronmm_ops.nn import relayout_


def assert_same_function(layer: nn.Module, other: nn.Module) -> None:
    x = torch.randn(5, 12, dtype=next(other.parameters()).dtype)
    oracle = copy.deepcopy(other).double()(x.double())
    if x.dtype == torch.float64:
        assert_same_in_fp64(layer(x), oracle)
    else:
        assert_close_to_oracle(layer(x), oracle, other(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_constructor(bias, device, dtype):
    layer = SVDLinear(12, 8, 3, bias=bias, device=device, dtype=dtype)
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    expected = {"u": (12, 3), "v": (3, 8), "weight": (0,)} | ({"bias": (8,)} if bias else {})
    assert shapes == expected
    assert is_contiguous(layer)
    assert all(p.dtype == dtype and p.device.type == device for p in layer.parameters())
    assert all(p.requires_grad and p.is_leaf for p in layer.parameters())
    assert layer(torch.empty(2, 12, device=device, dtype=dtype)).shape == (2, 8)


def test_a_meta_layer_can_be_filled():
    source = SVDLinear(12, 8, 3)
    layer = SVDLinear(12, 8, 3, device="meta").to_empty(device="cpu")
    layer.load_state_dict(source.state_dict())
    assert is_contiguous(layer)
    assert_same_function(layer, source)


@pytest.mark.parametrize("sizes", [(0, 4, 2), (4, 0, 2), (4, 4, 0), (4, 4, -1)])
def test_sizes_are_positive(sizes):
    with pytest.raises(ValueError, match=rf"at least 1, got {sizes[0]}, {sizes[1]} and {sizes[2]}"):
        SVDLinear(*sizes)


@pytest.mark.parametrize("storage", [None, "int8", "fp8"])
def test_initial_values_have_the_variance_of_a_linear(storage):
    torch.manual_seed(0)
    layer, linear = SVDLinear(256, 192, 64, storage=storage), nn.Linear(256, 192)
    ratio = layer.to_linear().weight.var() / linear.weight.var()
    assert 0.9 < ratio < 1.1
    assert layer.bias.abs().max() <= 1 / 16


@pytest.mark.parametrize(("K", "N"), [(12, 12), (12, 7), (7, 12), (1, 5), (5, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_from_linear_at_full_rank_is_the_linear(K, N, bias):
    linear = nn.Linear(K, N, bias=bias, dtype=torch.float64)
    layer = SVDLinear.from_linear(linear, min(K, N))
    assert is_contiguous(layer)
    x = torch.randn(3, K, dtype=torch.float64)
    assert_same_in_fp64(layer(x), linear(x))


def test_from_linear_is_the_best_approximation_of_the_weight():
    linear = nn.Linear(12, 9, dtype=torch.float64)
    sigma = torch.linalg.svdvals(linear.weight.detach())
    for rank in range(1, 10):
        layer = SVDLinear.from_linear(linear, rank)
        lost = torch.linalg.svdvals(linear.weight - (layer.u @ layer.v).t())
        expected = torch.cat([sigma[rank:], sigma.new_zeros(rank)])
        # Beside the largest singular value: that is the scale.
        assert_same_in_fp64(torch.cat([sigma[:1], lost]), torch.cat([sigma[:1], expected]))


def test_from_linear_copies_and_keeps_the_dtype():
    linear = nn.Linear(12, 8, dtype=torch.bfloat16)
    layer = SVDLinear.from_linear(linear, 4)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    before = layer.bias.detach().clone()
    with torch.no_grad():
        linear.bias.add_(1)
    assert torch.equal(layer.bias, before)


@pytest.mark.parametrize(
    ("rank", "device", "message"),
    [
        *[(rank, "cpu", rf"1..min\(K, N\) = 8, got {rank}") for rank in (0, 9, -1)],
        (4, "meta", "meta device"),
    ],
)
def test_from_linear_refuses(rank, device, message):
    with pytest.raises(ValueError, match=message):
        SVDLinear.from_linear(nn.Linear(12, 8, device=device), rank)


@pytest.mark.parametrize(
    ("u", "v", "bias", "message"),
    [
        ((12,), (3, 8), None, r"u must be \[K, r\] and v \[r, N\], got \[12\] and \[3, 8\]"),
        ((12, 3), (8,), None, r"got \[12, 3\] and \[8\]"),
        ((2, 12, 3), (3, 8), None, r"got \[2, 12, 3\] and \[3, 8\]"),
        ((12, 3), (4, 8), None, r"got \[12, 3\] and \[4, 8\]"),
        ((12, 3), (3, 8), (7,), r"bias must be \[8\], got \[7\]"),
        ((12, 3), (3, 8), (1, 8), r"bias must be \[8\], got \[1, 8\]"),
        ((12, 0), (0, 8), None, r"at least 1, got 12, 8 and 0"),
    ],
)
def test_from_factors_checks_shapes(u, v, bias, message):
    tensors = [None if shape is None else torch.zeros(shape) for shape in (u, v, bias)]
    with pytest.raises(ValueError, match=message):
        SVDLinear.from_factors(*tensors)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.booleans(), st.booleans())
def test_from_factors_computes_the_product_in_any_layout(K, r, N, transposed, bias):
    u, v = torch.randn(K, r), torch.randn(r, N)
    if transposed:
        u, v = u.t().contiguous().t(), v.t().contiguous().t()
    b = torch.randn(N) if bias else None
    layer = SVDLinear.from_factors(u, v, b)
    x = torch.randn(2, K)
    assert_close_to_oracle(layer(x), plain_xuv(*doubled(x, u, v, b)), plain_xuv(x, u, v, b))
    assert is_contiguous(layer)


def test_from_factors_keeps_a_bias_parameter_and_copies_a_tensor():
    u, v = torch.randn(4, 2, dtype=torch.bfloat16), torch.randn(2, 3)
    parameter = nn.Parameter(torch.randn(3), requires_grad=False)
    assert SVDLinear.from_factors(u, v, parameter).bias is parameter
    bias = torch.zeros(3)
    layer = SVDLinear.from_factors(u, v, bias)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}, "that of u"
    bias.add_(1)
    assert layer.bias.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_to_linear_round_trip(dtype, bias):
    layer = SVDLinear(12, 8, 3, bias=bias, dtype=dtype)
    linear = layer.to_linear()
    assert type(linear) is nn.Linear
    assert linear.weight.dtype == dtype
    assert (linear.bias is not None) == bias
    wide = (layer.u.double() @ layer.v.double()).t()
    assert_close_to_oracle(linear.weight, wide, wide.to(dtype))
    if dtype == torch.float64:
        assert_same_function(linear, layer)
        assert_same_function(SVDLinear.from_linear(linear, 3), layer)


def test_extra_repr_says_what_it_is():
    assert repr(SVDLinear(100, 50, 10, bias=False)) == (
        "SVDLinear(in_features=100, out_features=50, rank=10, bias=False, effective_ratio=0.700)"
    )
    assert SVDLinear(100, 50, 10).effective_ratio == pytest.approx(1 - 10 * 150 / 5000)


def test_relayout_lays_factors_along_their_contraction_but_in_float32():
    source = SVDLinear(12, 8, 3, dtype=torch.bfloat16)
    layer = copy.deepcopy(source)
    u = layer.u
    assert relayout_(layer) is layer
    assert (layer.u.stride(), layer.v.stride()) == ((1, 12), (1, 3))
    assert layer.u is u
    assert_same_function(layer, source)
    assert is_contiguous(relayout_(copy.deepcopy(layer).float()))
    kinds = {"dtype": torch.bfloat16}
    for fresh in (SVDLinear(12, 8, 3, **kinds), SVDLinear(12, 8, 3, device="meta", **kinds)):
        fresh.load_state_dict(layer.state_dict(), assign=fresh.u.is_meta)
        assert_same_function(fresh, source)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_reach_input_and_parameters(bias):
    layer = SVDLinear(6, 5, 3, bias=bias, dtype=torch.float64)
    x = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    layer(x).square().sum().backward()
    inputs = [x, *layer.parameters()]
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = leaves[0] @ leaves[1] @ leaves[2] + (leaves[3] if bias else 0)
    for tensor, expected in zip(inputs, torch.autograd.grad(y.square().sum(), leaves), strict=True):
        assert_same_in_fp64(tensor.grad, expected)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("storage", [None, "int8"])
def test_exported(storage, strict):
    layer, x = SVDLinear(64, 40, 8, storage=storage), torch.randn(3, 64)
    program = torch.export.export(layer, (x,), strict=strict)
    assert torch.equal(program.module()(x), layer(x))
