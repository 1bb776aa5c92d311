"""What each rank holds of a layer of vLLM, without vLLM: the ranks together have the whole."""

# pyright: basic, reportOptionalMemberAccess=false, reportArgumentType=false

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized import random_factors

from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.members import ROWS_AT_A_TIME, DenseMember, Pair, unpacked
from neuronmm_ops.engines.places import Shard, joined, member_sections
from neuronmm_ops.errors import CheckpointError, NonFiniteError
from neuronmm_ops.ops import xuv, xw
from neuronmm_ops.parallel.sharding import DIVIDES, split_gathered

STORAGES = (None, "fp8", "int8")
WHOLE = Shard(None, "both", 0, 1)


def record(K: int, r: int, N: int, storage: str | None = None) -> LayerReport:
    return LayerReport("model.layers.0.q_proj", K, N, r, False, None, None, 1, 1, storage)


def dense(name: str, K: int, N: int) -> LayerReport:
    return LayerReport(name, K, N, None, True, None, None, 0, 0)


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


def sections_of(place: Shard = WHOLE, name: str = "q_proj", width: int = 5):
    """Of a layer of one member."""
    return member_sections([name], [width], [1], place)[0]


def small_pair(tensors, storage: str | None = None, pack=None, place: Shard = WHOLE) -> Pair:
    return loaded(record(8, 3, 5, storage), place, sections_of(place), tensors, pack)


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
        sections = sections_of(place, "o_proj", N)
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
    pair = small_pair(tensors, place=Shard(None, "both", 1, 2))
    assert torch.equal(pair.u, tensors["u"])
    assert torch.equal(pair.v, tensors["v"])
    assert pair.u.t().is_contiguous()
    assert pair.v.t().is_contiguous()


def test_dense_members_have_their_ranks_rows():
    weight = torch.randn(6, 4)
    rows = []
    for place in ranks_of(2, "column", "both"):
        _, own = member_sections(["gate_proj", "up_proj"], [4, 3], [1, 1], place)
        own_rows = DenseMember(
            dense("up_proj", 4, sum(s.size for s in own)), place, own, torch.float32
        )
        own_rows.load("weight", weight)
        own_rows.check_missing()
        rows.append(own_rows.weight)
    assert torch.equal(torch.cat(rows), weight)


def copied(weight: torch.Tensor):
    """A product with a weight that is kept elsewhere, as packed ones are."""
    kept = weight.clone()
    return lambda x: torch.nn.functional.linear(x, kept)


def members_of(tensors, weight: torch.Tensor, pack=None) -> tuple[Pair, DenseMember]:
    """A pair, and a dense member of the same size, on one rank."""
    own = DenseMember(dense("up", 8, 5), WHOLE, sections_of(), torch.float32, pack)
    own.load("weight", weight)
    return small_pair(tensors, pack=pack), own


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
    x, pair = torch.randn(4, 8), small_pair(checkpoint(8, 3, 5, None), pack=copied)
    before = pair.product(x, None)
    pair.load("u", torch.randn(8, 3))
    assert torch.equal(pair.product(x, None), before)
    with pytest.raises(CheckpointError, match=r"q_proj\.v: config\.json asks for \[3, 5\]"):
        pair.check_missing()


def test_a_rehearsal_is_checked_and_loads_nothing():
    tensors = checkpoint(8, 3, 5, None)
    pair = small_pair(tensors)
    pair.load("u", torch.randn(8, 3), is_rehearsal=True)
    assert torch.equal(pair.u, tensors["u"])
    with pytest.raises(CheckpointError, match=r"asks for \[8, 3\], the file has \[8, 4\]"):
        pair.load("u", torch.randn(8, 4), is_rehearsal=True)


def test_factors_in_one_byte_are_not_packed():
    tensors = checkpoint(8, 3, 5, "int8")
    pair = small_pair(tensors, "int8", copied)
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
    ("storage", "key", "tensor", "problem"),
    [
        (None, "u", torch.zeros(8, 4), r"q_proj\.u: config\.json asks for \[8, 3\], .* has \[8, 4"),
        (None, "u", torch.zeros(8, 3).char(), "asks for bfloat16 or float16 or .* has int8"),
        (None, "u", torch.zeros(8, 3).int(), "asks for bfloat16 or float16 or .* int32"),
        (None, "u_scale", torch.ones(3), r"u_scale: config\.json says nothing of it"),
        (
            None,
            "weight",
            torch.zeros(5, 8),
            r"weight: config\.json says nothing of it, .* \[5, 8\]",
        ),
        ("int8", "u", torch.zeros(8, 3), "u: config.json asks for int8, the file has float32"),
        (
            "int8",
            "v_scale",
            torch.ones(5).bfloat16(),
            "v_scale: .* asks for float32, .* has bfloat16",
        ),
    ],
)
def test_tensors_that_the_record_does_not_describe_are_refused(storage, key, tensor, problem):
    pair = Pair(record(8, 3, 5, storage), WHOLE, sections_of(), torch.float32)
    missing = set(pair.missing)
    with pytest.raises(CheckpointError, match=problem) as error:
        pair.load(key, tensor)
    assert "\n" not in str(error.value)
    assert pair.missing == missing >= {"u", "v"}


@pytest.mark.parametrize("storage", STORAGES)
def test_a_missing_tensor_is_named(storage):
    tensors = checkpoint(8, 3, 5, storage)
    for key in tensors:
        some = {name: tensor for name, tensor in tensors.items() if name != key}
        with pytest.raises(CheckpointError, match=rf"0\.q_proj\.{key}: .* the files have none"):
            small_pair(some, storage)


@pytest.mark.parametrize(
    ("storage", "key", "value", "error", "words"),
    [
        (None, "v", torch.nan, NonFiniteError, r"0\.q_proj"),
        ("int8", "u", -128, CheckpointError, r"q_proj: u must be in -127\.\.127"),
        ("fp8", "v_scale", 0, CheckpointError, r"q_proj: v_scale must be .* positive"),
    ],
)
@pytest.mark.parametrize("place", [WHOLE, Shard("row", "both", 1, 2)])
def test_values_that_cannot_be_are_refused(storage, key, value, error, words, place):
    tensors = checkpoint(8, 3, 5, storage)
    tensors[key].view(-1)[-1] = value
    with pytest.raises(error, match=words):
        small_pair(tensors, storage, place=place)


@pytest.mark.parametrize("storage", ["fp8", "int8"])
def test_scales_are_in_fp32_whatever_the_models_dtype(storage):
    """vLLM loads with the model's dtype as torch's default."""
    tensors = checkpoint(8, 3, 5, storage)
    torch.set_default_dtype(torch.bfloat16)
    try:
        pair = small_pair(tensors, storage)
    finally:
        torch.set_default_dtype(torch.float32)
    assert pair.u_scale.dtype == pair.v_scale.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_weight_is_taken_out_exactly(dtype):
    weight = torch.randn(3, 2 * ROWS_AT_A_TIME + 5).to(dtype)
    assert torch.equal(unpacked(lambda x: x @ weight.t(), weight.to("meta")), weight)
