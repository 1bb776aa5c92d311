"""The decode kernels: values, FLOPs and traffic on small sizes; plans that run."""

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from decoding import CORES, SIZES, TOKENS, act, decode_arguments, rounded, wide
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close_to_oracle

from neuroncore import TensorSpec, dtypes, lint, simulate
from neuroncore.hardware import TRN1, TRN2, TRN3, Machine
from neuroncore.profile.profile import Profile
from neuronmm_ops.kernels.stages import chunks, decode, sums, tiling, weights
from neuronmm_ops.kernels.svd_mlp.decode import svd_mlp_decode
from neuronmm_ops.kernels.svd_qkv.decode import svd_qkv_decode
from neuronmm_ops.kernels.xuv.decode import xuv_decode
from neuronmm_ops.kernels.xw.decode import xw_decode
from neuronmm_ops.models import SHAPES
from neuronmm_ops.plan import Plan, Problem, mlp_matrices, plan_problem, qkv_matrices
from neuronmm_ops.rank import aligned_rank

KERNELS = {
    "xw": xw_decode,
    "xuv": xuv_decode,
    "svd_mlp": svd_mlp_decode,
    "svd_qkv": svd_qkv_decode,
}
DTYPES = ("bfloat16", "float16", "float32")


BIASED = ("xw", "xuv", "svd_qkv")


def shapes_of(problem: Problem) -> list[tuple[int, ...]]:
    """Of x and the weights, then of the bias."""
    bias = [(size,) for size in problem.outputs] if problem.op in BIASED else []
    return [(problem.M, problem.K), *problem.matrices, *bias]


def operands(problem: Problem, bias: bool, seed: int = 0) -> list[np.ndarray]:
    """Random values such that every product is of the order of 1."""
    rng = np.random.default_rng(seed)
    shapes = [s for s in shapes_of(problem) if len(s) == 2 or bias]
    scales = [1.0, *[s[0] ** -0.5 if len(s) == 2 else 0.5 for s in shapes[1:]]]
    drawn = [rng.standard_normal(s) * c for s, c in zip(shapes, scales, strict=True)]
    return [rounded(a, problem.dtype) for a in drawn]


def composition(problem: Problem, arrays: list[np.ndarray], name: str, keep: Any) -> np.ndarray:
    """The op in fp64; `keep` rounds what the plain composition stores on the way."""
    x, *weights = [wide(a) for a in arrays]
    count = {"xw": 1, "xuv": 2, "svd_mlp": 6, "svd_qkv": 6}[problem.op]
    factors, biases = weights[:count], weights[count:]
    bias = np.concatenate(biases) if biases else 0.0
    if problem.op == "xw":
        return keep(x @ factors[0] + bias)
    if problem.op == "xuv":
        return keep(keep(x @ factors[0]) @ factors[1] + bias)
    if problem.op == "svd_qkv":
        pairs = zip(factors[::2], factors[1::2], strict=True)
        return keep(np.concatenate([keep(x @ u) @ v for u, v in pairs], axis=1) + bias)
    gate = keep(keep(x @ factors[0]) @ factors[1])
    up = keep(keep(x @ factors[2]) @ factors[3])
    hidden = keep(keep(act(name, gate)) * up)
    return keep(keep(hidden @ factors[4]) @ factors[5])


def run(problem: Problem, arguments: dict[str, Any], arrays: list[Any], **options: Any) -> Any:
    kernel = KERNELS[problem.op]
    launch = kernel[2] if problem.lnc == 2 else kernel
    return simulate(launch, *arrays, target=problem.target, **arguments, **options)


def traced(plan: Plan, bias: bool = False) -> Profile:
    problem = plan.problem
    shapes = [s for s in shapes_of(problem) if len(s) == 2 or bias]
    specs = [TensorSpec(s, dtypes.dtype_of(problem.dtype)) for s in shapes]
    return run(problem, plan.arguments, specs, mode="trace").profile


def check(problem: Problem, arguments: dict[str, Any], bias: bool, name: str = "silu") -> None:
    """Values against fp64, FLOPs without padding, and each weight byte loaded once."""
    arrays = operands(problem, bias)
    given_name = {"activation": name} if problem.op == "svd_mlp" else {}
    done = run(problem, {**arguments, **given_name}, arrays)
    exact = composition(problem, arrays, name, wide)
    plain = composition(problem, arrays, name, lambda a: wide(rounded(a, problem.dtype)))
    # relu keeps positive values, and no activation here magnifies.
    size = composition(problem, [np.abs(a) for a in arrays], "relu", wide)
    dtype = getattr(torch, problem.dtype)
    actual, plain = (torch.from_numpy(wide(a)).to(dtype) for a in (done.outputs, plain))
    assert_close_to_oracle(actual, torch.from_numpy(exact), plain, torch.from_numpy(size))
    added = sum(a.size for a in arrays if a.ndim == 1)
    assert done.profile.flops == 2 * problem.M * (problem.weight_elements + added)
    traffic = {t.name: t.read_bytes for t in done.profile.tensors}
    names = list(inspect.signature(KERNELS[problem.op].func).parameters)
    for tensor, array in list(zip(names, arrays, strict=False))[1:]:
        assert traffic[tensor] == array.nbytes, tensor


@settings(max_examples=8)
@given(TOKENS, SIZES, SIZES, CORES, st.sampled_from(DTYPES), st.booleans(), st.booleans())
def test_dense(
    M: int, K: int, N: int, core: tuple[str, int], dtype: str, bias: bool, resident: bool
) -> None:
    problem = Problem("xw", M, ((K, N),), dtype, *core)
    cut = {"k_chunk": 128, "block": 96, "last_block": 64, "tile_bytes": 512}
    check(problem, {**cut, "resident": resident}, bias)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    TOKENS,
    SIZES,
    SIZES,
    SIZES,
    CORES,
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
)
def test_low_rank(
    M: int, K: int, r: int, N: int, core: tuple[str, int], dtype: str, bias: bool, small: bool
) -> None:
    problem = Problem("xuv", M, ((K, r), (r, N)), dtype, *core)
    cut = {"k_chunk": 128, "rank_block": 128, "block": 96, "last_block": 64, "tile_bytes": 512}
    check(problem, cut if small else decode_arguments(problem), bias)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    TOKENS,
    st.tuples(SIZES, SIZES, SIZES),
    st.tuples(SIZES, SIZES, SIZES),
    CORES,
    st.sampled_from(DTYPES),
    st.sampled_from(("silu", "gelu", "gelu_tanh", "relu")),
    st.sampled_from(("planned", "spilled", "in SBUF")),
)
def test_mlp(
    M: int,
    sizes: tuple[int, int, int],
    ranks: tuple[int, int, int],
    core: tuple[str, int],
    dtype: str,
    name: str,
    blocks: str,
) -> None:
    K, inner, N = sizes
    problem = Problem("svd_mlp", M, mlp_matrices(K, ranks, inner, N), dtype, *core)
    cut = {"k_chunk": 128, "rank_block": 128, "inner_block": 128, "last_block": 64}
    cut["spill"] = blocks == "spilled"
    chosen = decode_arguments(problem) if blocks == "planned" else cut
    check(problem, chosen, bias=False, name=name)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    TOKENS,
    SIZES,
    st.tuples(SIZES, SIZES, SIZES),
    st.tuples(SIZES, SIZES, SIZES),
    CORES,
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from(("planned", "fused", "one by one")),
)
def test_qkv(
    M: int,
    K: int,
    ranks: tuple[int, int, int],
    outputs: tuple[int, int, int],
    core: tuple[str, int],
    dtype: str,
    bias: bool,
    blocks: str,
) -> None:
    problem = Problem("svd_qkv", M, qkv_matrices(K, ranks, outputs), dtype, *core)
    cut = {"k_chunk": 128, "rank_block": 128, "block": 96, "last_block": 64, "tile_bytes": 512}
    cut["fuse"] = blocks == "fused"
    check(problem, decode_arguments(problem) if blocks == "planned" else cut, bias)


@pytest.mark.slow
@pytest.mark.parametrize("core", [("trn1", 1), ("trn2", 2), ("trn3", 1)])
@pytest.mark.parametrize("M", [3, 100])
def test_several_banks_and_a_last_tile_in_two_parts(M: int, core: tuple[str, int]) -> None:
    pair = Problem("xuv", M, ((130, 700), (700, 2600)), "float32", *core)
    check(pair, {"block": 1024, "last_block": 1400, "rank_block": 1536}, bias=False)
    blocks = {"block": 1024, "last_block": 1300, "rank_block": 512, "tile_bytes": 99999}
    check(pair, blocks, bias=True)
    few = Problem("xuv", M, ((300, 7), (7, 1400)), "float32", *core)
    check(few, {"last_block": 1400, "tile_bytes": 99999}, bias=False)
    mlp = Problem("svd_mlp", M, mlp_matrices(70, (600, 300, 500), 1200, 90), "bfloat16", *core)
    check(mlp, {"inner_block": 1024, "spill": False}, bias=False)


@given(
    st.integers(1, 9000), TOKENS, st.sampled_from((TRN1, TRN2, TRN3)), st.sampled_from((32, 128)),
    st.sampled_from((2, 4)),
)  # fmt: skip
def test_sums_are_cut_without_overlap(
    size: int, M: int, machine: Machine, unit: int, itemsize: int
) -> None:
    step = tiling.matmul_columns(M, machine.moving_max)
    sums = tiling.SumTiling(size, M, machine.pe_tile, unit, step)
    assert sums.partitions <= 128
    whole = tiling.Span(0, size)

    def columns(parts: list[tiling.GroupSpan]) -> list[int]:
        starts = [sums.groups[part.group].start + part.start for part in parts]
        return [c for a, part in zip(starts, parts, strict=True) for c in range(a, a + part.size)]

    assert columns(sums.evictions()) == list(range(size))
    assert sorted(columns(sums.matmuls(whole))) == list(range(size))
    parts = [part for half in sums.halves(itemsize) for part in sums.matmuls(half)]
    assert sorted(columns(parts)) == list(range(size))


@given(st.integers(0, 60), st.integers(2, 9000), st.sampled_from((512, 4096, 16384)), st.booleans())
def test_weight_tiles_follow_one_another(
    tiles: int, row_bytes: int, tile_bytes: int, first: bool
) -> None:
    for last in (False, True):
        found = tiling.weight_tiles(tiles, row_bytes, tile_bytes, first, last)
        starts = [0, *[s.start + s.size for s in found]]
        assert [s.start for s in found] == starts[:-1]
        assert starts[-1] == tiles
        assert all(s.size == 1 or s.size * row_bytes <= tile_bytes for s in found)
        for s in found[:1] * first + found[-1:] * last:
            assert s.size == 1 or s.size * row_bytes <= tiling.EDGE_TILE_BYTES


@pytest.mark.parametrize("M", [1, 32, 33, 64, 65, 128])
def test_transposes_on_trn1(M: int) -> None:
    """TensorE writes fp32 there, and reads from partitions 0 and 64 only."""
    assert 128 // tiling.column_groups(M, TRN1.pe_tile) >= 64
    problem = Problem("xuv", M, ((600, 300), (300, 200)), "bfloat16", "trn1")
    records = traced(plan_problem(problem)).schedule.cores[0].trace.records
    into = [storages[0] for form, storages, _, _ in records if form.opcode == "nc_transpose"]
    assert into
    assert {storage.layout.dtype for storage in into} == {dtypes.dtype_of("float32")}


def test_strict_front_end() -> None:
    for kernel in KERNELS.values():
        assert lint(kernel) == []
    for module in (decode, sums, weights, chunks, tiling):
        members = [m for _, m in inspect.getmembers(module) if inspect.getmodule(m) is module]
        for member in members:
            methods = inspect.getmembers(member, inspect.isfunction)
            for function in [member] if inspect.isfunction(member) else [m for _, m in methods]:
                assert lint(function) == []


@pytest.mark.parametrize(
    ("M", "target", "stores"),
    [
        (1, "trn1", 1),
        (1, "trn2", 1),
        (8, "trn2", 2),
        (32, "trn3", 2),
        (33, "trn2", 2),
        (65, "trn2", 1),
    ],
)
def test_the_last_sums_are_stored_by_few_dmas(M: int, target: str, stores: int) -> None:
    """A queue starts DMAs one after the other: four column groups share two, of one token one."""
    problem = Problem("xw", M, ((256, 1024),), "bfloat16", target)
    arguments = {"block": 1024, "last_block": 1024}
    specs = [TensorSpec(s, dtypes.dtype_of("bfloat16")) for s in ((M, 256), (256, 1024))]
    records = run(problem, arguments, specs, mode="trace").profile.schedule.cores[0].trace.records
    found = [form.dma for form, *_ in records if form.dma and form.dma.direction == "store"]
    assert [dma.bytes for dma in found] == [M * 1024 * 2 // stores] * stores


MODELS = ("Qwen3-0.6B", "Llama-3.2-1B")
"""Whose plans are searched here: those of larger models take minutes."""


def model_problems(op: str, M: int, lnc: int) -> list[Problem]:
    found: list[Problem] = []
    for target in ("trn1", "trn2", "trn3"):
        for shape in [SHAPES[name] for name in MODELS]:
            K, N = shape.hidden_size, shape.intermediate_size
            r = aligned_rank(K, N, 0.2)
            assert r is not None
            if lnc == 2 and target == "trn1":
                continue
            if op == "xuv":
                found.append(Problem("xuv", M, ((K, r), (r, N)), target=target, lnc=lnc))
                found.append(Problem("xuv", M, ((N, r), (r, K)), target=target, lnc=lnc))
            else:
                found.append(
                    Problem("svd_mlp", M, mlp_matrices(K, (r, r, r), N, K), target=target, lnc=lnc)
                )
    return list(dict.fromkeys(found))  # some models share their sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "M", "share", "slack_us"),
    [
        ("xuv", 1, 0.9, 5.5),
        ("xuv", 16, 0.88, 7),
        ("xuv", 128, 0.88, 7.5),
        ("svd_mlp", 8, 0.87, 6.5),
    ],
)
def test_model_shapes_are_near_the_limit(op: str, M: int, share: float, slack_us: float) -> None:
    """Share of the modelled limit, or microseconds above it."""
    for problem in model_problems(op, M, lnc=1):
        time_ms, roofline_ms = plan_problem(problem).time_ms, problem.roofline_ms
        near = roofline_ms >= share * time_ms or time_ms <= roofline_ms + slack_us / 1e3
        assert near, f"{problem}: {time_ms} ms, limit {roofline_ms} ms"


@pytest.mark.slow
def test_two_cores_are_nearly_twice_as_fast() -> None:
    for problem in model_problems("svd_mlp", 1, lnc=2):
        if problem.inner >= 8192 and problem.target == "trn3":
            alone = replace(problem, lnc=1)
            one, two = [plan_problem(p).time_ms for p in (alone, problem)]
            assert one > 1.7 * two, problem
