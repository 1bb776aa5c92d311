"""Plans against the simulated core: time within a bound; traffic, SBUF and instructions exact."""

import math
import random
import statistics

import pytest

from neuronmm_ops import neuroncore as nc
from neuronmm_ops.hardware import DMA_DONE_NS, DMA_START_NS, Engine, Target, resolve_target
from neuronmm_ops.kernels import Plan, Problem, nki_kernel, plan_op, plan_part, plan_xuv, plan_xw
from neuronmm_ops.kernels.planner import search
from neuronmm_ops.kernels.planner.instructions import result_ns
from neuronmm_ops.kernels.planner.problem import mlp_matrices, qkv_matrices
from neuronmm_ops.kernels.planner.timeline import Program, Step, Timeline, sbuf_peak
from neuronmm_ops.neuroncore.dtypes import dtype_of

OPS = ("xw", "xuv", "svd_mlp", "svd_qkv")
CORES: tuple[tuple[Target, int], ...] = (
    ("trn1", 1),
    ("trn2", 1),
    ("trn2", 2),
    ("trn3", 1),
    ("trn3", 2),
)
DTYPES = ("bfloat16", "bfloat16", "float16", "float32")
MOST_MATMULS = 20_000
"""Of a problem, so that a sample of 200 runs in a minute."""


def drawn(rng: random.Random, low: int, high: int) -> int:
    """A whole number, its logarithm even."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def sample(op: str, count: int, first_M: int = 1) -> list[Problem]:
    """Random problems, the same in every run."""
    rng, found = random.Random(op), list[Problem]()  # noqa: S311
    while len(found) < count:
        M = drawn(rng, first_M, 4096)
        K, inner, N = [drawn(rng, 64, 8192) for _ in range(3)]
        ranks = (drawn(rng, 16, 2048), drawn(rng, 16, 2048), drawn(rng, 16, 2048))
        matrices = {
            "xw": ((K, N),),
            "xuv": ((K, ranks[0]), (ranks[0], N)),
            "svd_mlp": mlp_matrices(K, ranks, inner, N),
            "svd_qkv": qkv_matrices(K, ranks, (inner, N, N)),
        }[op]
        target, lnc = rng.choice(CORES)
        problem = Problem(op, M, matrices, rng.choice(DTYPES), target, lnc)
        if problem.flops / (2 * 128 * 128 * 512) < MOST_MATMULS:
            found.append(problem)
    return found


def prefill_plan(problem: Problem) -> Plan:
    return next(plan for plan in search.candidates(problem) if plan.phase == "prefill")


def traced(plan: Plan) -> nc.Profile:
    p = plan.problem
    specs = [nc.TensorSpec(shape, dtype_of(p.dtype)) for shape in ((p.M, p.K), *p.matrices)]
    kernel = nki_kernel(plan)
    return nc.simulate(kernel, *specs, target=p.target, mode="trace", **plan.arguments).profile


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_prefill_plans_predict_200_random_problems(op):
    errors, large = list[float](), 0
    for problem in sample(op, 200):
        plan = prefill_plan(problem)
        seen = traced(plan)
        assert plan.hbm_bytes == seen.hbm_bytes, plan
        assert plan.instructions == seen.instructions, plan
        assert seen.sbuf_peak_bytes <= plan.sbuf_bytes, plan
        error = abs(plan.time_ms / seen.time_ms - 1)
        large += seen.time_ms >= 0.02 and error > 0.1
        assert seen.time_ms < 0.02 or error <= 0.2, f"{plan}: {seen.time_ms} ms"
        errors.append(error)
    assert statistics.median(errors) <= 0.01
    assert large <= 2


@pytest.mark.parametrize("op", OPS)
def test_prefill_plans_count_instructions_and_bytes(op):
    for problem in sample(op, 6, first_M=129):
        plan = prefill_plan(problem)
        seen = traced(plan)
        assert (plan.hbm_bytes, plan.instructions) == (seen.hbm_bytes, seen.instructions), plan


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("M", [2048, 2100])
@pytest.mark.parametrize(("target", "lnc"), [("trn1", 1), ("trn2", 2)])
def test_a_launch_of_many_instructions_is_split_by_tokens(op, M, target, lnc):
    matrices = {
        "xw": ((512, 768),),
        "xuv": ((512, 256), (256, 768)),
        "svd_mlp": mlp_matrices(512, (128, 128, 256), 768, 512),
        "svd_qkv": qkv_matrices(512, (256, 128, 128), (768, 256, 256)),
    }[op]
    whole = plan_op(op, M, matrices, "bfloat16", target, lnc)
    assert whole.launches == (M,)
    most = whole.instructions // 2
    plan = plan_op(op, M, matrices, "bfloat16", target, lnc, most)
    *first, last = plan.launches
    assert sum(plan.launches) == M
    assert first
    assert set(first) == {first[0]}
    assert first[0] % 128 == 0
    assert 0 < last <= first[0]
    parts = [plan_part(plan, tokens) for tokens in plan.launches]
    assert {part.blocks for part in parts} == {plan.blocks}
    assert parts[-1] is plan_part(plan, last)  # planned once, however often it is launched
    launches = [traced(part) for part in parts]
    assert max(launch.instructions for launch in launches) <= most
    assert plan.instructions == sum(launch.instructions for launch in launches)
    assert plan.hbm_bytes == sum(launch.hbm_bytes for launch in launches)
    time_ms = sum(launch.time_ms for launch in launches)
    assert plan.time_ms == pytest.approx(time_ms, rel=0.1)


def test_a_launch_has_128_tokens_at_least():
    plan = plan_xuv(300, 512, 128, 640, target="trn1", max_instructions=1)
    assert plan.launches == (128, 128, 44)
    decode = plan_xw(1, 2048, 8192, target="trn2", lnc=2, max_instructions=1)
    assert (decode.phase, decode.launches) == ("decode", (1,))
    longest = plan_xw(2**17, 512, 640, target="trn1", max_instructions=1)
    assert longest.launches == (128,) * 1024
    with pytest.raises(ValueError, match="max_instructions must be at least 1, got 0"):
        plan_xw(128, 512, 640, max_instructions=0)


def test_a_long_prompt_is_split_by_default():
    plan = plan_xuv(2**17, 8192, 4096, 16384, target="trn2")
    assert len(plan.launches) > 1
    assert plan.instructions / len(plan.launches) <= search.MAX_INSTRUCTIONS


def test_a_step_waits_for_its_first_load_and_is_evicted_and_stored():
    machine = resolve_target("trn1")
    step = Step(
        1000.0, load_ns=400.0, head_ns=100.0, tail_ns=250.0, store_ns=60.0,
        tiles=2, first_ns=100.0, last_ns=100.0, scalar_ns=300.0,
    )  # fmt: skip
    timeline = Timeline(machine)
    timeline.repeat([program_of([step])], 1)
    assert timeline.now == DMA_START_NS + 100 + DMA_DONE_NS + 1000
    # the last tile is evicted after the first, which ends later than the last matmul
    first = timeline.now - 100 + result_ns(machine, Engine.TENSOR) + 300
    seen = first + 300 + result_ns(machine, Engine.SCALAR)
    assert timeline.end_ns == pytest.approx(seen + DMA_START_NS + 60)


def test_tensor_engine_waits_for_the_last_byte():
    step = Step(100.0, load_ns=400.0, head_ns=100.0, tail_ns=50.0)
    timeline = Timeline(resolve_target("trn2"))
    timeline.repeat([program_of([step])], 1)
    assert timeline.now == DMA_START_NS + 400 + DMA_DONE_NS + 50


def test_a_load_waits_for_sbuf_that_a_step_before_frees():
    machine = resolve_target("trn2")
    size = machine.usable_sbuf_bytes
    step = Step(1000.0, load_ns=10.0, head_ns=10.0, fills=size, needs=size, frees=size)
    timeline = Timeline(machine)
    timeline.repeat([program_of([step])], 2)
    first = DMA_START_NS + 10 + DMA_DONE_NS + 1000
    second = (
        first + DMA_START_NS + 10 + DMA_DONE_NS + 1000
    )  # it fills what is free when the first ends
    assert timeline.now == second
    assert sbuf_peak([program_of([step])], live=7) == size + 7


def test_repeats_are_skipped_without_a_change():
    step = Step(700.0, load_ns=300.0, head_ns=50.0, tail_ns=20.0, store_ns=90.0,
                tiles=4, first_ns=50.0, last_ns=50.0, scalar_ns=120.0)  # fmt: skip
    program = program_of([step])
    long, short = Timeline(resolve_target("trn2")), Timeline(resolve_target("trn2"))
    for _ in range(500):  # each of them alone, so that none is skipped
        long.repeat([program], 1)
    short.repeat([program], 500)
    assert short.end_ns == pytest.approx(long.end_ns, rel=1e-6)
    assert len(program.sections) == 1


def program_of(steps: list[Step]) -> Program:
    program = Program()
    program.again(None)
    for step in steps:
        program.add(step)
    return program
