"""The ops in plain torch: their specification, and the kernel of every device without its own.

Numerics: both matmuls accumulate in fp32 over the whole contraction; the intermediate `x @ u` is
rounded once, to x's dtype. `mm` reads a matrix in whichever of the two orders it is stored, so
factors stored contiguous along the contraction (`SVDLinear` does) take the CPU's fast path.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from neuronmm_ops.ops.validation import check_svd_mlp, check_xuv, check_xw

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
ACTIVATION_NAMES = tuple(ACTIVATIONS)


def xuv(x: Tensor, u: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `(x @ u) @ v + bias` for `x[..., K]`, `u[K, r]`, `v[r, N]`, `bias[N]`."""
    # What the matmuls refuse by themselves is explained afterwards: that keeps the decode path
    # within a microsecond of two bare matmuls. The rest is checked here.
    if bias is not None or not x.is_floating_point() or u.dim() != 2 or v.dim() != 2:
        check_xuv(x, u, v, bias)
    try:
        if bias is not None:
            y = torch.addmm(bias, torch.mm(rows(x), u), v)
            return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])
        if x.dim() == 2:
            return torch.mm(torch.mm(x, u), v)
        return torch.matmul(torch.matmul(x, u), v)
    except RuntimeError:
        check_xuv(x, u, v, bias)
        raise


def xw(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ w + bias` for `x[..., K]`, `w[K, N]`, `bias[N]`."""
    check_xw(x, w, bias)
    y = _affine(rows(x), w, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


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
    check_svd_mlp(x, u_gate, v_gate, u_up, v_up, u_down, v_down, activation, ACTIVATION_NAMES)
    flat = rows(x)
    hidden = ACTIVATIONS[activation](flat.mm(u_gate).mm(v_gate))
    hidden = hidden.mul_(flat.mm(u_up).mm(v_up))
    y = hidden.mm(u_down).mm(v_down)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


def rows(x: Tensor) -> Tensor:
    """View x [..., K] as rows [M, K]."""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def _affine(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, w) if bias is None else torch.addmm(bias, x, w)
