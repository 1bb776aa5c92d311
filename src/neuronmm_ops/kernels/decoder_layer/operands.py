"""The operands of a layer's kernel, from a problem's matrices and other tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from neuroncore import TensorSpec
from neuroncore.dtypes import dtype_of
from neuronmm_ops.storages import BY_DTYPE

if TYPE_CHECKING:
    from neuronmm_ops.kernels.problem import Matrices, Problem

NORMS = ("input_norm", "mlp_norm", "query_norm", "key_norm")
CACHES = ("key_cache", "value_cache")


def linears_of(problem: Problem) -> list[Matrices]:
    """u and v of each Linear in the kernel's order, or its dense weight.

    A pair's rank is less than its features: what follows its u has other rows than what the next
    Linear begins with.
    """
    left, H = list(problem.matrices), problem.K
    if problem.tp > 1:
        return _linears_of_rank(problem)
    stages: list[Matrices] = []
    for n in range(7):
        # of the Linear after: from x, from attention, from the gated features
        features = stages[n - 2][-1][1] if n == 2 else stages[n - 1][-1][1] if n == 5 else H
        is_pair = len(left) > 1 and (n == 6 or left[1][0] != features)
        size = 1 + is_pair
        stages.append(tuple(left[:size]))
        left = left[size:]
    assert not left, f"{problem.op}: 7 Linears, each a pair or dense; got {problem.matrices}"
    return stages


def _linears_of_rank(problem: Problem) -> list[Matrices]:
    """As `linears_of`, where Linears of a stage are all pairs, or all dense.

    A stage of pairs reads a part of the features, and its norm has as many.
    """
    more = len(problem.matrices) - 7
    sizes = {name: shape[0] for name, shape, _ in problem.others if name in NORMS[:2]}
    of_qkv = more >= 6 or (more >= 3 and sizes["input_norm"] < sizes["mlp_norm"])
    of_mlp = more >= 6 or (more >= 3 and not of_qkv)
    left = iter(problem.matrices)
    return [
        tuple([next(left) for _ in range(1 + is_pair)])
        for is_pair in (*(of_qkv,) * 3, more % 3 == 1, *(of_mlp,) * 3)
    ]


def stages_of(linears: Sequence[Matrices]) -> dict[str, Sequence[Matrices]]:
    """The Linears of each stage."""
    return {"qkv": linears[:3], "output": linears[3:4], "mlp": linears[4:]}


def operands(problem: Problem, layers: int = 1) -> list[Any]:
    """Operands of so many alike layers in the kernel's order, without values and biases."""
    x = dtype_of(problem.dtype)
    others: dict[str, TensorSpec] = {}
    for name, shape, dtype in problem.others:
        sizes = tuple([problem.M if size < 0 else size for size in shape])
        others[name] = TensorSpec(sizes, dtype_of(dtype) if dtype else x)

    def each_layers(names: Iterable[str]) -> tuple[TensorSpec | None, ...]:
        return tuple([others.get(name) for name in names]) * layers

    matrices: list[TensorSpec | None] = []
    scales: list[TensorSpec | None] = []
    stored = iter(problem.weight_dtypes)
    for linear in linears_of(problem):
        missing = [None] * (2 - len(linear))
        matrices += missing
        scales += missing
        for size in linear:
            storage = BY_DTYPE.get(next(stored))
            shape, of_scale = storage.shapes(*size) if storage else (size, ())
            matrices.append(TensorSpec(shape, dtype_of(storage.tensor_dtype) if storage else x))
            scales.append(TensorSpec(of_scale, dtype_of("float32")) if storage else None)
    first = [TensorSpec((problem.M, problem.K), x)]
    first += [others.get(name) for name in ("residual", "cos", "sin", "positions")]
    lists = [each_layers(NORMS), each_layers(CACHES), tuple(matrices) * layers, ()]
    return [*first, *lists, tuple(scales) * layers if any(scales) else ()]
