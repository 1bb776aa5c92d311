"""The prefill kernels with their blocks of tokens as a loop of the device."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import OPS, Case, drawn, matrices_of, run, traced

from neuronmm_ops.plan import MAX_INSTRUCTIONS, Problem, mlp_matrices, plan_op
from neuronmm_ops.plan.search import find_plan

MATRICES = {op: matrices_of(op, 256, (130, 100, 128), (600, 100, 103), 600) for op in OPS}
STORAGES = {"": {}, "float8_e4m3fn": {}, "fp8": {"double_row": True}}
SIZES = {
    "xw": ((4096, 4096),),
    "xuv": ((4096, 1024), (1024, 8192)),
    "svd_mlp": mlp_matrices(2048, (768, 768, 768), 6144, 2048),
    "svd_qkv": ((2048, 768), (768, 4096), (2048, 384), (384, 1024), (2048, 384), (384, 1024)),
}
launches = st.sampled_from([("trn2", 1), ("trn2", 2), ("trn3", 1)])


@pytest.mark.parametrize("stored", STORAGES)
@pytest.mark.parametrize("op", OPS)
@settings(max_examples=4)
@given(M=st.integers(1, 1000), launch=launches, layout=st.sampled_from(["dma", "pe"]))
def test_a_loop_computes_what_the_unrolled_kernel_does(op, stored, M, launch, layout):
    weights = {"weight_dtype": "float8_e4m3fn" if stored else ""}
    problem = Problem(op, M, MATRICES[op], "bfloat16", *launch, **weights)
    blocks = {"token_block": 128, **STORAGES[stored]}
    if not blocks.get("double_row"):
        blocks["layout"] = layout
    case = Case(problem, blocks=blocks | ({"spill": 1} if op == "svd_mlp" else {}))
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
    plan = plan_op(op, M, SIZES[op], "bfloat16", target, lnc, 1, device_loop=True)
    # not plan_op: a shipped plan may be of an earlier search
    whole = find_plan(plan.problem, MAX_INSTRUCTIONS, device_loop=False)
    assert plan.arguments == {**whole.arguments, "device_loop": True}
    assert plan.launches == (M,)
    looped, unrolled = traced(plan), traced(whole)
    assert looped.time_ms == pytest.approx(unrolled.time_ms, rel=0.03)
    assert looped.time_ms == pytest.approx(plan.time_ms)
    assert looped.instructions == unrolled.instructions == whole.instructions
    assert looped.stream_instructions == plan.instructions < whole.instructions
    assert looped.hbm_bytes == unrolled.hbm_bytes == plan.hbm_bytes


def test_a_loop_is_one_launch_of_thousands_of_instructions():
    split = plan_op("svd_mlp", 4096, SIZES["svd_mlp"], target="trn2", max_instructions=6000)
    assert len(split.launches) > 1
    assert split.instructions > 6000
    looped = plan_op(
        "svd_mlp", 4096, SIZES["svd_mlp"], target="trn2", max_instructions=6000, device_loop=True
    )
    assert looped.launches == (4096,)
    assert looped.instructions < 6000
    profile, whole = traced(looped), plan_op("svd_mlp", 4096, SIZES["svd_mlp"], target="trn2")
    assert profile.stream_instructions == looped.instructions
    assert profile.instructions == whole.instructions <= split.instructions
    assert profile.time_ms == pytest.approx(split.time_ms, rel=0.03)


def test_what_a_loop_does_not_shorten_stays_as_it_is():
    long = plan_op("xuv", 2048, MATRICES["xuv"], target="trn1", max_instructions=200)
    for target in ("trn1", "trn2"):
        plan = plan_op("xuv", 2048, MATRICES["xuv"], target=target, device_loop=True)
        assert "device_loop" not in plan.arguments  # it is short
    plan = plan_op(
        "xuv", 2048, MATRICES["xuv"], target="trn1", max_instructions=200, device_loop=True
    )
    assert plan == long  # NKI 0.6, which has the loop, does not document trn1
    small = plan_op("xw", 130, MATRICES["xw"], target="trn2", max_instructions=1, device_loop=True)
    assert small.launches == (128, 2)
