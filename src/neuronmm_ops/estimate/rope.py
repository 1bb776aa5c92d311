"""The launch of RoPE."""

from __future__ import annotations

from neuroncore.hardware import DEFAULT_TARGET
from neuronmm_ops.estimate.attention import check_launch, check_shape
from neuronmm_ops.kernels.simulated import simulated_kernel
from neuronmm_ops.plan.launches import PlannedKernel, TensorShape

BLOCKS = (512, 256, 128)
"""Tokens that are stored together: the longer, the longer the runs."""


def plan_rope(
    M: int,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    head_norm: bool,
    dtype: str = "bfloat16",
    target: str = DEFAULT_TARGET,
    lnc: int = 1,
) -> list[PlannedKernel]:
    """The launches between the product that makes qkv and attention.

    Prefill: `rope`, which takes qkv [batch * M, ...], cos and sin [M, head_dim], the two caches of
    M tokens and the weights of the norms; its first result is what `attention` takes. Decode
    (M == 1): none, for `attention_decode` does it.

    The arguments are those of `plan_attention`; with head_norm heads are normalised first.

    Raises:
        ValueError: sizes that are no attention.
    """
    target = check_launch(dtype, target, lnc)
    check_shape(batch, heads, kv_heads, head_dim, M)
    if M == 1:
        return []
    d = head_dim
    weight = TensorShape((d,), dtype) if head_norm else None
    operands = (
        TensorShape((batch * M, (heads + 2 * kv_heads) * d), dtype),
        TensorShape((M, d), dtype),
        TensorShape((M, d), dtype),
        TensorShape((batch, kv_heads, d, M), dtype),
        TensorShape((batch, kv_heads, M, d), dtype),
        weight,
        weight,
    )
    kernel = simulated_kernel("rope", "rope", lnc)
    for block in BLOCKS:
        planned = PlannedKernel(kernel, operands, {"block": block})
        if planned.cost(target) is not None:
            return [planned]
    raise ValueError(
        f"rope of {heads} and {kv_heads} heads of {d} in {dtype} does not fit the SBUF of "
        f"{target}; share heads among devices"
    )
