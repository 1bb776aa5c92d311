"""Plans of attention and RoPE: work, launches, refusals."""

from dataclasses import replace

import pytest

from neuronmm_ops.estimate.attention import plan_attention
from neuronmm_ops.estimate.rope import plan_rope
from neuronmm_ops.kernels.attention import units
from neuronmm_ops.plan import MAX_INSTRUCTIONS

LLAMA_1B = {"heads": 32, "kv_heads": 8, "head_dim": 64}
LLAMA_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128}


def test_decode_reads_the_cache_once():
    (plan,) = plan_attention(1, 4096, batch=1, **LLAMA_8B, target="trn2")
    cache = 2 * 8 * 4096 * 128 * 2
    seen = plan.profile("trn2")
    read = {t.name: t.read_bytes for t in seen.tensors}
    assert read["k_cache"] + read["v_cache"] == cache


def test_a_window_is_all_that_is_read_of_a_long_cache():
    options = {"batch": 1, **LLAMA_8B, "target": "trn2"}
    (short,), (long,) = [plan_attention(1, T, **options) for T in (4096, 32768)]
    cost = replace(long, arguments={"window": 4096}).cost("trn2")
    assert cost.hbm_bytes < 1.01 * short.cost("trn2").hbm_bytes
    assert cost.times_ms[0] < 1.1 * short.cost("trn2").times_ms[0]


def test_two_cores_share_the_tokens_of_one_key_head_where_it_is_quicker(monkeypatch):
    def times_ms(T, shared):
        monkeypatch.setattr(units, "SHARED_TOKENS", shared)
        options = {"batch": 1, "heads": 4, "kv_heads": 1, "head_dim": 128, "lnc": 2}
        (launch,) = plan_attention(1, T, **options)
        return launch.cost("trn2").times_ms

    shared = units.SHARED_TOKENS
    for T in (2048, 4096, 8192, 32768, 131072):
        chosen, *others = [times_ms(T, tokens) for tokens in (shared, 1, 2**30)]
        assert chosen == min(others)
    assert max(chosen) < 0.6 * max(others[1])


def test_only_the_lower_triangle_is_computed():
    M, d = 2048, 64
    (plan,) = plan_attention(M, M, batch=1, heads=1, kv_heads=1, head_dim=d, target="trn2")
    tiles = M // 128
    pairs = tiles * (tiles + 1) // 2 * 128 * 128
    per_pair = 2 * d + 2 * (d + 1) + 2 * (d + 1)  # maxima, scores less these, values and a sum
    diagonal = 2 * tiles * 128**3 * 2
    seen = plan.profile("trn2")
    # maxima of a tile are found a bank of 512 keys at a time, the last one cut at the diagonal
    assert seen.flops == pairs * per_pair + diagonal


def test_two_cores_share_a_prompt_and_a_cache():
    model = {"heads": 4, "kv_heads": 2, "head_dim": 64}
    for M in (1, 2048):
        one, two = [
            plan_attention(M, 2048, batch=1, **model, target="trn2", lnc=lnc)[0].profile("trn2")
            for lnc in (1, 2)
        ]
        assert two.time_ms < one.time_ms


def test_long_prompts_are_several_launches():
    plan, *others = plan_attention(16384, 16384, batch=1, **LLAMA_8B, target="trn2")
    assert others
    assert plan.operands[1].shape == (1, 8 // (1 + len(others)), 128, 16384)
    (short,) = plan_attention(1024, 1024, batch=1, **LLAMA_8B, target="trn2")
    assert len(short.profile("trn2").launch.cores[0].trace.records) < MAX_INSTRUCTIONS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 30}, "heads must be a multiple of kv_heads; got batch 1, heads 30"),
        ({"head_dim": 130}, "head_dim must be even and at most 128"),
        ({"head_dim": 63}, "head_dim must be even"),
        ({"batch": 0}, "sizes must be at least 1; got batch 0"),
        ({"heads": 1024}, "at most 127 query heads share a key head"),
        ({"dtype": "int8"}, "dtype must be one of bfloat16, float16, float32; got 'int8'"),
        ({"target": "trn9"}, "target must be one of"),
        ({"lnc": 3}, "lnc must be 1, or 2 on trn2 and trn3; got 3 on trn2"),
        ({"target": "trn1", "lnc": 2}, "lnc must be 1, or 2 on trn2 and trn3; got 2 on trn1"),
    ],
)
def test_bad_sizes_are_one_line(change, message):
    sizes = {"batch": 1, **LLAMA_1B, "target": "trn2"} | change
    plans = (
        lambda: plan_attention(1, 64, **sizes),
        lambda: plan_attention(64, 64, **sizes),
        lambda: plan_rope(64, **sizes, head_norm=False),
    )
    for plan in plans:
        with pytest.raises(ValueError, match=message) as error:
            plan()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("M", "T"), [(64, 32), (9, 64), (0, 64), (0, 0), (1, 0)])
def test_prefill_takes_all_tokens_and_decode_a_few(M, T):
    with pytest.raises(ValueError, match=r"M must be 1 to 8|at least 1"):
        plan_attention(M, T, batch=1, **LLAMA_1B)


def test_tokens_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="does not fit the SBUF of trn2"):
        plan_attention(10**6, 10**6, batch=1, **LLAMA_8B, target="trn2")


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model", [LLAMA_8B, {"heads": 15, "kv_heads": 1, "head_dim": 128}])
@pytest.mark.parametrize("new", [1, 8])
def test_decode_takes_a_long_cache(model, dtype, target, new):
    """Sums of parts of a long cache are joined."""
    (launch,) = plan_attention(new, 2**17, batch=1, **model, dtype=dtype, target=target)
    assert launch.cost(target).sbuf_bytes < 200_000


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 8), (64, 64), (128, 8)])
def test_rope_fits_or_is_refused(heads, kv_heads, norm):
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 128, "head_norm": norm}
    try:
        (plan,) = plan_rope(300, batch=1, **sizes, target="trn1")
    except ValueError as error:
        assert norm
        assert "does not fit the SBUF of trn1" in str(error)  # noqa: PT017
        return
    assert plan.profile("trn1").time_ms > 0
