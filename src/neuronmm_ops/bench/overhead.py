"""What a call costs before any arithmetic: the op beside two bare `F.linear`s, on tiny inputs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuronmm_ops
from neuronmm_ops.bench.timing import time_paired
from neuronmm_ops.nn import SVDLinear

K, R, N = 8, 4, 8
SHAPES = ((2, K), (1, 1, K))
MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}


def run(repeats: int = 30, calls: int = 2000) -> list[dict[str, Any]]:
    """Time calls on inputs so small that nothing but overhead is left.

    Args:
        repeats: paired repeats; the fastest one counts, for noise only ever adds time.
        calls: calls of a candidate in one repeat.

    Returns:
        A row for each grad mode and shape of x: `mode`, `x`, microseconds a call of two
        `F.linear`s (`linear_us`), of the op (`op_us`), of `neuronmm_ops.xuv` (`function_us`), of an
        `nn.Sequential` of two `nn.Linear`s (`sequential_us`) and of an `SVDLinear` (`module_us`);
        and `op_excess_us`, the op's less the two `F.linear`s'.
    """
    return [_row(mode, shape, repeats, calls) for mode in MODES for shape in SHAPES]


def _row(mode: str, shape: tuple[int, ...], repeats: int, calls: int) -> dict[str, Any]:
    x, op = torch.randn(shape), torch.ops.neuronmm.xuv.default
    layer = SVDLinear(K, N, R, bias=False)
    linears = nn.Linear(K, R, bias=False), nn.Linear(R, N, bias=False)
    pair = nn.Sequential(*linears)
    first, second = (linear.weight for linear in linears)
    u, v = layer.u, layer.v
    candidates: dict[str, Callable[[int], Tensor]] = {
        "linear": lambda _: F.linear(F.linear(x, first), second),
        "op": lambda _: op(x, u, v),
        "function": lambda _: neuronmm_ops.xuv(x, u, v),
        "sequential": lambda _: pair(x),
        "module": lambda _: layer(x),
    }
    times = time_paired(candidates, repeats, calls=calls, mode=MODES[mode])
    us = {name: 1e3 * min(times.rounds_ms[name]) for name in candidates}
    return {
        "mode": mode,
        "x": list(shape),
        **{f"{name}_us": value for name, value in us.items()},
        "op_excess_us": us["op"] - us["linear"],
    }
