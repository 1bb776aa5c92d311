"""The prefill kernels with their blocks of tokens as a loop of the device."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import OPS, Case, drawn, matrices_of, run, traced

from neuronmm_ops.plan import MAX_INSTRUCTIONS, Problem, mlp_matrices, plan_op, qkv_matrices
from neuronmm_ops.plan.search import find_plan

MATRICES = {op: matrices_of(op, 256, (130, 100, 128), (600, 100, 103), 600) for op in OPS}
MATRICES["mlp"] = (256, 600), (256, 600), (600, 103)
STORAGES = {"": {}, "float8_e4m3fn": {}, "fp8": {"double_row": True}}
SIZES = {
    "xw": ((2048, 2048),),
    "xuv": ((2048, 512), (512, 4096)),
    "svd_mlp": mlp_matrices(1024, (384, 384, 384), 3072, 1024),
    "svd_qkv": qkv_matrices(1024, (384, 256, 256), (2048, 512, 512)),
}
launches = st.sampled_from([("trn2", 1), ("trn2", 2), ("trn3", 1)])


@pytest.mark.parametrize("stored", STORAGES)
@pytest.mark.parametrize("op", MATRICES)
@settings(max_examples=4)
@given(M=st.integers(1, 1000), launch=launches, layout=st.sampled_from(["dma", "pe"]))
def test_a_loop_computes_what_the_unrolled_kernel_does(op, stored, M, launch, layout):
    weights = {"weight_dtype": "float8_e4m3fn" if stored else ""}
    problem = Problem(op, M, MATRICES[op], "bfloat16", *launch, **weights)
    blocks = {"token_block": 128, **STORAGES[stored]}
    if not blocks.get("double_row"):
        blocks["layout"] = layout
    case = Case(problem, blocks=blocks | ({"spill": 1} if "mlp" in op else {}))
    given = drawn(case)
    unrolled, looped = run(case, given), run(case, given, device_loop=True)
    same = (looped.outputs == unrolled.outputs).all(1)
    if case.doubled:  # next to a power of 4, sums in another order find a token's other scale
        assert same.double().mean() > 0.99
    else:
        assert same.all()
        assert looped.profile.opcodes == unrolled.profile.opcodes
    assert looped.profile.hbm_bytes == unrolled.profile.hbm_bytes
    if max(problem.core_tokens) >= 256:
        assert looped.profile.stream_instructions < looped.profile.instructions


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("target", "lnc", "M"), [("trn2", 1, 4096), ("trn3", 2, 8200)])
def test_a_loop_takes_as_long_as_the_unrolled_kernel(op, target, lnc, M):
    # not plan_op: a kept plan may be of an earlier search
    problem = Problem(op, M, SIZES[op], "bfloat16", target, lnc)
    plan = find_plan(problem, 1, device_loop=True)
    whole = find_plan(problem, MAX_INSTRUCTIONS, device_loop=False)
    assert plan.arguments == {**whole.arguments, "device_loop": True}
    assert plan.launches == (M,)
    looped, unrolled = traced(plan), traced(whole)
    assert looped.time_ms == pytest.approx(unrolled.time_ms, rel=0.03)
    assert looped.time_ms == pytest.approx(plan.time_ms)
    assert looped.instructions == unrolled.instructions == whole.instructions
    assert looped.stream_instructions == plan.instructions < whole.instructions
    assert looped.hbm_bytes == unrolled.hbm_bytes == plan.hbm_bytes


def test_a_loop_is_one_launch_of_fewer_instructions():
    given = ("svd_mlp", 4096, SIZES["svd_mlp"], "bfloat16", "trn2", 1)
    split, looped, whole = [
        plan_op(*given, most, device_loop=loop)
        for most, loop in ((2000, False), (2000, True), (MAX_INSTRUCTIONS, False))
    ]
    assert len(split.launches) > 1
    assert split.instructions > 2000
    assert looped.launches == (4096,)
    assert looped.instructions < 2000
    profile = traced(looped)
    assert profile.stream_instructions == looped.instructions
    assert profile.instructions == whole.instructions <= split.instructions
    assert profile.time_ms == pytest.approx(split.time_ms, rel=0.03)


def test_what_a_loop_does_not_shorten_stays_as_it_is():
    given = ("xuv", 2048, MATRICES["xuv"], "bfloat16")
    for target in ("trn1", "trn2"):  # it is short
        assert "device_loop" not in plan_op(*given, target, device_loop=True).arguments
    # NKI 0.6, which has the loop, does not document trn1
    assert plan_op(*given, "trn1", 1, 200, device_loop=True) == plan_op(*given, "trn1", 1, 200)
    small = plan_op("xw", 130, MATRICES["xw"], target="trn2", max_instructions=1, device_loop=True)
    assert small.launches == (128, 2)
