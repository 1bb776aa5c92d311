"""Runs of the kernels of ops on operands drawn here, and what they must make of them, in fp64."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from tolerances import assert_close_to_oracle
from torch import Tensor

import neuroncore as nc
from neuroncore.dtypes import dtype_of
from neuronmm_ops.kernels import kernel_named, nki_kernel
from neuronmm_ops.models import SHAPES
from neuronmm_ops.plan import Matrices, Plan, Problem, mlp_matrices, qkv_matrices
from neuronmm_ops.plan.search import descend, knobs_of
from neuronmm_ops.rank import aligned_rank
from neuronmm_ops.storages import BY_DTYPE, dequantized

OPS = ("svd_mlp", "svd_qkv", "xuv", "xw")
DTYPES = ("bfloat16", "float16", "float32")
TARGETS = ("trn1", "trn2", "trn3")
LAUNCHES = [("trn1", 1), ("trn2", 1), ("trn2", 2), ("trn3", 1), ("trn3", 2)]
CORES = st.sampled_from(LAUNCHES)
SIZES = st.one_of(st.sampled_from((1, 127, 128, 129, 256)), st.integers(1, 300))
TOKENS = st.one_of(st.sampled_from((1, 2, 32, 33, 64, 65, 128)), st.integers(1, 128))
LARGEST = {"float8_e4m3fn": 240.0, "int8": 127.0}
ROUNDED = (*LARGEST, "int4")
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
    phase: str = "prefill"

    @property
    def doubled(self) -> bool:
        """Whether activations are rounded to fp8, too."""
        return bool(self.blocks.get("double_row"))

    @property
    def kernel(self) -> Any:
        op = self.problem.op
        return kernel_named(op, f"{op}_decode" if self.phase == "decode" else op)


@dataclass(frozen=True)
class Operands:
    """Tensors of a case; scales of weights in one byte, `x_up` of mlp."""

    x: Tensor
    weights: list[Tensor]
    scales: list[Tensor]
    bias: Tensor | None = None
    x_up: Tensor | None = None


def matrices_of(
    op: str, K: int, ranks: tuple[int, int, int], outputs: Sequence[int], inner: int = 1
) -> Matrices:
    """Shapes of an op's weights; of one rank or output it takes the first."""
    N = outputs[0]
    if op == "svd_qkv":
        return qkv_matrices(K, ranks, (N, outputs[1], outputs[2]))
    if op == "svd_mlp":
        return mlp_matrices(K, ranks, inner, N)
    return ((K, ranks[0]), (ranks[0], N)) if op == "xuv" else ((K, N),)


@st.composite
def problems(
    draw: st.DrawFn, op: str, M: Any, sizes: Any, weight_dtypes: Sequence[str], inner: Any = None
) -> Problem:
    """An op of any sizes on any core, in any dtype."""
    ranks, outputs = (tuple([draw(sizes) for _ in range(3)]) for _ in range(2))
    matrices = matrices_of(op, draw(sizes), ranks, outputs, draw(sizes if inner is None else inner))
    dtype, stored = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(weight_dtypes))
    return Problem(op, draw(M), matrices, dtype, *draw(CORES), weight_dtype=stored)


def biased(op: str) -> Any:
    """Whether there is a bias: those of the ops that take one may have it."""
    return st.just(False) if op == "svd_mlp" else st.booleans()


def stored_in(w: Tensor, weight_dtype: str) -> tuple[Tensor, Tensor]:
    """Weights of a storage rounded to nearest, and their scales."""
    stored = BY_DTYPE[weight_dtype]
    scale = (stored.magnitudes(w) / stored.largest * 1.01).bfloat16().float()
    return stored.encode(stored.nearest(w / stored.spread(scale, len(w)))), scale


def drawn(case: Case) -> Operands:
    """Normal values whose products stay near 1; columns in one byte are of different size."""
    problem = case.problem
    dtype = getattr(torch, problem.dtype)
    generator = torch.Generator().manual_seed(problem.M + problem.K + problem.N)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = normal(problem.M, problem.K)
    if case.doubled:  # tokens of very different size, and one of zeros
        x *= torch.exp2(torch.randint(-3, 4, (problem.M, 1), generator=generator).float())
        if problem.M > 1:
            x[problem.M // 3] = 0
    weights = [normal(*shape) * shape[0] ** -0.5 for shape in problem.matrices]
    scales: list[Tensor] = []
    if problem.weight_dtype:
        spread = [w * (0.1 + 2.9 * torch.rand(w.shape[1], generator=generator)) for w in weights]
        pairs = [stored_in(w, problem.weight_dtype) for w in spread]
        weights, scales = [w for w, _ in pairs], [scale for _, scale in pairs]
    else:
        weights = [w.to(dtype) for w in weights]
    bias = normal(problem.N).to(dtype) if case.bias else None
    x_up = normal(problem.M, problem.matrices[1][0]).to(dtype) if problem.others else None
    return Operands(x.to(dtype), weights, scales, bias, x_up)


def rounded_rows(a: Tensor) -> Tensor:
    """Tokens rounded to fp8: e4m3(a * s) / s, where s = 2^floor(log2(1 / rms)) of the token."""
    wide = a.float()
    rms = wide.square().mean(-1, keepdim=True).sqrt()
    s = torch.where(rms > 0, torch.exp2(torch.floor(-torch.log2(rms))), 1.0)
    return ((wide * s).clamp(-240, 240).to(torch.float8_e4m3fn).float() / s).to(a.dtype)


def composed(case: Case, given: Operands, *, exact: bool, absolute: bool = False) -> Tensor:
    """The op in fp64; unless `exact`, with every intermediate and the output rounded to x's dtype.

    Where activations are rounded to fp8 they are in both. With `absolute` the output is the sums of
    the absolute values of its terms.
    """
    dtype = given.x.dtype
    last = {"xw": (0,), "xuv": (1,), "svd_qkv": (1, 3, 5), "svd_mlp": (5,), "mlp": (2,)}

    def rounded(value: Tensor) -> Tensor:
        return value if exact else value.to(dtype).double()

    def product(a: Tensor, n: int) -> Tensor:
        a = rounded_rows(a.to(dtype)).double() if case.doubled else a
        scale = given.scales[n] if given.scales else None
        w = dequantized(given.weights[n], scale, torch.float64).double()
        return a.abs() @ w.abs() if absolute and n in last[case.problem.op] else a @ w

    def pair(a: Tensor, n: int) -> Tensor:
        return product(rounded(product(a, n)), n + 1)

    x, op = given.x.double(), case.problem.op
    if op == "xw":
        out = product(x, 0)
    elif op == "xuv":
        out = pair(x, 0)
    elif op == "svd_qkv":
        out = torch.cat([pair(x, n) for n in (0, 2, 4)], 1)
    else:
        if op == "mlp":
            gate, up = product(x, 0), product(x if given.x_up is None else given.x_up.double(), 1)
        else:
            gate, up = pair(x, 0), pair(x, 2)
        hidden = rounded(rounded(ACTIVATIONS[case.activation](rounded(gate))) * rounded(up))
        out = product(hidden, 2) if op == "mlp" else pair(hidden, 4)
    if given.bias is not None:
        out = out + (given.bias.abs() if absolute else given.bias).double()
    return rounded(out)


def beside_weights(problem: Problem, given: Operands) -> list[Any]:
    """What the kernel takes between weights and scales: a bias for each output, or x_up."""
    if problem.op == "svd_mlp":
        return []
    if problem.op == "mlp":
        return [given.x_up]
    if given.bias is None:
        return [None] * len(problem.outputs)
    ends = list(accumulate(problem.outputs))
    return [given.bias[end - size : end] for size, end in zip(problem.outputs, ends, strict=True)]


def run(case: Case, given: Operands, **options: Any) -> Any:
    """The kernel on the simulated core."""
    problem = case.problem
    if problem.op in ("mlp", "svd_mlp"):
        options["activation"] = case.activation
    tensors = [given.x, *given.weights, *beside_weights(problem, given), *given.scales]
    kernel = case.kernel if problem.lnc == 1 else case.kernel[problem.lnc]
    return nc.simulate(kernel, *tensors, target=problem.target, **case.blocks, **options)


def check(case: Case, given: Operands | None = None) -> nc.Profile:
    """Run a case: values about as near to fp64 as the plain composition's, work without padding.

    A decode kernel loads each byte of a weight once.
    """
    given = given or drawn(case)
    done = run(case, given)
    plain = composed(case, given, exact=False).to(given.x.dtype)
    oracle = composed(case, given, exact=True)
    size = composed(case, given, exact=True, absolute=True)
    assert_close_to_oracle(done.outputs, oracle, plain, size)
    beside = beside_weights(case.problem, given) if given.bias is not None else []
    flops = case.problem.flops
    if case.phase == "decode":
        if not case.blocks.get("stationary"):  # TensorE spreads a bias
            flops += sum([2 * case.problem.M * bias.numel() for bias in beside])
        traffic = {t.name: t.read_bytes for t in done.profile.tensors}
        names = list(inspect.signature(case.kernel.func).parameters)[1:]
        tensors = given.weights if given.scales else [*given.weights, *beside]
        for name, tensor in zip(names, tensors, strict=False):
            assert traffic[name] == tensor.numel() * tensor.element_size(), name
    if case.phase == "prefill" or not given.scales:  # decode multiplies to spread its scales
        assert done.profile.flops == flops, "padding was computed"
    return done.profile


def decode_arguments(problem: Problem) -> dict[str, Any]:
    """Arguments of the quickest decode kernel, where prefill may be quicker."""
    fitting = [each for knobs in knobs_of(problem, "decode") for each in descend(problem, knobs)]
    return min(fitting, key=lambda candidate: candidate.rank).arguments


def traced(plan: Plan) -> nc.Profile:
    """The profile of a plan's kernel on all tokens, without values."""
    p = plan.problem
    specs = [nc.TensorSpec(shape, dtype_of(p.dtype)) for shape in ((p.M, p.K), *p.matrices)]
    kernel = nki_kernel(plan)
    return nc.simulate(kernel, *specs, target=p.target, mode="trace", **plan.arguments).profile


def of_model(name: str, M: int, target: str, op: str = "svd_mlp", **options: Any) -> Problem:
    """A model's svd_mlp, or xuv of its gate, at a ratio of 0.2."""
    shape = SHAPES[name]
    K, inner = shape.hidden_size, shape.intermediate_size
    rank = aligned_rank(K, inner, 0.2)
    assert rank
    matrices = matrices_of(op, K, (rank, rank, rank), (K if op == "svd_mlp" else inner,), inner)
    return Problem(op, M, matrices, target=target, **options)
