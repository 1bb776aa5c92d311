"""Prefill with weights in one byte: values, and how long it takes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.one_byte import ACTIVATIONS, KERNELS, Case, check, drawn, run

import neuroncore as nc
from neuronmm_ops.kernels.stages.tiling import KEPT_COLUMNS
from neuronmm_ops.models import SHAPES
from neuronmm_ops.plan import Matrices, Problem, mlp_matrices, plan_problem, qkv_matrices
from neuronmm_ops.rank import aligned_rank

WEIGHTS = ("float8_e4m3fn", "int8")
DTYPES = ("bfloat16", "float16", "float32")
TARGETS = ("trn1", "trn2", "trn3")
OPS = sorted(KERNELS)
launches = st.sampled_from([("trn1", 1), ("trn2", 1), ("trn2", 2), ("trn3", 1), ("trn3", 2)])
sizes = st.integers(1, 500)


def matrices_of(op: str, K: int, ranks: tuple[int, int, int], inner: int, N: int) -> Matrices:
    if op == "xw":
        return ((K, N),)
    if op == "svd_qkv":
        return qkv_matrices(K, ranks, (inner, N, N + 3))
    return ((K, ranks[0]), (ranks[0], N)) if op == "xuv" else mlp_matrices(K, ranks, inner, N)


def layout_of(dtype: str, target: str) -> str:
    return "pe" if dtype == "float32" and target == "trn1" else "dma"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    op, (target, lnc) = draw(st.sampled_from(OPS)), draw(launches)
    dtype = draw(st.sampled_from(DTYPES))
    ranks = draw(sizes), draw(sizes), draw(sizes)
    matrices = matrices_of(op, draw(sizes), ranks, draw(sizes), draw(sizes))
    problem = Problem(
        op, draw(sizes), matrices, dtype, target, lnc, weight_dtype=draw(st.sampled_from(WEIGHTS))
    )
    blocks = {
        "layout": layout_of(dtype, target),
        "token_block": draw(st.sampled_from([128, 192, 512])),
        "resident": draw(st.sampled_from([0, 2, 9])),
        "token_tiles": draw(st.sampled_from([1, 3])),
        "banks": 6,
        "engines": 1 if target == "trn1" else 2,
    }
    if op == "xuv":
        blocks |= {"k_block": draw(st.sampled_from([0, 128, 256])), "v_block": 100}
    return Case(problem, op != "svd_mlp" and draw(st.booleans()), blocks=blocks)


@pytest.mark.slow
@settings(max_examples=8)
@given(cases())
def test_any_size(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("weight_dtype", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activations(activation: str, dtype: str, weight_dtype: str) -> None:
    matrices = mlp_matrices(200, (70, 40, 65), 300, 150)
    problem = Problem("svd_mlp", 130, matrices, dtype, "trn2", weight_dtype=weight_dtype)
    check(Case(problem, activation=activation))


@pytest.mark.parametrize("weight_dtype", WEIGHTS)
@pytest.mark.parametrize("target", TARGETS)
def test_weights_are_read_in_one_byte(target: str, weight_dtype: str) -> None:
    problem = Problem(
        "xuv", 256, ((300, 200), (200, 260)), target=target, weight_dtype=weight_dtype
    )
    profile = check(Case(problem, blocks={"token_block": 256}))
    rows = 127 * problem.N * 4  # v_scale is read once for each partition
    assert profile.hbm_bytes == problem.least_bytes + rows


def test_scales_of_wide_outputs_do_not_stay() -> None:
    N = KEPT_COLUMNS + 100
    problem = Problem("xuv", 140, ((130, 40), (40, N)), target="trn2", weight_dtype="int8")
    check(Case(problem, bias=True, blocks={"token_block": 128, "v_block": 1024}))


@pytest.mark.parametrize("op", OPS)
def test_a_loop_computes_what_the_unrolled_kernel_does(op: str) -> None:
    matrices = matrices_of(op, 256, (128, 100, 128), 300, 200)
    problem = Problem(op, 400, matrices, target="trn2", weight_dtype="float8_e4m3fn")
    case = Case(problem, blocks={"token_block": 128})
    given = drawn(case)
    unrolled = run(case, given)
    looped = run(replace(case, blocks={**case.blocks, "device_loop": True}), given)
    assert torch.equal(looped.outputs, unrolled.outputs)
    assert looped.profile.hbm_bytes == unrolled.profile.hbm_bytes
    assert looped.profile.stream_instructions < looped.profile.instructions


@pytest.mark.parametrize("op", OPS)
def test_scales_of_another_size_are_refused(op: str) -> None:
    matrices = matrices_of(op, 64, (16, 16, 16), 48, 32)
    case = Case(Problem(op, 8, matrices, target="trn2", weight_dtype="int8"))
    given = drawn(case)
    wrong = replace(given, scales=[scale[:-1] for scale in given.scales])
    with pytest.raises(AssertionError, match=r"scales must be \[\d+\], got \[\d+\]"):
        run(case, wrong)


@pytest.mark.parametrize("weight_dtype", WEIGHTS)
def test_one_byte_without_scales_is_refused(weight_dtype: str) -> None:
    problem = Problem("xuv", 8, ((64, 16), (16, 32)), target="trn2", weight_dtype=weight_dtype)
    given = drawn(Case(problem))
    with pytest.raises(AssertionError, match="weights need scales of their columns; got none"):
        nc.simulate(KERNELS["xuv"], given.x, *given.weights, target="trn2")


def of_model(name: str, M: int, target: str, **options: str) -> Problem:
    shape = SHAPES[name]
    K, inner = shape.hidden_size, shape.intermediate_size
    rank = aligned_rank(K, inner, 0.2)
    assert rank
    matrices = mlp_matrices(K, (rank, rank, rank), inner, K)
    return Problem("svd_mlp", M, matrices, target=target, **options)


@pytest.mark.parametrize("target", TARGETS)
def test_is_not_slower_than_16_bits(target: str) -> None:
    """The smallest model: its ranks leave least time to scale anything."""
    times = {
        w: plan_problem(of_model("Qwen3-0.6B", 1024, target, weight_dtype=w)).times_ms
        for w in ("", *WEIGHTS)
    }
    for stored in WEIGHTS:
        assert all(a <= 1.002 * b for a, b in zip(times[stored], times[""], strict=True))


def test_lint() -> None:
    for kernel in KERNELS.values():
        assert nc.lint(kernel) == []
