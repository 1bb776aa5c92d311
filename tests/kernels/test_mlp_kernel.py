"""`mlp` and `mlp_decode`: values against fp64, plans against the simulator and three `xw`.

Beside x there may be an x_up, which up contracts; `up` are its features, 0 where there is none.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import (
    ACTIVATIONS,
    CORES,
    DTYPES,
    LARGEST,
    LAUNCHES,
    SIZES,
    TOKENS,
    Case,
    check,
    decode_arguments,
    drawn,
    run,
)

import neuroncore as nc
from neuronmm_ops.kernels.knobs import balances
from neuronmm_ops.kernels.mlp.decode import mlp_decode
from neuronmm_ops.kernels.mlp.prefill import mlp
from neuronmm_ops.models import SHAPES
from neuronmm_ops.plan import Matrices, Other, Problem, plan_op, plan_problem, plan_xw

UP = st.one_of(st.just(0), SIZES)
NAMES = st.sampled_from(tuple(ACTIVATIONS))


def mlp_weights(K: int, inner: int, N: int, up: int = 0) -> Matrices:
    """Shapes of the weights of gate, up and down; `up` of an x_up [M, up]."""
    return ((K, inner), (up or K, inner), (inner, N))


def problem_of(
    M: int, sizes: tuple[int, int, int], up: int = 0, dtype: str = "bfloat16",
    core: tuple[str, int] = ("trn2", 1), stored: str = "",
) -> Problem:  # fmt: skip
    others: tuple[Other, ...] = (("x_up", (-1, up), ""),) if up else ()
    matrices = mlp_weights(*sizes, up)
    return Problem("mlp", M, matrices, dtype, *core, weight_dtype=stored, others=others)


def planned(problem: Problem) -> Case:
    plan = plan_problem(problem)
    return Case(problem, blocks=plan.arguments, phase=plan.phase)


@pytest.mark.parametrize(
    ("M", "up", "core", "stored"),
    [
        (1, 129, ("trn2", 2), "float8_e4m3fn"),
        (33, 0, ("trn3", 2), ""),
        (5, 40, ("trn2", 1), "int8"),
    ],
)
def test_decode_with_stationary_weights(M, up, core, stored):
    problem = problem_of(M, (300, 1290, 700), up, "float16", core, stored)
    case = Case(problem, blocks={"stationary": True, "inner_block": 1024}, phase="decode")
    check(case)
    if core[1] == 2:  # in any order that the cores' waiting allows
        run(case, drawn(case), schedules=2)


@settings(max_examples=8)
@given(
    M=TOKENS, sizes=st.tuples(SIZES, SIZES, SIZES), up=UP, core=CORES,
    dtype=st.sampled_from(DTYPES), name=NAMES, blocks=st.sampled_from(("planned", True, False)),
)  # fmt: skip
def test_decode(M, sizes, up, core, dtype, name, blocks):
    problem = problem_of(M, sizes, up, dtype, core)
    chosen: dict[str, Any] = {"k_chunk": 128, "inner_block": 128, "block": 96, "last_block": 64}
    chosen |= {"tile_bytes": 512, "spill": blocks}
    chosen = decode_arguments(problem) if blocks == "planned" else chosen
    profile = check(Case(problem, activation=name, blocks=chosen, phase="decode"))
    if up:  # by each core that has a part of I
        once = M * up * problem.itemsize
        (traffic,) = [t.read_bytes for t in profile.tensors if t.name == "x_up"]
        assert traffic in (once, core[1] * once)


@pytest.mark.parametrize(("M", "stored"), [(1, ""), (4, "int8")])
def test_cores_balance_what_they_load(M, stored):
    """Of seven tiles of inner features the first core has four, and fewer columns of down."""
    problem = problem_of(M, (1024, 896, 2048), 0, "bfloat16", ("trn2", 2), stored)
    loads: list[list[int]] = []
    for balance in (False, True):
        blocks = {"stationary": False, "inner_block": 512, "balance": balance}
        case = Case(problem, blocks=blocks, phase="decode")
        cores = check(case).schedule.cores
        loads.append([sum([t.dma.reads[1] for t, *_ in c.issued if t.dma]) for c in cores])
        run(case, drawn(case), schedules=2)
    uneven, even = [abs(first - second) / first for first, second in loads]
    assert uneven > 0.1 > 0.05 > even
    assert {"balance": True} in balances(problem)


@settings(max_examples=8)
@given(
    M=st.integers(1, 700), sizes=st.tuples(SIZES, st.integers(1, 1300), SIZES), up=UP, core=CORES,
    dtype=st.sampled_from(DTYPES), name=NAMES, data=st.data(),
)  # fmt: skip
def test_prefill(M, sizes, up, core, dtype, name, data):
    layouts = ["pe"] if dtype == "float32" and core[0] == "trn1" else ["dma", "pe"]
    layout = data.draw(st.sampled_from(layouts))
    blocks: dict[str, Any] = {
        "token_block": data.draw(st.sampled_from([128, 512])),
        "layout": layout,
        "resident": data.draw(st.sampled_from([0, 1, 9])) if layout == "dma" else 9,
        "inner_block": data.draw(st.sampled_from([128, 512])),
        "block": data.draw(st.sampled_from([100, 512])),
        "tokens": data.draw(st.sampled_from([128, 512])),
        "token_tiles": data.draw(st.sampled_from([1, 3])),
        "banks": 6 if layout == "pe" else 8,
        "engines": data.draw(st.sampled_from([1, 2])),
    }
    if sizes[1] >= 512:
        blocks["spill"] = data.draw(st.sampled_from([0, 1, sizes[1] // 512]))
        blocks["resident_spilled"] = data.draw(st.sampled_from([0, 1]))
    check(Case(problem_of(M, sizes, up, dtype, core), activation=name, blocks=blocks))


@pytest.mark.parametrize("stored", LARGEST)
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(
    ("M", "dtype", "up"),
    [(1, "bfloat16", 0), (70, "float16", 0), (200, "float32", 0), (3, "bfloat16", 140),
     (200, "bfloat16", 300)],
)  # fmt: skip
def test_one_byte_is_the_reference_on_dequantized_weights(M, dtype, up, launch, stored):
    check(planned(problem_of(M, (200, 333, 130), up, dtype, launch, stored)))


@pytest.mark.parametrize("layout", ["dma", "pe"])
@pytest.mark.parametrize(("spill", "up"), [(0, 0), (1, 0), (1, 170)])
def test_a_loop_on_the_device_makes_the_same(spill, up, layout):
    blocks: dict[str, Any] = {"token_block": 128, "inner_block": 512, "block": 512, "spill": spill}
    blocks |= {"layout": layout, "banks": 6}
    case = Case(problem_of(300, (200, 700, 130), up), blocks=blocks)
    operands = drawn(case)
    looped, one = [run(case, operands, device_loop=loop).outputs for loop in (True, False)]
    assert looped.equal(one)


@pytest.mark.slow
@pytest.mark.parametrize("M", [1, 128, 4096])
@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Llama-3.2-1B"])
def test_a_strong_baseline(model, M):
    """Near the limit on trn2, and no slower than three launches of `xw`."""
    shape = SHAPES[model]
    H, inner = shape.hidden_size, shape.intermediate_size
    problem = Problem("mlp", M, mlp_weights(H, inner, H), target="trn2")
    time_ms = plan_problem(problem).time_ms
    assert problem.roofline_ms >= 0.9 * time_ms
    three = 2 * plan_xw(M, H, inner, target="trn2").time_ms
    assert time_ms <= three + plan_xw(M, inner, H, target="trn2").time_ms


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ((), "without x_up gate and up contract the same features, got 8 and 9; use"),
        ((("x_down", (-1, 9), ""),), "^mlp_decode takes no x_down; leave it out$"),
    ],
)
def test_others_are_those_of_the_kernel(others, message):
    with pytest.raises(ValueError, match=message):
        plan_op("mlp", 4, mlp_weights(8, 8, 8, 9), others=others)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 8), (9, 8), (8, 8), (8, 8)), "8 features and 9 rows"),
        (((4, 8), (8, 9), (8, 9), (8, 8)), "9 features and 8 rows"),
        (((4, 8), (8, 8), (8, 8), (8, 8), (4, 9)), "9 features and 8 rows"),
        (((4, 8), (8, 8), (9, 8), (8, 8), (3, 9)), "x has 4 tokens and x_up 3"),
    ],
)
@pytest.mark.parametrize("kernel", [mlp, mlp_decode])
def test_bad_operands_are_refused(kernel, shapes, message):
    with pytest.raises(AssertionError, match=message):
        nc.simulate(kernel, *[torch.zeros(shape) for shape in shapes], target="trn2")
