"""Attention of one token a sequence with a KV cache, RoPE and the write of its key included."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.heads import HeadNorm, NewHeads, NewToken, Rotation
from neuronmm_ops.kernels.attention.mixture import Mixture, Rescaling
from neuronmm_ops.kernels.attention.scores import Scores
from neuronmm_ops.kernels.attention.units import Shape, Unit, cache_blocks, decode_units
from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, jit, nisa, nl
from neuronmm_ops.kernels.stages.tiling import PARTITIONS


class Caches(nl.NKIObject):
    """The caches of a unit in HBM.

    Args:
        k_cache: [batch, kv_heads, head_dim, T].
        v_cache: [batch, kv_heads, T, head_dim].
        unit: which heads.
    """

    def __init__(self, k_cache: NkiTensor, v_cache: NkiTensor, unit: Unit) -> None:
        B, kv, d, T = k_cache.shape
        first, n = unit.sequence * kv + unit.keys.start, unit.keys.size
        self.keys = k_cache.reshape((B * kv * d, T))[nl.ds(first * d, n * d), :]
        self.values = v_cache.reshape((B * kv, T, d))[nl.ds(first, n), :, :]


def same_lanes(lanes: int) -> NkiTensor:
    """[128, lanes], fp32: 1 where the partition is the lane's, of any group."""
    ones_sb = nl.ndarray((PARTITIONS, lanes), dtype=nl.float32)
    same_sb = nl.ndarray((PARTITIONS, lanes), dtype=nl.float32)
    nisa.memset(ones_sb, 1.0, engine=nisa.gpsimd_engine)
    for c in range(PARTITIONS // lanes):
        own = nl.ds(c * lanes, lanes)
        nisa.affine_select(same_sb[own, :], [[-1, lanes]], 1, ones_sb[own, :], 0.0, nl.equal)
    return same_sb


def load_table() -> None:
    """Let ScalarE load the table of exp, which it needs much later."""
    zero_sb = nl.ndarray((1, 1), dtype=nl.float32)
    nisa.memset(zero_sb, 0.0)
    nisa.activation(zero_sb, nl.exp, zero_sb)


@jit
def attention_decode(
    qkv: NkiTensor,
    cos: NkiTensor,
    sin: NkiTensor,
    k_cache: NkiTensor,
    v_cache: NkiTensor,
    q_weight: NkiTensor | None = None,
    k_weight: NkiTensor | None = None,
    eps: float = 1e-6,
) -> tuple[NkiTensor, NkiTensor, NkiTensor]:
    """out = softmax(q k^T / sqrt(head_dim)) v of one token a sequence; its k, v join the caches.

    Dimensions:
        batch: sequences. T: tokens in the cache, the new one, which is the last, included.
        head_dim: even, up to 128. heads: a multiple of kv_heads, up to 127 a kv head.

    Args:
        qkv: [batch, (heads + 2 kv_heads) head_dim], query, key and value before RoPE.
        cos: [1, head_dim] of position T - 1, any float dtype.
        sin: [1, head_dim].
        k_cache: [batch, kv_heads, head_dim, T], keys after RoPE, transposed; written at T - 1.
        v_cache: [batch, kv_heads, T, head_dim]; written at T - 1.
        q_weight: [head_dim], an RMSNorm of each query head before RoPE, or None.
        k_weight: [head_dim] of each key head; both or none.
        eps: of the norm.

    Returns:
        out [batch, heads * head_dim] in shared HBM, dtype of qkv, and the two caches.

    Notes:
        T is a compile-time size: serving stacks compile a few, and round up to the next. RoPE is
        Llama's, which rotates the two halves of a head. What is written is not read back. Scores,
        their maximum and sums are fp32; probabilities are rounded to the dtype of the cache. Two
        cores share the key heads, or the sequences where there is one key head.

        The key cache is transposed because the simulated clock says so: at T = 2048 and 8 key heads
        of 64 on trn2 its keys are in SBUF after 8.6 us. Natural keys take 9.2 to 14.3 us by DMA
        transposes and 11.6 us by TensorE's. Its price is a write of one column, 2 bytes a row,
        which ends long before the output is stored.

    Pseudocode:
        q, k = rope(norm(q)), rope(norm(k));  k_cache[:, T - 1], v_cache[T - 1] = k, v
        scores[heads, T] = q . k_cache / sqrt(head_dim)
        weights = exp(scores - max(scores));  out = weights . v_cache / sum(weights)
    """
    B, kv, d, T = k_cache.shape
    heads = qkv.shape[1] // d - 2 * kv
    shape = Shape(B, heads, kv, d, T)
    check_operands(shape, qkv, v_cache)
    assert is_none(q_weight) == is_none(k_weight), "give both weights of norms, or none"
    out_hbm = nl.ndarray((B, heads * d), dtype=qkv.dtype, buffer=nl.shared_hbm)
    units = decode_units(shape, nl.program_id(0), nl.num_programs(0))
    norms: list[HeadNorm] = []
    if not is_none(q_weight) and not is_none(k_weight):
        norms.append(HeadNorm(q_weight, k_weight, heads, eps))
    rotation = Rotation(cos, sin, min(PARTITIONS, heads + kv), norms)
    load_table()
    joins: list[Rescaling] = []
    made: list[NewToken] = []
    scored: list[Scores] = []
    for u in range(len(units) + 1):
        if u == len(made):
            made.extend(new_tokens(qkv, shape, units, u, rotation))
        if u < len(units):
            keys = Caches(k_cache, v_cache, units[u]).keys
            scores = Scores(made[u], keys, cache_blocks(T, made[u].groups))
            for cache_block in scores.blocks:
                scores.add(cache_block, d**-0.5)
            scores.finish()
            scored.append(scores)
        if u == 0 and len(units) > 0:
            dtype = nl.float32 if qkv.dtype == nl.float32 else nl.tfloat32
            joins.append(Rescaling(same_lanes(made[0].lanes), dtype))
        if u > 0:  # while the keys of the next unit come
            caches = Caches(k_cache, v_cache, units[u - 1])
            mix(out_hbm, scored[u - 1], caches, joins[0])
    return out_hbm, k_cache, v_cache


def mix(out_hbm: NkiTensor, scores: Scores, caches: Caches, sums: Rescaling) -> None:
    """The output of a unit, and its new token's places in the caches."""
    new = scores.new
    mixture = Mixture(new, caches.values, scores)
    T = caches.values.shape[1]
    mixture.run(sums)
    new.store(caches.keys[:, nl.ds(T - 1, 1)], caches.values[:, nl.ds(T - 1, 1), :])
    first = new.unit.keys.start * new.group * new.head_dim
    columns = out_hbm[new.unit.sequence, nl.ds(first, new.queries * new.head_dim)]
    mixture.store(columns.reshape((new.queries, new.head_dim)), sums)


def new_tokens(
    qkv: NkiTensor, shape: Shape, units: list[Unit], first: int, rotation: Rotation
) -> list[NewToken]:
    """The new token of all units from number `first` on that are of its sequence."""
    found: list[NewToken] = []
    if first == len(units):
        return found
    heads = NewHeads(qkv, shape, units[first].sequence, rotation)
    for unit in units[first : len(units)]:
        if unit.sequence == units[first].sequence:
            found.append(NewToken(heads, unit))
    return found


def check_operands(shape: Shape, qkv: NkiTensor, v_cache: NkiTensor) -> None:
    """Check what the sizes of the key cache ask of the others."""
    wanted = (shape.batch, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    assert qkv.shape == wanted, f"qkv must be {wanted}, got {qkv.shape}"
    wanted = (shape.batch, shape.kv_heads, shape.tokens, shape.head_dim)
    assert v_cache.shape == wanted, f"v_cache must be {wanted}, got {v_cache.shape}"
