"""Operands of a kernel, and how far its results are from what they must be."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from neuroncore.calibration.published import Profiled
from neuronmm_ops.kernels.problem import Problem
from neuronmm_ops.ops.backends.launch import Tensors
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.storages import WeightStorage

ROUNDINGS = 4
"""On the way to an output: `x @ u`, its product with v, the bias, the output itself."""


def operands(problem: Problem) -> Tensors:
    """The op's tensors as its kernel takes them, a missing one None; the same in every run.

    Normal values, weights such that products stay near 1.
    """
    spec, generator = SPECS[problem.op], torch.Generator().manual_seed(problem.M + problem.K)
    dtype = getattr(torch, problem.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    by_name: dict[str, Tensor] = {"x": normal(problem.M, problem.K).to(dtype)}
    for place, shape in zip(spec.factors, problem.matrices, strict=True):
        name, matrix = spec.operands[place].name, normal(*shape) * shape[0] ** -0.5
        if problem.storage is None:
            by_name[name] = matrix.to(dtype)
        else:
            by_name[name], by_name[f"{name}_scale"] = stored(matrix, problem.storage)
    return tuple([by_name.get(operand.name) for operand in spec.tensors])


def stored(matrix: Tensor, storage: WeightStorage) -> tuple[Tensor, Tensor]:
    """A matrix rounded to the nearest numbers of a storage, and its scales."""
    scale = (storage.magnitudes(matrix) / storage.full).bfloat16().float()
    return storage.encode(storage.nearest(matrix / storage.spread(scale, len(matrix)))), scale


def op_error_ratio(problem: Problem, tensors: Tensors, result: Tensor, layers: int = 0) -> float:
    """`error_ratio` of an op's result [M, N], or that of so many `layered`, by the CPU's."""
    dtype = getattr(torch, problem.dtype)
    wide = tuple([t.double() if t is not None and t.dtype == dtype else t for t in tensors])
    exact, plain = (_reference(problem.op, operands, layers) for operands in (wide, tensors))
    return error_ratio(result, exact, plain)


def _reference(op: str, tensors: Tensors, layers: int) -> Tensor:
    spec = SPECS[op]

    def call(tensors: Tensors) -> Tensor:
        result = spec.reference(*spec.joined(tensors, spec.defaults))
        assert isinstance(result, Tensor), f"{op} has one result"
        return result

    with torch.inference_mode():
        return layered(call, tensors, layers) if layers else call(tensors)


def factors(case: Profiled) -> tuple[Tensor, Tensor]:
    """The operands of a profiled kernel, the same in every run: its products are near 1."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(each.shape, generator=generator) for each in case.operands)
    return a.bfloat16(), (b * len(b) ** -0.5).bfloat16()


def product_error_ratio(case: Profiled, tensors: tuple[Tensor, Tensor], result: Tensor) -> float:
    """`error_ratio` of a profiled kernel's result, so many times the product of its factors."""

    def product(dtype: torch.dtype) -> Tensor:
        a, b = (tensor.to(dtype) for tensor in tensors)
        return ((a if case.function == "transposing" else a.T) @ b) * case.arguments.get("count", 1)

    # in float32, then rounded: a host without bf16 units takes a minute for a product in bfloat16
    return error_ratio(result, product(torch.float64), product(torch.float32).bfloat16())


def layered(call: Callable[[Tensors], Tensor], tensors: Tensors, layers: int) -> Tensor:
    """Call an op so many times, x each time what it was and the result, as a decoder's MLP does."""
    x, *weights = tensors
    assert x is not None
    for _ in range(layers):
        x = x + call((x, *weights))
    return x


def error_ratio(
    actual: Tensor, oracle: Tensor, low_precision: Tensor, magnitude: Tensor | None = None
) -> float:
    """How far a result is off, as a share of what its dtype excuses; infinite for NaN.

    `max|actual - oracle| / (2 max|low_precision - oracle| + 4 eps max(magnitude))`: the first term
    is what the dtype costs anyone; the second lets each rounding fall the other way, and matters
    where the plain composition happens to be exact.

    Args:
        actual: the result.
        oracle: the same in fp64, from the same (rounded) operands.
        low_precision: the plain composition in actual's dtype.
        magnitude: fp64 sums of absolute values of the terms, which cancellation does not shrink;
            default `|oracle|`.

    Raises:
        ValueError: shapes differ.
    """
    if not actual.shape == oracle.shape == low_precision.shape:
        raise ValueError(f"a result must be {list(oracle.shape)}, got {list(actual.shape)}")
    if actual.numel() == 0:
        return 0.0

    def largest(values: Tensor) -> float:
        return float(values.detach().abs().max())

    scale = largest(oracle if magnitude is None else magnitude)
    band = ROUNDINGS * torch.finfo(actual.dtype).eps * scale
    error = largest(actual.double() - oracle)
    allowed = 2 * largest(low_precision.double() - oracle) + band
    if error == 0:
        return 0.0
    return error / allowed if allowed > 0 and math.isfinite(error) else math.inf
