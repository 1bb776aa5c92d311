"""Attention of a few new tokens with a KV cache; RoPE and the writes of keys are included."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.heads import HeadNorm, NewTokens, Rotation, RowHeads
from neuronmm_ops.kernels.attention.mixture import Rescaling
from neuronmm_ops.kernels.attention.outputs import HeadsKept, HeadsToHbm
from neuronmm_ops.kernels.attention.parts import UnitOutput, meet
from neuronmm_ops.kernels.attention.scores import Scores
from neuronmm_ops.kernels.attention.turned import TurnedHeads
from neuronmm_ops.kernels.attention.units import (
    BLOCK_TILES,
    SCORES,
    Shape,
    Unit,
    cache_blocks,
    decode_units,
    halves,
    parts_of,
    shares_tokens,
)
from neuronmm_ops.kernels.attention.visible import Lanes, Positions, Reach, Visible
from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, jit, nisa, nl
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, Span, tiles_in


class Caches(nl.NKIObject):
    """The caches of a unit in HBM.

    Args:
        k_cache: [batch, kv_heads, head_dim, T].
        v_cache: [batch, kv_heads, T, head_dim].
        unit: which heads.
        reach: the tokens of the cache that are read.
    """

    def __init__(self, k_cache: NkiTensor, v_cache: NkiTensor, unit: Unit, reach: Reach) -> None:
        B, kv, d, T = k_cache.shape
        n = unit.keys.size
        self.first = unit.sequence * kv + unit.keys.start
        self.all_keys = k_cache.reshape((B * kv * d, T))
        self.all_values = v_cache.reshape((B * kv, T, d))
        self.keys = self.all_keys[nl.ds(self.first * d, n * d), :]
        self.values = self.all_values[nl.ds(self.first, n), :, :]
        self.tokens = T
        for starts_sb in reach.starts_sb:
            start, size = starts_sb[0:1, nl.ds(unit.sequence, 1)], reach.tokens
            self.keys = self.all_keys.ap(
                [[T, n * d], [1, size]],
                self.first * d * T,
                scalar_offset=start,
                indirect_dim=1,
            )
            self.values = self.all_values.ap(
                [[T * d, n], [d, size], [1, d]],
                self.first * T * d,
                scalar_offset=start,
                indirect_dim=1,
            )

    def store_keys(self, new: NewTokens, place: NkiTensor) -> None:
        """Write the new keys to their places, which are known at run time alone."""
        M = new.shape.new
        (n, _, d), T = self.values.shape, self.tokens
        full = n // new.stacked  # tiles of keys that have all of their heads
        for s in (Span(0, full), Span(full, tiles_in(n, new.stacked) - full)):
            if s.size > 0:
                rows = new.rows_of(s.start)
                keys_hbm = self.all_keys.ap(
                    [[T, rows], [T * new.rows, s.size], [1, M]],
                    (self.first * d + s.start * new.rows) * T,
                    scalar_offset=place,
                    indirect_dim=1,
                )
                nisa.dma_copy(keys_hbm, new.keys_sb[0:rows, nl.ds(s.start, s.size), :])

    def store_values(self, new: NewTokens, place: NkiTensor) -> None:
        """Write the new values."""
        M = new.shape.new
        (n, _, d), T = self.values.shape, self.tokens
        values_hbm = self.all_values.ap(
            [[d, M], [T * d, n], [1, d]],
            self.first * T * d,
            scalar_offset=place,
            indirect_dim=1,
        )
        nisa.dma_copy(values_hbm, new.values_hbm)


class Attending(nl.NKIObject):
    """What attention of all layers of a launch shares, made where the first one needs it.

    Args:
        positions: where the new tokens begin.
        shape: all sizes.
        window: tokens that a query sees, its own included; 0 for all.
        ahead: caches come before they are needed, as they do in a launch of layers.
    """

    def __init__(self, positions: Positions, shape: Shape, window: int, ahead: bool) -> None:
        self.positions = positions
        self.shape = shape
        self.window = window
        self.ahead = ahead
        self.reach = Reach(positions, shape.tokens, window)
        self.lanes: list[Lanes] = []
        # of each sequence
        self.visible: list[Visible] = []
        self.joins: list[Rescaling] = []

    def visible_to(self, new: NewTokens) -> Visible:
        """What new tokens see."""
        if len(self.lanes) == 0:
            self.lanes.append(Lanes(self.shape, new.lanes))
        sequence = new.unit.sequence
        for visible in self.visible:
            if visible.sequence == sequence:
                return visible
        of_sequence = Visible(self.lanes[0], self.positions, self.reach, sequence, self.window)
        self.visible.append(of_sequence)
        return of_sequence

    def join(self, lanes: int, dtype: nl.DType) -> Rescaling:
        """How groups of so many lanes join, for activations of a dtype."""
        if len(self.joins) == 0:
            weights = nl.float32 if dtype == nl.float32 else nl.tfloat32
            self.joins.append(Rescaling(same_lanes(lanes), weights, self.ahead))
        return self.joins[0]


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
    positions: NkiTensor,
    q_weight: NkiTensor | None = None,
    k_weight: NkiTensor | None = None,
    eps: float = 1e-6,
    window: int = 0,
) -> tuple[NkiTensor, NkiTensor, NkiTensor]:
    """out = softmax(q k^T / sqrt(head_dim)) v of M new tokens a sequence; k, v join the caches.

    Dimensions:
        batch: sequences. M: new tokens of each, 1 to 8, causal among themselves: several verify a
        draft. T: tokens that the caches have room for, the new ones included.
        head_dim: even, up to 128. heads: a multiple of kv_heads; M heads up to 127 kv_heads.

    Args:
        qkv: [batch * M, (heads + 2 kv_heads) head_dim], query, key and value before RoPE, the
            tokens of a sequence together.
        cos: [batch * M, head_dim] of the tokens' positions, any float dtype.
        sin: [batch * M, head_dim].
        k_cache: [batch, kv_heads, head_dim, T], keys after RoPE, transposed; finite.
        v_cache: [batch, kv_heads, T, head_dim]; finite.
        positions: int32 [batch], where the first new token of a sequence is written, 0 to T - M:
            tokens of the cache before it are seen, what the cache holds from there on is not.
        q_weight: [head_dim], an RMSNorm of each query head before RoPE, or None.
        k_weight: [head_dim] of each key head; both or none.
        eps: of the norm.
        window: tokens that a query sees, its own included; 0 for all. No more of a cache is read.

    Returns:
        out [batch * M, heads * head_dim] in shared HBM, dtype of qkv, and the two caches.

    Notes:
        T is a compile-time size: serving stacks compile a few, and round up to the next. RoPE is
        Llama's, which rotates the two halves of a head. What is written is not read back. Scores,
        their maximum and sums are fp32; probabilities are rounded to the dtype of the cache. Two
        cores share the key heads, the sequences where there is one key head, or the tokens of one
        key head of one sequence from `SHARED_TOKENS` on, each half relative to its own maximum;
        they exchange their sums once. So are parts of a cache joined, each of `SCORES` scores of a
        partition.

        The key cache is transposed because the simulated clock says so: at T = 2048 and 8 key heads
        of 64 on trn2 its keys are in SBUF after 8.6 us. Natural keys take 9.2 to 14.3 us by DMA
        transposes and 11.6 us by TensorE's. Its price is a write of one column, 2 bytes a row,
        which ends long before the output is stored.

    Pseudocode:
        q, k = rope(norm(q)), rope(norm(k));  p = position + 0 ... M - 1
        scores[heads, T + M] = q . [k_cache, k] / sqrt(head_dim), of the tokens that are seen
        weights = exp(scores - max(scores));  out = weights . [v_cache, v] / sum(weights)
        k_cache[:, p], v_cache[p] = k, v
    """
    B, kv, d, T = k_cache.shape
    M = qkv.shape[0] // B
    shape = Shape(B, qkv.shape[1] // d - 2 * kv, kv, d, T, M)
    check_operands(shape, qkv.shape, cos, v_cache, positions)
    assert is_none(q_weight) == is_none(k_weight), "give both weights of norms, or none"
    out_hbm = nl.ndarray((B * M, shape.heads * d), dtype=qkv.dtype, buffer=nl.shared_hbm)
    norms: list[HeadNorm] = []
    if not is_none(q_weight) and not is_none(k_weight):
        norms.append(HeadNorm(q_weight, k_weight, shape.heads, eps))
    rotation = Rotation(cos, sin, min(PARTITIONS, shape.heads + kv), norms)
    load_table()
    heads = RowHeads(qkv, shape, rotation)
    attending = Attending(Positions(positions), shape, window, False)
    attend(HeadsToHbm(out_hbm), heads, k_cache, v_cache, attending)
    return out_hbm, k_cache, v_cache


def attend(
    out: HeadsToHbm | HeadsKept,
    heads: RowHeads | TurnedHeads,
    k_cache: NkiTensor,
    v_cache: NkiTensor,
    attending: Attending,
) -> None:
    """This core's columns of the output, or its sequences; the caches as above."""
    core, cores = nl.program_id(0), nl.num_programs(0)
    shape, window, reach = attending.shape, attending.window, attending.reach
    is_shared = shares_tokens(shape, window, cores)
    tokens = Span(0, reach.tokens)
    if is_shared:
        tokens = halves(reach.tokens, BLOCK_TILES * PARTITIONS, core, cores)
    units = decode_units(shape, window, core, cores)
    made: list[NewTokens] = []
    seen: list[Visible] = []
    scored: list[Scores] = []  # the part whose values come next
    waiting: list[UnitOutput] = []
    for u in range(len(units)):
        if u == len(made):
            made.extend(new_tokens(heads, units, u))
            visible = attending.visible_to(made[u])
            for _ in range(len(made) - u):
                seen.append(visible)
        caches = Caches(k_cache, v_cache, units[u], reach)
        blocks = cache_blocks(tokens, made[u].groups, 0 if tokens.start > 0 else shape.new)
        parts = parts_of(blocks, SCORES)
        output = UnitOutput(made[u], out, caches.values, len(parts), is_shared)
        number = 0
        for part in parts:
            scores = Scores(made[u], caches.keys, part)
            for cache_block in part:
                scores.add(cache_block, seen[u].seen(number, cache_block))
                number += 1
            scores.finish()
            join = attending.join(made[0].lanes, heads.dtype)
            if len(scored) > 0:  # while the keys of this part come
                waiting[0].add(scored[0], join)
            scored = [scores]
            waiting = [output]
    if len(units) > 0:
        waiting[0].add(scored[0], attending.join(made[0].lanes, heads.dtype))
    if is_shared:
        meet(k_cache)  # the other core has read what is written now
        meet(v_cache)
    for u in range(len(units)):
        caches = Caches(k_cache, v_cache, units[u], reach)
        if core == 0 or not is_shared:
            caches.store_keys(made[u], seen[u].place_sb)
        if core == 1 or not is_shared:
            caches.store_values(made[u], seen[u].place_sb)


def new_tokens(heads: RowHeads | TurnedHeads, units: list[Unit], first: int) -> list[NewTokens]:
    """The new tokens of all units from number `first` on that are of its sequence."""
    tokens: list[NewTokens] = []
    own = heads.of(units[first].sequence)
    for unit in units[first : len(units)]:
        if unit.sequence == units[first].sequence:
            tokens.append(NewTokens(own, unit))
    return tokens


def check_operands(
    shape: Shape,
    qkv: tuple[int, ...],
    cos: NkiTensor,
    v_cache: NkiTensor,
    positions: NkiTensor,
) -> None:
    """Check what the sizes of the key cache ask of the others."""
    rows = shape.batch * shape.new
    wanted = (rows, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    assert qkv == wanted, f"qkv must be {wanted}, got {qkv}"
    wanted = (rows, shape.head_dim)
    assert cos.shape == wanted, f"cos must be {wanted}, got {cos.shape}"
    wanted = (shape.batch, shape.kv_heads, shape.tokens, shape.head_dim)
    assert v_cache.shape == wanted, f"v_cache must be {wanted}, got {v_cache.shape}"
    wanted = (shape.batch,)
    assert positions.shape == wanted, f"positions must be {wanted}, got {positions.shape}"
