"""What a call of an op costs on tiny inputs, next to bare matmuls."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import neuronmm_ops
from neuronmm_ops.measure.timing import PairedTimes, time_paired
from neuronmm_ops.nn import SVDLinear
from neuronmm_ops.ops.backends import xla
from neuronmm_ops.ops.backends.environment import XLA_INSTALL
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.spec import OpSpec, Results

K, R, N = 8, 4, 8
SHAPES = ((2, K), (1, 1, K))
MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}


def run(repeats: int = 30, calls: int = 2000) -> list[dict[str, Any]]:
    """Time calls on inputs so small that their arithmetic takes no time.

    Args:
        repeats: paired repeats; the fastest one counts.
        calls: calls of a candidate in one repeat.

    Returns:
        A row for each grad mode and shape of x: `mode`, `x`, microseconds a call of two
        `F.linear`s (`linear_us`), of the op (`op_us`), of `neuronmm_ops.xuv` (`function_us`), of an
        `nn.Sequential` of two `nn.Linear`s (`sequential_us`) and of an `SVDLinear` (`module_us`);
        and `op_excess_us`, the op's less the two `F.linear`s'.
    """
    return [_row(mode, shape, repeats, calls) for mode in MODES for shape in SHAPES]


def run_xla(repeats: int = 30, calls: int = 500) -> list[dict[str, Any]]:
    """Time what tracing an op costs on XLA tensors: nothing is compiled or run.

    Args:
        repeats: paired repeats; the fastest one counts.
        calls: traced calls of a candidate in one repeat.

    Returns:
        A row for each op: `op`, microseconds a call of the kernel under the XLA key (`kernel_us`),
        of the public function (`op_us`) and of the op in plain torch (`composite_us`).

    Raises:
        ImportError: torch_xla is not installed.
    """
    try:
        import torch_xla  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ImportError(XLA_INSTALL) from error

    device = torch_xla.device()
    rows: list[dict[str, Any]] = []
    for op, spec in SPECS.items():
        if spec.states:  # a launch of layers, not a call that takes microseconds
            continue
        tensors = [torch.randn(shape, device=device) for shape in _shapes(spec)]
        torch_xla.sync()
        candidates: dict[str, Callable[[int], Results]] = {
            "kernel": lambda _, op=op, tensors=tensors: xla.IMPLEMENTATIONS[op](*tensors),
            "op": lambda _, op=op, tensors=tensors: getattr(neuronmm_ops, op)(*tensors),
            "composite": lambda _, spec=spec, tensors=tensors: spec.reference(*tensors),
        }
        rows.append({"op": op, **_fastest_us(time_paired(candidates, repeats, calls=calls))})
    return rows


def _fastest_us(times: PairedTimes) -> dict[str, float]:
    """Microseconds of each candidate's fastest round: noise only ever adds time."""
    return {f"{name}_us": 1e3 * min(rounds) for name, rounds in times.rounds_ms.items()}


def _shapes(spec: OpSpec) -> list[tuple[int, ...]]:
    """Tiny shapes of an op's tensors, without a bias."""
    sizes = {n: R if n.islower() else K for operand in spec.operands for n in operand.sizes}
    shapes = zip(spec.operands, spec.shapes(sizes, lead=(2,)), strict=True)
    return [shape for operand, shape in shapes if not operand.optional]


def _row(mode: str, shape: tuple[int, ...], repeats: int, calls: int) -> dict[str, Any]:
    x, op = torch.randn(shape), torch.ops.neuronmm.xuv.default
    layer = SVDLinear(K, N, R, bias=False)
    linears = nn.Linear(K, R, bias=False), nn.Linear(R, N, bias=False)
    pair = nn.Sequential(*linears)
    first, second = (linear.weight for linear in linears)
    u, v = layer.u, layer.v
    candidates: dict[str, Callable[[int], Results]] = {
        "linear": lambda _: F.linear(F.linear(x, first), second),
        "op": lambda _: op(x, u, v),
        "function": lambda _: neuronmm_ops.xuv(x, u, v),
        "sequential": lambda _: pair(x),
        "module": lambda _: layer(x),
    }
    us = _fastest_us(time_paired(candidates, repeats, calls=calls, mode=MODES[mode]))
    return {"mode": mode, "x": list(shape), **us, "op_excess_us": us["op_us"] - us["linear_us"]}
