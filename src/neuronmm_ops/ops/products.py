"""What the references and gradients of the ops share: their matmuls.

All sums are fp32 over the whole contraction. `mm` reads a matrix in whichever of the two orders it
is stored, so factors stored contiguous along the contraction (`SVDLinear` does) take the CPU's fast
path: for a single row that is `mv`, except where `cpu.streams_by_mv` says otherwise.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from neuronmm_ops.ops.backends.cpu import mm, streams_by_mv, weight_gradient
from neuronmm_ops.ops.spec import FLOAT_DTYPES

# A single row of these is multiplied by `mm`.
_MM_ROWS = frozenset(dtype for dtype in FLOAT_DTYPES if not streams_by_mv(dtype))


def rows(x: Tensor) -> Tensor:
    """View x [..., K] as rows [M, K]."""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def flat(x: Tensor, w: Tensor) -> Tensor:
    """View x [..., K] as rows [M, K], or as a vector [K] where `mv` is the faster matmul."""
    is_vector = 0 < x.numel() == x.shape[-1] and w.stride(0) == 1 and x.dtype not in _MM_ROWS
    return x.reshape(-1) if is_vector else rows(x)


def batched(y: Tensor, x: Tensor) -> Tensor:
    """View y, [M, N] or [N], with the leading dimensions of x [..., K]."""
    return y if x.dim() == y.dim() else y.view(*x.shape[:-1], y.shape[-1])


def affine(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ w + bias` for x [M, K] or [K], w [K, N], bias [N]."""
    if x.dim() == 1:
        return torch.mv(w.t(), x) if bias is None else torch.addmv(bias, w.t(), x)
    return mm(x, w, bias)


def pair_backward(
    grad: Tensor, needs: Sequence[bool], x: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, du and dv of `(x @ u) @ v` for x [M, K] and grad [M, N], those that are needed."""
    dinner = mm(grad, v.t()) if needs[0] or needs[1] else None
    dx = mm(dinner, u.t()) if needs[0] and dinner is not None else None
    du = weight_gradient(x, dinner, u) if needs[1] and dinner is not None else None
    dv = weight_gradient(mm(x, u), grad, v) if needs[2] else None
    return dx, du, dv
