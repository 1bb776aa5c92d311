"""Measured on the host's CPU: the ops beside the dense layer and beside two bare matmuls a pair.

Weights are met cold, as in a model's forward: every round takes another copy of them.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronmm_ops.bench.timing import PairedTimes, copies_for, time_paired
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.rank import aligned_rank
from neuronmm_ops.models import model_shape
from neuronmm_ops.nn import SVDMLP, SVDLinear
from neuronmm_ops.ops.backends.cpu import compute_dtype

OPS = ("xuv", "svd_mlp")
RATIOS = (0.2, 0.5)
TOKENS = (1, 8, 64, 512)
FORWARD, BOTH = "forward", "forward+backward"


def run(
    shape: str = "Llama-3.2-1B",
    ops: Sequence[str] = OPS,
    ratios: Sequence[float] = RATIOS,
    tokens: Sequence[int] = TOKENS,
    dtype: torch.dtype = torch.bfloat16,
    threads: int | None = None,
    rounds: int = 30,
    block: int = 128,
    progress: Progress | None = None,
    backward: bool = False,
) -> list[dict[str, Any]]:
    """Time each op at each ratio and number of tokens.

    Args:
        shape: name of a model shape; `xuv` is its up projection, `svd_mlp` its MLP.
        ops: of `xuv`, `svd_mlp`.
        ratios: compression ratios; ranks as `aligned_rank` gives them.
        tokens: values of M.
        dtype: of activations and weights.
        threads: of torch; default as it is.
        rounds: timed rounds a row; fewer where they take more than a minute.
        block: ranks are multiples of it.
        progress: called with ("measure", rows done, rows in all).
        backward: also time a forward and the gradients of x and of all weights.

    Returns:
        A row for each combination: `op`, `pass` (`forward` or `forward+backward`), `M`, `K`, `N`,
        `r`, `dtype` (of the tensors), `compute_dtype` (in which the op multiplies on this CPU),
        `threads`, `dense_ms`, `two_gemm_ms`, `op_ms` (medians), `speedup` (dense to op, median of
        paired rounds), `ideal_speedup` (dense parameters to low-rank ones: the ratio of bytes, and
        of operations), `gbps` (bytes of the factors over the op's time) and `gflops` (of the
        products of x, factors and gradients, recomputed ones not counted).

    Raises:
        ValueError: an op or the shape is unknown, or no low-rank pair is smaller at a ratio.
    """
    sizes = model_shape(shape)
    K, N = sizes.hidden_size, sizes.intermediate_size
    cases = list(product(ops, (False, True) if backward else (False,), ratios, tokens))
    rows: list[dict[str, Any]] = []
    for op, with_gradients, ratio, M in cases:
        rows.append(row(op, M, K, N, ratio, dtype, threads, rounds, block, with_gradients))
        if progress:
            progress("measure", len(rows), len(cases))
    return rows


def row(
    op: str,
    M: int,
    K: int,
    N: int,
    ratio: float,
    dtype: torch.dtype = torch.bfloat16,
    threads: int | None = None,
    rounds: int = 30,
    block: int = 128,
    backward: bool = False,
) -> dict[str, Any]:
    """Time one op; for `svd_mlp`, K is the hidden and N the intermediate size. See `run`."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}; got {op!r}")
    if M < 1:
        raise ValueError(f"tokens must be at least 1, got {M}")
    r = aligned_rank(K, N, ratio, block)
    if r is None:
        raise ValueError(f"no rank that is a multiple of {block} is smaller than [{K}, {N}]")
    matrices = 1 if op == "xuv" else 3
    dense, low_rank = matrices * K * N, matrices * r * (K + N)
    copies = copies_for(low_rank * dtype.itemsize)
    with _threads(threads) as used:
        layers = _layers(op, K, N, r, dtype, copies)
        times = _time(layers, torch.randn(M, K, dtype=dtype), rounds, backward)
    op_ms = times.median_ms("op")
    return {
        "op": op,
        "pass": BOTH if backward else FORWARD,
        "M": M,
        "K": K,
        "N": N,
        "r": r,
        "dtype": _name(dtype),
        "compute_dtype": _name(compute_dtype(dtype)),
        "threads": used,
        "dense_ms": times.median_ms("dense"),
        "two_gemm_ms": times.median_ms("two_gemm"),
        "op_ms": op_ms,
        "speedup": times.speedup("op", "dense"),
        "ideal_speedup": dense / low_rank,
        "gbps": low_rank * dtype.itemsize / op_ms / 1e6,
        "gflops": (6 if backward else 2) * M * low_rank / op_ms / 1e6,
    }


def _layers(
    op: str, K: int, N: int, r: int, dtype: torch.dtype, copies: int
) -> dict[str, list[nn.Module]]:
    """Copies of each candidate, with weights of its own: the next would find them in the cache."""

    def linear(K: int, N: int) -> nn.Linear:
        return nn.Linear(K, N, bias=False, dtype=dtype)

    def pair(K: int, N: int) -> nn.Sequential:
        return nn.Sequential(linear(K, r), linear(r, N))

    makers: dict[str, Callable[[], nn.Module]] = {
        "dense": lambda: linear(K, N),
        "two_gemm": lambda: pair(K, N),
        "op": lambda: SVDLinear(K, N, r, bias=False, dtype=dtype),
    }
    if op == "svd_mlp":
        makers = {
            "dense": lambda: _GatedMLP(linear(K, N), linear(K, N), linear(N, K)),
            "two_gemm": lambda: _GatedMLP(pair(K, N), pair(K, N), pair(N, K)),
            "op": lambda: SVDMLP(K, N, (r, r, r), dtype=dtype),
        }
    return {name: [make() for _ in range(copies)] for name, make in makers.items()}


def _time(
    layers: dict[str, list[nn.Module]], x: Tensor, rounds: int, backward: bool
) -> PairedTimes:
    def forward(copies: list[nn.Module]) -> Callable[[int], object]:
        return lambda turn: copies[turn % len(copies)](x)

    def both(copies: list[nn.Module]) -> Callable[[int], object]:
        def step(turn: int) -> object:
            layer = copies[turn % len(copies)]
            y = layer(x)
            return torch.autograd.grad(y, (x, *layer.parameters()), seed)

        return step

    if not backward:
        return time_paired({name: forward(copies) for name, copies in layers.items()}, rounds)
    seed = torch.randn_like(layers["op"][0](x))
    x = x.requires_grad_()
    return time_paired(
        {name: both(copies) for name, copies in layers.items()}, rounds, mode=torch.enable_grad
    )


class _GatedMLP(nn.Module):
    """The gated MLP as Transformers' `LlamaMLP` computes it."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _threads(count: int | None) -> Generator[int]:
    """Run a block with torch on `count` threads; yield how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
