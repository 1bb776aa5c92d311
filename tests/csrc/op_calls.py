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
OPS = ("xuv", "xw", "svd_mlp")


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
        mlp = [draw(*shape) for shape in ((256, 8), (8, 40), (256, 9), (9, 40), (40, 7), (7, 20))]
        for by_column in (False, True):
            order: Callable[[Tensor], Tensor] = stored_by_column if by_column else torch.clone
            case = f"{list(lead)} {'columns' if by_column else 'rows'}"
            yield f"xuv {case}", "xuv", (x, order(u), order(v))
            yield f"xuv bias {case}", "xuv", (x, order(u), order(v), bias)
            yield f"xw {case}", "xw", (x, order(w))
            yield f"xw bias {case}", "xw", (x, order(w), bias)
            for activation in ACTIVATIONS:
                factors = tuple(order(factor) for factor in mlp)
                yield f"svd_mlp {activation} {case}", "svd_mlp", (x, *factors, activation)


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
    return [refusal(op, arguments) for op, arguments in wrong]


def refusal(op: str, arguments: tuple[Any, ...]) -> str:
    try:
        getattr(torch.ops.neuronmm, op)(*arguments)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


if __name__ == "__main__":
    torch.ops.load_library(sys.argv[1])
    folder = Path(sys.argv[2])
    torch.set_num_threads(1)
    for dtype in DTYPES:
        save_file(results(dtype), folder / f"{dtype}.safetensors")
    texts = {"schemas": schemas(), "refusals": refusals()}
    (folder / "texts.json").write_text(json.dumps(texts))
    assert "neuronmm_ops" not in sys.modules
