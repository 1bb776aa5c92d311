"""The prefill kernels of factors: values against fp64, work and traffic against formulas."""

from dataclasses import replace
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import (
    ACTIVATIONS,
    DTYPES,
    LARGEST,
    OPS,
    TARGETS,
    Case,
    Operands,
    biased,
    check,
    composed,
    drawn,
    matrices_of,
    of_model,
    problems,
    run,
    traced,
)

import neuroncore as nc
from neuroncore.dtypes import bfloat16
from neuroncore.hardware import DMA_MODELS
from neuronmm_ops.kernels import nki_kernel
from neuronmm_ops.kernels.stages.tiling import HIDDEN_TILES, KEPT_COLUMNS
from neuronmm_ops.kernels.xuv.prefill import xuv
from neuronmm_ops.kernels.xw.prefill import xw
from neuronmm_ops.plan import (
    Problem,
    mlp_matrices,
    plan_problem,
    plan_svd_mlp,
    plan_svd_qkv,
    plan_xuv,
    plan_xw,
)

LLAMA_1B = (2048, (768, 384, 384), (2048, 512, 512))
BLOCKS: dict[str, dict[str, tuple[Any, ...]]] = {
    "xw": {"token_block": (128, 512), "resident": (0, 1, 9), "block": (100, 512, 1024)},
    "xuv": {
        "token_block": (128, 512, 1024),
        "resident": (0, 2, 9),
        "u_block": (128, 384),
        "k_block": (0, 128, 256),
        "v_block": (100, 512, 1024),
        "v_banks": (1, 6),
    },
    "svd_qkv": {
        "token_block": (128, 512),
        "resident": (0, 2, 9),
        "u_block": (128, 384),
        "v_block": (100, 512),
        "tokens": (128, 512),
    },
    "svd_mlp": {
        **dict.fromkeys(("u_block", "v_block", "down_block", "out_block"), (128, 256, 1024)),
        "token_block": (192, 512, 640),
        "tokens": (512, 1024),
        "resident": (0, 4, 1024),
    },
}


def layout_of(dtype: str, target: str) -> dict[str, Any]:
    """The DMA engine transposes no fp32 on trn1."""
    turns = dtype == "float32" and target == "trn1"
    return {"layout": "pe", "banks": 6} if turns else {"layout": "dma", "banks": 8}


@st.composite
def cases(draw: st.DrawFn, op: str, stored: tuple[str, ...]) -> Case:
    inner = st.integers(1, 1400) if op == "svd_mlp" else None
    problem = draw(problems(op, st.integers(1, 700), st.integers(1, 500), stored, inner))
    blocks: dict[str, Any] = {k: draw(st.sampled_from(v)) for k, v in BLOCKS[op].items()}
    blocks["token_tiles"] = draw(st.sampled_from((1, 2, 3)))
    blocks["engines"] = 1 if problem.target == "trn1" else draw(st.sampled_from((1, 2)))
    if op == "svd_mlp":
        blocks |= layout_of(problem.dtype, problem.target)
        blocks["spill"] = draw(st.integers(0, problem.inner // (HIDDEN_TILES * 128)))
        blocks["resident_spilled"] = draw(st.integers(0, blocks["spill"]))
    else:
        blocks |= {"banks": 6, "layout": draw(st.sampled_from(("dma", "pe")))}
    if op == "xuv":
        whole = blocks["token_block"]
        blocks["tokens"] = draw(st.sampled_from((min(whole, 512), whole)))
    name = draw(st.sampled_from(sorted(ACTIVATIONS)))
    return Case(problem, draw(biased(op)), name, blocks)


@pytest.mark.slow
@pytest.mark.parametrize("stored", [("",), tuple(LARGEST)], ids=["of x", "one byte"])
@pytest.mark.parametrize("op", OPS)
@settings(max_examples=8)
@given(data=st.data())
def test_any_size(op, stored, data):
    check(data.draw(cases(op, stored)))


def test_one_token_of_one_feature_on_two_cores():
    check(Case(Problem("svd_mlp", 1, mlp_matrices(1, (1, 1, 1), 1, 1), "float32", lnc=2)))


@pytest.mark.parametrize("stored", ["", *LARGEST])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activations(activation, dtype, stored):
    matrices = mlp_matrices(200, (70, 40, 65), 300, 150)
    target = "trn2" if stored else "trn1"
    problem = Problem("svd_mlp", 130, matrices, dtype, target, weight_dtype=stored)
    check(Case(problem, activation=activation, blocks=layout_of(dtype, target)))


def test_partial_sums_may_be_rounded_behind_a_flag():
    case = Case(Problem("xuv", 96, ((2048, 64), (64, 96))))
    given = drawn(case)
    exact = composed(case, given, exact=True)
    sums = [run(case, given, k_block=128, bf16_partial_sums=r).outputs for r in (False, True)]
    errors = [(each.double() - exact).norm() for each in sums]
    assert errors[0] < errors[1] < 10 * errors[0]


@pytest.mark.slow
def test_long_contractions():
    """A quarter of the paper's shape in each size: every loop still runs many times."""
    problem = Problem("xuv", 256, ((2048, 1024), (1024, 4096)), target="trn1")
    blocks = {"token_block": 256, "resident": 16, "u_block": 256, "v_block": 256}
    check(Case(problem, blocks=blocks))


@pytest.mark.parametrize("target", TARGETS)
def test_every_byte_moves_as_often_as_the_blocks_say(target):
    M, K, r, N, block, resident = 1024, 1024, 512, 2048, 512, 3
    specs = [nc.TensorSpec(shape, bfloat16) for shape in ((M, K), (K, r), (r, N))]
    done = nc.simulate(
        xuv, *specs, target=target, mode="trace",
        token_block=block, resident=resident, u_block=256, tokens=512, v_block=512,
    )  # fmt: skip
    moved = {t.name: t.read_bytes + t.write_bytes for t in done.profile.tensors}
    blocks, groups = M // block, ceil(r / 256)
    reloaded = (groups - 1) * (K // 128 - resident) * 128 * M
    assert moved["x"] == 2 * (M * K + reloaded)
    assert moved["u"] == 2 * K * r * blocks
    assert moved["v"] == 2 * r * N * blocks
    assert sum(moved.values()) == done.profile.hbm_bytes
    assert done.profile.hbm_write_bytes == 2 * M * N


@pytest.mark.parametrize("resident", [0, 1, 2, 5, 9])
def test_tiles_that_are_not_resident_are_transposed_again(resident):
    problem = Problem("xw", 256, ((1100, 1100),), "float32", "trn1")
    blocks = {"token_block": 256, "resident": resident, "block": 512, "token_tiles": 1, "banks": 6}
    check(Case(problem, blocks={**blocks, "layout": "pe"}))


@pytest.mark.parametrize(
    ("plan", "arguments", "count"),
    [
        (plan_xw, (200, 64, 32), 2),
        (plan_xuv, (200, 64, 16, 32), 3),
        (plan_svd_mlp, (200, 64, (16, 16, 16), 48, 64), 7),
        (plan_svd_qkv, (200, 64, (16, 16, 16), (64, 16, 16)), 7),
        (plan_xw, (2, 4096, 4096), 2),
        (plan_xuv, (2, 4096, 1024, 4096), 3),
        (plan_svd_qkv, (2, 4096, (1664, 640, 640), (4096, 1024, 1024)), 7),
    ],
    ids=["xw", "xuv", "svd_mlp", "svd_qkv", "xw_decode", "xuv_decode", "svd_qkv_decode"],
)
def test_operands_that_do_not_fit_are_refused(plan, arguments, count, request):
    plan = plan(*arguments)
    assert plan.kernel == request.node.callspec.id
    wrong = [nc.TensorSpec(shape, bfloat16) for shape in ((plan.problem.M, 65), *[(64, 16)] * 6)]
    with pytest.raises(AssertionError, match="a contraction has 65 features and 64 rows"):
        nc.simulate(nki_kernel(plan), *wrong[:count], target="trn1", mode="trace", **plan.arguments)


def test_tensor_engine_transposes_a_tile_ahead():
    """It multiplies a tile while the next is evicted: 60 tiles, each once, hardly a wait."""
    M, K, N = 512, 7680, 512
    specs = [nc.TensorSpec(shape, bfloat16) for shape in ((M, K), (K, N))]
    blocks = {"token_block": 512, "block": 512, "token_tiles": 4, "banks": 4}
    done = nc.simulate(xw, *specs, target="trn2", mode="trace", layout="pe", **blocks).profile
    busy = next(use.busy_ms for use in done.engines[0] if use.engine == "TensorE")
    assert busy > 0.85 * done.time_ms


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(("spill", "resident"), [(1, 0), (2, 1), (2, 2)])
def test_traffic_of_a_spilled_hidden_block(spill, resident, lnc):
    blocks = {"token_block": 128, "spill": spill, "resident_spilled": resident, "banks": 1}
    matrices = mlp_matrices(128, (64, 64, 256), 1100, 100)
    problem = Problem("svd_mlp", 256, matrices, target="trn2", lnc=lnc)
    profile = check(Case(problem, blocks={**blocks, "engines": 2}))
    weights = problem.weight_elements * 2  # token blocks
    activations = problem.M * (problem.K + problem.N)
    group = HIDDEN_TILES * 128 * problem.M
    spilled = group * (2 * spill + (spill - resident))  # written and read, and read for rank tile 2
    assert profile.hbm_bytes == 2 * (weights + activations + spilled)


@pytest.mark.parametrize("stored", LARGEST)
@pytest.mark.parametrize("target", TARGETS)
def test_weights_are_read_in_one_byte(target, stored):
    matrices = ((300, 200), (200, 260))
    problem = Problem("xuv", 256, matrices, target=target, weight_dtype=stored)
    profile = check(Case(problem, blocks={"token_block": 256}))
    rows = 127 * problem.N * 4  # v_scale is read once for each partition
    assert profile.hbm_bytes == problem.least_bytes + rows


def test_scales_of_wide_outputs_do_not_stay():
    N = KEPT_COLUMNS + 100
    problem = Problem("xuv", 140, ((130, 40), (40, N)), target="trn2", weight_dtype="int8")
    check(Case(problem, bias=True, blocks={"token_block": 128, "v_block": 1024}))


@pytest.mark.parametrize("stored", LARGEST)
@pytest.mark.parametrize("op", OPS)
def test_scales_of_another_size_or_none_are_refused(op, stored):
    matrices = matrices_of(op, 64, (16, 16, 16), (32, 48, 35), 48)
    case = Case(Problem(op, 8, matrices, target="trn2", weight_dtype=stored))
    given = drawn(case)
    with pytest.raises(AssertionError, match=r"scales must be \[\d+\], got \[\d+\]"):
        run(case, replace(given, scales=[scale[:-1] for scale in given.scales]))
    if op == "xuv":
        with pytest.raises(AssertionError, match="weights need scales of their columns; got none"):
            run(case, replace(given, scales=[]))


def test_factors_that_do_not_fit_are_refused():
    case = Case(Problem("svd_qkv", 3, ((8, 2), (2, 4)) * 3))
    for place, wrong in ((0, (7, 2)), (3, (3, 4)), (4, (7, 2))):
        shapes = list(case.problem.matrices)
        shapes[place] = wrong
        given = Operands(torch.zeros(3, 8), [torch.zeros(shape) for shape in shapes], [])
        with pytest.raises(AssertionError, match=r"pass u \[K, r\], v \[r, N\]"):
            run(case, given)


@pytest.mark.parametrize(("M", "gain"), [(1, 1.2), (64, 1.25), (512, 1.15)])
def test_one_launch_is_faster_than_three_under_every_dma_model(M, gain):
    K, ranks, outputs = LLAMA_1B
    together = traced(plan_svd_qkv(M, K, ranks, outputs, target="trn2"))
    pairs = zip(ranks, outputs, strict=True)
    alone = [traced(plan_xuv(M, K, r, N, target="trn2")) for r, N in pairs]
    for model in DMA_MODELS:
        three = sum([profile.times_ms[model] for profile in alone])
        assert three >= gain * together.times_ms[model]
    assert sum([profile.hbm_bytes for profile in alone]) - together.hbm_bytes == 2 * M * K * 2


@pytest.mark.parametrize(
    ("name", "target"), [*[("Qwen3-0.6B", t) for t in TARGETS], ("Llama-3.2-1B", "trn2")]
)
def test_svd_mlp_reaches_the_limit(name, target):
    """Of plans that are shipped."""
    problem = of_model(name, 4096, target)
    share = problem.roofline_ms / plan_problem(problem).time_ms
    assert share >= (0.95 if target == "trn1" else 0.99)


def test_two_cores_are_nearly_twice_as_fast():
    one, two = [plan_problem(of_model("Qwen3-0.6B", 1024, "trn2", lnc=n)) for n in (1, 2)]
    assert one.time_ms / two.time_ms >= 1.8


@pytest.mark.parametrize("target", TARGETS)
def test_one_byte_is_not_slower_than_16_bits(target):
    """The smallest model: its ranks leave least time to scale anything."""
    times = {
        w: plan_problem(of_model("Qwen3-0.6B", 1024, target, weight_dtype=w)).times_ms
        for w in ("", *LARGEST)
    }
    for stored in LARGEST:
        assert all(a <= 1.002 * b for a, b in zip(times[stored], times[""], strict=True))
