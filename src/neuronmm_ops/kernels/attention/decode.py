"""Attention of one token a sequence with a KV cache, RoPE and the write of its key included."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.heads import HeadNorm, NewToken, Rotation
from neuronmm_ops.kernels.attention.units import Shape, Unit, decode_units
from neuronmm_ops.kernels.shim import NkiTensor, jit, nisa, nl
from neuronmm_ops.kernels.stages.chunks import evict, generation, itemsize
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    PARTITIONS,
    Span,
    spans,
    tiles_in,
    transposes_in_bank,
)

LOAD_BYTES = 512 * 1024
"""Of a load at least, where the cache has so many: a queue starts one each 830 ns."""


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


class Scores(nl.NKIObject):
    """Scores [heads, T] of a unit, fp32 in SBUF, and the probabilities made of them.

    Args:
        new: the unit's query heads and new key.
        keys: [n * head_dim, T] in HBM.
        shape: all sizes.
    """

    def __init__(self, new: NewToken, keys: NkiTensor, shape: Shape) -> None:
        self.new = new
        self.keys = keys
        self.shape = shape
        banks = tiles_in(shape.tokens, BANK_COLUMNS)
        self.scores_sb = nl.ndarray((new.queries, shape.tokens), dtype=nl.float32)
        self.most_sb = nl.ndarray((new.queries, banks), dtype=nl.float32)

    def load(self, tokens: Span) -> list[NkiTensor]:
        """Keys of some tokens in SBUF, [rows, tokens] a tile of rows; the new token is left out."""
        found: list[NkiTensor] = []
        size = min(tokens.size, self.shape.tokens - 1 - tokens.start)
        if size < 1:
            return found
        rows, full = self.new.rows, self.keys.shape[0] // self.new.rows
        columns_hbm = self.keys[:, nl.ds(tokens.start, size)]
        each = max(1, LOAD_BYTES // (rows * size * itemsize(self.keys.dtype)))
        for s in spans(0, full, each):
            tile_sb = nl.ndarray((rows, s.size, size), dtype=self.keys.dtype)
            tile_hbm = columns_hbm[nl.ds(s.start * rows, s.size * rows), :]
            tile_hbm = tile_hbm.reshape_dim(0, (s.size, rows)).permute((1, 0, 2))
            nisa.dma_copy(tile_sb, tile_hbm, dge_mode=nisa.dge_mode.none)
            for i in range(s.size):
                found.append(tile_sb[:, i, :])
        rest = self.keys.shape[0] - full * rows
        if rest > 0:
            tile_sb = nl.ndarray((rest, size), dtype=self.keys.dtype)
            tile_hbm = columns_hbm[nl.ds(full * rows, rest), :]
            nisa.dma_copy(tile_sb, tile_hbm, dge_mode=nisa.dge_mode.none)
            found.append(tile_sb)
        return found

    def add(self, tokens: Span, scale: float) -> None:
        """Compute the scores of some tokens."""
        tiles_sb = self.load(tokens)
        banks: list[Span] = spans(tokens.start, tokens.size, BANK_COLUMNS)
        banks_psum: list[NkiTensor] = []
        for s in banks:
            banks_psum.append(nl.ndarray((self.new.queries, s.size), nl.float32, buffer=nl.psum))
        ends = tokens.start + tokens.size == self.shape.tokens
        if ends:  # needs no load
            last_psum, column = banks_psum[len(banks) - 1], banks[len(banks) - 1].size - 1
            for t in range(self.new.tiles):
                nisa.nc_matmul(
                    last_psum[:, nl.ds(column, 1)],
                    self.new.query(t),
                    self.new.key(t),
                    accumulate=t > 0,
                )
        for t in range(len(tiles_sb)):
            for i in range(len(banks)):
                start = banks[i].start - tokens.start
                size = min(banks[i].size, tiles_sb[t].shape[1] - start)
                if size > 0:
                    nisa.nc_matmul(
                        banks_psum[i][:, 0:size],
                        self.new.query(t),
                        tiles_sb[t][:, nl.ds(start, size)],
                        accumulate=t > 0,
                    )
        for i in range(len(banks)):
            nisa.tensor_scalar_reduce(
                self.scores_sb[:, nl.ds(banks[i].start, banks[i].size)],
                banks_psum[i],
                nl.multiply,
                scale,
                nl.maximum,
                self.most_sb[:, nl.ds(banks[i].start // BANK_COLUMNS, 1)],
            )

    def softmax(self, parts: list[Span]) -> tuple[NkiTensor, NkiTensor]:
        """exp(scores - maximum), of the keys' dtype, and 1 / their fp32 sum, [heads, 1]."""
        H, T = self.scores_sb.shape
        least_sb = nl.ndarray((H, 1), dtype=nl.float32)
        nisa.tensor_reduce(least_sb, nl.maximum, self.most_sb, axis=1, negate=True)
        weights_sb = nl.ndarray((H, T), dtype=self.keys.dtype)
        sums_sb = nl.ndarray((H, len(parts)), dtype=nl.float32)
        for i in range(len(parts)):
            own = nl.ds(parts[i].start, parts[i].size)
            nisa.activation_reduce(
                weights_sb[:, own],
                nl.exp,
                self.scores_sb[:, own],
                nl.add,
                sums_sb[:, nl.ds(i, 1)],
                bias=least_sb,
            )
        inverse_sb = nl.ndarray((H, 1), dtype=nl.float32)
        if len(parts) > 1:
            sum_sb = nl.ndarray((H, 1), dtype=nl.float32)
            nisa.tensor_reduce(sum_sb, nl.add, sums_sb, axis=1)
            nisa.reciprocal(inverse_sb, sum_sb)
        else:
            nisa.reciprocal(inverse_sb, sums_sb)
        return weights_sb, inverse_sb


class Mixture(nl.NKIObject):
    """Sums of values [head_dim, queries] times probabilities, in PSUM.

    Args:
        new: of the unit.
        values: [n, T, head_dim] in HBM.
        weights_sb: probabilities [heads, T].
    """

    def __init__(self, new: NewToken, values: NkiTensor, weights_sb: NkiTensor) -> None:
        self.new = new
        self.values = values
        self.weights_sb = weights_sb
        shape = (new.rows, new.tiles, new.stacked * new.group)
        self.sums_psum = nl.ndarray(shape, nl.float32, buffer=nl.psum)
        self.started = False

    def transpose(self, tokens: Span, tiles: int) -> NkiTensor:
        """Probabilities [tokens / tiles, tiles, heads]: token p * tiles + j is in tile j."""
        H, rows = self.new.queries, tokens.size // tiles
        to_sb = nl.ndarray((rows, tiles, H), dtype=self.weights_sb.dtype)
        in_psum = nl.float32 if generation() == 2 else self.weights_sb.dtype
        groups = spans(0, tiles, transposes_in_bank(H, itemsize(in_psum)))
        for n in range(len(groups)):
            group = groups[n]
            bank_psum = nl.ndarray((rows, group.size, H + H % 2), dtype=in_psum, buffer=nl.psum)
            for i in range(group.size):
                first = tokens.start + group.start + i
                columns = self.weights_sb[:, first : tokens.start + tokens.size : tiles]
                nisa.nc_transpose(bank_psum[:, i, 0:H], columns)
            evict(to_sb[:, nl.ds(group.start, group.size), :], bank_psum[:, :, 0:H], n)
        return to_sb

    def add(self, tokens: Span, loaded: list[NkiTensor]) -> None:
        """Add some tokens, whose values [rows, heads, tiles, head_dim] are in SBUF by tile."""
        tiles = loaded[0].shape[2]
        weights_sb = self.transpose(tokens, tiles)
        for t in range(self.new.tiles):
            n = loaded[t].shape[1]
            queries = nl.ds(t * self.new.stacked * self.new.group, n * self.new.group)
            for j in range(tiles):
                nisa.nc_matmul(
                    self.sums_psum[0 : n * self.new.head_dim, t, 0 : n * self.new.group],
                    loaded[t][:, :, j, :],
                    weights_sb[:, j, queries],
                    accumulate=self.started or j > 0,
                )
        self.started = True

    def load(self, tokens: Span) -> list[NkiTensor]:
        """Values of some tokens, a multiple of 128, in SBUF."""
        tiles = tokens.size // PARTITIONS
        n, _, d = self.values.shape
        found: list[NkiTensor] = []
        each = LOAD_BYTES // (self.new.stacked * tokens.size * d * itemsize(self.values.dtype))
        each = max(1, each) * self.new.stacked
        for s in spans(0, n, each):
            own_hbm = self.values[nl.ds(s.start, s.size), nl.ds(tokens.start, tokens.size), :]
            own_hbm = own_hbm.reshape_dim(1, (PARTITIONS, tiles)).permute((1, 0, 2, 3))
            own_sb = nl.ndarray((PARTITIONS, s.size, tiles, d), dtype=self.values.dtype)
            nisa.dma_copy(own_sb, own_hbm, dge_mode=nisa.dge_mode.none)
            for heads in spans(0, s.size, self.new.stacked):
                found.append(own_sb[:, nl.ds(heads.start, heads.size), :, :])
        return found

    def add_last(self, tokens: Span) -> None:
        """Add the last tokens, up to 128, of which the last one is the new one."""
        n, _, d = self.values.shape
        rows = tokens.size
        own_sb = nl.ndarray((rows, n, 1, d), dtype=self.values.dtype)
        new_hbm = self.new.value_hbm.expand_dim(0).expand_dim(2)
        nisa.dma_copy(own_sb[rows - 1 : rows, :, :, :], new_hbm, dge_mode=nisa.dge_mode.none)
        if rows > 1:
            own_hbm = self.values[:, nl.ds(tokens.start, rows - 1), :].expand_dim(2)
            own_hbm = own_hbm.permute((1, 0, 2, 3))
            nisa.dma_copy(own_sb[0 : rows - 1, :, :, :], own_hbm, dge_mode=nisa.dge_mode.none)
        loaded: list[NkiTensor] = []
        for heads in spans(0, n, self.new.stacked):
            loaded.append(own_sb[:, nl.ds(heads.start, heads.size), :, :])
        self.add(tokens, loaded)

    def store(self, out_hbm: NkiTensor, inverse_sb: NkiTensor) -> None:
        """out [heads, head_dim] = sums^T / the sum of probabilities."""
        new = self.new
        d, width = new.head_dim, new.stacked * new.group
        mixed_sb = nl.ndarray((d, new.tiles, width), dtype=nl.float32)
        for a in range(new.stacked):
            tiles = tiles_in(new.keys - a, new.stacked)
            if tiles > 0:
                own = nl.ds(a * new.group, new.group)
                sums = self.sums_psum[nl.ds(a * d, d), 0:tiles, own]
                evict(mixed_sb[:, 0:tiles, own], sums, a)
        mixed = mixed_sb.reshape((d, new.tiles * width))[:, 0 : new.queries]
        out_psum = nl.ndarray((new.queries, d), nl.float32, buffer=nl.psum)
        nisa.nc_transpose(out_psum, mixed)
        out_sb = nl.ndarray((new.queries, d), dtype=out_hbm.dtype)
        nisa.tensor_scalar(out_sb, out_psum, nl.multiply, inverse_sb)
        nisa.dma_copy(out_hbm, out_sb, dge_mode=nisa.dge_mode.none)


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
    block: int = 2048,
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
        block: tokens of the cache in a load.

    Returns:
        out [batch, heads * head_dim] in shared HBM, dtype of qkv, and the two caches.

    Notes:
        T is a compile-time size: serving stacks compile a few, and round up to the next. RoPE is
        Llama's, which rotates the two halves of a head. What is written is not read back. Scores,
        their maximum and sums are fp32; probabilities are rounded to the dtype of the cache. Two
        cores share the key heads, or the sequences where there is one key head.

    Pseudocode:
        q, k = rope(norm(q)), rope(norm(k));  k_cache[:, T - 1], v_cache[T - 1] = k, v
        scores[heads, T] = q . k_cache / sqrt(head_dim)
        weights = exp(scores - max(scores));  out = weights . v_cache / sum(weights)
    """
    B, kv, d, T = k_cache.shape
    heads = qkv.shape[1] // d - 2 * kv
    shape = Shape(B, heads, kv, d, T)
    check_operands(shape, qkv, v_cache)
    assert (q_weight == None) == (k_weight == None), "give both weights of norms, or none"  # noqa: E711
    out_hbm = nl.ndarray((B, heads * d), dtype=qkv.dtype, buffer=nl.shared_hbm)
    units = decode_units(shape, nl.program_id(0), nl.num_programs(0))
    norms: list[HeadNorm] = []
    if q_weight != None and k_weight != None:  # noqa: E711 - strict NKI has no `is`
        norms.append(HeadNorm(q_weight, k_weight, eps))
    rotation = Rotation(cos, sin, norms)
    made: list[NewToken] = []
    if len(units) > 0:
        made.append(NewToken(qkv, shape, units[0], rotation))
    whole = (T - 1) // PARTITIONS * PARTITIONS
    for u in range(len(units)):
        new, unit = made[u], units[u]
        caches = Caches(k_cache, v_cache, unit)
        scores = Scores(new, caches.keys, shape)
        for s in spans(0, T, block):
            scores.add(s, d**-0.5)
        if u + 1 < len(units):  # while this unit's values come
            made.append(NewToken(qkv, shape, units[u + 1], rotation))
        parts = spans(0, whole, block)
        last = Span(whole, T - whole)
        parts.append(last)
        weights_sb, inverse_sb = scores.softmax(parts)
        mixture = Mixture(new, caches.values, weights_sb)
        mixture.add_last(last)
        for s in spans(0, whole, block):
            mixture.add(s, mixture.load(s))
        new.store(caches.keys[:, nl.ds(T - 1, 1)], caches.values[:, nl.ds(T - 1, 1), :])
        columns = out_hbm[unit.sequence, nl.ds(unit.keys.start * new.group * d, new.queries * d)]
        mixture.store(columns.reshape((new.queries, d)), inverse_sb)
    return out_hbm, k_cache, v_cache


def check_operands(shape: Shape, qkv: NkiTensor, v_cache: NkiTensor) -> None:
    """Check what the sizes of the key cache ask of the others."""
    wanted = (shape.batch, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    assert qkv.shape == wanted, f"qkv must be {wanted}, got {qkv.shape}"
    wanted = (shape.batch, shape.kv_heads, shape.tokens, shape.head_dim)
    assert v_cache.shape == wanted, f"v_cache must be {wanted}, got {v_cache.shape}"
