"""`lm_head`: ids and greatest logits against fp64, plans against the simulator."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import CORES, DTYPES, LARGEST, LAUNCHES, TARGETS, TOKENS, stored_in
from tolerances import assert_close_to_oracle
from torch import Tensor

import neuroncore as nc
from neuroncore.hardware import resolve_target
from neuronmm_ops.kernels.lm_head.decode import lm_head_decode
from neuronmm_ops.models import SHAPES
from neuronmm_ops.plan import plan_op

VOCABULARIES = st.one_of(st.sampled_from((1, 2, 7, 8, 128, 513, 2049)), st.integers(1, 3000))


def run(x: Tensor, w: Tensor, scale: Tensor | None, launch: tuple[str, int], **blocks: Any) -> Any:
    target, lnc = launch
    kernel = lm_head_decode if lnc == 1 else lm_head_decode[lnc]
    return nc.simulate(kernel, x, w, scale, target=target, **blocks)


def drawn(M: int, H: int, V: int, dtype: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(M + H + V)
    x = torch.randn((M, H), generator=generator)
    w = torch.randn((H, V), generator=generator) * H**-0.5
    kind = getattr(torch, dtype)
    return x.to(kind), w.to(kind)


CUT = {"k_chunk": 128, "block": 1024, "last_block": 512, "tile_bytes": 512}


@settings(max_examples=8)
@given(
    M=TOKENS, H=st.integers(1, 300), V=VOCABULARIES, dtype=st.sampled_from(DTYPES),
    launch=CORES, planned=st.booleans(),
)  # fmt: skip
def test_values(M, H, V, dtype, launch, planned):
    x, w = drawn(M, H, V, dtype)
    target, lnc = launch
    blocks = CUT
    if planned:
        blocks = plan_op("lm_head", M, ((H, V),), dtype, target, lnc).arguments
    done = run(x, w, None, launch, **blocks)
    ids, greatest = done.outputs
    assert ids.dtype == torch.int32
    assert greatest.dtype == torch.float32
    oracle = x.double() @ w.double()
    plain = x.float() @ w.float()
    size = x.double().abs() @ w.double().abs()
    assert_close_to_oracle(greatest, oracle.amax(1), plain.amax(1), size.amax(1))
    # the id's logit is the greatest, but for rounding
    chosen = oracle.gather(1, ids.long()[:, None])[:, 0]
    assert_close_to_oracle(greatest, chosen, plain.amax(1), size.amax(1))
    traffic = {t.name: t.read_bytes for t in done.profile.tensors}
    assert traffic["w"] == w.numel() * w.element_size()


@settings(max_examples=8)
@given(
    M=TOKENS, H=st.integers(1, 40), V=VOCABULARIES, launch=CORES,
    seed=st.integers(0, 99),
)  # fmt: skip
def test_of_equal_logits_the_lowest_id_is_taken(M, H, V, launch, seed):
    generator = torch.Generator().manual_seed(seed)
    # small integers: sums are exact, and many are equal
    x = torch.randint(-1, 2, (M, H), generator=generator).bfloat16()
    w = torch.randint(-1, 2, (H, V), generator=generator).bfloat16()
    ids, greatest = run(x, w, None, launch, **CUT).outputs
    exact = x.double() @ w.double()
    assert ids.tolist() == exact.argmax(1).tolist()
    assert greatest.tolist() == exact.amax(1).tolist()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("weight_dtype", LARGEST)
@pytest.mark.parametrize(("M", "dtype"), [(1, "bfloat16"), (5, "float16"), (70, "float32")])
def test_one_byte_is_the_reference_on_dequantized_weights(M, dtype, weight_dtype, target):
    x, w = drawn(M, 200, 1111, dtype)
    stored, scale = stored_in(w.float(), weight_dtype)
    found: list[Any] = [
        run(x, stored, scale, (target, lnc), **CUT).outputs
        for lnc in ((1,) if target == "trn1" else (1, 2))
    ]
    dequantized = stored.double() * scale.double()
    oracle, size = x.double() @ dequantized, x.double().abs() @ dequantized.abs()
    plain = x.float() @ dequantized.float()
    for ids, greatest in found:
        assert_close_to_oracle(greatest, oracle.amax(1), plain.amax(1), size.amax(1))
        assert ids.tolist() == found[0][0].tolist()
        chosen = oracle.gather(1, ids.long()[:, None])[:, 0]
        assert_close_to_oracle(greatest, chosen, plain.amax(1), size.amax(1))


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_is_not_finite_has_no_id(value, launch):
    x, w = drawn(1, 200, 3000, "bfloat16")
    w[7, 2100] = float(value)
    ids, greatest = run(x, w, None, launch, **CUT).outputs
    assert ids.tolist() == [-1]
    assert greatest.isnan().all()


def test_what_is_not_finite_stays_in_its_token():
    x, w = drawn(3, 200, 3000, "bfloat16")
    x[1, 0] = float("nan")
    ids, greatest = run(x, w, None, ("trn2", 1), **CUT).outputs
    assert [int(n) for n in ids.sign()] == [1, -1, 1]
    assert greatest.isnan().tolist() == [False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(
    ("model", "parts"), [("Qwen3-0.6B", 1), ("Llama-3.2-1B", 1), ("Llama-3.1-70B", 8)]
)
def test_one_token_is_bound_by_bytes(model, parts, lnc):
    """Also by an eighth of a large model's, which takes less to plan."""
    shape = SHAPES[model]
    matrices = ((shape.hidden_size, shape.vocab_size // parts),)
    plan = plan_op("lm_head", 1, matrices, target="trn2", lnc=lnc)
    least_ms = plan.hbm_bytes / resolve_target("trn2").dma_peak_gbps / 1e6 / lnc
    assert least_ms >= 0.95 * plan.time_ms


@pytest.mark.parametrize(
    ("x", "w", "scale", "message"),
    [
        ((129, 8), (8, 9), None, "at most 128 tokens, got 129"),
        ((4, 8), (9, 9), None, "8 features and 9 rows"),
        ((4, 8), (8, 9), (8,), "scales must be"),
    ],
)
def test_bad_operands_are_refused(x, w, scale, message):
    given_ = [None if shape is None else torch.zeros(shape) for shape in (x, w, scale)]
    with pytest.raises(AssertionError, match=message):
        nc.simulate(lm_head_decode, *given_, target="trn2")
