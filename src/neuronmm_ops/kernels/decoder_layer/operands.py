"""The operands of a layer's kernel, from a problem's matrices and other tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from neuroncore import TensorSpec
from neuroncore.dtypes import dtype_of

if TYPE_CHECKING:
    from neuronmm_ops.kernels.problem import Matrices, Problem

NORMS = ("input_norm", "mlp_norm", "query_norm", "key_norm")
CACHES = ("key_cache", "value_cache")


def stage_matrices(problem: Problem) -> dict[str, Matrices]:
    """The matrices of each stage; of a dense Linear its weight, of a pair u and v.

    A dense weight has the features of x as rows, or as columns, where a pair has a lower rank.
    """
    given, H = problem.matrices, problem.K
    qkv = 3 if given[1][0] == H else 6
    output = qkv + (1 if given[qkv][1] == H else 2)
    mlp = output + (3 if given[output + 1][0] == H else 6)
    assert mlp == len(given), f"{problem.op}: stages are all pairs or all dense; got {given}"
    return {"qkv": given[:qkv], "output": given[qkv:output], "mlp": given[output:]}


def operands(problem: Problem, layers: int = 1) -> list[Any]:
    """Operands of so many alike layers in the kernel's order, without values and biases."""
    x, storage = dtype_of(problem.dtype), problem.storage
    others: dict[str, TensorSpec] = {}
    for name, shape, dtype in problem.others:
        sizes = tuple([problem.M if size < 0 else size for size in shape])
        others[name] = TensorSpec(sizes, dtype_of(dtype) if dtype else x)

    def each_layers(names: Iterable[str]) -> tuple[TensorSpec | None, ...]:
        return tuple([others.get(name) for name in names]) * layers

    matrices: list[TensorSpec | None] = []
    scales: list[TensorSpec | None] = []
    for own in stage_matrices(problem).values():
        is_dense = len(own) in (1, 3)
        for size in own:
            shape, of_scale = storage.shapes(*size) if storage else (size, ())
            stored = dtype_of(storage.tensor_dtype) if storage else x
            matrices += [*([None] * is_dense), TensorSpec(shape, stored)]
            scales += [*([None] * is_dense), TensorSpec(of_scale, dtype_of("float32"))]
    first = [TensorSpec((problem.M, problem.K), x)]
    first += [others.get(name) for name in ("residual", "cos", "sin", "positions")]
    lists = [each_layers(NORMS), each_layers(CACHES), tuple(matrices) * layers, ()]
    return [*first, *lists, tuple(scales) * layers if storage else ()]
