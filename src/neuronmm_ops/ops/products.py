"""What the references and gradients of the ops share: their matmuls.

All sums are fp32 over the whole contraction. `mm` reads a matrix in whichever of the two orders it
is stored, so factors that lie along the contraction (`nn.relayout_`) take the CPU's fast
path: for a single row that is `mv`, except where `cpu.streams_by_mv` says otherwise.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from neuronmm_ops.ops.backends.cpu import mm, streams_by_mv, weight_gradient
from neuronmm_ops.ops.backends.cpu_one_byte import scaled_mm
from neuronmm_ops.ops.spec import FLOAT_DTYPES
from neuronmm_ops.storages import STORAGES

# A single row of these is multiplied by `mm`.
_MM_ROWS = frozenset(dtype for dtype in FLOAT_DTYPES if not streams_by_mv(dtype))


def rows(x: Tensor) -> Tensor:
    """View x [..., K] as rows [M, K]."""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def flat(x: Tensor, w: Tensor) -> Tensor:
    """View x [..., K] as rows [M, K], or as a vector [K] where `mv` is the CPU's faster matmul."""
    is_vector = 0 < x.numel() == x.shape[-1] and w.stride(0) == 1 and x.dtype not in _MM_ROWS
    return x.reshape(-1) if is_vector and x.is_cpu else rows(x)


def batched(y: Tensor, x: Tensor) -> Tensor:
    """View y, [M, N] or [N], with the leading dimensions of x [..., K]."""
    return y if x.dim() == y.dim() else y.view(*x.shape[:-1], y.shape[-1])


def affine(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    compute: str = "x",
) -> Tensor:
    """Return `(x @ w) * scale + bias` for x [M, K] or [K], w [K, N], scale [N], bias [N].

    Without a scale w has the dtype of x; with one it is of a storage. `compute` is "fp8" where x
    is to be rounded as `rounded_to_fp8` does.
    """
    if scale is not None:
        a = rounded_to_fp8(x) if compute == "fp8" else x
        y = scaled_mm(a if x.dim() == 2 else a.unsqueeze(0), w, scale, bias)
        return y if x.dim() == 2 else y[0]
    if x.dim() == 1:
        return torch.mv(w.t(), x) if bias is None else torch.addmv(bias, w.t(), x)
    return mm(x, w, bias)


def rounded_to_fp8(x: Tensor) -> Tensor:
    """Round each row of x [..., K] to e4m3 times a power of two, in the dtype of x.

    The factor 2^floor(log2(1 / rms)) gives the row a root mean square of 1/2 to 1. No entry is then
    larger than sqrt(K), which e4m3 holds up to K = 57,600; larger ones are clamped to 240.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rms = wide.square().mean(-1, keepdim=True).sqrt()
    # frexp: 1 / rms = m 2^e with m in [0.5, 1)
    exponent = torch.frexp(torch.where(rms > 0, 1 / rms, 1.0)).exponent - 1
    scaled = torch.ldexp(wide, exponent)
    return torch.ldexp(STORAGES["fp8"].nearest(scaled), -exponent).to(x.dtype)


def matrix_backward(
    grad: Tensor, needs: Sequence[bool], x: Tensor, w: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx and dw of `x @ w` for x [M, K] and grad [M, N], those that are needed."""
    dx = mm(grad, w.t()) if needs[0] else None
    dw = weight_gradient(x, grad, w) if needs[1] else None
    return dx, dw


def pair_backward(
    grad: Tensor, needs: Sequence[bool], x: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, du and dv of `(x @ u) @ v` for x [M, K] and grad [M, N], those that are needed."""
    dinner = mm(grad, v.t()) if needs[0] or needs[1] else None
    dx = mm(dinner, u.t()) if needs[0] and dinner is not None else None
    du = weight_gradient(x, dinner, u) if needs[1] and dinner is not None else None
    dv = weight_gradient(mm(x, u), grad, v) if needs[2] else None
    return dx, du, dv
