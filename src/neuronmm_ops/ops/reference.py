"""The ops in plain torch: their specification, and the kernel of every device without its own.

Numerics: both matmuls accumulate in fp32 over the whole contraction; the intermediate `x @ u` is
rounded once, to x's dtype. `mm` reads a matrix in whichever of the two orders it is stored, so
factors stored contiguous along the contraction (`SVDLinear` does) take the CPU's fast path: for a
single row that is `mv`, except where `cpu.streams_by_mv` says otherwise.
What the CPU multiplies slowly in its own dtype goes through float32 (`matmul.py`).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from neuronmm_ops.ops.cpu import streams_by_mv
from neuronmm_ops.ops.matmul import SLOW_DTYPES, mm
from neuronmm_ops.ops.validation import (
    FLOAT_DTYPES,
    check_svd_mlp,
    check_xuv,
    check_xw,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
ACTIVATION_NAMES = tuple(ACTIVATIONS)

# A single row of these is multiplied by `mm`.
_MM_ROWS = frozenset(dtype for dtype in FLOAT_DTYPES if not streams_by_mv(dtype))
# From this many entries on, choosing the faster matmul for one row is worth a microsecond.
_WORTH_A_CHOICE = 2**16
# Entries of the strips [M, n] in which a CPU passes through the MLP's hidden activations: they are
# in its cache from the matmul to the product, and the allocator has them at hand. Strips narrower
# than MIN_STRIP would starve the matmuls.
_STRIP = 2**20
_MIN_STRIP = 512


def xuv(x: Tensor, u: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `(x @ u) @ v + bias` for `x[..., K]`, `u[K, r]`, `v[r, N]`, `bias[N]`."""
    # What the matmuls refuse by themselves is explained afterwards: that keeps the decode path
    # within a microsecond of two bare matmuls. The rest is checked here.
    if bias is not None or x.dtype not in FLOAT_DTYPES or u.dim() != 2 or v.dim() != 2:
        check_xuv(x, u, v, bias)
    try:
        dim = x.dim()
        if dim and (u.numel() >= _WORTH_A_CHOICE or bias is not None or x.dtype in SLOW_DTYPES):
            y = _affine(_affine(_flat(x, u), u), v, bias)
            return y if dim == y.dim() else y.view(*x.shape[:-1], y.shape[-1])
        if dim == 2:
            return torch.mm(torch.mm(x, u), v)
        return torch.matmul(torch.matmul(x, u), v)
    except RuntimeError:
        check_xuv(x, u, v, bias)
        raise


def xw(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ w + bias` for `x[..., K]`, `w[K, N]`, `bias[N]`."""
    check_xw(x, w, bias)
    y = _affine(_flat(x, w), w, bias)
    return y if x.dim() == y.dim() else y.view(*x.shape[:-1], y.shape[-1])


def svd_mlp(
    x: Tensor,
    u_gate: Tensor,
    v_gate: Tensor,
    u_up: Tensor,
    v_up: Tensor,
    u_down: Tensor,
    v_down: Tensor,
    activation: str = "silu",
) -> Tensor:
    """Return `down(act(gate(x)) * up(x))`, each projection `(x @ u) @ v`."""
    factors = (u_gate, v_gate, u_up, v_up, u_down, v_down)
    # As in xuv; the product of gate and up would broadcast.
    if (
        activation not in ACTIVATIONS
        or x.dtype not in FLOAT_DTYPES
        or x.dim() == 0
        or v_gate.shape[-1] != v_up.shape[-1]
    ):
        check_svd_mlp(x, *factors, activation, ACTIVATION_NAMES)
    try:
        flat = _flat(x, u_gate)
        gate, up = _affine(flat, u_gate), _affine(flat, u_up)
        hidden = _gated(gate, v_gate, up, v_up, ACTIVATIONS[activation])
        y = _affine(_affine(hidden, u_down), v_down)
    except (RuntimeError, IndexError):
        check_svd_mlp(x, *factors, activation, ACTIVATION_NAMES)
        raise
    return y if x.dim() == y.dim() else y.view(*x.shape[:-1], y.shape[-1])


KERNELS: dict[str, Callable[..., Tensor]] = {
    "xuv": xuv,
    "xw": xw,
    "svd_mlp": svd_mlp,
}
"""Each op's specification by its name."""


def rows(x: Tensor) -> Tensor:
    """View x [..., K] as rows [M, K]."""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def _gated(
    gate: Tensor, v_gate: Tensor, up: Tensor, v_up: Tensor, act: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `act(gate @ v_gate) * (up @ v_up)` for gate and up [M, r], v [r, N]."""
    M, N = gate.shape[0], v_gate.shape[1]
    if gate.dim() == 1 or M * N <= _STRIP or not gate.is_cpu:
        return act(_affine(gate, v_gate)).mul_(_affine(up, v_up))
    width = max(_STRIP // M, _MIN_STRIP)
    hidden = gate.new_empty(M, N)
    strips = (matrix.split(width, dim=1) for matrix in (v_gate, v_up, hidden))
    for v_gate_strip, v_up_strip, out in zip(*strips, strict=True):
        torch.mul(act(mm(gate, v_gate_strip)), mm(up, v_up_strip), out=out)
    return hidden


def _flat(x: Tensor, w: Tensor) -> Tensor:
    """View x [..., K] as rows [M, K], or as a vector [K] where `mv` is the faster matmul."""
    is_vector = 0 < x.numel() == x.shape[-1] and w.stride(0) == 1 and x.dtype not in _MM_ROWS
    return x.reshape(-1) if is_vector else rows(x)


def _affine(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ w + bias` for x [M, K] or [K], w [K, N], bias [N]."""
    if x.dim() == 1:
        return torch.mv(w.t(), x) if bias is None else torch.addmv(bias, w.t(), x)
    return mm(x, w, bias)
