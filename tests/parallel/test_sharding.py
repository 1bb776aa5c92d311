"""Which part of a pair each rank holds."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from neuronmm_ops.parallel.sharding import (
    DIVIDES,
    KINDS,
    check_groups,
    check_heads,
    matrix_dims,
    pair_dims,
    part,
    part_width,
    shard,
)

PARTS_OF_A_PAIR = {
    ("column", "one"): {"u": None, "v": 1, "u_scale": None, "v_scale": 0, "bias": 0},
    ("column", "both"): {"u": 1, "v": 1, "u_scale": 0, "v_scale": 0, "bias": 0},
    ("row", "one"): {"u": 0, "v": None, "u_scale": None, "v_scale": None, "bias": None},
    ("row", "both"): {"u": 0, "v": 1, "u_scale": None, "v_scale": 0, "bias": 0},
}


def test_groups_that_share_scales_stay_whole():
    for storage, kind, K in (("int8", "row", 200), ("int4", "column", 200), ("int4", "row", 256)):
        check_groups("layer", storage, kind, K, 2)
    with pytest.raises(ValueError, match=r"^layer: .* groups of 128 rows .*, got 384 rows and tp"):
        check_groups("layer", "int4", "row", 384, 2)


def test_dims_of_a_pair():
    found = {key: pair_dims(*key) for key in itertools.product(KINDS, DIVIDES)}
    assert found == PARTS_OF_A_PAIR
    for key, dims in found.items():
        grouped = {**dims, "u_scale": dims["u"], "v_scale": dims["v"]}
        assert pair_dims(*key, "int4") == grouped


def test_dims_of_a_dense_layer():
    assert matrix_dims("column", "fp8") == {"w": 1, "w_scale": 0, "bias": 0}
    assert matrix_dims("column", "int4") == {"w": 1, "w_scale": 1, "bias": 0}
    assert matrix_dims("row", "int8") == {"w": 0, "w_scale": None, "bias": None}
    assert matrix_dims("row", "int4") == {"w": 0, "w_scale": 0, "bias": None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("divide", DIVIDES)
@given(sizes=st.tuples(*[st.integers(1, 12)] * 3), tp=st.integers(1, 5), data=st.data())
def test_padded_parts_of_a_pair_give_its_product(kind, divide, sizes, tp, data):
    """The exchanges written out: what the ranks gather or add is that of whole factors."""
    K, r, N = sizes
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x, u, v, bias = (
        torch.randint(-4, 5, shape, generator=generator).double()
        for shape in ((3, K), (K, r), (r, N), (N,))
    )
    dims = pair_dims(kind, divide)

    def own(name: str, tensor: Tensor) -> list[Tensor]:
        return [shard(tensor, dims[name], rank, tp, name, padded=True) for rank in range(tp)]

    us, vs, biases = own("u", u), own("v", v), own("bias", bias)
    if kind == "row":
        xs = [shard(x, 1, rank, tp, "K", padded=True) for rank in range(tp)]
        low = torch.stack([x_i @ u_i for x_i, u_i in zip(xs, us, strict=True)]).sum(0)
    elif divide == "both":
        low = torch.cat([x @ u_i for u_i in us], 1)[:, :r]
    else:
        low = x @ us[0]
    whole = [low @ v_i + bias_i for v_i, bias_i in zip(vs, biases, strict=True)]
    y = whole[0] if dims["v"] is None else torch.cat(whole, 1)[:, :N]
    assert torch.equal(y, x @ u @ v + bias)


@given(size=st.integers(0, 40), tp=st.integers(1, 9))
def test_parts_are_those_of_dtensor(size, tp):
    tensor = torch.arange(size)
    parts = [tensor[part(size, rank, tp, "N", padded=True)] for rank in range(tp)]
    assert torch.equal(torch.cat(parts), tensor)
    chunks = [chunk.tolist() for chunk in tensor.chunk(tp)] if size else []
    assert [p.tolist() for p in parts if len(p)] == [chunk for chunk in chunks if chunk]
    assert {len(p) for p in parts} <= set(range(part_width(size, tp) + 1))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pair_dims("rows", "one"), "^kind must be column or row"),
        (lambda: pair_dims("row", "none"), "^divide must be one or both"),
        (
            lambda: part(10, 0, 3, "I"),
            "^tp must divide I, got I = 10 and tp = 3; use a tp that divides 10$",
        ),
        *[
            (lambda rank=rank, tp=tp: part(12, rank, tp, "I"), r"^rank must be in 0\.\.tp - 1")
            for rank, tp in ((3, 3), (-1, 2), (0, 0))
        ],
        (
            lambda: check_heads(32, 8, 3),
            "^tp must divide the heads, got 32 heads and tp = 3; use a tp that",
        ),
        (lambda: check_heads(24, 8, 6), "^tp must divide the key/value heads or be a multiple"),
        (lambda: check_heads(8, 8, 0), "tp must divide the heads"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_a_shard_is_a_padded_contiguous_copy(dtype):
    whole = torch.arange(20).reshape(4, 5).to(dtype)
    for given_ in (whole, whole.t().contiguous().t()):
        shards = [shard(given_, 1, rank, 4, "r", padded=True) for rank in range(4)]
        assert [s.shape for s in shards] == [(4, 2)] * 4
        assert all(s.is_contiguous() and s.dtype == dtype for s in shards)
        joined = torch.cat([s.float() for s in shards], 1)
        assert torch.equal(joined[:, :5], whole.float())
        assert not joined[:, 5:].any()
        copied = shard(given_, None, 1, 4, "r")
        assert torch.equal(copied.float(), whole.float())
        assert copied.is_contiguous()
        assert copied.data_ptr() != given_.data_ptr()


def test_parts_and_heads():
    assert part(12, 2, 3, "I") == slice(8, 12)
    assert check_heads(32, 8, 8) == check_heads(32, 8, 4) == check_heads(6, 3, 3) == 1
    assert check_heads(32, 8, 32) == 4
