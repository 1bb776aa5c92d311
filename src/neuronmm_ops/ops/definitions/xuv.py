"""`neuronmm::xuv`: the low-rank matmul `(x @ u) @ v + bias`, `x @ u` rounded once to x's dtype."""

import torch
from torch import Tensor

from neuronmm_ops.ops.backends.cpu import SLOW_DTYPES
from neuronmm_ops.ops.products import affine, batched, flat, pair_backward, rows
from neuronmm_ops.ops.spec import FLOAT_DTYPES, Operand, OpSpec

# From this many entries on, choosing the faster matmul for one row is worth a microsecond.
_WORTH_A_CHOICE = 2**16


def reference(
    x: Tensor,
    u: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    u_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    compute: str = "x",
) -> Tensor:
    """Return `((x @ u) * u_scale) @ v * v_scale + bias`, without the scales where they are None."""
    if u_scale is not None or v_scale is not None or compute != "x":
        SPEC.check(x, u, v, bias, u_scale, v_scale, compute)
        inner = affine(rows(x), u, None, u_scale, compute)
        return batched(affine(inner, v, bias, v_scale, compute), x)
    # What the matmuls refuse by themselves is explained afterwards: that keeps the decode path
    # within a microsecond of two bare matmuls. The rest is checked here.
    if bias is not None or x.dtype not in FLOAT_DTYPES or u.dim() != 2 or v.dim() != 2:
        SPEC.check(x, u, v, bias, None, None, compute)
    try:
        dim = x.dim()
        if dim and (u.numel() >= _WORTH_A_CHOICE or bias is not None or x.dtype in SLOW_DTYPES):
            return batched(affine(affine(flat(x, u), u), v, bias), x)
        if dim == 2:
            return torch.mm(torch.mm(x, u), v)
        return torch.matmul(torch.matmul(x, u), v)
    except RuntimeError:
        SPEC.check(x, u, v, bias, None, None, compute)
        raise


SPEC = OpSpec(
    "xuv",
    operands=(
        Operand("x", "... K", "activation"),
        Operand("u", "K r"),
        Operand("v", "r N"),
        Operand("bias", "N", "bias", optional=True),
    ),
    reference=reference,
    backward=pair_backward,
    is_scaled=True,
    cuts=("N", "K", "r"),
)
