"""What each rank holds of a layer of vLLM, without vLLM: the ranks together have the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized import random_factors

from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.errors import CheckpointError, NonFiniteError
from neuronmm_ops.integrations.vllm.factors import Dense, Pair
from neuronmm_ops.integrations.vllm.places import Shard, joined, member_sections, split_gathered
from neuronmm_ops.ops import xuv, xw
from neuronmm_ops.parallel.sharding import DIVIDES

STORAGES = (None, "fp8", "int8")
WHOLE = Shard(None, "both", 0, 1)


def record(K: int, r: int, N: int, storage: str | None = None) -> LayerReport:
    return LayerReport("model.layers.0.q_proj", K, N, r, False, None, None, 1, 1, storage)


def checkpoint(K: int, r: int, N: int, storage: str | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(K + r + N)
    if storage is None:
        return {"u": torch.randn(K, r) / K**0.5, "v": torch.randn(r, N) / r**0.5}
    return dict(
        zip(("u", "v", "u_scale", "v_scale"), random_factors(K, r, N, storage), strict=True)
    )


def loaded(layer: LayerReport, place: Shard, sections, tensors, pack=None) -> Pair:
    pair = Pair(layer, place, sections, torch.float32, pack)
    for key, tensor in tensors.items():
        pair.load(key, tensor)
    pair.load("weight", torch.empty(0))  # the placeholder
    pair.check_missing()
    return pair


def ranks_of(tp: int, kind, divide):
    return [Shard(kind, divide, rank, tp) for rank in range(tp)]


def second(pair: Pair, low: torch.Tensor) -> torch.Tensor:
    return xw(low, pair.v, None, pair.v_scale)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("divide", DIVIDES)
@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(1, 3), st.integers(1, 2))
def test_ranks_of_a_column_layer_make_its_columns(storage, divide, tp, r, width, kv_width):
    """Two sections, the second with heads on fewer ranks than there are."""
    copies = tp if tp < 4 else 2
    replicas = [1, copies]
    K, N = 24, width * tp + kv_width * tp // copies
    tensors, x = checkpoint(K, r, N, storage), torch.randn(3, K)
    pairs = []
    for place in ranks_of(tp, "column", divide):
        (sections,) = member_sections(["qkv_proj"], [width, kv_width], replicas, place)
        pairs.append(loaded(record(K, r, N, storage), place, sections, tensors))
    lows = [xw(x, pair.u, None, pair.u_scale) for pair in pairs]
    if divide == "both":
        (low,) = split_gathered(torch.cat(lows, -1), [pairs[0].u.shape[1]], tp)
        lows = [low] * tp
    whole = xuv(x, tensors["u"], tensors["v"], None, *list(tensors.values())[2:])
    for rank, (pair, low) in enumerate(zip(pairs, lows, strict=True)):
        first = slice(rank * width, (rank + 1) * width)
        start = width * tp + rank // copies * kv_width
        expected = torch.cat([whole[:, first], whole[:, start : start + kv_width]], -1)
        torch.testing.assert_close(second(pair, low), expected)
        assert pair.width == width + kv_width


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("divide", DIVIDES)
@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(1, 9))
def test_ranks_of_a_row_layer_make_its_sum(storage, divide, tp, r, N):
    K = 6 * tp
    tensors, x = checkpoint(K, r, N, storage), torch.randn(3, K)
    pairs = []
    for place in ranks_of(tp, "row", divide):
        (sections,) = member_sections(["o_proj"], [N], [1], place)
        pairs.append(loaded(record(K, r, N, storage), place, sections, tensors))
    parts = x.split(K // tp, -1)
    low = torch.stack(
        [xw(part, pair.u, None, pair.u_scale) for part, pair in zip(parts, pairs, strict=True)]
    ).sum(0)
    whole = xuv(x, tensors["u"], tensors["v"], None, *list(tensors.values())[2:])
    results = [second(pair, low) for pair in pairs]
    if divide == "both":
        results = [torch.cat(results, -1)[:, : pairs[0].width]]
    for result in results:
        torch.testing.assert_close(result, whole)


def test_a_layer_that_is_not_divided_is_whole():
    tensors = checkpoint(8, 3, 5, None)
    (sections,) = member_sections(["gate"], [5], [1], Shard(None, "both", 1, 2))
    pair = loaded(record(8, 3, 5), Shard(None, "both", 1, 2), sections, tensors)
    assert torch.equal(pair.u, tensors["u"])
    assert torch.equal(pair.v, tensors["v"])
    assert pair.u.t().is_contiguous()
    assert pair.v.t().is_contiguous()


def test_dense_members_have_their_ranks_rows():
    weight = torch.randn(6, 4)
    rows = []
    for place in ranks_of(2, "column", "both"):
        _, own = member_sections(["gate_proj", "up_proj"], [4, 3], [1, 1], place)
        dense = Dense("up_proj", 4, own, torch.float32)
        dense.load("weight", weight)
        dense.check_missing()
        rows.append(dense.weight)
    assert torch.equal(torch.cat(rows), weight)


def copied(weight: torch.Tensor):
    """A product with a weight that is kept elsewhere, as packed ones are."""
    kept = weight.clone()
    return lambda x: torch.nn.functional.linear(x, kept)


def members_of(tensors, weight: torch.Tensor, pack=None) -> tuple[Pair, Dense]:
    """A pair, and a dense member of the same size, on one rank."""
    (sections,) = member_sections(["gate"], [5], [1], WHOLE)
    dense = Dense("up", 8, sections, torch.float32, pack)
    dense.load("weight", weight)
    return loaded(record(8, 3, 5), WHOLE, sections, tensors, pack), dense


def test_packed_members_multiply_by_what_was_loaded_last():
    first, second = torch.randn(5, 8), torch.randn(5, 8)
    tensors, others = checkpoint(8, 3, 5, None), {"u": torch.randn(8, 3), "v": torch.randn(3, 5)}
    x, bias = torch.randn(4, 8), torch.randn(5)
    packed = members_of(tensors, first, copied)
    for member, expected in zip(packed, members_of(tensors, first), strict=True):
        torch.testing.assert_close(member.product(x, bias), expected.product(x, bias))
        assert all(parameter.is_meta for parameter in member.parameters())
    torch.testing.assert_close(packed[0].low(x), x @ tensors["u"])
    for key, tensor in others.items():
        packed[0].load(key, tensor)
    packed[1].load("weight", second)
    for member, expected in zip(packed, members_of(others, second), strict=True):
        torch.testing.assert_close(member.product(x, None), expected.product(x, None))


def test_a_pair_answers_as_before_until_both_factors_are_loaded_again():
    tensors, x = checkpoint(8, 3, 5, None), torch.randn(4, 8)
    pair, _ = members_of(tensors, torch.randn(5, 8), copied)
    before = pair.product(x, None)
    pair.load("u", torch.randn(8, 3))
    assert torch.equal(pair.product(x, None), before)
    with pytest.raises(CheckpointError, match=r"q_proj\.v: config\.json asks for \[3, 5\]"):
        pair.check_missing()


def test_a_rehearsal_is_checked_and_loads_nothing():
    tensors = checkpoint(8, 3, 5, None)
    pair, _ = members_of(tensors, torch.randn(5, 8))
    pair.load("u", torch.randn(8, 3), is_rehearsal=True)
    assert torch.equal(pair.u, tensors["u"])
    with pytest.raises(CheckpointError, match=r"asks for \[8, 3\], the file has \[8, 4\]"):
        pair.load("u", torch.randn(8, 4), is_rehearsal=True)


def test_factors_in_one_byte_are_not_packed():
    (sections,) = member_sections(["gate"], [5], [1], WHOLE)
    tensors = checkpoint(8, 3, 5, "int8")
    pair = loaded(record(8, 3, 5, "int8"), WHOLE, sections, tensors, copied)
    assert not pair.packed
    assert torch.equal(pair.u, tensors["u"])


def test_members_share_a_gather():
    """Each rank sends its columns of all members side by side."""
    lows = torch.randn(5, 4), torch.randn(5, 6)
    sent = [joined([low[:, rank::2] for low in lows]) for rank in range(2)]
    given = split_gathered(torch.cat(sent, -1), [2, 3], 2)
    for low, found in zip(lows, given, strict=True):
        assert torch.equal(found, torch.cat([low[:, 0::2], low[:, 1::2]], -1))


def test_members_and_sections_must_fit():
    with pytest.raises(ValueError, match=r"a member for each section, got a, b for 3 sections"):
        member_sections(["a", "b"], [1, 1, 1], [1, 1, 1], Shard(None, "both", 0, 1))


@pytest.mark.parametrize(
    ("key", "tensor", "problem"),
    [
        ("u", torch.zeros(8, 4), r"q_proj\.u: config\.json asks for \[8, 3\], the file has \[8, 4"),
        ("u", torch.zeros(8, 3, dtype=torch.int8), "asks for bfloat16 or float16 or .* has int8"),
        ("u", torch.zeros(8, 3, dtype=torch.int32), "asks for bfloat16 or float16 or .* int32"),
        ("u_scale", torch.ones(3), r"u_scale: config\.json says nothing of it"),
        ("weight", torch.zeros(5, 8), r"weight: config\.json says nothing of it, .* \[5, 8\]"),
    ],
)
def test_tensors_that_the_record_does_not_describe_are_refused(key, tensor, problem):
    (sections,) = member_sections(["q_proj"], [5], [1], WHOLE)
    pair = Pair(record(8, 3, 5), WHOLE, sections, torch.float32)
    with pytest.raises(CheckpointError, match=problem) as error:
        pair.load(key, tensor)
    assert "\n" not in str(error.value)
    assert pair.missing == {"u", "v"}


@pytest.mark.parametrize(
    ("key", "tensor", "problem"),
    [
        ("u", torch.zeros(8, 3), "u: config.json asks for int8, the file has float32"),
        ("v_scale", torch.ones(5).bfloat16(), "v_scale: .* asks for float32, .* has bfloat16"),
    ],
)
def test_one_byte_factors_have_their_dtypes(key, tensor, problem):
    (sections,) = member_sections(["q_proj"], [5], [1], WHOLE)
    pair = Pair(record(8, 3, 5, "int8"), WHOLE, sections, torch.float32)
    with pytest.raises(CheckpointError, match=problem):
        pair.load(key, tensor)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_missing_tensor_is_named(storage):
    tensors = checkpoint(8, 3, 5, storage)
    for key in tensors:
        (sections,) = member_sections(["q_proj"], [5], [1], WHOLE)
        some = {name: tensor for name, tensor in tensors.items() if name != key}
        with pytest.raises(CheckpointError, match=rf"0\.q_proj\.{key}: .* the files have none"):
            loaded(record(8, 3, 5, storage), WHOLE, sections, some)


def test_values_that_cannot_be_are_refused():
    (sections,) = member_sections(["q_proj"], [5], [1], WHOLE)
    tensors = checkpoint(8, 3, 5, None)
    tensors["v"][1, 2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"0\.q_proj"):
        loaded(record(8, 3, 5), WHOLE, sections, tensors)
    tensors = checkpoint(8, 3, 5, "int8")
    tensors["u"][1, 2] = -128
    with pytest.raises(CheckpointError, match=r"q_proj: u must be in -127\.\.127"):
        loaded(record(8, 3, 5, "int8"), WHOLE, sections, tensors)
    tensors = checkpoint(8, 3, 5, "fp8")
    tensors["v_scale"][4] = 0
    for place in (WHOLE, Shard("row", "both", 1, 2)):
        (sections,) = member_sections(["q_proj"], [5], [1], place)
        with pytest.raises(CheckpointError, match=r"q_proj: v_scale must be .* positive"):
            loaded(record(8, 3, 5, "fp8"), place, sections, tensors)


@pytest.mark.parametrize("storage", STORAGES)
def test_scales_are_in_fp32_whatever_the_models_dtype(storage):
    """vLLM loads with the model's dtype as torch's default."""
    tensors = checkpoint(8, 3, 5, storage)
    (sections,) = member_sections(["q_proj"], [5], [1], WHOLE)
    torch.set_default_dtype(torch.bfloat16)
    try:
        pair = loaded(record(8, 3, 5, storage), WHOLE, sections, tensors)
    finally:
        torch.set_default_dtype(torch.float32)
    assert storage is None or pair.u_scale.dtype == pair.v_scale.dtype == torch.float32
