"""`rms_norm`: values against fp64, plans."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import CORES, DTYPES
from tolerances import assert_close_to_oracle
from torch import Tensor

import neuroncore as nc
from neuronmm_ops.kernels.rms_norm.prefill import rms_norm
from neuronmm_ops.plan.rms_norm import plan_rms_norm

EPS = 1e-5


def drawn(M: int, H: int, dtype: str, residual: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(M * H)
    # tokens of very different size, and one of zeros
    x = torch.randn((M, H), generator=generator)
    x *= torch.exp2(torch.randint(-6, 6, (M, 1), generator=generator).float())
    added = torch.randn((M, H), generator=generator)
    if M > 1:
        x[M // 2] = added[M // 2] = 0
    weight = torch.randn(H, generator=generator)
    kind = getattr(torch, dtype)
    return [x.to(kind), added.to(kind) if residual else None, weight.to(kind)]


def normed(s: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    """In sums of `wide`; in fp32 with Transformers' roundings, in fp64 with none."""
    value = s.to(wide)
    inverse = torch.rsqrt(value.square().mean(-1, keepdim=True) + EPS)
    if wide is torch.float64:
        return value * inverse * weight.double()
    return (value * inverse).to(s.dtype) * weight


def check(given_: list[Any], launch: tuple[str, int], **arguments: Any) -> nc.Profile:
    x, added, weight = given_
    target, lnc = launch
    kernel = rms_norm if lnc == 1 else rms_norm[lnc]
    done = nc.simulate(kernel, x, added, weight, target=target, eps=EPS, **arguments)
    s, out = (x, done.outputs) if added is None else (x + added, done.outputs[1])
    if added is not None:
        torch.testing.assert_close(done.outputs[0], s, rtol=0, atol=0)
    oracle, plain = normed(s, weight, torch.float64), normed(s, weight, torch.float32)
    assert_close_to_oracle(out, oracle, plain)
    return done.profile


@settings(max_examples=30)
@given(
    M=st.one_of(st.integers(1, 9), st.integers(100, 300)), H=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES), residual=st.booleans(), launch=CORES, data=st.data(),
)  # fmt: skip
def test_values(M, H, dtype, residual, launch, data):
    parts = data.draw(st.sampled_from([n for n in range(1, min(H, 128) + 1) if H % n == 0]))
    check(drawn(M, H, dtype, residual), launch, parts=parts)


def test_what_is_not_a_number_stays_in_its_token():
    x, _, weight = drawn(4, 96, "bfloat16", residual=False)
    x[1, 5] = float("nan")
    out = nc.simulate(rms_norm, x, None, weight, target="trn2", parts=1).outputs
    assert out.isnan().all(1).tolist() == [False, True, False, False]


def test_each_byte_is_moved_once_beside_the_weight():
    profile = plan_rms_norm(300, 1024, residual=True, target="trn2").profile("trn2")
    traffic = {t.name: t.read_bytes for t in profile.tensors}
    assert traffic["x"] == traffic["residual"] == 300 * 1024 * 2
    assert traffic["weight"] <= 128 * 1024 * 2


def test_wide_tokens_are_spread_until_they_fit():
    plan = plan_rms_norm(32, 2**17, residual=True, dtype="float32", target="trn1")
    assert plan.arguments["parts"] > 8
    assert plan.cost("trn1") is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"M": 0, "H": 8}, "at least 1"),
        ({"M": 8, "H": 8, "dtype": "int8"}, "dtype must be one of bfloat16"),
        ({"M": 8, "H": 8, "target": "trn1", "lnc": 2}, "lnc must be 1, or 2 on trn2"),
        ({"M": 8, "H": 99991}, "none of at most 128 makes 99991 bfloat16 features fit"),
    ],
)
def test_bad_problems_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        plan_rms_norm(**arguments, residual=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "parts", "message"),
    [
        (((4, 8), None, (9,)), 1, r"weight must be \[8\], got \[9\]"),
        (((4, 8), (4, 9), (8,)), 1, r"residual must be \(4, 8\)"),
        (((4, 8), None, (8,)), 3, "parts must divide 8"),
        (((4, 8), None, (8,)), 0, "parts must be at least 1"),
        (((4, 256), None, (256,)), 256, "parts must be at most 128"),
    ],
)
def test_bad_operands_are_refused(shapes, parts, message):
    tensors = [None if shape is None else torch.zeros(shape) for shape in shapes]
    with pytest.raises(AssertionError, match=message):
        nc.simulate(rms_norm, *tensors, target="trn2", parts=parts)
