"""Attention and RoPE: values against fp64, decode against prefill, two cores against one."""

import pytest
import torch
from attending import angles, attended, decoded, drawn, heads_of, norm_weights, on
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import CORES
from tolerances import assert_close_to_oracle
from torch import Tensor

import neuroncore as nc
from neuronmm_ops.kernels.attention import decode, units
from neuronmm_ops.kernels.attention.decode import attention_decode
from neuronmm_ops.kernels.attention.prefill import attention
from neuronmm_ops.kernels.rope.prefill import rope

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
head_dims = st.sampled_from([2, 32, 48, 64, 80, 96, 128])
groups = st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2), (15, 5)])
many = st.sampled_from([(40, 1), (70, 2), (66, 66)])
lengths = st.one_of(st.integers(1, 600), st.sampled_from([128, 640, 2048, 2177, 4500]))


def double(tensors: list[Tensor]) -> list[Tensor]:
    return [t.double() for t in tensors]


def check_decode(sizes, launch, dtype, positions, M=1, window=0, norm=False, scale=1.0):
    """Values of M new tokens a sequence from `positions` on; what the caches hold there is junk."""
    (H, kv, d, T), (target, lnc), B = sizes, launch, len(positions)
    qkv = drawn(B * M, (H + 2 * kv) * d, dtype=dtype, seed=1, scale=scale)
    k_cache = drawn(B, kv, d, T, dtype=dtype, seed=2, scale=scale)
    v_cache = drawn(B, kv, T, d, dtype=dtype, seed=3)
    weights = norm_weights(d, dtype) if norm else []
    cos, sin = angles(B * M, d, dtype)
    tensors = [qkv, cos, sin, k_cache, v_cache]
    oracle = decoded(*double(tensors), positions, double(weights), window)
    plain = decoded(*tensors, positions, weights, window)
    for b, position in enumerate(positions):
        k_cache[b, :, :, position:] = 1e4
        v_cache[b, :, position:] = 1e4
    kept = [k_cache.clone(), v_cache.clone()]
    tensors += [torch.tensor(positions, dtype=torch.int32), *weights]
    done = nc.simulate(on(attention_decode, lnc), *tensors, target=target, window=window)
    out, keys, values = done.outputs
    assert_close_to_oracle(out, oracle[0], plain[0], oracle[0].abs().clamp_min(1))
    assert torch.equal(keys, k_cache)
    for b, position in enumerate(positions):
        own = slice(position, position + M)
        assert_close_to_oracle(k_cache[b, ..., own], oracle[1][b, ..., own], plain[1][b, ..., own])
        assert torch.equal(values[b, :, own], plain[2][b, :, own])
        k_cache[b, ..., own], v_cache[b, :, own] = kept[0][b, ..., own], kept[1][b, :, own]
    assert torch.equal(k_cache, kept[0])  # nothing else is written
    assert torch.equal(v_cache, kept[1])


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(), heads=st.one_of(groups, many), d=head_dims, T=lengths, launch=CORES,
    dtype=st.sampled_from(DTYPES), norm=st.booleans(), window=st.sampled_from([0, 0, 1, 100]),
)  # fmt: skip
def test_decode_at_any_size(data, heads, d, T, launch, dtype, norm, window):
    most = min(8, T, 127 * heads[1] // heads[0])
    M = data.draw(st.integers(1, most))
    places = st.integers(0, T - M)
    positions = data.draw(st.lists(places, min_size=1, max_size=3))
    check_decode((*heads, d, T), launch, dtype, positions, M, window, norm)


@pytest.mark.parametrize("M", [1, 4])
@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_decode_at_the_edges_of_a_bucket(target, M):
    """One launch of a bucket serves every length."""
    positions = [0, 1, 127, 128, 129, 511, 640 - M - 1, 640 - M]
    check_decode((4, 2, 64, 640), (target, 1), torch.bfloat16, positions, M)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(), heads=st.sampled_from([(1, 1), (4, 1), (15, 5)]), d=head_dims, launch=CORES,
    T=st.sampled_from([129, 512, 2177, 4500]), window=st.sampled_from([0, 100]),
    scores=st.sampled_from([1, 600]), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_parts_of_a_cache_become_one(data, heads, d, launch, T, window, scores, dtype):
    """Few scores at a time make many parts; two cores share the tokens of one key head."""
    M = data.draw(st.integers(1, min(8, 127 * heads[1] // heads[0])))
    edges = st.sampled_from([0, min(127, T - M), T // 2 - M, T // 2, T - M])
    positions = data.draw(st.lists(edges, min_size=1, max_size=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "SCORES", scores)
        patch.setattr(units, "SHARED_TOKENS", 1)
        check_decode((*heads, d, T), launch, dtype, positions, M, window, scale=4.0)


def test_a_batch_of_sixteen_sequences():
    check_decode((8, 2, 64, 300), ("trn2", 2), torch.bfloat16, list(range(0, 288, 18)))


def check_prefill(sizes, launch, dtype, scale=1.0, **blocks):
    B, H, kv, d, M = sizes
    target, lnc = launch
    q = drawn(B, H, d, M, dtype=dtype, seed=1, scale=scale)
    k = drawn(B, kv, d, M, dtype=dtype, seed=2, scale=scale)
    v = drawn(B, kv, M, d, dtype=dtype, seed=3)
    done = nc.simulate(on(attention, lnc), q, k, v, target=target, **blocks)
    tensors = [q.transpose(2, 3), k.transpose(2, 3), v]
    oracle = attended(*double(tensors))
    assert_close_to_oracle(done.outputs, oracle, attended(*tensors), oracle.abs().clamp_min(1))
    return done


@settings(max_examples=30, deadline=None)
@given(
    B=st.integers(1, 2), heads=groups, d=head_dims, M=st.integers(1, 700), launch=CORES,
    dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_prefill_at_any_size(B, heads, d, M, launch, dtype):
    check_prefill((B, *heads, d, M), launch, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 12.0])
def test_softmax_is_safe(dtype, scale):
    """Scores of thousands, where exp alone overflows, and of zeros."""
    check_prefill((1, 2, 1, 64, 300), ("trn2", 1), dtype, scale)
    check_decode((2, 1, 64, 300), ("trn2", 1), dtype, [150], scale=scale)


@settings(max_examples=20, deadline=None)
@given(
    B=st.integers(1, 2), heads=groups, d=head_dims, M=st.integers(1, 600), launch=CORES,
    dtype=st.sampled_from(DTYPES), norm=st.booleans(), block=st.sampled_from([128, 512]),
)  # fmt: skip
def test_rope_at_any_size(B, heads, d, M, launch, dtype, norm, block):
    (H, kv), (target, lnc) = heads, launch
    qkv = drawn(B * M, (H + 2 * kv) * d, dtype=dtype, seed=1)
    cos, sin = angles(M, d, dtype)
    weights = norm_weights(d, dtype) if norm else []
    caches = [torch.full(s, torch.nan, dtype=dtype) for s in ((B, kv, d, M), (B, kv, M, d))]
    kernel = on(rope, lnc)
    tensors = [qkv, cos, sin, *caches, *weights]
    done = nc.simulate(kernel, *tensors, target=target, block=block)
    oracle = heads_of(*double([qkv, cos, sin]), H, kv, double(weights))
    plain = heads_of(qkv, cos, sin, H, kv, weights)
    for got, wanted, low in zip(done.outputs[:2], oracle[:2], plain[:2], strict=True):
        assert_close_to_oracle(got.transpose(2, 3), wanted, low)
    assert torch.equal(done.outputs[2], plain[2])
    assert torch.equal(caches[0], done.outputs[1])
    assert torch.equal(caches[1], plain[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_decoded_in_a_loop_are_those_of_prefill(dtype):
    """A prompt by `rope` and `attention`, then one and four tokens at a time."""
    B, H, kv, d, prompt, T = 2, 4, 2, 64, 61, 161
    qkv = drawn(B, T, (H + 2 * kv) * d, dtype=dtype, seed=1)
    cos, sin = angles(T, d, dtype)

    def prefilled(tokens):
        caches = [torch.zeros(s, dtype=dtype) for s in ((B, kv, d, tokens), (B, kv, tokens, d))]
        rows = qkv[:, :tokens].reshape(B * tokens, -1)
        q = nc.simulate(rope, rows, cos[:tokens], sin[:tokens], *caches, target="trn2").outputs[0]
        out = nc.simulate(attention, q, *caches, target="trn2").outputs
        return out.reshape(B, tokens, -1), *caches

    wanted, whole_keys, whole_values = prefilled(T)
    _, prompt_keys, prompt_values = prefilled(prompt)
    k_cache, v_cache = torch.zeros_like(whole_keys), torch.zeros_like(whole_values)
    k_cache[..., :prompt], v_cache[:, :, :prompt] = prompt_keys, prompt_values
    place, M = prompt, 1
    while place < T:
        own = slice(place, place + M)
        positions = torch.full((B,), place, dtype=torch.int32)
        rows = [qkv[:, own].reshape(B * M, -1), cos[own].repeat(B, 1), sin[own].repeat(B, 1)]
        launch = nc.simulate(attention_decode, *rows, k_cache, v_cache, positions, target="trn2")
        got = launch.outputs[0].reshape(B, M, -1)
        assert_close_to_oracle(got, wanted[:, own].double(), wanted[:, own], torch.ones(1))
        place, M = place + M, 4 if M == 1 and place % 4 == 0 and T - place > 4 else 1
    assert_close_to_oracle(k_cache, whole_keys.double(), whole_keys)
    assert torch.equal(v_cache, whole_values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": (9, 512)}, "at most 8 new tokens, and T, pass a cache together; got 9"),
        ({"qkv": (3, 512), "k": (1, 2, 64, 2)}, "at most 8 new tokens, and T"),
        (
            {"qkv": (3, 512), "k": (2, 2, 64, 8), "positions": (2,), "v": (2, 2, 8, 64)},
            r"qkv must be \(2, 512\), got \(3, 512\)",
        ),
        ({"cos": (2, 64)}, r"cos must be \(1, 64\), got \(2, 64\)"),
        ({"v": (1, 2, 64, 8)}, r"v_cache must be \(1, 2, 8, 64\)"),
        ({"positions": (2,)}, r"positions must be \(1,\), got \(2,\)"),
    ],
)
def test_operands_of_decode_are_checked(change, message):
    shapes = {"qkv": (1, 512), "cos": (1, 64), "sin": (1, 64), "k": (1, 2, 64, 8)}
    shapes |= {"v": (1, 2, shapes["k"][3], 64), "positions": (1,)} | change
    tensors = [torch.zeros(shape) for shape in shapes.values()]
    tensors[-1] = tensors[-1].int()
    with pytest.raises(AssertionError, match=message):
        nc.simulate(attention_decode, *tensors, target="trn2")
