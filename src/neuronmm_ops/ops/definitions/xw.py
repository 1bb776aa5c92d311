"""`neuronmm::xw`: `x @ w + bias`, the dense baseline."""

from torch import Tensor

from neuronmm_ops.ops.products import affine, batched, flat, matrix_backward, rows
from neuronmm_ops.ops.spec import FLOAT_DTYPES, Operand, OpSpec


def reference(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    w_scale: Tensor | None = None,
    compute: str = "x",
) -> Tensor:
    """Return `(x @ w) * w_scale + bias`, without the scale where it is None."""
    if w_scale is not None or compute != "x":
        SPEC.check(x, w, bias, w_scale, compute)
        return batched(affine(rows(x), w, bias, w_scale, compute), x)
    # As in xuv: what the matmul refuses by itself is explained afterwards.
    if bias is not None or x.dtype not in FLOAT_DTYPES or x.dim() == 0 or w.dim() != 2:
        SPEC.check(x, w, bias, None, compute)
    try:
        return batched(affine(flat(x, w), w, bias), x)
    except RuntimeError:
        SPEC.check(x, w, bias, None, compute)
        raise


SPEC = OpSpec(
    "xw",
    operands=(
        Operand("x", "... K", "activation"),
        Operand("w", "K N"),
        Operand("bias", "N", "bias", optional=True),
    ),
    reference=reference,
    backward=matrix_backward,
    is_scaled=True,
    cuts=("N", "K"),
)
