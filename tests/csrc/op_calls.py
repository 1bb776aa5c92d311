"""Calls of the ops, made here on the Python package's, and as a program on the C++ library's."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OPS = ("xuv", "xw", "mlp", "svd_mlp", "svd_qkv")


def schemas() -> dict[str, list[str]]:
    """Return each op's schema and tags."""
    overloads = {name: getattr(torch.ops.neuronmm, name).default for name in OPS}
    return {name: [str(op._schema), *map(str, op.tags)] for name, op in overloads.items()}


def cases() -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Yield name, op and arguments: leading dimensions, layouts, biases, activations."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.25

    def stored_by_column(matrix: Tensor) -> Tensor:
        return matrix.t().contiguous().t()

    for lead in ((), (1,), (5,), (2, 3), (0,), (2, 0)):
        x, bias = draw(*lead, 256), draw(20)
        u, v, w = draw(256, 12), draw(12, 20), draw(256, 20)
        x_up, gated = draw(*lead, 96), [draw(*s) for s in ((256, 40), (96, 40), (40, 20))]
        dense = draw(256, 40)
        mlp = [draw(*shape) for shape in ((256, 8), (8, 40), (256, 9), (9, 40), (40, 7), (7, 20))]
        qkv = [draw(*shape) for shape in ((256, 8), (8, 40), (256, 9), (9, 12), (256, 7), (7, 20))]
        for by_column in (False, True):
            order: Callable[[Tensor], Tensor] = stored_by_column if by_column else torch.clone
            case = f"{list(lead)} {'columns' if by_column else 'rows'}"
            yield f"xuv {case}", "xuv", (x, order(u), order(v))
            yield f"xuv bias {case}", "xuv", (x, order(u), order(v), bias)
            yield f"xw {case}", "xw", (x, order(w))
            yield f"xw bias {case}", "xw", (x, order(w), bias)
            for activation in ACTIVATIONS:
                weights = tuple(order(weight) for weight in gated)
                yield f"mlp x_up {activation} {case}", "mlp", (x, *weights, x_up, activation)
                weights = (weights[0], order(dense), weights[2])
                yield f"mlp {activation} {case}", "mlp", (x, *weights, None, activation)
                factors = tuple(order(factor) for factor in mlp)
                yield f"svd_mlp {activation} {case}", "svd_mlp", (x, *factors, activation)
            factors = tuple(order(factor) for factor in qkv)
            yield f"svd_qkv {case}", "svd_qkv", (x, *factors)
            yield f"svd_qkv bias {case}", "svd_qkv", (x, *factors, None, draw(12), bias)


def one_byte_cases() -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Yield the same for factors in one byte: both orders in memory, both dtypes, both computes."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.25

    def factor(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
        values = draw(*shape) * 200
        rounded = values.clamp(-127, 127).round().to(dtype)
        return rounded.t().contiguous().t(), torch.rand(shape[1], generator=generator) / 400

    mlp = ((64, 32), (32, 40), (64, 32), (32, 40), (40, 7), (7, 20))
    gated = ((64, 40), (32, 40), (40, 20))
    for dtype, computes in ((torch.int8, ("x",)), (torch.float8_e4m3fn, ("x", "fp8"))):
        (u, u_scale), (v, v_scale) = factor(dtype, 64, 32), factor(dtype, 32, 20)
        pairs = [factor(dtype, *shape) for shape in mlp]
        weights, of_weights = zip(*[factor(dtype, *shape) for shape in gated], strict=True)
        for lead in ((), (1,), (3, 3), (0,)):
            x, bias, x_up = draw(*lead, 64), draw(20), draw(*lead, 32)
            for compute in computes:
                case = f"{dtype} {compute} {list(lead)}"
                scales = (u_scale, v_scale, compute)
                yield f"xuv {case}", "xuv", (x, u, v, bias, *scales)
                yield f"xuv rows {case}", "xuv", (x, u.contiguous(), v, None, *scales)
                yield f"xw {case}", "xw", (x, u, None, u_scale, compute)
                yield f"mlp {case}", "mlp", (x, *weights, x_up, "gelu", *of_weights, compute)
                factors, own = zip(*pairs, strict=True)
                yield f"svd_mlp {case}", "svd_mlp", (x, *factors, "gelu", *own, compute)
                three = [(u, u_scale), (v, v_scale)] * 3
                factors, own = zip(*three, strict=True)
                biases = (bias, None, None)
                yield f"svd_qkv {case}", "svd_qkv", (x, *factors, *biases, *own, compute)


def results(
    dtype: torch.dtype, prepare: Callable[[Tensor], Tensor] = torch.clone
) -> dict[str, Tensor]:
    """Return what the registered ops compute for every case, from prepared operands of a dtype."""
    outputs = {}
    for name, op, arguments in cases():
        cast = (prepare(t.to(dtype)) if isinstance(t, Tensor) else t for t in arguments)
        outputs[name] = getattr(torch.ops.neuronmm, op)(*cast)
        assert outputs[name].is_contiguous(), name
    return outputs


def one_byte_results(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what the registered ops compute of factors in one byte, for x of a dtype."""
    outputs = {}
    for name, op, arguments in one_byte_cases():
        # x and the bias are drawn in fp64
        is_cast = [isinstance(t, Tensor) and t.dtype == torch.float64 for t in arguments]
        cast = [t.to(dtype) if yes else t for t, yes in zip(arguments, is_cast, strict=True)]
        outputs[name] = getattr(torch.ops.neuronmm, op)(*cast)
    return outputs


def refusals() -> list[str]:
    """Return type and text of the error that each wrong call raises."""
    ones = torch.ones
    mlp = [ones(4, 2), ones(2, 8), ones(4, 2), ones(2, 8), ones(8, 2), ones(2, 4)]
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        ("xw", (ones(()), ones(4, 5))),
        ("xw", (ones(3, 4), ones(4))),
        ("xw", (ones(3, 4), ones(5, 4))),
        ("xw", (ones(3, 4), ones(4, 5), ones(4))),
        ("xw", (ones(3, 4), ones(4, 5), ones(1, 5))),
        ("xw", (ones(3, 4).int(), ones(4, 5).int())),
        ("xw", (ones(3, 4), ones(4, 5).half())),
        ("xw", (ones(3, 4), ones(4, 5), ones(5).bfloat16())),
        ("xw", (ones(3, 4), ones(4, 5, device="meta"))),
        ("xuv", (ones(3, 4), ones(5, 2), ones(2, 5))),
        ("xuv", (ones(3, 4), ones(4, 2), ones(3, 5))),
        ("xuv", (ones(3, 4), ones(4, 2), ones(2, 5), ones(4))),
        ("svd_mlp", (ones(3, 5), *mlp)),
        ("svd_mlp", (ones(3, 4), *mlp[:3], ones(2, 7), *mlp[4:])),
        ("svd_mlp", (ones(3, 4), *mlp[:4], ones(7, 2), mlp[5])),
        ("svd_mlp", (ones(3, 4), *mlp, "tanh")),
        *(("svd_mlp", (ones(3, 4), *mlp[:i], ones(3, 3), *mlp[i + 1 :])) for i in range(len(mlp))),
    ]
    gated = [ones(4, 8), ones(3, 8), ones(8, 2)]
    wrong += [
        ("mlp", (ones(2, 4), *gated)),
        ("mlp", (ones(2, 5), *gated, ones(2, 3))),
        ("mlp", (ones(2, 4), *gated, ones(2, 4))),
        ("mlp", (ones(2, 4), *gated, ones(3))),
        ("mlp", (ones(2, 4), *gated, ones(()))),
        ("mlp", (ones(4), *gated, ones(()))),
        ("mlp", (ones(2, 4), *gated, ones(1, 3))),
        ("mlp", (ones(2, 4), *gated, ones(2, 3).half())),
        ("mlp", (ones(2, 4), *gated, ones(2, 3, device="meta"))),
        ("mlp", (ones(2, 4), *gated[:2], ones(7, 2), ones(2, 3))),
        ("mlp", (ones(2, 4), gated[0], ones(3, 1), gated[2], ones(2, 3))),
        ("mlp", (ones(2, 4), gated[0], ones(3), gated[2], ones(2, 3))),
        ("mlp", (ones(2, 4), *gated, ones(2, 3), "tanh")),
        ("mlp", (ones(2, 4), *gated, ones(2, 3), "silu", ones(8))),
        ("mlp", (ones(2, 4), *gated, ones(2, 3), "silu", None, None, None, "fp8")),
    ]
    pairs = [ones(4, 2), ones(2, 5), ones(4, 3), ones(3, 6), ones(4, 1), ones(1, 7)]
    wrong += [
        ("svd_qkv", (ones(3, 5), *pairs)),
        ("svd_qkv", (ones(()), *pairs)),
        ("svd_qkv", (ones(3, 4), *pairs, ones(6))),
        ("svd_qkv", (ones(3, 4), *pairs, None, ones(6), ones(1))),
        ("svd_qkv", (ones(3, 4), *pairs, None, ones(6).half())),
        *((("svd_qkv"), (ones(3, 4), *pairs[:i], ones(8, 8), *pairs[i + 1 :])) for i in range(6)),
        *((("svd_qkv"), (ones(3, 4), *pairs[:i], ones(8), *pairs[i + 1 :])) for i in range(6)),
    ]
    u, v, r, n = ones(4, 2).to(torch.int8), ones(2, 5).to(torch.int8), ones(2), ones(5)
    fp8 = torch.float8_e4m3fn
    stored = [w.to(fp8) for w in gated]
    wrong += [
        ("xuv", (ones(3, 4), u, v)),
        ("xuv", (ones(3, 4), u, v, None, r)),
        ("xuv", (ones(3, 4), u, v.to(fp8), None, r, n)),
        ("xuv", (ones(3, 4), u.float(), v.float(), None, r, n)),
        ("xuv", (ones(3, 4), u, v, None, r.double(), n)),
        ("xuv", (ones(3, 4), u, v, None, r, r)),
        ("xuv", (ones(3, 4), u, v, None, n, n)),
        ("xuv", (ones(3, 4), u, v, None, r, n.to("meta"))),
        ("xuv", (ones(3, 4), u, v, None, r, n, "fp8")),
        ("xuv", (ones(3, 4), u, v, None, r, n, "int8")),
        ("xuv", (ones(3, 4), u.float(), v.float(), None, None, None, "fp8")),
        ("xuv", (ones(3, 4), u, v, n.bfloat16(), r, n)),
        ("xw", (ones(3, 4), u)),
        ("xw", (ones(3, 4), u, None, n)),
        ("mlp", (ones(2, 4), *stored, ones(2, 3), "silu", ones(8), ones(7))),
        ("mlp", (ones(2, 4), *stored, None, "silu", ones(8), ones(7), ones(2))),
        ("mlp", (ones(2, 4), *stored, ones(2, 3), "silu", *map(ones, (8, 7, 2)))),
        ("svd_mlp", (ones(3, 4), *[matrix.to(fp8) for matrix in mlp])),
        ("svd_mlp", (ones(3, 4), *mlp, "silu", r)),
        ("svd_qkv", (ones(3, 4), *[matrix.to(fp8) for matrix in pairs])),
        ("svd_qkv", (ones(3, 4), *pairs, None, None, None, r)),
        ("svd_qkv", (ones(3, 4), u, v, u, v, u, v, *[None] * 3, r, n, r, n, r, r)),
        ("svd_qkv", (ones(3, 4), u, v, u, v, u, v, *[None] * 3, r, n, r, n, r, n, "fp8")),
        ("svd_mlp", (ones(3, 4), *mlp[:5], mlp[5].to(fp8))),
    ]
    return [refusal(op, arguments) for op, arguments in wrong]


def refusal(op: str, arguments: tuple[Any, ...]) -> str:
    try:
        getattr(torch.ops.neuronmm, op)(*arguments)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def products() -> dict[str, list[str]]:
    """Return which matmul one row and a matrix along its contraction take, by dtype."""
    found: dict[str, list[str]] = {}
    for dtype in DTYPES:
        x, w = torch.ones(1, 64, dtype=dtype), torch.ones(32, 64, dtype=dtype).t()
        with torch.profiler.profile() as profile:
            torch.ops.neuronmm.xw(x, w)
        names = {event.key for event in profile.key_averages()}
        found[str(dtype)] = sorted(names & {"aten::mv", "aten::mm"})
    return found


if __name__ == "__main__":
    torch.ops.load_library(sys.argv[1])
    folder = Path(sys.argv[2])
    torch.set_num_threads(1)
    for dtype in DTYPES:
        save_file(results(dtype), folder / f"{dtype}.safetensors")
        save_file(one_byte_results(dtype), folder / f"{dtype}-one-byte.safetensors")
    texts = {"schemas": schemas(), "refusals": refusals(), "products": products()}
    (folder / "texts.json").write_text(json.dumps(texts))
    assert "neuronmm_ops" not in sys.modules
