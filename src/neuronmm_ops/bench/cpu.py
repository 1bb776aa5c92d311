"""Measured on the host's CPU: the ops beside the dense layer and beside two bare matmuls a pair.

Weights are met cold, as in a model's forward: every round takes another copy of them.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronmm_ops.bench.shapes import model_shape
from neuronmm_ops.bench.timing import PairedTimes, copies_for, time_paired
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.rank import aligned_rank
from neuronmm_ops.nn import SVDMLP, SVDLinear

OPS = ("xuv", "svd_mlp")
RATIOS = (0.2, 0.5)
TOKENS = (1, 8, 64, 512)

T = TypeVar("T")


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
) -> list[dict[str, Any]]:
    """Time each op at each ratio and number of tokens.

    Args:
        shape: name of a model shape; `xuv` is its up projection, `svd_mlp` its MLP.
        ops: of `xuv`, `svd_mlp`.
        ratios: compression ratios; ranks as `aligned_rank` gives them.
        tokens: values of M.
        dtype: of activations and weights.
        threads: of torch; default as it is.
        rounds: timed rounds a row.
        block: ranks are multiples of it.
        progress: called with ("measure", rows done, rows in all).

    Returns:
        A row for each combination: `op`, `M`, `K`, `N`, `r`, `dtype`, `threads`, `dense_ms`,
        `two_gemm_ms`, `op_ms` (medians), `speedup` (dense to op, median of paired rounds),
        `ideal_speedup` (dense parameters to low-rank ones: the ratio of bytes, and of operations),
        `gbps` (bytes of the factors over the op's time) and `gflops`.

    Raises:
        ValueError: an op or the shape is unknown, or no low-rank pair is smaller at a ratio.
    """
    sizes = model_shape(shape)
    K, N = sizes.hidden_size, sizes.intermediate_size
    cases = list(product(ops, ratios, tokens))
    rows: list[dict[str, Any]] = []
    for op, ratio, M in cases:
        rows.append(row(op, M, K, N, ratio, dtype, threads, rounds, block))
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
    candidates = _xuv if op == "xuv" else _svd_mlp
    with _threads(threads) as used:
        times = candidates(M, K, N, r, dtype, copies, rounds)
    op_ms = times.median_ms("op")
    return {
        "op": op,
        "M": M,
        "K": K,
        "N": N,
        "r": r,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": used,
        "dense_ms": times.median_ms("dense"),
        "two_gemm_ms": times.median_ms("two_gemm"),
        "op_ms": op_ms,
        "speedup": times.speedup("op", "dense"),
        "ideal_speedup": dense / low_rank,
        "gbps": low_rank * dtype.itemsize / op_ms / 1e6,
        "gflops": 2 * M * low_rank / op_ms / 1e6,
    }


@torch.inference_mode()
def _xuv(
    M: int, K: int, N: int, r: int, dtype: torch.dtype, copies: int, rounds: int
) -> PairedTimes:
    op = torch.ops.neuronmm.xuv.default
    x = torch.randn(M, K, dtype=dtype)
    dense = _copies(lambda: nn.Linear(K, N, bias=False, dtype=dtype).weight, copies)
    # Each candidate has its own factors: the next one would find them in the cache.
    pairs = _copies(lambda: (_matrix(r, K, dtype), _matrix(N, r, dtype)), copies)
    layers = _copies(lambda: SVDLinear(K, N, r, bias=False, dtype=dtype), copies)
    factors = [(layer.u, layer.v) for layer in layers]

    def two_gemm(turn: int) -> Tensor:
        first, second = pairs[turn % copies]
        return F.linear(F.linear(x, first), second)

    return time_paired(
        {
            "dense": lambda turn: F.linear(x, dense[turn % copies]),
            "two_gemm": two_gemm,
            "op": lambda turn: op(x, *factors[turn % copies]),
        },
        rounds,
    )


@torch.inference_mode()
def _svd_mlp(
    M: int, K: int, N: int, r: int, dtype: torch.dtype, copies: int, rounds: int
) -> PairedTimes:
    x = torch.randn(M, K, dtype=dtype)
    # Each candidate has its own weights: the next one would find them in the cache.
    dense = _copies(lambda: _DenseMLP(K, N, dtype), copies)
    pairs = _copies(lambda: _MatrixPairs(K, N, r, dtype), copies)
    fused = _copies(lambda: SVDMLP(K, N, (r, r, r), dtype=dtype), copies)
    return time_paired(
        {
            "dense": lambda turn: dense[turn % copies](x),
            "two_gemm": lambda turn: pairs[turn % copies](x),
            "op": lambda turn: fused[turn % copies](x),
        },
        rounds,
    )


class _DenseMLP(nn.Module):
    """The gated MLP as Transformers' `LlamaMLP` computes it."""

    def __init__(self, K: int, N: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(K, N, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(K, N, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(N, K, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _MatrixPairs(nn.Module):
    """The same MLP of pairs of matrices, each a `F.linear`."""

    def __init__(self, K: int, N: int, r: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = _matrix(r, K, dtype), _matrix(N, r, dtype)
        self.up = _matrix(r, K, dtype), _matrix(N, r, dtype)
        self.down = _matrix(r, N, dtype), _matrix(K, r, dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.linear(F.linear(x, self.gate[0]), self.gate[1])
        up = F.linear(F.linear(x, self.up[0]), self.up[1])
        hidden = F.silu(gate) * up
        return F.linear(F.linear(hidden, self.down[0]), self.down[1])


def _matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype).uniform_(-1, 1).mul_(columns**-0.5)


def _copies(make: Callable[[], T], copies: int) -> list[T]:
    return [make() for _ in range(copies)]


@contextmanager
def _threads(count: int | None) -> Generator[int]:
    """Run a block with torch on `count` threads; yield how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
