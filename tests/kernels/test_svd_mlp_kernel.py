"""`svd_mlp`, prefill form: values against fp64, FLOPs, HBM traffic, and its plans."""

from dataclasses import dataclass, field, replace
from math import erf
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tolerances import assert_close_to_oracle

from neuroncore import Profile, simulate
from neuroncore.checks.lint import lint
from neuronmm_ops.kernels.stages.tiling import HIDDEN_TILES
from neuronmm_ops.kernels.svd_mlp.prefill import svd_mlp
from neuronmm_ops.models import SHAPES
from neuronmm_ops.plan import Problem, mlp_matrices, plan_problem
from neuronmm_ops.rank import aligned_rank

DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
BLOCKS = ("u_block", "v_block", "down_block", "out_block")
TARGETS = ("trn1", "trn2", "trn3")


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu}


@dataclass(frozen=True)
class Case:
    M: int
    K: int
    ranks: tuple[int, int, int]
    inner: int
    N: int
    dtype: str = "float32"
    target: str = "trn2"
    lnc: int = 1
    activation: str = "silu"
    blocks: dict[str, Any] = field(default_factory=dict)


def operands(case: Case) -> list[np.ndarray]:
    rng = np.random.default_rng(case.M * case.K + case.inner)
    gate, up, down = case.ranks
    shapes = [(case.K, gate), (gate, case.inner), (case.K, up), (up, case.inner)]
    shapes += [(case.inner, down), (down, case.N)]
    values = [rng.standard_normal((case.M, case.K))]
    values += [rng.standard_normal(s) / np.sqrt(s[0]) for s in shapes]
    return [v.astype(DTYPES[case.dtype]) for v in values]


def composed(case: Case, arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    """The plain composition: each intermediate rounded to `dtype`, sums in at least fp32."""
    wide = np.float64 if dtype is np.float64 else np.float32
    x, *factors = arrays

    def rounded(value: np.ndarray) -> np.ndarray:
        return value.astype(dtype).astype(wide)

    def pair(left: np.ndarray, at: int) -> np.ndarray:
        u, v = factors[at : at + 2]
        return rounded(rounded(left @ u.astype(wide)) @ v.astype(wide))

    gate, up = pair(x.astype(wide), 0), pair(x.astype(wide), 2)
    hidden = rounded(rounded(ACTIVATIONS[case.activation](gate)) * up)
    return pair(hidden, 4)


def check(case: Case) -> Profile:
    """Run it, compare with fp64, and return the profile."""
    arrays = operands(case)
    kernel = svd_mlp if case.lnc == 1 else svd_mlp[case.lnc]
    found = simulate(kernel, *arrays, activation=case.activation, target=case.target, **case.blocks)
    assert found.outputs.dtype == DTYPES[case.dtype]
    assert found.outputs.shape == (case.M, case.N)
    oracle = composed(case, arrays, np.float64)
    plain = composed(case, arrays, DTYPES[case.dtype])
    # relu keeps positive values, and no activation here magnifies.
    sizes = [np.abs(a) for a in arrays]
    size = composed(replace(case, activation="relu"), sizes, np.float64)
    dtype = getattr(torch, case.dtype)
    actual, plain = (
        torch.from_numpy(a.astype(np.float64)).to(dtype) for a in (found.outputs, plain)
    )
    assert_close_to_oracle(actual, torch.from_numpy(oracle), plain, torch.from_numpy(size))
    assert found.profile.flops == problem_of(case).flops
    return found.profile


def problem_of(case: Case) -> Problem:
    matrices = mlp_matrices(case.K, case.ranks, case.inner, case.N)
    return Problem("svd_mlp", case.M, matrices, case.dtype, case.target, case.lnc)


def layout_of(dtype: str, target: str) -> dict[str, Any]:
    turns = dtype == "float32" and target == "trn1"
    return {"layout": "pe", "banks": 6} if turns else {"layout": "dma", "banks": 8}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = st.integers(1, 300)
    dtype, target = draw(st.sampled_from(sorted(DTYPES))), draw(st.sampled_from(TARGETS))
    inner = draw(st.integers(1, 1400))
    blocks = layout_of(dtype, target)
    blocks |= {name: draw(st.sampled_from((128, 256, 1024))) for name in BLOCKS}
    blocks["token_block"] = draw(st.sampled_from((192, 512, 640)))
    blocks["tokens"] = draw(st.sampled_from((512, 1024)))
    blocks["token_tiles"] = draw(st.sampled_from((1, 2, 4)))
    blocks["engines"] = 1 if target == "trn1" else 2
    blocks["resident"] = draw(st.sampled_from((0, 4, 1024)))
    blocks["spill"] = draw(st.integers(0, inner // (HIDDEN_TILES * 128)))
    blocks["resident_spilled"] = draw(st.integers(0, blocks["spill"]))
    return Case(
        draw(st.integers(1, 700)),
        draw(size),
        (draw(size), draw(size), draw(size)),
        inner,
        draw(size),
        dtype,
        target,
        1 if target == "trn1" else draw(st.sampled_from((1, 2))),
        draw(st.sampled_from(sorted(ACTIVATIONS))),
        blocks,
    )


@pytest.mark.slow
@settings(max_examples=8)
@example(Case(1, 1, (1, 1, 1), 1, 1, lnc=2))
@given(cases())
def test_is_as_accurate_as_the_plain_composition(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activations(activation: str, dtype: str) -> None:
    blocks = layout_of(dtype, "trn1")
    case = Case(130, 200, (70, 40, 65), 300, 150, dtype, "trn1", 1, activation, blocks=blocks)
    check(case)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(("spill", "resident"), [(1, 0), (2, 1), (2, 2)])
def test_traffic_of_a_spilled_hidden_block(spill: int, resident: int, lnc: int) -> None:
    blocks = {
        "token_block": 128,
        "spill": spill,
        "resident_spilled": resident,
        "banks": 1,
        "engines": 2,
    }
    case = Case(256, 128, (64, 64, 256), 1100, 100, "bfloat16", "trn2", lnc, blocks=blocks)
    profile = check(case)
    once = problem_of(case)
    weights = once.weight_elements * 2  # token blocks
    activations = once.M * (once.K + once.N)
    group = HIDDEN_TILES * 128 * once.M
    spilled = group * (2 * spill + (spill - resident))  # written and read, and read for rank tile 2
    assert profile.hbm_bytes == 2 * (weights + activations + spilled)


def test_two_cores_take_disjoint_tokens() -> None:
    case = Case(300, 64, (32, 32, 32), 96, 64, "float32", "trn3", 2)
    assert check(case).lnc == 2


def test_lint() -> None:
    assert lint(svd_mlp) == []
    assert lint(svd_mlp.func.__code__.co_filename) == []


def of_model(name: str, M: int, target: str, lnc: int = 1) -> Problem:
    shape = SHAPES[name]
    K, inner = shape.hidden_size, shape.intermediate_size
    wide, narrow = aligned_rank(K, inner, 0.2), aligned_rank(inner, K, 0.2)
    assert wide
    assert narrow
    return Problem(
        "svd_mlp", M, mlp_matrices(K, (wide, wide, narrow), inner, K), target=target, lnc=lnc
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Llama-3.2-1B"])
def test_reaches_the_limit(name: str, target: str) -> None:
    problem = of_model(name, 1024, target)
    share = problem.roofline_ms / plan_problem(problem).time_ms
    # 0.91 under this DMA model takes plans that are 1.4 times as long under the other
    assert share >= (0.89 if target == "trn1" else 0.97)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_two_cores_are_nearly_twice_as_fast(target: str) -> None:
    one, two = [plan_problem(of_model("Qwen3-0.6B", 1024, target, n)) for n in (1, 2)]
    assert one.time_ms / two.time_ms >= 1.8
