"""Attention of a chunk of a prompt with the cache of what is before it: kernel and op."""

from typing import Any

import pytest
import torch
from attending import EPS, angles, decoded, drawn, norm_weights, on
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import CORES
from tolerances import assert_close_to_oracle, assert_same_in_fp64
from torch import Tensor

import neuroncore as nc
import neuronmm_ops as nm
from neuronmm_ops.kernels.attention.prefill import attention_chunk
from neuronmm_ops.plan import plan_op

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
head_dims = st.sampled_from([2, 32, 48, 64, 96, 128])
groups = st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2), (15, 5)])


def check_chunk(sizes, launch, dtype, positions, M, window=0, norm=False):
    """Values of M tokens a sequence from `positions` on; what the caches hold there is junk."""
    (H, kv, d, T), (target, lnc), B = sizes, launch, len(positions)
    qkv = drawn(B * M, (H + 2 * kv) * d, dtype=dtype, seed=1)
    k_cache = drawn(B, kv, d, T, dtype=dtype, seed=2)
    v_cache = drawn(B, kv, T, d, dtype=dtype, seed=3)
    weights = norm_weights(d, dtype) if norm else []
    cos, sin = angles(B * M, d, dtype)
    wide = [t.double() for t in (qkv, cos, sin, k_cache, v_cache)]
    oracle = decoded(*wide, positions, [w.double() for w in weights], window)
    plain = decoded(qkv, cos, sin, k_cache, v_cache, positions, weights, window)
    for b, position in enumerate(positions):
        k_cache[b, :, :, position:] = 1e4
        v_cache[b, :, position:] = 1e4
    kept = [k_cache.clone(), v_cache.clone()]
    parts = [part.contiguous() for part in qkv.split([H * d, kv * d, kv * d], 1)]
    places = torch.tensor(positions, dtype=torch.int32)
    tensors = [*parts, cos, sin, k_cache, v_cache, places, *weights]
    done = nc.simulate(on(attention_chunk, lnc), *tensors, target=target, eps=EPS, window=window)
    assert_close_to_oracle(done.outputs[0], oracle[0], plain[0], oracle[0].abs().clamp_min(1))
    assert torch.equal(done.outputs[1], k_cache)
    for b, position in enumerate(positions):
        own = slice(position, position + M)
        assert_close_to_oracle(k_cache[b, ..., own], oracle[1][b, ..., own], plain[1][b, ..., own])
        assert torch.equal(v_cache[b, :, own], plain[2][b, :, own])
        k_cache[b, ..., own], v_cache[b, :, own] = kept[0][b, ..., own], kept[1][b, :, own]
    assert torch.equal(k_cache, kept[0])  # nothing else is written
    assert torch.equal(v_cache, kept[1])


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(), heads=groups, d=head_dims, M=st.integers(1, 600), launch=CORES,
    dtype=st.sampled_from(DTYPES), norm=st.booleans(), window=st.sampled_from([0, 0, 1, 100, 300]),
)  # fmt: skip
def test_a_chunk_at_any_size(data, heads, d, M, launch, dtype, norm, window):
    T = M + data.draw(st.integers(0, 700))
    places = st.integers(0, T - M)
    positions = data.draw(st.lists(places, min_size=1, max_size=3))
    check_chunk((*heads, d, T), launch, dtype, positions, M, window, norm)


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("M", [1, 127, 128, 129, 639, 640])
def test_chunks_at_the_edges_of_a_bucket(target, M):
    """One launch of a bucket serves every position."""
    positions = sorted({min(place, 640 - M) for place in (0, 1, 127, 128, 129, 511)})
    check_chunk((4, 2, 64, 640), (target, 1), torch.bfloat16, positions, M)


def operands(
    dtype: torch.dtype, M: int, positions: list[int], norm: bool = False, T: int = 200
) -> dict[str, Any]:
    """Operands of the op by name: 4 heads of 32 and 2 key heads, a cache of T tokens."""
    B, H, kv, d = len(positions), 4, 2, 32
    query = drawn(B, M, H * d, dtype=dtype, seed=1)
    key, value = [drawn(B, M, kv * d, dtype=dtype, seed=seed) for seed in (2, 3)]
    cos, sin = [table.view(B, M, d) for table in angles(B * M, d, dtype)]
    given = {"query": query, "key": key, "value": value, "cos": cos, "sin": sin}
    given["key_cache"] = drawn(B, kv, d, T, dtype=dtype, seed=4)
    given["value_cache"] = drawn(B, kv, T, d, dtype=dtype, seed=5)
    given["positions"] = torch.tensor(positions, dtype=torch.int32)
    if norm:
        given |= dict(zip(("query_norm", "key_norm"), norm_weights(d, dtype), strict=True))
    return given


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in given.items()}


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("norm", [False, True])
def test_the_reference_is_attention_in_fp64(norm, window):
    given = operands(torch.float64, 40, [0, 21, 160], norm)
    rows = torch.cat([given[name] for name in ("query", "key", "value")], -1).flatten(0, 1)
    tables = [given[name].flatten(0, 1) for name in ("cos", "sin")]
    caches = [given[name] for name in ("key_cache", "value_cache")]
    weights = [given[name] for name in ("query_norm", "key_norm") if norm]
    wanted = decoded(rows, *tables, *caches, [0, 21, 160], weights, window)
    found = nm.attention(**given, eps=EPS, window=window)
    assert_same_in_fp64(found.flatten(0, 1), wanted[0])
    for own, expected in zip(caches, wanted[1:], strict=True):
        assert_same_in_fp64(own, expected)


@pytest.mark.parametrize("norm", [False, True])
def test_opcheck(norm):
    given = operands(torch.float32, 12, [3, 50], norm)
    torch.library.opcheck(torch.ops.neuronmm.attention.default, (), given)


@pytest.mark.parametrize("norm", [False, True])
def test_the_simulated_op_has_the_values_of_the_reference(norm):
    given = operands(torch.float32, 70, [3, 130], norm)
    there = copied(given)
    with nm.use_impl("simulated", target="trn2"):
        found = nm.attention(**there, eps=EPS, window=50)
    torch.testing.assert_close(
        found, nm.attention(**given, eps=EPS, window=50), rtol=1e-4, atol=1e-4
    )
    for name in ("key_cache", "value_cache"):
        torch.testing.assert_close(there[name], given[name], rtol=1e-4, atol=1e-4)


def test_a_compiled_call_changes_the_caches():
    given = operands(torch.float32, 12, [3, 50])
    there = copied(given)
    compiled = torch.compile(nm.attention, fullgraph=True, backend="aot_eager")
    for place in (3, 60):  # read at run time
        both = [{**each, "positions": torch.tensor([place, 9]).int()} for each in (given, there)]
        torch.testing.assert_close(compiled(**both[1]), nm.attention(**both[0]))
    assert torch.equal(there["key_cache"], given["key_cache"])


def in_chunks(given: dict[str, Any], sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """A prompt in chunks of so many tokens from empty caches: output and caches."""
    caches = {name: torch.zeros_like(given[name]) for name in ("key_cache", "value_cache")}
    outputs, place = [], 0
    for M in sizes:
        names = ("query", "key", "value", "cos", "sin")
        part = {name: given[name][:, place : place + M].contiguous() for name in names}
        positions = torch.full_like(given["positions"], place)
        outputs.append(nm.attention(**part, **caches, positions=positions))
        place += M
    return torch.cat(outputs, 1), *caches.values()


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_one_after_the_other_are_the_prompt_at_once(dtype):
    """Chunks, the last ones of a token: a prompt that is continued by decoding."""
    given = operands(dtype, 300, [0, 0], T=320)
    wide = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
    with nm.use_impl("simulated", target="trn2"):
        found = in_chunks(given, [128, 130, 40, 1, 1])
        whole = in_chunks(given, [300])
    oracle, plain = in_chunks(wide, [300]), in_chunks(given, [300])
    for chunks, once, exact, rough in zip(found, whole, oracle, plain, strict=True):
        magnitude = exact.abs().clamp_min(1)
        assert_close_to_oracle(chunks, exact, rough, magnitude)
        assert_close_to_oracle(once, exact, rough, magnitude)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"positions": [189, 0]},
            r"^attention: positions must be in 0..T - M = 188, got \[189, 0\]",
        ),
        ({"positions": [-1, 0]}, r"positions must be in 0..T - M = 188, got \[-1, 0\]"),
        (
            {"positions": [0], "key_cache": (1, 2, 32, 200), "value_cache": (1, 2, 200, 32)},
            "positions must have one place a sequence; got 1 for a batch of 2",
        ),
        ({"query": (2, 12, 96)}, "query heads must be a multiple of kv heads, got 96 features"),
        (
            {"key": (2, 12, 32), "value": (2, 12, 32)},
            "key must have 2 heads of 32, got 32 features",
        ),
        ({"query": (24, 128)}, r"query must have shape \[B, M, heads"),
        ({"query_norm": (32,)}, "norms of query and key heads come together"),
        ({"key_cache": (2, 2, 32, 9), "value_cache": (2, 2, 9, 32)}, "room for 12 new tokens"),
        ({"window": -1}, "window must be 0, for all tokens, or more; got -1"),
    ],
)
def test_bad_input_is_one_line_before_a_launch(change, message):
    given = operands(torch.float32, 12, [0, 0])
    if "query" in change and len(change["query"]) == 2:
        given = {n: t.flatten(0, 1) if t.dim() == 3 else t for n, t in given.items()}
    for name, value in change.items():
        is_shape = isinstance(value, tuple)
        given[name] = torch.zeros(value) if is_shape else value
        if name == "positions":
            given[name] = torch.tensor(value, dtype=torch.int32)
    with pytest.raises(ValueError, match=message) as refused:
        nm.attention(**given)
    assert "\n" not in str(refused.value)


def planned(M: int, T: int):
    """The plan of a chunk of Llama-3.2-1B."""
    others = (
        ("query", (-1, 2048), ""), ("key", (-1, 512), ""), ("value", (-1, 512), ""),
        ("cos", (-1, 64), ""), ("sin", (-1, 64), ""), ("key_cache", (1, 8, 64, T), ""),
        ("value_cache", (1, 8, T, 64), ""), ("positions", (1,), "int32"),
    )  # fmt: skip
    return plan_op("attention", M, (), target="trn2", others=others)


def test_a_chunk_is_planned_by_its_trace(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = planned(128, 8192)
    assert (plan.kernel, plan.launches) == ("attention_chunk", (128,))
    assert plan.time_ms < planned(256, 8192).time_ms
    with pytest.raises(ValueError, match="fits SBUF on trn2; take fewer tokens, or a shorter T"):
        planned(128, 2**17)
