"""`neuronmm::svd_qkv`: low-rank projections of one x to query, key and value, side by side."""

from collections.abc import Sequence

import torch
from torch import Tensor

from neuronmm_ops.ops.products import affine, batched, flat, pair_backward
from neuronmm_ops.ops.spec import FLOAT_DTYPES, Operand, OpSpec


def reference(
    x: Tensor,
    u_query: Tensor,
    v_query: Tensor,
    u_key: Tensor,
    v_key: Tensor,
    u_value: Tensor,
    v_value: Tensor,
    bias_query: Tensor | None = None,
    bias_key: Tensor | None = None,
    bias_value: Tensor | None = None,
    u_query_scale: Tensor | None = None,
    v_query_scale: Tensor | None = None,
    u_key_scale: Tensor | None = None,
    v_key_scale: Tensor | None = None,
    u_value_scale: Tensor | None = None,
    v_value_scale: Tensor | None = None,
    compute: str = "x",
) -> Tensor:
    """Return `cat([(x @ u) @ v + bias for each pair], -1)`, each product times its scale."""
    factors = (u_query, v_query, u_key, v_key, u_value, v_value)
    biases = (bias_query, bias_key, bias_value)
    u_scales = (u_query_scale, u_key_scale, u_value_scale)
    v_scales = (v_query_scale, v_key_scale, v_value_scale)
    scales = [scale for pair in zip(u_scales, v_scales, strict=True) for scale in pair]
    args = (x, *factors, *biases, *scales, compute)
    # As in xuv; a bias of one element would broadcast.
    if (
        x.dtype not in FLOAT_DTYPES
        or x.dim() == 0
        or compute != "x"
        or any(optional is not None for optional in (*biases, *scales))
    ):
        SPEC.check(*args)
    try:
        rows = flat(x, u_query)
        pairs = zip(factors[::2], factors[1::2], biases, u_scales, v_scales, strict=True)
        parts = [
            affine(affine(rows, u, None, u_scale, compute), v, bias, v_scale, compute)
            for u, v, bias, u_scale, v_scale in pairs
        ]
        return batched(torch.cat(parts, dim=-1), x)
    except (RuntimeError, IndexError):
        SPEC.check(*args)
        raise


def backward(
    grad: Tensor, needs: Sequence[bool], x: Tensor, *factors: Tensor
) -> tuple[Tensor | None, ...]:
    """Return dx and the gradients of the six factors."""
    dx, gradients = None, list[Tensor | None]()
    grads = grad.split([v.shape[1] for v in factors[1::2]], dim=1)
    for n, (grad_of_pair, u, v) in enumerate(zip(grads, factors[::2], factors[1::2], strict=True)):
        own_needs = (needs[0], *needs[2 * n + 1 : 2 * n + 3])
        dx_own, du, dv = pair_backward(grad_of_pair, own_needs, x, u, v)
        dx = dx_own if dx is None or dx_own is None else dx + dx_own
        gradients += [du, dv]
    return dx, *gradients


SPEC = OpSpec(
    "svd_qkv",
    operands=(
        Operand("x", "... K", "activation"),
        Operand("u_query", "K r_query"),
        Operand("v_query", "r_query N_query"),
        Operand("u_key", "K r_key"),
        Operand("v_key", "r_key N_key"),
        Operand("u_value", "K r_value"),
        Operand("v_value", "r_value N_value"),
        Operand("bias_query", "N_query", "bias", optional=True),
        Operand("bias_key", "N_key", "bias", optional=True),
        Operand("bias_value", "N_value", "bias", optional=True),
    ),
    reference=reference,
    backward=backward,
    outputs=("N_query+N_key+N_value",),
    is_scaled=True,
    cuts=("N", "K"),
)
