"""Plans: they cost what their kernel does, are the same everywhere, and are kept."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

import neuroncore
import neuroncore.isa as nisa
import neuroncore.language as nl
import neuronmm_ops
from neuroncore.alike import alike_launches
from neuroncore.hardware import resolve_target
from neuronmm_ops.plan import (
    MAX_INSTRUCTIONS,
    Problem,
    cache,
    mlp_matrices,
    plan_op,
    plan_problem,
    plan_xuv,
    plan_xw,
    qkv_matrices,
    search,
    tracing,
)

PAIR = ((512, 256), (256, 768))
OPS = {
    "xw": ((512, 768),),
    "xuv": PAIR,
    "svd_mlp": mlp_matrices(512, (128, 128, 256), 768, 512),
    "svd_qkv": qkv_matrices(512, (256, 128, 128), (768, 256, 256)),
}
MLP = ((3269, 1280), (3269, 1280), (1280, 3269))
QKV = qkv_matrices(3509, (1440, 160, 128), (3509, 877, 877))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """A cache of the user's own without entries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan_problem.cache_clear()
    return tmp_path / "neuronmm-ops" / "plans"


BLOCKS = {"token_block": 128, "u_block": 256, "v_block": 512, "tokens": 512, "resident": 4}


@pytest.mark.parametrize(
    ("M", "target", "lnc", "dtype"),
    [
        (2048, "trn1", 1, "bfloat16"),
        (2200, "trn2", 1, "bfloat16"),
        (5120, "trn2", 2, "bfloat16"),
        (2100, "trn3", 1, "float32"),
        (4800, "trn3", 2, "float16"),
    ],
)
def test_blocks_that_are_not_traced_cost_what_those_before_do(M, target, lnc, dtype):
    problem = Problem("xuv", M, PAIR, dtype, target, lnc)
    arguments = {**BLOCKS, "layout": "dma" if dtype != "float32" else "pe", "banks": 6}
    whole = tracing._traced(problem, "xuv", arguments)
    extended = tracing.traced(problem, "xuv", arguments)
    assert extended.times_ms == pytest.approx(whole.times_ms, rel=1e-4)
    assert (extended.hbm_bytes, extended.instructions) == (whole.hbm_bytes, whole.instructions)
    assert extended.sbuf_bytes == whole.sbuf_bytes


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("M", "lnc"), [(3, 1), (300, 2)])
def test_a_plan_costs_what_its_kernel_does(op, M, lnc):
    plan = plan_op(op, M, OPS[op], target="trn2", lnc=lnc)
    cost = tracing.traced(plan.problem, plan.kernel, plan.arguments)
    assert plan.times_ms == cost.times_ms
    assert plan.kernel in ((op, f"{op}_decode") if M == 3 else (op,))
    assert 0 < plan.sbuf_bytes <= plan.problem.machine.planned_sbuf_bytes
    assert plan.hbm_bytes >= plan.problem.least_bytes * 0.99


@pytest.mark.parametrize(
    ("op", "M", "matrices", "target", "lnc", "others"),
    [
        ("xw", 200, ((2527, 1024),), "trn3", 2, {"layout": "pe", "banks": 6}),
        ("mlp", 384, MLP, "trn1", 1, {"inner_block": 1024, "block": 2048}),
        ("svd_qkv", 1024, QKV, "trn1", 1, {"token_block": 512, "u_block": 1536, "v_block": 2048}),
    ],
)
def test_knobs_that_only_help_together_are_found(op, M, matrices, target, lnc, others):
    plan = plan_op(op, M, matrices, target=target, lnc=lnc)
    cost = tracing.traced(plan.problem, plan.kernel, {**plan.arguments, **others})
    ratios = zip(plan.times_ms, cost.times_ms, strict=True)
    assert max([ms / other_ms for ms, other_ms in ratios]) <= 1.02


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_plans_leave_a_reserve_that_kernels_may_use(target):
    machine = resolve_target(target)

    def traced(columns):
        def kernel(x):
            nisa.memset(nl.ndarray((128, columns), nl.uint8)[:, :1], 0)

        x = neuroncore.TensorSpec((1, 1), nl.float32)
        return tracing.trace(neuroncore.jit(kernel), [x], target, {})

    assert traced(machine.planned_sbuf_bytes).sbuf_bytes == machine.planned_sbuf_bytes
    assert traced(machine.planned_sbuf_bytes + 1) is None
    assert traced(machine.usable_sbuf_bytes) is None


@pytest.mark.parametrize("op", ["xw", "svd_mlp"])
@pytest.mark.parametrize("M", [2048, 2100])
@pytest.mark.parametrize(("target", "lnc"), [("trn1", 1), ("trn2", 2)])
def test_a_launch_of_many_instructions_is_split_by_tokens(op, M, target, lnc):
    whole = plan_op(op, M, OPS[op], "bfloat16", target, lnc)
    assert whole.launches == (M,)
    most = whole.instructions // 2
    plan = plan_op(op, M, OPS[op], "bfloat16", target, lnc, most)
    *first, last = plan.launches
    assert sum(plan.launches) == M
    assert set(first) == {first[0]}
    assert first[0] % 128 == 0
    assert 0 < last <= first[0]
    assert plan.blocks == whole.blocks
    parts = [replace(plan.problem, M=tokens) for tokens in plan.launches]
    costs = [tracing.traced(part, plan.kernel, plan.arguments) for part in parts]
    assert max(cost.instructions for cost in costs) <= most
    assert plan.instructions == sum(cost.instructions for cost in costs)
    assert plan.times_ms[0] == pytest.approx(sum(cost.times_ms[0] for cost in costs))


def test_a_launch_has_128_tokens_at_least():
    plan = plan_xuv(300, 512, 128, 640, target="trn1", max_instructions=1)
    assert plan.launches == (128, 128, 44)
    decode = plan_xw(1, 2048, 1024, target="trn2", lnc=2, max_instructions=1)
    assert (decode.phase, decode.launches) == ("decode", (1,))


def test_a_long_prompt_is_split_by_default():
    plan = plan_xuv(2**23, 512, 256, 1024, target="trn2")
    assert len(plan.launches) > 1
    assert plan.instructions / len(plan.launches) <= MAX_INSTRUCTIONS


def test_rows_of_fp8_are_doubled_where_that_is_quicker():
    fp8 = {"weight_dtype": "float8_e4m3fn", "target": "trn2"}
    matrices = ((2048, 1280), (1280, 8192))
    doubled = plan_op("xuv", 1024, matrices, compute="fp8", **fp8)
    assert doubled.arguments["double_row"]
    assert doubled.time_ms < plan_op("xuv", 1024, matrices, **fp8).time_ms


@pytest.mark.parametrize("op", ["xuv", "svd_mlp"])
def test_plans_of_one_byte_weigh_serial_column_groups(op):
    pair = ((2048, 2048), (2048, 4096))
    matrices = pair if op == "xuv" else mlp_matrices(1024, (1024,) * 3, 2048, 1024)
    problem = Problem(op, 4, matrices, target="trn2", weight_dtype="float8_e4m3fn")
    best, regret = search.best_candidate(problem)
    assert best.arguments["stationary"]
    assert regret < 0.1  # of stationary weights, where matmuls issue slowly
    moving, *_ = search.knobs_of(problem, "decode")
    other, _ = search._chosen(search.descend(problem, moving, tracing.weighed(problem)))
    serial_ms, other_ms = best.cost.other_ms[-1], other.cost.other_ms[-1]
    assert serial_ms <= 0.9 * other_ms
    assert best.cost.times_ms[0] <= 1.05 * other.cost.times_ms[0]


def test_a_plan_weighs_the_other_issue_of_matmuls():
    assert tracing.weighed(Problem("xw", 4096, OPS["xw"], target="trn2")) == ("matmul-issue",)
    base = tracing.Cost((1.0, 1.0), 1, 1, 1, "PE", 1, (1.4,))
    costs = [base, replace(base, times_ms=(1.01, 1.01), other_ms=(1.1,))]
    candidates = [search.Candidate("xw", {"block": n}, cost) for n, cost in enumerate(costs)]
    best, regret = search._chosen(candidates)
    assert (best, regret) == (candidates[1], pytest.approx(0.01))


def test_a_layer_is_searched_as_one_of_two_and_costs_as_one():
    H, d, T = 512, 64, 256
    matrices = [(H, 512), (H, 128), (H, 128), (512, H), (H, 1024), (H, 1024), (1024, H)]
    others = [("residual", (-1, H), ""), ("cos", (-1, d), ""), ("sin", (-1, d), "")]
    others += [("positions", (1,), "int32"), ("input_norm", (H,), ""), ("mlp_norm", (H,), "")]
    others += [("key_cache", (1, 2, d, T), ""), ("value_cache", (1, 2, T, d), "")]
    problem = Problem("decoder_layer", 1, tuple(matrices), target="trn2", others=tuple(others))
    stages = tuple([plan_problem(each) for each in search.stages_of(problem)])
    best, _ = search.best_candidate(problem, stages)
    plan = search.find_plan(problem, MAX_INSTRUCTIONS, device_loop=False, stages=stages)
    one, two = [
        tracing.traced(problem, plan.kernel, plan.arguments, repeats=repeats) for repeats in (1, 2)
    ]
    assert (plan.time_ms, plan.instructions) == (one.times_ms[0], one.instructions)
    assert best.cost.times_ms == two.times_ms
    assert 1.9 * one.instructions < two.instructions < 2.1 * one.instructions


@pytest.mark.parametrize(("op", "M", "lnc"), [("xw", 1, 1), ("xuv", 300, 2), ("svd_mlp", 600, 1)])
def test_launches_that_share_templates_cost_what_each_alone_does(op, M, lnc):
    problem = Problem(op, M, OPS[op], target="trn2", lnc=lnc)
    knobs = search.knobs_of(problem, "decode" if M == 1 else "prefill")[0]
    axes = [axis for axis in knobs.axes if not callable(axis)]
    tried = [{**knobs.starts[0], **axis[n % len(axis)]} for n, axis in enumerate(axes)]
    alone = [tracing.traced(problem, knobs.kernel, each, ("matmul-issue",)) for each in tried]
    with alike_launches():
        together = [
            tracing.traced(problem, knobs.kernel, each, ("matmul-issue",)) for each in tried
        ]
    assert together == alone
    assert any(alone)


def test_a_candidate_far_slower_than_the_quickest_is_dropped():
    problem = Problem("xw", 1, OPS["xw"], target="trn2")
    (knobs,) = search.knobs_of(problem, "decode")
    cost = tracing.traced(problem, knobs.kernel, knobs.starts[0])
    first_ms = cost.times_ms[0]
    assert tracing.traced(problem, knobs.kernel, knobs.starts[0], (), first_ms) == cost
    assert tracing.traced(problem, knobs.kernel, knobs.starts[0], (), 0.99 * first_ms) is None


def test_the_limit_is_the_slower_of_matmuls_and_bytes():
    prefill = Problem("xuv", 1024, ((8192, 4096), (4096, 16384)), target="trn1")
    each = 6.97e6 / (32 * 64 * 16)  # ns of a full matmul in the kernel the overhead was fitted on
    assert prefill.roofline_ms == pytest.approx(2 * 32 * (64 + 128) * each / 1e6)
    assert Problem("xw", 4096, ((8192, 8192),), target="trn1").roofline_ms == pytest.approx(6.97)
    decode = Problem("xuv", 1, ((2048, 1280), (1280, 8192)), target="trn1")
    assert decode.roofline_ms == pytest.approx(decode.least_bytes / 272e6)
    assert decode.least_bytes == 2 * (2048 + 1280 * (2048 + 8192) + 8192)


def test_plans_are_the_same_in_all_processes(tmp_path):
    script = """
import json, sys, types
# The package's root would import torch, which takes seconds; plans need none of it.
sys.modules["neuronmm_ops"] = root = types.ModuleType("neuronmm_ops")
root.__path__ = [sys.argv[1]]
from neuronmm_ops.plan import plan_xuv
p = plan_xuv(200, 700, 77, 500, 'bfloat16', 'trn2')
print(json.dumps([p.times_ms, p.hbm_bytes, p.blocks]))
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script, *neuronmm_ops.__path__],
            env={
                "PYTHONHASHSEED": seed,
                "XDG_CACHE_HOME": str(tmp_path / seed),
                "PYTHONPATH": str(neuroncore.__path__[0] + "/.."),
            },
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert json.loads(outputs.pop())[0][0] > 0


def test_a_plan_is_searched_once_for_these_kernels(empty_cache, monkeypatch):
    first = plan_xw(100, 200, 300)
    assert plan_xw(100, 200, 300, target="gen3") is first
    with monkeypatch.context() as patch:
        patch.setattr("neuronmm_ops.plan.find_plan", None)  # another process only reads
        plan_problem.cache_clear()
        assert plan_xw(100, 200, 300) == first
    assert len(list(empty_cache.rglob("*.json"))) == 1
    plan_problem.cache_clear()
    monkeypatch.setattr(cache, "fingerprint", lambda: "of another kernel")
    assert plan_xw(100, 200, 300) == first
    assert len(list(empty_cache.rglob("*.json"))) == 2


def test_what_is_no_entry_is_searched_again(empty_cache):
    first = plan_xw(100, 200, 300)
    (path,) = empty_cache.rglob("*.json")
    for content in (b"", b"[]", b"{}", b'{"phase": 1}', b"\xff", b"nul"):
        path.write_bytes(content)
        plan_problem.cache_clear()
        assert plan_xw(100, 200, 300) == first
        assert json.loads(path.read_bytes())["kernel"] == first.kernel


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert plan_xw(100, 200, 300).launches == (100,)
    assert file.read_text() == ""


REAL_NKI = """
class Any(type):
    def __getattr__(cls, name):
        return cls


class Nothing(metaclass=Any):
    def __new__(cls, *args, **kwargs):
        raise RuntimeError("the real nki runs nothing on a CPU")


class NKIObject:
    pass


def __getattr__(name):
    return Nothing


def jit(function):
    return object()
"""


@pytest.mark.slow
def test_plans_are_made_where_the_real_nki_is_installed(tmp_path):
    package = tmp_path / "nki"
    package.mkdir()
    for name in ("__init__", "isa", "language"):
        (package / f"{name}.py").write_text(REAL_NKI)
    script = """
import nki, sys
from neuronmm_ops import kernels
from neuronmm_ops.plan import plan_xuv
plan = plan_xuv(100, 512, 256, 768, target="trn2")
assert type(kernels.kernel_named("xuv", "xuv")) is object, "bound to the package that is installed"
assert sys.modules["nki"] is nki and sys.modules["neuronmm_ops.kernels"] is kernels
print(plan)
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(plan_xuv(100, 512, 256, 768, target="trn2"))


@pytest.mark.parametrize(
    ("op", "M", "options", "message"),
    [
        ("xw", 0, {}, "at least 1"),
        ("xw", 8, {"dtype": "int8"}, "dtype must be one of bfloat16"),
        ("xw", 8, {"target": "trn9"}, "target must be one of trn1"),
        ("xw", 8, {"target": "trn1", "lnc": 2}, "lnc must be 1, or 2 on trn2 and trn3"),
        ("xw", 8, {"max_instructions": 0}, "max_instructions must be at least 1, got 0"),
        ("xw", 8, {"weight_dtype": "int3"}, "weight_dtype must be one of"),
        ("xw", 8, {"weight_dtype": None}, "weight_dtype must be one of .*, or empty .* got None"),
        ("lm_head", 0, {}, "at least 1"),
        ("lm_head", 129, {}, "up to 128 tokens, got 129"),
        ("lm_head", 8, {"matrices": ((8, 2**23),)}, "below 2"),
    ],
)
def test_bad_problems_are_refused(op, M, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        plan_op(op, M, **{"matrices": ((8, 8),)} | options)
    assert "\n" not in str(caught.value)
