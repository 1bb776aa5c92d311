"""`mlp` and `mlp_decode`: values against fp64, plans against the simulator and three `xw`.

Beside x there may be an x_up, which up contracts; `up` are its features, 0 where there is none.
"""

from typing import Any

import pytest
import torch
from decoding import CORES, SIZES, TOKENS, decode_arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from one_byte import ACTIVATIONS, LARGEST
from tolerances import assert_close_to_oracle
from torch import Tensor

import neuroncore as nc
from neuronmm_ops import ops, use_impl
from neuronmm_ops.kernels.mlp.decode import mlp_decode
from neuronmm_ops.kernels.mlp.prefill import mlp
from neuronmm_ops.models import SHAPES
from neuronmm_ops.plan import Other, Problem, plan_op, plan_problem, plan_xw

DTYPES = ("bfloat16", "float16", "float32")
UP = st.one_of(st.just(0), SIZES)
LAUNCHES = [("trn1", 1), ("trn2", 1), ("trn2", 2), ("trn3", 1), ("trn3", 2)]


def mlp_weights(K: int, inner: int, N: int, up: int = 0) -> Any:
    """Shapes of the weights of gate, up and down; `up` of an x_up [M, up]."""
    return ((K, inner), (up or K, inner), (inner, N))


def drawn(M: int, sizes: tuple[int, int, int], dtype: str, up: int = 0) -> list[Tensor]:
    """x and the three weights."""
    K, inner, N = sizes
    generator = torch.Generator().manual_seed(M + K + inner + N)
    x = torch.randn((M, K), generator=generator)
    shapes = mlp_weights(K, inner, N, up)
    weights = [torch.randn(s, generator=generator) * s[0] ** -0.5 for s in shapes]
    return [t.to(getattr(torch, dtype)) for t in (x, *weights)]


def drawn_up(M: int, up: int, dtype: str) -> Tensor | None:
    """x_up, if there is one."""
    generator = torch.Generator().manual_seed(M + up)
    return torch.randn((M, up), generator=generator).to(getattr(torch, dtype)) if up else None


def problem_of(
    M: int, sizes: tuple[int, int, int], up: int, dtype: str, core: tuple[str, int],
    weight_dtype: str = "",
) -> Problem:  # fmt: skip
    options = {"weight_dtype": weight_dtype, "others": others_of(up)}
    return Problem("mlp", M, mlp_weights(*sizes, up), dtype, *core, **options)


def others_of(up: int) -> tuple[Other, ...]:
    return (("x_up", (-1, up), ""),) if up else ()


def composed(
    tensors: list[Tensor], name: str, wide: torch.dtype, x_up: Tensor | None = None
) -> Tensor:
    """In sums of `wide`; in fp32 intermediates are rounded to x's dtype, in fp64 none is."""
    x, gate, up, down = [t.to(wide) for t in tensors]
    given = x if x_up is None else x_up.to(wide)

    def rounded(value: Tensor) -> Tensor:
        return value if wide is torch.float64 else value.to(tensors[0].dtype).to(wide)

    return rounded(rounded(ACTIVATIONS[name](rounded(x @ gate)) * rounded(given @ up)) @ down)


def check(
    kernel: Any, tensors: list[Tensor], launch: tuple[str, int], scales: list[Tensor] | None = None,
    name: str = "silu", x_up: Tensor | None = None, **blocks: Any,
) -> nc.Profile:  # fmt: skip
    target, lnc = launch
    kernel = kernel if lnc == 1 else kernel[lnc]
    given = [*tensors, x_up, *(scales or [])]
    done = nc.simulate(kernel, *given, target=target, activation=name, **blocks)
    x, *weights = tensors
    if scales:
        pairs = zip(weights, scales, strict=True)
        weights = [w.double() * s.double() for w, s in pairs]
        plain = composed([x, *[w.float() for w in weights]], name, torch.float32, x_up)
    else:
        plain = composed(tensors, name, torch.float32, x_up)
    oracle = composed([x, *weights], name, torch.float64, x_up)
    magnitudes = [t.double().abs() for t in (x, *weights)]
    up = None if x_up is None else x_up.double().abs()
    size = composed(magnitudes, "relu", torch.float64, up)
    assert_close_to_oracle(done.outputs, oracle, plain.to(x.dtype), size)
    return done.profile


@settings(max_examples=8)
@given(
    M=TOKENS, sizes=st.tuples(SIZES, SIZES, SIZES), up=UP, core=CORES,
    dtype=st.sampled_from(DTYPES), name=st.sampled_from(tuple(ACTIVATIONS)),
    blocks=st.sampled_from(("planned", "spilled", "in SBUF")),
)  # fmt: skip
def test_decode(
    M: int, sizes: tuple[int, int, int], up: int, core: tuple[str, int], dtype: str, name: str,
    blocks: str,
) -> None:  # fmt: skip
    chosen: dict[str, Any] = {"k_chunk": 128, "inner_block": 128, "block": 96, "last_block": 64}
    chosen |= {"tile_bytes": 512, "spill": blocks == "spilled"}
    if blocks == "planned":
        chosen = decode_arguments(problem_of(M, sizes, up, dtype, core))
    tensors, x_up = drawn(M, sizes, dtype, up), drawn_up(M, up, dtype)
    profile = check(mlp_decode, tensors, core, name=name, x_up=x_up, **chosen)
    assert profile.flops == 2 * M * sum([w.numel() for w in tensors[1:]]), "padding was computed"
    traffic = {t.name: t.read_bytes for t in profile.tensors}
    for n, w in zip(("w_gate", "w_up", "w_down"), tensors[1:], strict=True):
        assert traffic[n] == w.numel() * w.element_size()
    if x_up is not None:  # by each core that has a part of I
        once = x_up.numel() * x_up.element_size()
        assert traffic["x_up"] in (once, core[1] * once)


@settings(max_examples=8)
@given(
    M=st.integers(1, 700), sizes=st.tuples(SIZES, st.integers(1, 1300), SIZES), up=UP, core=CORES,
    dtype=st.sampled_from(DTYPES), name=st.sampled_from(tuple(ACTIVATIONS)), data=st.data(),
)  # fmt: skip
def test_prefill(
    M: int, sizes: tuple[int, int, int], up: int, core: tuple[str, int], dtype: str, name: str,
    data: st.DataObject,
) -> None:  # fmt: skip
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
    tensors, x_up = drawn(M, sizes, dtype, up), drawn_up(M, up, dtype)
    profile = check(mlp, tensors, core, name=name, x_up=x_up, **blocks)
    assert profile.flops == 2 * M * sum([w.numel() for w in tensors[1:]]), "padding was computed"


@pytest.mark.parametrize("weight_dtype", LARGEST)
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(
    ("M", "dtype", "up"),
    [(1, "bfloat16", 0), (70, "float16", 0), (200, "float32", 0), (3, "bfloat16", 140),
     (200, "bfloat16", 300)],
)  # fmt: skip
def test_one_byte_is_the_reference_on_dequantized_weights(
    M: int, dtype: str, up: int, launch: tuple[str, int], weight_dtype: str
) -> None:
    x, *weights = drawn(M, (200, 333, 130), dtype, up)
    scales = [w.float().abs().amax(0) / LARGEST[weight_dtype] * 1.01 for w in weights]
    values = [w.float() / s for w, s in zip(weights, scales, strict=True)]
    if weight_dtype == "int8":
        stored = [v.round().to(torch.int8) for v in values]
    else:
        stored = [v.to(torch.float8_e4m3fn) for v in values]
    plan = plan_op(
        "mlp", M, mlp_weights(200, 333, 130, up), dtype, *launch, weight_dtype=weight_dtype,
        others=others_of(up),
    )  # fmt: skip
    kernel = mlp if plan.phase == "prefill" else mlp_decode
    x_up = drawn_up(M, up, dtype)
    check(kernel, [x, *stored], launch, scales, x_up=x_up, **plan.arguments)


@pytest.mark.parametrize("up", [0, 256, 100])
@pytest.mark.parametrize("M", [1, 40, 300])
def test_two_cores_make_what_one_makes(M: int, up: int) -> None:
    tensors = [*drawn(M, (256, 1000, 200), "bfloat16", up), drawn_up(M, up, "bfloat16")]
    matrices = mlp_weights(256, 1000, 200, up)
    found: list[Tensor] = []
    for lnc in (1, 2):
        plan = plan_op("mlp", M, matrices, target="trn2", lnc=lnc, others=others_of(up))
        kernel: Any = mlp if plan.phase == "prefill" else mlp_decode
        kernel = kernel if lnc == 1 else kernel[2]
        found.append(nc.simulate(kernel, *tensors, target="trn2", **plan.arguments).outputs)
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.01)


def test_an_x_up_that_is_x_changes_nothing() -> None:
    for M in (3, 300):
        tensors = drawn(M, (256, 1000, 200), "bfloat16", 256)
        with use_impl("simulated", "trn2"):
            torch.testing.assert_close(
                ops.mlp(*tensors, tensors[0].clone()), ops.mlp(*tensors), rtol=0, atol=0
            )


@pytest.mark.parametrize("layout", ["dma", "pe"])
@pytest.mark.parametrize(("spill", "up"), [(0, 0), (1, 0), (1, 170)])
def test_a_loop_on_the_device_makes_the_same(spill: int, up: int, layout: str) -> None:
    tensors = [*drawn(300, (200, 700, 130), "bfloat16", up), drawn_up(300, up, "bfloat16")]
    blocks: dict[str, Any] = {"token_block": 128, "inner_block": 512, "block": 512, "spill": spill}
    blocks |= {"layout": layout, "banks": 6}
    one, looped = [
        nc.simulate(mlp, *tensors, target="trn2", device_loop=loop, **blocks).outputs
        for loop in (False, True)
    ]
    torch.testing.assert_close(looped, one, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("M", [1, 16, 1024])
@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Llama-3.2-1B"])
def test_a_strong_baseline(model: str, M: int) -> None:
    """Near the limit on trn2, and no slower than three launches of `xw`."""
    shape = SHAPES[model]
    H, inner = shape.hidden_size, shape.intermediate_size
    problem = Problem("mlp", M, mlp_weights(H, inner, H), target="trn2")
    time_ms = plan_problem(problem).time_ms
    assert problem.roofline_ms >= 0.9 * time_ms
    three = 2 * plan_xw(M, H, inner, target="trn2").time_ms
    assert time_ms <= three + plan_xw(M, inner, H, target="trn2").time_ms


def test_many_tokens_are_several_launches() -> None:
    plan = plan_op("mlp", 2**17, mlp_weights(4096, 14336, 4096), target="trn2")
    assert len(plan.launches) > 1
    assert sum(plan.launches) == 2**17


def test_strict_front_end() -> None:
    for kernel in (mlp, mlp_decode):
        assert nc.lint(kernel) == []
        assert nc.lint(kernel.func.__code__.co_filename) == []


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ((), "without x_up gate and up contract the same features, got 8 and 9; use"),
        ((("x_down", (-1, 9), ""),), "^mlp_decode takes no x_down; leave it out$"),
    ],
)
def test_others_are_those_of_the_kernel(others: tuple[Other, ...], message: str) -> None:
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
def test_bad_operands_are_refused(kernel: Any, shapes: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        nc.simulate(kernel, *[torch.zeros(shape) for shape in shapes], target="trn2")
