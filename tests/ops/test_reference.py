"""Every op against its fp64 oracle, over shapes, dtypes, layouts and biases."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operands import (
    ACTIVATIONS,
    DTYPES,
    OPS,
    PLAIN,
    doubled,
    magnitude_of,
    make,
    mlp_shapes,
    operands_of,
    plain_mlp,
    plain_svd_mlp,
    plain_xuv,
    plain_xw,
)
from tolerances import assert_close_to_oracle
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from neuronmm_ops import ops
from neuronmm_ops.ops.definitions import SPECS


def check_output(op: str, arguments: Sequence[Any]) -> Tensor:
    """Of x's dtype, contiguous, and described exactly by the fake and on the meta device."""
    x, public = arguments[0], getattr(ops, op)
    y = public(*arguments)
    expected = SPECS[op].result_shapes(arguments)[0]
    assert y.dtype == x.dtype
    assert y.shape == expected
    assert y.stride() == torch.empty(expected).stride()
    mode = FakeTensorMode()
    for describe in (mode.from_tensor, lambda t: t.to("meta")):
        like = public(*(describe(a) if isinstance(a, Tensor) else a for a in arguments))
        assert (like.shape, like.dtype, like.stride()) == (y.shape, y.dtype, y.stride())
    return y


@pytest.mark.parametrize("op", OPS)
@given(data=st.data())
@settings(max_examples=150)
def test_the_op_matches_the_fp64_oracle_and_its_fake(op, data):
    arguments = data.draw(operands_of(op))
    assert_close_to_oracle(
        check_output(op, arguments),
        PLAIN[op](*doubled(*arguments)),
        PLAIN[op](*arguments),
        magnitude_of(op, *arguments[: len(SPECS[op].operands)]),
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("lead", [(), (1,), (1, 1), (2,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_through_large_factors(dtype, lead, layout, bias):
    # Large enough for a CPU to choose another matmul for one row.
    K, r, N = 640, 128, 300
    operands = [
        make((*lead, K), dtype),
        make((K, r), dtype, layout).mul_(K**-0.5),
        make((r, N), dtype, layout).mul_(r**-0.5),
        make((N,), dtype) if bias else None,
    ]
    assert_close_to_oracle(ops.xuv(*operands), plain_xuv(*doubled(*operands)), plain_xuv(*operands))
    dense = [operands[0], operands[1]]
    assert_close_to_oracle(ops.xw(*dense), plain_xw(*doubled(*dense)), plain_xw(*dense))
    check_output("xuv", operands)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_many_tokens_through_a_wide_mlp(layout, activation):
    # So many hidden activations that a CPU passes through them in strips.
    operands = [
        make((2, 1100, 8)),
        *(make(shape, layout=layout).mul_(0.5) for shape in mlp_shapes(8, 1100, 6)),
    ]
    assert_close_to_oracle(
        ops.svd_mlp(*operands, activation),
        plain_svd_mlp(*doubled(*operands), activation=activation),
        plain_svd_mlp(*operands, activation=activation),
    )

    x, x_up = operands[0], make((2, 1100, 5))
    weights = [make(shape, layout=layout).mul_(0.5) for shape in ((8, 1100), (5, 1100), (1100, 6))]
    assert_close_to_oracle(
        ops.mlp(x, *weights, x_up, activation),
        plain_mlp(*doubled(x, *weights, x_up), activation=activation),
        plain_mlp(x, *weights, x_up, activation=activation),
    )


@pytest.mark.parametrize("lead", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("orders", [(0, 1), (1, 0), (1, 1)])
def test_one_row_through_weights_of_either_order(orders, lead):
    # A weight's order in memory decides whether a row is a vector.
    gate, up = [make((16, 9), layout=("contiguous", "transposed")[order]) for order in orders]
    x, x_up, w_down = make((*lead, 16)), make((*lead, 16)) + 1, make((9, 4))
    y = ops.mlp(x, gate, up, w_down, x_up)
    torch.testing.assert_close(y, plain_mlp(x, gate, up, w_down, x_up))
    assert y.shape == (*lead, 4)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("r", [1, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_whole_contraction_is_accumulated_in_fp32(dtype, r, M, transposed):
    # 1 + 4095 * eps/2: in a low-precision accumulator every later term is rounded away.
    K = 4096
    small = torch.finfo(dtype).eps / 2
    x = torch.full((M, K), small, dtype=dtype)
    x[:, 0] = 1
    ones, one = torch.ones(K, r, dtype=dtype), torch.ones(M, 1, dtype=dtype)
    ones = ones.t().contiguous().t() if transposed else ones
    first = torch.zeros(r, 1, dtype=dtype)
    first[0] = 1
    total = torch.tensor(1 + (K - 1) * small, dtype=torch.float64).to(dtype)
    assert torch.equal(ops.xw(x, ones), total.expand(M, r))
    assert torch.equal(ops.xuv(x, ones, first), total.expand(M, 1))
    # The second matmul: x @ u is a row of ones, v holds the small terms.
    v = x[:1].t().expand(K, r)
    v = v.t().contiguous().t() if transposed else v.contiguous()
    assert torch.equal(ops.xuv(one, torch.ones(1, K, dtype=dtype), v), total.expand(M, r))
    zeros = torch.zeros(r, dtype=dtype)
    assert torch.equal(ops.xuv(one, torch.ones(1, K, dtype=dtype), v, zeros), total.expand(M, r))


def test_rows_without_features_are_no_vector():
    x, w = torch.empty(2, 0), torch.empty(5, 0).t()
    assert torch.equal(ops.xw(x, w), torch.zeros(2, 5))
    bias = torch.ones(5)
    assert torch.equal(ops.xuv(x, torch.empty(3, 0).t(), torch.ones(3, 5), bias), bias.expand(2, 5))
