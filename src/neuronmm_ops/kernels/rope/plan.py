"""Plans of RoPE."""

from __future__ import annotations

from neuronmm_ops.hardware import DEFAULT_TARGET, DMA_MODELS
from neuronmm_ops.kernels.attention.plan import check_launch, check_shape
from neuronmm_ops.kernels.planned import PlannedKernel, TensorShape
from neuronmm_ops.kernels.planner.problem import ITEMSIZES
from neuronmm_ops.kernels.rope.prefill import rope


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

    Args:
        M: tokens of each sequence.
        batch: sequences.
        heads: query heads, a multiple of kv_heads.
        kv_heads: key and value heads.
        head_dim: even, up to 128.
        head_norm: query and key heads are normalised first (Qwen3).
        dtype: of activations and caches: bfloat16, float16 or float32.
        target: trn1, trn2 or trn3.
        lnc: cores that share the launch.

    Raises:
        ValueError: sizes that are no attention.
    """
    machine = check_launch(dtype, target, lnc)
    check_shape(batch, heads, kv_heads, head_dim, M)
    if M == 1:
        return []
    d, item = head_dim, ITEMSIZES[dtype]
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
    moved = 2 * batch * M * (heads + 2 * kv_heads) * d + 2 * M * d
    if head_norm:
        moved += 2 * lnc * min(128, M) * d
    moved *= item
    times = tuple([(moved / lnc / machine.under(m).dma_peak_gbps + 8000) / 1e6 for m in DMA_MODELS])
    kernel = rope if lnc == 1 else rope[lnc]
    return [PlannedKernel("rope", kernel, operands, {}, times, moved)]
