"""Attention and RoPE: values against fp64, decode against prefill, two cores against one."""

import pytest
import torch
from attending import angles, attended, drawn, heads_of, norm_weights, on
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import CORES
from tolerances import assert_close_to_oracle
from torch import Tensor

import neuroncore as nc
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


def check_decode(sizes, launch, dtype, norm=False, scale=1.0, **blocks):
    B, H, kv, d, T = sizes
    target, lnc = launch
    qkv = drawn(B, (H + 2 * kv) * d, dtype=dtype, seed=1, scale=scale)
    k_cache = drawn(B, kv, d, T, dtype=dtype, seed=2, scale=scale)
    v_cache = drawn(B, kv, T, d, dtype=dtype, seed=3)
    weights = norm_weights(d, dtype) if norm else []
    cos, sin = angles(1, d, dtype)

    def composed(qkv, cos, sin, k_cache, v_cache, *weights):
        q, k, v = heads_of(qkv, cos, sin, H, kv, list(weights))
        keys = torch.cat([k_cache[..., :-1].transpose(2, 3), k], 2)
        values = torch.cat([v_cache[:, :, :-1], v], 2)
        return attended(q, keys, values), keys.transpose(2, 3), values

    tensors = [qkv, cos, sin, k_cache, v_cache, *weights]
    oracle, plain = composed(*double(tensors)), composed(*tensors)
    k_cache[..., -1] = torch.nan  # what is there before is not read
    v_cache[:, :, -1] = torch.nan
    done = nc.simulate(on(attention_decode, lnc), *tensors, target=target, **blocks)
    for got, wanted, low in zip(done.outputs, oracle, plain, strict=True):
        assert_close_to_oracle(got, wanted, low, wanted.abs().clamp_min(1))
    assert torch.equal(k_cache, done.outputs[1])
    assert torch.equal(v_cache, plain[2])


@settings(max_examples=30, deadline=None)
@given(
    B=st.integers(1, 3), heads=st.one_of(groups, many), d=head_dims, T=lengths, launch=CORES,
     dtype=st.sampled_from(DTYPES), norm=st.booleans(),
)  # fmt: skip
def test_decode_at_any_size(B, heads, d, T, launch, dtype, norm):
    check_decode((B, *heads, d, T), launch, dtype, norm)


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
    check_decode((1, 2, 1, 64, 300), ("trn2", 1), dtype, scale=scale)


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
def test_decode_is_the_last_row_of_prefill(dtype):
    B, H, kv, d, M = 2, 4, 2, 64, 261
    qkv = drawn(B * M, (H + 2 * kv) * d, dtype=dtype, seed=1)
    cos, sin = angles(M, d, dtype)
    caches = [torch.zeros(s, dtype=dtype) for s in ((B, kv, d, M), (B, kv, M, d))]
    q = nc.simulate(rope, qkv, cos, sin, *caches, target="trn2").outputs[0]
    rows = nc.simulate(attention, q, *caches, target="trn2").outputs
    kept = [c.clone() for c in caches]
    last = [qkv.reshape(B, M, -1)[:, -1].contiguous(), cos[-1:], sin[-1:], *caches]
    got = nc.simulate(attention_decode, *last, target="trn2").outputs[0]
    wanted = rows.reshape(B, M, -1)[:, -1]
    assert_close_to_oracle(got, wanted.double(), wanted, torch.ones(1))
    for cache, before in zip(caches, kept, strict=True):
        assert_close_to_oracle(cache, before.double(), before)
