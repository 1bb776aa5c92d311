"""Operands in one byte, and what kernels must make of them: in fp64 and as plainly as they do."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from tolerances import assert_close_to_oracle
from torch import Tensor

import neuroncore as nc
from neuronmm_ops.kernels.svd_mlp.prefill import svd_mlp
from neuronmm_ops.kernels.svd_qkv.prefill import svd_qkv
from neuronmm_ops.kernels.xuv.prefill import xuv
from neuronmm_ops.kernels.xw.prefill import xw
from neuronmm_ops.plan import Problem

KERNELS: dict[str, Any] = {"xw": xw, "xuv": xuv, "svd_mlp": svd_mlp, "svd_qkv": svd_qkv}
LARGEST = {"float8_e4m3fn": 240.0, "int8": 127.0}
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class Case:
    """One run of a kernel; `problem.weight_dtype` is that of its weights."""

    problem: Problem
    bias: bool = False
    activation: str = "silu"
    blocks: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def doubled(self) -> bool:
        """Whether activations are rounded to fp8, too."""
        return bool(self.blocks.get("double_row"))


@dataclass(frozen=True)
class Operands:
    """Tensors of a case; weights in one byte, and their scales."""

    x: Tensor
    weights: list[Tensor]
    scales: list[Tensor]
    bias: Tensor | None


def drawn(case: Case) -> Operands:
    """Normal values; of weights in a grid a column, rounded to nearest."""
    problem = case.problem
    dtype = getattr(torch, problem.dtype)
    generator = torch.Generator().manual_seed(problem.M + problem.K + problem.N)
    # tokens of very different size, and one of zeros
    x = torch.randn((problem.M, problem.K), generator=generator)
    x *= torch.exp2(torch.randint(-3, 4, (problem.M, 1), generator=generator).float())
    if problem.M > 1:
        x[problem.M // 3] = 0
    weights: list[Tensor] = []
    scales: list[Tensor] = []
    largest = LARGEST[problem.weight_dtype]
    for shape in problem.matrices:
        w = torch.randn(shape, generator=generator) * shape[0] ** -0.5
        scale = (w.abs().amax(0) / largest).bfloat16().float() * 1.01
        values = (w / scale).clamp(-largest, largest)
        integer = problem.weight_dtype == "int8"
        weights.append((values.round() if integer else values).to(_torch(problem.weight_dtype)))
        scales.append(scale)
    bias = torch.randn((problem.N,), generator=generator).to(dtype) if case.bias else None
    return Operands(x.to(dtype), weights, scales, bias)


def _torch(name: str) -> torch.dtype:
    return getattr(torch, name)


def rounded_rows(a: Tensor) -> Tensor:
    """Tokens rounded to fp8: e4m3(a * s) / s, where s = 2^floor(log2(1 / rms)) of the token."""
    wide = a.float()
    rms = wide.square().mean(-1, keepdim=True).sqrt()
    s = torch.where(rms > 0, torch.exp2(torch.floor(-torch.log2(rms))), 1.0)
    return ((wide * s).clamp(-240, 240).to(torch.float8_e4m3fn).float() / s).to(a.dtype)


def composed(case: Case, given: Operands, wide: torch.dtype) -> Tensor:
    """The op in sums of `wide`; in fp32 every intermediate is rounded to x's dtype, in fp64 none.

    Where activations are rounded to fp8 they are in both.
    """
    exact = wide is torch.float64

    def rounded(value: Tensor) -> Tensor:
        return value if exact else value.to(given.x.dtype).to(wide)

    def product(a: Tensor, n: int) -> Tensor:
        a = rounded_rows(a.to(given.x.dtype)).to(wide) if case.doubled else a
        return a @ given.weights[n].to(wide) * given.scales[n].to(wide)

    x = given.x.to(wide)
    if case.problem.op == "xw":
        out = product(x, 0)
    elif case.problem.op == "xuv":
        out = product(rounded(product(x, 0)), 1)
    elif case.problem.op == "svd_qkv":
        out = torch.cat([product(rounded(product(x, n)), n + 1) for n in (0, 2, 4)], 1)
    else:
        gate, up = (product(rounded(product(x, n)), n + 1) for n in (0, 2))
        hidden = rounded(ACTIVATIONS[case.activation](gate) * up)
        out = product(rounded(product(hidden, 4)), 5)
    return out if given.bias is None else out + given.bias.to(wide)


def magnitude(case: Case, given: Operands) -> Tensor:
    """fp64 sums of the absolute values of the terms."""
    absolute = Operands(
        given.x.abs(),
        [w.float().abs().to(w.dtype) for w in given.weights],
        given.scales,
        None if given.bias is None else given.bias.abs(),
    )
    plain = {k: v for k, v in case.blocks.items() if k != "double_row"}
    return composed(Case(case.problem, case.bias, "relu", plain), absolute, torch.float64)


def biases_of(problem: Problem, bias: Any) -> list[Any]:
    """A bias [N] as the kernel takes it: one for each output, none of svd_mlp."""
    if problem.op == "svd_mlp":
        return []
    if bias is None:
        return [None] * len(problem.outputs)
    ends = list(accumulate(problem.outputs))
    return [bias[end - size : end] for size, end in zip(problem.outputs, ends, strict=True)]


def run(case: Case, given: Operands) -> Any:
    """The kernel on the simulated core."""
    problem = case.problem
    kernel = KERNELS[problem.op]
    options: dict[str, Any] = {"activation": case.activation} if problem.op == "svd_mlp" else {}
    tensors: list[Any] = [given.x, *given.weights, *biases_of(problem, given.bias)]
    return nc.simulate(
        kernel if problem.lnc == 1 else kernel[problem.lnc],
        *tensors, *given.scales, target=problem.target, **options, **case.blocks,
    )  # fmt: skip


def check(case: Case) -> nc.Profile:
    """Run a case; its values are about as near to fp64 as the plain composition's."""
    given = drawn(case)
    done = run(case, given)
    plain = composed(case, given, torch.float32).to(given.x.dtype)
    oracle = composed(case, given, torch.float64)
    assert_close_to_oracle(done.outputs, oracle, plain, magnitude(case, given))
    assert done.profile.flops == case.problem.flops, "padding was computed"
    return done.profile
