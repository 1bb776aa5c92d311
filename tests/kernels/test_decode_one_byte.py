"""The decode kernels with weights in one byte: values, traffic, and plans that are exact."""

import inspect
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from decoding import CORES, SIZES, TOKENS, act, decode_arguments, rounded, wide
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.one_byte import biases_of
from tolerances import assert_close_to_oracle

from neuroncore import TensorSpec, dtypes, simulate
from neuroncore.hardware import TRN1, TRN2, TRN3, Machine
from neuronmm_ops.kernels.stages import tiling
from neuronmm_ops.kernels.svd_mlp.decode import svd_mlp_decode
from neuronmm_ops.kernels.svd_qkv.decode import svd_qkv_decode
from neuronmm_ops.kernels.xuv.decode import xuv_decode
from neuronmm_ops.kernels.xw.decode import xw_decode
from neuronmm_ops.models import SHAPES
from neuronmm_ops.plan import Problem, mlp_matrices, plan_op, plan_problem, qkv_matrices
from neuronmm_ops.rank import aligned_rank

KERNELS = {
    "xw": xw_decode,
    "xuv": xuv_decode,
    "svd_mlp": svd_mlp_decode,
    "svd_qkv": svd_qkv_decode,
}
STORED = {"float8_e4m3fn": (np.dtype(ml_dtypes.float8_e4m3fn), 240), "int8": (np.dtype("i1"), 127)}
FP8, INT8 = STORED
DTYPES = st.sampled_from(("bfloat16", "bfloat16", "float16", "float32"))
WEIGHTS = st.sampled_from((FP8, INT8))
CUT: dict[str, dict[str, Any]] = {
    "xw": {"k_chunk": 128, "block": 96, "last_block": 64, "tile_bytes": 512, "dma_cast": 2},
    "xuv": {"k_chunk": 128, "rank_block": 128, "block": 96, "last_block": 64, "tile_bytes": 512},
    "svd_mlp": {
        "k_chunk": 128,
        "rank_block": 128,
        "inner_block": 128,
        "last_block": 64,
        "dma_cast": 3,
    },
}
CUT["svd_qkv"] = {**CUT["xuv"], "dma_cast": 3}


class Operands(NamedTuple):
    x: np.ndarray
    weights: list[np.ndarray]
    scales: list[np.ndarray]
    bias: np.ndarray | None


def operands(problem: Problem, bias: bool, seed: int = 0) -> Operands:
    """Random weights, each column divided by its scale and rounded; products of the order of 1."""
    rng = np.random.default_rng(seed)
    stored, most = STORED[problem.weight_dtype]
    weights, scales = list[np.ndarray](), list[np.ndarray]()
    for rows, columns in problem.matrices:
        drawn = rng.standard_normal((rows, columns)) * rows**-0.5 * rng.uniform(0.1, 3, columns)
        scale = (np.abs(drawn).max(0) / most).astype(np.float32)
        grid = (drawn / scale).astype(np.float32)
        weights.append((np.rint(grid) if most == 127 else grid).astype(stored))
        scales.append(scale)
    x = rounded(rng.standard_normal((problem.M, problem.K)), problem.dtype)
    row = rounded(rng.standard_normal(problem.N), problem.dtype) if bias else None
    return Operands(x, weights, scales, row)


def composition(problem: Problem, given: Operands, name: str, keep: Any) -> np.ndarray:
    """What the op means, in fp64; `keep` rounds what is stored on the way."""
    x, bias = wide(given.x), 0.0 if given.bias is None else wide(given.bias)

    def product(h: np.ndarray, i: int) -> np.ndarray:
        return (h @ wide(given.weights[i])) * wide(given.scales[i])

    if problem.op == "xw":
        return keep(product(x, 0) + bias)
    if problem.op == "xuv":
        return keep(product(keep(product(x, 0)), 1) + bias)
    if problem.op == "svd_qkv":
        parts = [product(keep(product(x, i)), i + 1) for i in (0, 2, 4)]
        return keep(np.concatenate(parts, axis=1) + bias)
    gate, up = [keep(product(keep(product(x, i)), i + 1)) for i in (0, 2)]
    hidden = keep(keep(act(name, gate)) * up)
    return keep(product(keep(product(hidden, 4)), 5))


def run(problem: Problem, arguments: dict[str, Any], given: Operands, **options: Any) -> Any:
    kernel = KERNELS[problem.op]
    launch = kernel[2] if problem.lnc == 2 else kernel
    bias = biases_of(problem, given.bias)
    tensors = [given.x, *given.weights, *bias, *given.scales]
    return simulate(launch, *tensors, target=problem.target, **arguments, **options)


def specs(problem: Problem) -> Any:
    """The operands' shapes and dtypes, for a trace."""
    of = dtypes.dtype_of
    x = TensorSpec((problem.M, problem.K), of(problem.dtype))
    weights = [TensorSpec(s, of(problem.weight_dtype or problem.dtype)) for s in problem.matrices]
    scaled = problem.matrices if problem.weight_dtype else ()
    return Operands(x, weights, [TensorSpec((s[1],), of("float32")) for s in scaled], None)  # type: ignore[arg-type]


def check(problem: Problem, arguments: dict[str, Any], bias: bool, name: str = "silu") -> None:
    """Values against fp64, and each weight byte loaded once."""
    given = operands(problem, bias)
    chosen = {"activation": name} if problem.op == "svd_mlp" else {}
    done = run(problem, {**arguments, **chosen}, given)
    exact = composition(problem, given, name, wide)
    plain = composition(problem, given, name, lambda a: wide(rounded(a, problem.dtype)))
    sizes = Operands(
        np.abs(given.x),
        [np.abs(wide(w)) for w in given.weights],
        given.scales,
        None if given.bias is None else np.abs(given.bias),
    )
    size = composition(problem, sizes, "relu", wide)
    dtype = getattr(torch, problem.dtype)
    actual, plain = (torch.from_numpy(wide(a)).to(dtype) for a in (done.outputs, plain))
    assert_close_to_oracle(actual, torch.from_numpy(exact), plain, torch.from_numpy(size))
    traffic = {t.name: t.read_bytes for t in done.profile.tensors}
    names = list(inspect.signature(KERNELS[problem.op].func).parameters)
    for tensor, weight in zip(names[1:], given.weights, strict=False):
        assert traffic[tensor] == weight.nbytes, tensor


@settings(max_examples=8)
@given(TOKENS, SIZES, SIZES, CORES, DTYPES, WEIGHTS, st.booleans(), st.booleans())
def test_dense(
    M: int, K: int, N: int, core: tuple[str, int], dtype: str, weights: str, bias: bool, small: bool
) -> None:
    problem = Problem("xw", M, ((K, N),), dtype, *core, weight_dtype=weights)
    check(problem, CUT["xw"] if small else decode_arguments(problem), bias)


@settings(max_examples=8)
@given(TOKENS, SIZES, SIZES, SIZES, CORES, DTYPES, WEIGHTS, st.booleans(), st.booleans())
def test_low_rank(
    M: int,
    K: int,
    r: int,
    N: int,
    core: tuple[str, int],
    dtype: str,
    weights: str,
    bias: bool,
    small: bool,
) -> None:
    problem = Problem("xuv", M, ((K, r), (r, N)), dtype, *core, weight_dtype=weights)
    check(problem, CUT["xuv"] if small else decode_arguments(problem), bias)


@settings(max_examples=8)
@given(
    TOKENS,
    st.tuples(SIZES, SIZES, SIZES),
    st.tuples(SIZES, SIZES, SIZES),
    CORES,
    DTYPES,
    WEIGHTS,
    st.sampled_from(("silu", "gelu", "gelu_tanh", "relu")),
    st.sampled_from(("planned", "spilled", "in SBUF")),
)
def test_mlp(
    M: int,
    sizes: tuple[int, int, int],
    ranks: tuple[int, int, int],
    core: tuple[str, int],
    dtype: str,
    weights: str,
    name: str,
    blocks: str,
) -> None:
    K, inner, N = sizes
    matrices = mlp_matrices(K, ranks, inner, N)
    problem = Problem("svd_mlp", M, matrices, dtype, *core, weight_dtype=weights)
    cut = {**CUT["svd_mlp"], "spill": blocks == "spilled"}
    chosen = decode_arguments(problem) if blocks == "planned" else cut
    check(problem, chosen, bias=False, name=name)


@settings(max_examples=8)
@given(
    TOKENS,
    SIZES,
    st.tuples(SIZES, SIZES, SIZES),
    st.tuples(SIZES, SIZES, SIZES),
    CORES,
    DTYPES,
    WEIGHTS,
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
    weights: str,
    bias: bool,
    blocks: str,
) -> None:
    matrices = qkv_matrices(K, ranks, outputs)
    problem = Problem("svd_qkv", M, matrices, dtype, *core, weight_dtype=weights)
    cut = {**CUT["svd_qkv"], "fuse": blocks == "fused"}
    check(problem, decode_arguments(problem) if blocks == "planned" else cut, bias)


@pytest.mark.slow
@pytest.mark.parametrize("weights", STORED)
@pytest.mark.parametrize("core", [("trn1", 1), ("trn2", 2), ("trn3", 1)])
@pytest.mark.parametrize("M", [3, 100])
def test_several_banks_and_ragged_column_groups(
    M: int, core: tuple[str, int], weights: str
) -> None:
    pair = Problem("xuv", M, ((130, 700), (700, 2600)), "bfloat16", *core, weight_dtype=weights)
    check(pair, {"block": 1024, "last_block": 1400, "rank_block": 1536}, bias=True)
    blocks = {"block": 1024, "last_block": 1300, "rank_block": 512, "tile_bytes": 99999}
    check(pair, blocks, bias=False)
    matrices = mlp_matrices(70, (600, 300, 500), 1200, 90)
    mlp = Problem("svd_mlp", M, matrices, "bfloat16", *core, weight_dtype=weights)
    check(mlp, {"inner_block": 1024, "rank_block": 256, "spill": False}, bias=False)


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
@pytest.mark.parametrize("weights", STORED)
def test_rank_1(target: str, weights: str) -> None:
    pair = Problem("xuv", 1, ((300, 1), (1, 200)), target=target, weight_dtype=weights)
    check(pair, plan_problem(pair).arguments, bias=True)


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_sums_beyond_fp16_are_scaled_before_they_are_rounded(target: str) -> None:
    """x @ u of stored values up to 240 may exceed 65,504; scaled it does not."""
    problem = Problem("xuv", 2, ((512, 40), (40, 60)), "float16", target, weight_dtype=FP8)
    given = operands(problem, bias=False)
    same = np.full_like(given.weights[0], 240)
    given = given._replace(x=np.ones_like(given.x), weights=[same, given.weights[1]])
    found = run(problem, {}, given).outputs
    exact = composition(problem, given, "", wide)
    assert np.abs(wide(found) - exact).max() <= 0.01 * np.abs(exact).max()


@pytest.mark.parametrize("op", KERNELS)
def test_scales_and_dtypes_must_agree(op: str) -> None:
    matrices = {
        "xw": ((64, 48),),
        "xuv": ((64, 32), (32, 48)),
        "svd_mlp": mlp_matrices(64, (32, 32, 32), 48, 64),
        "svd_qkv": qkv_matrices(64, (32, 32, 32), (48, 64, 16)),
    }[op]
    problem = Problem(op, 2, matrices, weight_dtype=INT8)
    given = operands(problem, bias=False)
    with pytest.raises(AssertionError, match="a weight without a scale must have the dtype of x"):
        run(problem, {}, given._replace(scales=[None] * len(matrices)))  # type: ignore[list-item]
    short = [scale[:-1] for scale in given.scales]
    with pytest.raises(AssertionError, match=r"scale must be \[\d+\], got \[\d+\]"):
        run(problem, {}, given._replace(scales=short))
    same = [rounded(wide(w), "bfloat16") for w in given.weights]
    with pytest.raises(AssertionError, match="a scale is for stored weights, got bfloat16"):
        run(problem, {}, given._replace(weights=same))


@pytest.mark.parametrize("first", [True, False])
def test_factors_must_have_one_dtype(first: bool) -> None:
    problem = Problem("xuv", 2, ((64, 32), (32, 48)), weight_dtype=INT8)
    given = operands(problem, bias=False)
    n = 0 if first else 1
    weights, scales = list[Any](given.weights), list[Any](given.scales)
    weights[n], scales[n] = rounded(wide(weights[n]), "bfloat16"), None
    with pytest.raises(AssertionError, match="all factors must have one dtype; got"):
        run(problem, {}, given._replace(weights=weights, scales=scales))


@given(st.integers(0, 99), st.lists(st.integers(1, 20), max_size=9), st.integers(1, 9))
def test_dma_casts_each_so_manieth_k_tile(seen: int, loads: list[int], every: int) -> None:
    counts: list[int] = []
    for tiles in loads:
        counts.append(tiling.cast_by_dma(seen, tiles, every))
        assert counts[-1] == len([n for n in range(seen, seen + tiles) if n % every == 0])
        assert tiling.cast_by_dma(seen, tiles, 0) == 0
        seen += tiles


@given(st.integers(1, 9000), st.sampled_from((TRN1, TRN2, TRN3)))
def test_engines_share_casts(columns: int, machine: Machine) -> None:
    shares = tiling.cast_shares(columns, machine.casting_mhz)
    assert [c for s in shares for c in range(s.start, s.start + s.size)] == list(range(columns))
    assert len(shares) <= (2 if machine is TRN1 else 3)


@given(
    st.integers(0, 60), st.integers(2, 9000), st.sampled_from((512, 16384)),
    st.sampled_from((1024, 3072)),
)  # fmt: skip
def test_last_loads_get_smaller(tiles: int, row_bytes: int, tile_bytes: int, least: int) -> None:
    usual = tiling.weight_tiles(tiles, row_bytes, tile_bytes, False, False)
    found = tiling.weight_tiles(tiles, row_bytes, tile_bytes, False, False, least)
    assert [s.start for s in found] == [sum([t.size for t in found[:n]]) for n in range(len(found))]
    assert sum([s.size for s in found]) == tiles
    assert len(found) <= len(usual) + 2
    assert all(s.size * row_bytes >= least for s in found[len(usual) :])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
@pytest.mark.parametrize("model", ["Llama-3.2-1B", "Qwen3-1.7B", "Llama-3.1-8B"])
def test_fp8_decodes_faster_than_bf16(model: str, target: str) -> None:
    """Under both DMA models at least 1.8 times."""
    shape = SHAPES[model]
    H, I = shape.hidden_size, shape.intermediate_size  # noqa: E741
    r = aligned_rank(H, I, 0.2)
    assert r is not None
    problem = Problem("svd_mlp", 1, mlp_matrices(H, (r, r, r), I, H), target=target)
    times: list[list[float]] = []
    for weights in ("", FP8):
        plan = plan_op("svd_mlp", 1, problem.matrices, target=target, weight_dtype=weights)
        times.append(list(plan.times_ms))
    assert min([old / new for old, new in zip(*times, strict=True)]) >= 1.8
