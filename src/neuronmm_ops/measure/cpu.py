"""Measured on the host's CPU: the ops next to the dense layer and next to two bare matmuls a pair.

The layers of `pack_` are compared with dense ones that are packed, too. Weights are read from
memory, as in a model's forward: every round takes another copy of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.measure.timing import PairedTimes, copies_for, time_paired
from neuronmm_ops.models import resolve_shape
from neuronmm_ops.nn import SVDMLP, SVDLinear, pack_, relayout_
from neuronmm_ops.ops.backends.cpu import compute_dtype, name_of
from neuronmm_ops.rank import aligned_rank
from neuronmm_ops.storages import checked, factor_bytes

OPS = ("xuv", "svd_mlp")
RATIOS = (0.2, 0.5)
TOKENS = (1, 8, 64, 512)
FORWARD, BOTH = "forward", "forward+backward"


@dataclass(frozen=True)
class CpuOptions:
    """What to time.

    Attributes:
        shape: name of a model shape; `xuv` is its up projection, `svd_mlp` its MLP.
        ops: of `xuv`, `svd_mlp`.
        ratios: compression ratios; ranks as `aligned_rank` gives them.
        tokens: values of M.
        dtype: of activations and weights.
        rounds: timed rounds a row; fewer where they take more than a minute.
        block: ranks are multiples of it.
        backward: also time a forward and the gradients of x and of all weights.
        storage: `fp8` or `int8`: also time the op's forward on factors in one byte.
    """

    shape: str = "Llama-3.2-1B"
    ops: Sequence[str] = OPS
    ratios: Sequence[float] = RATIOS
    tokens: Sequence[int] = TOKENS
    dtype: torch.dtype = torch.bfloat16
    rounds: int = 30
    block: int = 128
    backward: bool = False
    storage: str | None = None


def run(
    options: CpuOptions = CpuOptions(), progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Time each op at each ratio and number of tokens.

    Args:
        options: what to time.
        progress: called with ("measure", rows done, rows in all).

    Returns:
        A row for each combination: `op`, `pass` (`forward` or `forward+backward`), `M`, `K`, `N`,
        `r`, `dtype` (of the tensors), `compute_dtype` (in which the op multiplies on this CPU),
        `threads`, `dense_ms`, `two_gemm_ms`, `op_ms` (medians), `speedup` (dense to op, median of
        paired rounds), `speedup_quartiles` (of them, three numbers), `ideal_speedup` (dense
        parameters to low-rank ones: the ratio of bytes, and of operations), `packed_dense_ms`,
        `packed_op_ms`, `packed_speedup` and `packed_speedup_quartiles` (the same after `pack_`;
        None with gradients, which it has none of), `storage`, `stored_ms`
        and `stored_speedup` (op to the op on factors in one byte, paired; None where there are
        none), `gbps` (bytes of the factors over the op's time) and `gflops` (of the products of x,
        factors and gradients, recomputed ones not counted).

    Raises:
        ValueError: an op, the shape or the storage is unknown, no low-rank pair is smaller at a
            ratio, or gradients of factors in one byte are asked for.
    """
    o = options
    if o.storage is not None and o.backward:
        raise ValueError("factors in one byte have no gradients; leave out --backward or --storage")
    checked(o.storage)
    sizes = resolve_shape(o.shape)
    K, N = sizes.hidden_size, sizes.intermediate_size
    for op in o.ops:
        if op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}; got {op!r}")
    if min(o.tokens) < 1:
        raise ValueError(f"tokens must be at least 1, got {min(o.tokens)}")
    ranks = [aligned_rank(K, N, ratio, o.block) for ratio in o.ratios]
    cases: list[Comparison] = []
    passes = (False, True)[: 1 + o.backward]
    for op, with_gradients, r, M in product(o.ops, passes, ranks, o.tokens):
        if r is None:
            raise ValueError(f"no rank that is a multiple of {o.block} is smaller than [{K}, {N}]")
        cases.append(Comparison(op, M, K, N, r, o.dtype, o.rounds, with_gradients, o.storage))
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows.append(measure(case))
        if progress is not None:
            progress("measure", len(rows), len(cases))
    return rows


@dataclass(frozen=True)
class Comparison:
    """What one row compares; for `svd_mlp`, K is the hidden and N the intermediate size."""

    op: str
    M: int
    K: int
    N: int
    r: int
    dtype: torch.dtype
    rounds: int
    backward: bool
    storage: str | None

    @property
    def matrices(self) -> int:
        """Linears that the op replaces."""
        return 1 if self.op == "xuv" else 3


def measure(case: Comparison) -> dict[str, Any]:
    """Time one op on the threads that torch has now, and return its row; see `run`."""
    M, K, N, r, itemsize = case.M, case.K, case.N, case.r, case.dtype.itemsize
    dense, low_rank = case.matrices * K * N, case.matrices * r * (K + N)
    times = _time(case, copies_for(case.matrices * factor_bytes(K, N, r, itemsize, case.storage)))
    op_ms = times.median_ms("op")
    is_stored, is_packed = case.storage is not None, not case.backward
    packed = ("packed_op", "packed_dense")
    return {
        "op": case.op,
        "pass": BOTH if case.backward else FORWARD,
        "M": M,
        "K": K,
        "N": N,
        "r": r,
        "dtype": name_of(case.dtype),
        "compute_dtype": name_of(compute_dtype(case.dtype)),
        "threads": torch.get_num_threads(),
        "dense_ms": times.median_ms("dense"),
        "two_gemm_ms": times.median_ms("two_gemm"),
        "op_ms": op_ms,
        "speedup": times.speedup("op", "dense"),
        "speedup_quartiles": times.speedup_quartiles("op", "dense"),
        "ideal_speedup": dense / low_rank,
        "packed_dense_ms": times.median_ms("packed_dense") if is_packed else None,
        "packed_op_ms": times.median_ms("packed_op") if is_packed else None,
        "packed_speedup": times.speedup(*packed) if is_packed else None,
        "packed_speedup_quartiles": times.speedup_quartiles(*packed) if is_packed else None,
        "storage": case.storage,
        "stored_ms": times.median_ms("stored") if is_stored else None,
        "stored_speedup": times.speedup("stored", "op") if is_stored else None,
        "gbps": low_rank * itemsize / op_ms / 1e6,
        "gflops": (6 if case.backward else 2) * M * low_rank / op_ms / 1e6,
    }


def _time(case: Comparison, copies: int) -> PairedTimes:
    """Each candidate on `copies` copies of its weights, so that no round finds them in a cache."""
    x = torch.randn(case.M, case.K, dtype=case.dtype, requires_grad=case.backward)
    made = makers(case)
    if not case.backward:
        made |= {f"packed_{name}": partial(_packed, made[name]) for name in ("dense", "op")}
    candidates = {
        name: _step([make() for _ in range(copies)], x, case.backward)
        for name, make in made.items()
    }
    mode = torch.enable_grad if case.backward else torch.inference_mode
    return time_paired(candidates, case.rounds, mode=mode)


def _packed(make: Callable[[], nn.Module]) -> nn.Module:
    return pack_(nn.Sequential(make()))


def _step(layers: list[nn.Module], x: Tensor, backward: bool) -> Callable[[int], object]:
    """A function of the round's number: the forward of one copy, or its gradients too."""
    if not backward:
        return lambda index: layers[index % len(layers)](x)
    with torch.no_grad():
        seed = torch.randn_like(layers[0](x))

    def both(index: int) -> object:
        layer = layers[index % len(layers)]
        return torch.autograd.grad(layer(x), (x, *layer.parameters()), seed)

    return both


def layer_of(op: str, K: int, N: int, linear: Callable[[int, int], nn.Module]) -> nn.Module:
    """Return what `xuv` or `svd_mlp` replaces, of Linears that are made from their sizes."""
    if op == "xuv":
        return linear(K, N)
    return _GatedMLP(linear(K, N), linear(K, N), linear(N, K))


def makers(case: Comparison) -> dict[str, Callable[[], nn.Module]]:
    """Return what makes a copy of each candidate; with a storage there is one more, `stored`."""
    K, N, r, dtype = case.K, case.N, case.r, case.dtype

    def linear(K: int, N: int) -> nn.Module:
        return nn.Linear(K, N, bias=False, dtype=dtype)

    def pair(K: int, N: int) -> nn.Module:
        return nn.Sequential(linear(K, r), linear(r, N))

    def op(storage: str | None = None) -> nn.Module:
        if case.op == "xuv":
            made: nn.Module = SVDLinear(K, N, r, bias=False, dtype=dtype, storage=storage)
        else:
            made = SVDMLP(K, N, (r, r, r), dtype=dtype, storage=storage)
        return relayout_(made)

    made: dict[str, Callable[[], nn.Module]] = {
        "dense": lambda: layer_of(case.op, K, N, linear),
        "two_gemm": lambda: layer_of(case.op, K, N, pair),
        "op": op,
    }
    if case.storage is not None:
        made["stored"] = lambda: op(case.storage)
    return made


class _GatedMLP(nn.Module):
    """The gated MLP as Transformers' `LlamaMLP` computes it."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
