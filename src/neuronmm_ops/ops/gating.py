"""The middle of a gated MLP, `act(gate) * up`, and the gradient of its activation."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from neuronmm_ops.ops.backends.cpu import mm
from neuronmm_ops.ops.products import affine

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
# Entries of the strips [M, n] in which a CPU passes through the hidden activations: they are in its
# cache from the matmul to the product, and the allocator has them at hand. Strips narrower than
# MIN_STRIP would starve the matmuls.
_STRIP = 2**20
_MIN_STRIP = 512

Side = tuple[Tensor, Tensor, Tensor | None]
"""Activations [M, r] or [r], a factor v [r, I] and the scale [I] of v."""


def gated(gate: Side, up: Side, act: Callable[[Tensor], Tensor], compute: str) -> Tensor:
    """Return `act(gate @ v_gate) * (up @ v_up)`, each product times its scale."""
    low, v, scale = gate
    M, inner = low.shape[0], v.shape[1]
    if low.dim() == 1 or M * inner <= _STRIP or not low.is_cpu or scale is not None:
        return act(affine(low, v, None, scale, compute)).mul_(
            affine(up[0], up[1], None, up[2], compute)
        )
    width = max(_STRIP // M, _MIN_STRIP)
    hidden = low.new_empty(M, inner)
    strips = (matrix.split(width, dim=1) for matrix in (v, up[1], hidden))
    for v_gate_strip, v_up_strip, out in zip(*strips, strict=True):
        torch.mul(act(mm(low, v_gate_strip)), mm(up[0], v_up_strip), out=out)
    return hidden


def activation_backward(name: str, grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `ACTIVATIONS[name](x)`, which can be differentiated once more."""
    aten = torch.ops.aten
    if name == "silu":
        if torch.is_grad_enabled():  # create_graph=True; silu_backward has no derivative itself
            sigmoid = torch.sigmoid(x)
            return grad * sigmoid * (1 + x * (1 - sigmoid))
        return aten.silu_backward(grad, x)
    if name == "relu":
        return aten.threshold_backward(grad, x, 0)
    return aten.gelu_backward(grad, x, approximate="tanh" if name == "gelu_tanh" else "none")
