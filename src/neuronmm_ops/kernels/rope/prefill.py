"""RoPE of prompts: queries and keys rotated, transposed for attention, and the caches filled."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.units import Shape
from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.rope.turning import Norm, turn_heads
from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.tiling import PARTITIONS


@jit
def rope(
    qkv: NkiTensor,
    cos: NkiTensor,
    sin: NkiTensor,
    k_cache: NkiTensor,
    v_cache: NkiTensor,
    q_weight: NkiTensor | None = None,
    k_weight: NkiTensor | None = None,
    eps: float = 1e-6,
    block: int = 512,
) -> tuple[NkiTensor, NkiTensor, NkiTensor]:
    """q, k_cache, v_cache = rope(query), rope(key), value, laid out for `attention`.

    Dimensions:
        batch: sequences. M: tokens of each, any number. head_dim: even, up to 128. heads: a
        multiple of kv_heads.

    Args:
        qkv: [batch * M, (heads + 2 kv_heads) head_dim], query, key and value.
        cos: [M, head_dim], any float dtype.
        sin: [M, head_dim].
        k_cache: [batch, kv_heads, head_dim, M], written.
        v_cache: [batch, kv_heads, M, head_dim], written.
        q_weight: [head_dim], an RMSNorm of each query head before RoPE, or None.
        k_weight: [head_dim] of each key head; both or none.
        eps: of the norm.
        block: tokens that are stored together, at most 512.

    Returns:
        q [batch, heads, head_dim, M] in shared HBM, dtype of qkv, and the two caches.

    Notes:
        RoPE is Llama's: x cos + [-x2, x1] sin, of the halves of a head. The two terms are rounded
        to the dtype of qkv and added in fp32; so are normalised heads rounded. Two cores share the
        tokens of each sequence.

    Pseudocode:
        for each block of tokens:
            x = norm(qkv[tokens]);  kept, turned = x cos, [-x2, x1] sin
            q, k_cache = (kept + turned)^T;  v_cache = qkv[tokens]
    """
    B, kv, d, M = k_cache.shape
    H = qkv.shape[1] // d - 2 * kv
    shape = Shape(B, H, kv, d, M)
    wanted = (B * M, (shape.heads + 2 * kv) * d)
    assert qkv.shape == wanted, f"qkv must be {wanted}, got {qkv.shape}"
    assert v_cache.shape == (B, kv, M, d), f"v_cache must be {(B, kv, M, d)}, got {v_cache.shape}"
    assert is_none(q_weight) == is_none(k_weight), "give both weights of norms, or none"
    q_hbm = nl.ndarray((B, H, d, M), dtype=qkv.dtype, buffer=nl.shared_hbm)
    norms: list[Norm] = []
    if not is_none(q_weight) and not is_none(k_weight):
        norms.append(Norm(q_weight, k_weight, eps, min(PARTITIONS, M)))
    turn_heads([qkv], [cos, sin], q_hbm, k_cache, [v_cache], norms, block)
    return q_hbm, k_cache, v_cache
