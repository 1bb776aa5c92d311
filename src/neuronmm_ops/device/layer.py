"""A decoder layer's kernel on a device: its problem, its operands, how far its results are off."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neuroncore.boundary import TensorSpec
from neuronmm_ops.device.values import error_ratio, stored
from neuronmm_ops.estimate.one_launch import others_of
from neuronmm_ops.kernels.decoder_layer.operands import linears_of
from neuronmm_ops.kernels.decoder_layer.operands import operands as specs_of
from neuronmm_ops.kernels.problem import Problem
from neuronmm_ops.models import ModelShape
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.rank import aligned_rank

OP = "decoder_layer"
CACHE = 256
"""Tokens of a cache, the last of which is the new one."""
NAMES = tuple([f"{each}_proj" for each in ("q", "k", "v", "o", "gate", "up", "down")])


def problem(shape: ModelShape, ratio: float, block: int, target: str, weight_dtype: str) -> Problem:
    """A layer of a model for one token; with a ratio of 0 it is dense."""
    matrices: list[tuple[int, int]] = []
    for name in NAMES:
        K, N = shape.projections[name]
        r = aligned_rank(K, N, ratio, block) if ratio else None
        matrices += [(K, N)] if r is None else [(K, r), (r, N)]
    others = others_of(shape, 1, CACHE)
    return Problem(OP, 1, tuple(matrices), target=target, weight_dtype=weight_dtype, others=others)


def operands(problem: Problem) -> tuple[Any, ...]:
    """The kernel's tensors, the lists of a layer as tuples; the same in every run.

    Normal values, weights such that products stay near 1.
    """
    generator, dtype = torch.Generator().manual_seed(problem.K), getattr(torch, problem.dtype)

    def normal(value: Any) -> Any:
        if value is None or isinstance(value, TensorSpec):
            return value and torch.randn(value.shape, generator=generator).to(dtype)
        return tuple([normal(each) for each in value])

    x, residual, cos, _, _, norms, caches, *_ = specs_of(problem)
    angles, storage = normal(cos).float(), problem.storage
    place = torch.tensor([CACHE - 1], dtype=torch.int32)
    matrices, scales = list[Tensor | None](), list[Tensor | None]()
    for sizes in linears_of(problem):
        missing = [None] * (2 - len(sizes))
        matrices += missing
        scales += missing
        for size in sizes:
            matrix = torch.randn(size, generator=generator) * size[0] ** -0.5
            kept = (matrix.to(dtype), None) if storage is None else stored(matrix, storage)
            matrices.append(kept[0])
            scales.append(kept[1])
    return (
        *(normal(x), normal(residual), angles.cos().to(dtype), angles.sin().to(dtype), place),
        *(normal(norms), normal(caches), tuple(matrices), ()),
        () if storage is None else tuple(scales),
    )


def layer_error_ratio(problem: Problem, tensors: tuple[Any, ...], results: Any) -> float:
    """The greatest `error_ratio` of a layer's results, caches included, by the CPU's."""
    wide, plain = [_reference(problem, tensors, each) for each in (torch.float64, None)]
    outputs = zip(results, wide, plain, strict=True)
    return max(
        [error_ratio(actual.view(exact.shape), exact, same) for actual, exact, same in outputs]
    )


def _reference(problem: Problem, tensors: tuple[Any, ...], wider: torch.dtype | None) -> list[Any]:
    """What the op returns, and its caches; its floats in another dtype where one is given."""
    dtype = getattr(torch, problem.dtype)

    def cast(value: Any) -> Any:
        if isinstance(value, tuple):
            return [cast(each) for each in value]
        if value is None or value.dtype != dtype:
            return value
        return value.to(wider or dtype, copy=True)

    spec, given = SPECS[OP], [cast(each) for each in tensors]
    caches = given[6]
    with torch.inference_mode():
        rows = [each.unsqueeze(0) for each in given[:4]]
        results: Any = spec.reference(*rows, *given[4:], *spec.defaults)
    return [*results, *caches]
