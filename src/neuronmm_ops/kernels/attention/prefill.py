"""Causal attention of whole prompts, and of chunks of a prompt with a cache."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.blocks import Block, Queries, run_blocks
from neuronmm_ops.kernels.attention.earlier import Bounds, Earlier
from neuronmm_ops.kernels.attention.keys import Keys, Masks
from neuronmm_ops.kernels.attention.parts import meet
from neuronmm_ops.kernels.attention.units import QUERY_BLOCK, Shape, prefill_groups
from neuronmm_ops.kernels.attention.visible import Positions
from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.rope.turning import Norm, turn_heads
from neuronmm_ops.kernels.shim import NkiTensor, jit, nisa, nl
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, spans


@jit
def attention(
    q: NkiTensor, k_cache: NkiTensor, v_cache: NkiTensor, device_loop: bool = False
) -> NkiTensor:
    """out = softmax(q k^T / sqrt(head_dim)) v, each token with those up to it.

    Dimensions:
        batch: sequences. M: tokens of each, any number. head_dim: even, up to 128. heads: a
        multiple of kv_heads, up to 127 a kv head.

    Args:
        q: [batch, heads, head_dim, M], queries after RoPE, transposed.
        k_cache: [batch, kv_heads, head_dim, M], keys after RoPE, transposed.
        v_cache: [batch, kv_heads, M, head_dim].
        device_loop: the key heads of a core are a loop on the device, of which the compiler gets
            the body once.

    Returns:
        [batch * M, heads * head_dim] in shared HBM, dtype of q.

    Notes:
        Only the lower triangle is computed, in tiles of 128. Scores, maxima and sums are fp32;
        probabilities, and the maximum that is subtracted from every score of a token, are rounded
        to q's dtype. Two cores share the query heads.

    Pseudocode:
        for each head, for each block of 512 tokens:
            most[tokens] = max(q^T . k);  weights[keys, tokens] = exp(k^T . q - most)
            sums = weights^T . [v, 1];  out = sums[:, :-1] / sums[:, -1]
    """
    B, H, d, M = q.shape
    kv = k_cache.shape[1]
    shape = Shape(B, H, kv, d, M)
    assert k_cache.shape == (B, kv, d, M), f"k_cache must be {(B, kv, d, M)}, got {k_cache.shape}"
    assert v_cache.shape == (B, kv, M, d), f"v_cache must be {(B, kv, M, d)}, got {v_cache.shape}"
    out_hbm = nl.ndarray((B * M, H * d), dtype=q.dtype, buffer=nl.shared_hbm)
    masks = Masks(q.dtype)
    blocks: list[Block] = []
    for group in prefill_groups(shape, nl.program_id(0), nl.num_programs(0)):
        b, n = group.sequence, group.key
        keys = Keys(k_cache[b, n, :, :], v_cache[b, n, :, :])
        first, heads = group.heads.start, group.heads.size
        q_hbm = q[b, nl.ds(first, heads), :, :]
        rows_hbm = out_hbm[nl.ds(b * M, M), nl.ds(first * d, heads * d)]
        for tokens in spans(0, M, QUERY_BLOCK):
            queries = Queries(q_hbm, rows_hbm, tokens, keys.rows)
            for head in range(heads):
                blocks.append(Block(queries, head, keys, masks, []))
    run_blocks(blocks, d**-0.5)
    return out_hbm


@jit
def attention_chunk(
    query: NkiTensor,
    key: NkiTensor,
    value: NkiTensor,
    cos: NkiTensor,
    sin: NkiTensor,
    key_cache: NkiTensor,
    value_cache: NkiTensor,
    positions: NkiTensor,
    query_norm: NkiTensor | None = None,
    key_norm: NkiTensor | None = None,
    eps: float = 1e-6,
    window: int = 0,
    fingerprint: str = "",
) -> tuple[NkiTensor, NkiTensor, NkiTensor]:
    """A chunk of a prompt: out = softmax(q k^T / sqrt(head_dim)) v; its k and v join the caches.

    Dimensions:
        batch: sequences. M: tokens of each in the chunk, any number. T: tokens that the caches have
        room for, those of the chunk included. head_dim: even, up to 128. heads: a multiple of
        kv_heads, up to 127 a kv head.

    Args:
        query: [batch * M, heads * head_dim], before RoPE, the tokens of a sequence together.
        key: [batch * M, kv_heads * head_dim], before RoPE.
        value: as key.
        cos: [batch * M, head_dim] of the tokens' positions.
        sin: as cos.
        key_cache: [batch, kv_heads, head_dim, T], keys after RoPE, transposed; finite.
        value_cache: [batch, kv_heads, T, head_dim]; finite.
        positions: int32 [batch], where the first token of a sequence's chunk is written, 0 to
            T - M: tokens of the cache before it are seen, what the cache holds from there on is
            not.
        query_norm: [head_dim], an RMSNorm of each query head before RoPE, or None.
        key_norm: [head_dim] of each key head; both or none.
        eps: of the norm.
        window: tokens that a query sees, its own included; 0 for all.
        fingerprint: of all kernels' source, for caches that know one function's alone; not read.

    Returns:
        out [batch * M, heads * head_dim] in shared HBM, dtype of query, and the two caches.

    Notes:
        Rounding is that of `rope` and `attention`. All T tokens of the cache are read and
        multiplied at every position; a window saves those of the chunk that no query sees. Keys and
        values of a head, T + M tokens of each, stay in SBUF.

    Pseudocode:
        q, k = rope(norm(query)), rope(norm(key))
        out = attention of q with [k_cache[:, :position], k] and [v_cache[:position], value]
        k_cache[:, position:position + M], v_cache[position:position + M] = k, value
    """
    B, kv, d, T = key_cache.shape
    M = query.shape[0] // B
    shape = Shape(B, query.shape[1] // d, kv, d, M)
    heads = shape.heads
    for pair in [(query, heads * d), (key, kv * d), (value, kv * d), (cos, d), (sin, d)]:
        assert pair[0].shape == (B * M, pair[1]), f"need {(B * M, pair[1])}, got {pair[0].shape}"
    wanted = (B, kv, T, d)
    assert value_cache.shape == wanted, f"value_cache must be {wanted}, got {value_cache.shape}"
    assert positions.shape == (B,), f"positions must be {(B,)}, got {positions.shape}"
    assert is_none(query_norm) == is_none(key_norm), "give both weights of norms, or none"
    assert M <= T, f"caches must have room for {M} tokens, got {T}"
    out_hbm = nl.ndarray((B * M, heads * d), dtype=query.dtype, buffer=nl.shared_hbm)
    turned_hbm = nl.ndarray((B, heads + kv, d, M), dtype=query.dtype, buffer=nl.shared_hbm)
    norms: list[Norm] = []
    if not is_none(query_norm) and not is_none(key_norm):
        norms.append(Norm(query_norm, key_norm, eps, min(PARTITIONS, M)))
    q_hbm, k_hbm = turned_hbm[:, 0:heads, :, :], turned_hbm[:, heads : heads + kv, :, :]
    turn_heads([query, key], [cos, sin], q_hbm, k_hbm, [], norms, QUERY_BLOCK)
    meet(turned_hbm)
    places = Positions(positions)
    bounds: list[Bounds] = []
    for b in range(B):
        bounds.append(Bounds(places, b, T, window))
    masks = Masks(query.dtype)
    blocks: list[Block] = []
    for group in prefill_groups(shape, nl.program_id(0), nl.num_programs(0)):
        b, n = group.sequence, group.key
        own = nl.ds(b * M, M)
        keys = Keys(k_hbm[b, n, :, :], value[own, nl.ds(n * d, d)])
        cached = Keys(key_cache[b, n, :, :], value_cache[b, n, :, :])
        earlier = Earlier(cached, bounds[b])
        first, count = group.heads.start, group.heads.size
        rows_hbm = out_hbm[own, nl.ds(first * d, count * d)]
        for tokens in spans(0, M, QUERY_BLOCK):
            queries = Queries(q_hbm[b, nl.ds(first, count), :, :], rows_hbm, tokens, keys.rows)
            for head in range(count):
                blocks.append(Block(queries, head, keys, masks, [earlier]))
    run_blocks(blocks, d**-0.5)
    meet(key_cache)  # the other core has read what is written now
    meet(value_cache)
    if nl.program_id(0) == 0:
        write_keys(key_cache, k_hbm, places)
    if nl.program_id(0) + 1 == nl.num_programs(0):
        write_values(value_cache, value, places)
    return out_hbm, key_cache, value_cache


def write_keys(key_cache: NkiTensor, keys: NkiTensor, positions: Positions) -> None:
    """Write keys [batch, kv_heads, head_dim, M] to their places."""
    B, kv, d, T = key_cache.shape
    M = keys.shape[3]
    rows_hbm = key_cache.reshape((B * kv * d, T))
    for b in range(B):
        place_sb = positions.places_sb[0:1, nl.ds(b, 1)]
        pattern, start = [[T, kv * d], [1, M]], b * kv * d * T
        own_hbm = rows_hbm.ap(pattern, start, scalar_offset=place_sb, indirect_dim=1)
        nisa.dma_copy(own_hbm, keys[b, :, :, :].reshape((kv * d, M)))


def write_values(value_cache: NkiTensor, values: NkiTensor, positions: Positions) -> None:
    """Write values [batch * M, kv_heads * head_dim] to their places."""
    B, kv, T, d = value_cache.shape
    M = values.shape[0] // B
    heads_hbm = value_cache.reshape((B * kv, T, d))
    for b in range(B):
        place_sb = positions.places_sb[0:1, nl.ds(b, 1)]
        pattern, start = [[d, M], [T * d, kv], [1, d]], b * kv * T * d
        own_hbm = heads_hbm.ap(pattern, start, scalar_offset=place_sb, indirect_dim=1)
        nisa.dma_copy(own_hbm, values[nl.ds(b * M, M), :].reshape((M, kv, d)))
