"""Causal attention of whole prompts.

Scores are computed twice. Queries on the partitions: VectorE takes the maximum of each. Keys on
the partitions: less the maximum, which one more row of the contraction subtracts, ScalarE makes
probabilities of them, and these lie as the product with the values needs them. So nothing is
transposed and nothing is rescaled: sums stay in PSUM from the first key to the last.
"""

from __future__ import annotations

from neuronmm_ops.kernels.attention.keys import Keys, Masks
from neuronmm_ops.kernels.attention.units import QUERY_BLOCK, Shape, prefill_groups
from neuronmm_ops.kernels.shim import NkiTensor, jit, nisa, nl
from neuronmm_ops.kernels.stages.facts import transposed_dtype
from neuronmm_ops.kernels.stages.tiling import BANK_COLUMNS, PARTITIONS, Span, spans, tiles_in

AHEAD = 3
"""Tiles of scores that TensorE makes before the product with the values of the first."""
EARLY = 3
"""Tiles before the last one, at which the next block's maxima are found."""


class Queries(nl.NKIObject):
    """Queries of the heads that share a key, a block of tokens, and their output.

    Args:
        q_hbm: [heads, head_dim, M].
        out_hbm: [M, heads * head_dim].
        tokens: of the block.
        rows: of a query with the row that is its maximum.
    """

    def __init__(self, q_hbm: NkiTensor, out_hbm: NkiTensor, tokens: Span, rows: int) -> None:
        self.q_hbm = q_hbm
        self.out_hbm = out_hbm
        self.tokens = tokens
        self.rows = rows
        # [rows, heads, tokens], and [128, tiles, heads * head_dim]
        self.queries_sb: list[NkiTensor] = []
        self.out_sb: list[NkiTensor] = []

    def load(self) -> None:
        """Load them once."""
        if len(self.queries_sb) > 0:
            return
        H, d, _ = self.q_hbm.shape
        queries_sb = nl.ndarray((self.rows, H, self.tokens.size), dtype=self.q_hbm.dtype)
        own_hbm = self.q_hbm[:, :, nl.ds(self.tokens.start, self.tokens.size)].permute((1, 0, 2))
        nisa.dma_copy(queries_sb[0:d, :, :], own_hbm, dge_mode=mode_of(self.q_hbm))
        self.queries_sb.append(queries_sb)
        tiles = tiles_in(self.tokens.size, PARTITIONS)
        self.out_sb.append(nl.ndarray((PARTITIONS, tiles, H * d), dtype=self.out_hbm.dtype))

    def store(self) -> None:
        """Store the output of all heads."""
        mode = mode_of(self.out_hbm)
        start, size = self.tokens.start, self.tokens.size
        whole = size // PARTITIONS
        if whole > 0:
            own_hbm = self.out_hbm[nl.ds(start, whole * PARTITIONS), :]
            own_hbm = own_hbm.reshape_dim(0, (whole, PARTITIONS)).permute((1, 0, 2))
            nisa.dma_copy(own_hbm, self.out_sb[0][:, 0:whole, :], dge_mode=mode)
        rest = size - whole * PARTITIONS
        if rest > 0:
            own_hbm = self.out_hbm[nl.ds(start + whole * PARTITIONS, rest), :]
            nisa.dma_copy(own_hbm, self.out_sb[0][0:rest, whole, :], dge_mode=mode)


class Block(nl.NKIObject):
    """Some tokens of one query head.

    Args:
        queries: of all heads that share its key.
        head: which of them.
        keys: that they share.
        masks: of tiles on the diagonal.
    """

    def __init__(self, queries: Queries, head: int, keys: Keys, masks: Masks) -> None:
        self.queries = queries
        self.head = head
        self.keys = keys
        self.masks = masks
        self.tokens = queries.tokens
        self.tiles = spans(0, self.tokens.size, PARTITIONS)
        self.key_tiles = tiles_in(self.tokens.start + self.tokens.size, PARTITIONS)
        # the keys that each tile of queries sees, a PSUM bank at a time
        self.seen: list[tuple[int, Span]] = []
        for i in range(len(self.tiles)):
            end = self.tokens.start + self.tiles[i].start + self.tiles[i].size
            for s in spans(0, end, BANK_COLUMNS):
                self.seen.append((i, s))
        self.done = 0
        self.most_sb: list[NkiTensor] = []
        self.least_sb: list[NkiTensor] = []
        self.row_sb: list[NkiTensor] = []
        self.sums_psum: list[NkiTensor] = []

    def query(self, rows: int, columns: Span) -> NkiTensor:
        """[rows, columns] of the head."""
        own = nl.ds(columns.start, columns.size)
        return self.queries.queries_sb[0][0:rows, self.head, own]

    # the maxima

    def begin(self) -> None:
        """Load what is not there yet."""
        self.queries.load()
        banks = tiles_in(self.tokens.start + self.tokens.size, BANK_COLUMNS)
        for t in self.tiles:
            self.most_sb.append(nl.ndarray((t.size, banks), dtype=nl.float32))
        dtype = self.queries.q_hbm.dtype
        self.least_sb.append(nl.ndarray((PARTITIONS, len(self.tiles)), dtype=dtype))

    def advance(self, to: int) -> None:
        """Find the maxima of the banks up to number `to`."""
        for n in range(self.done, min(to, len(self.seen))):
            i, columns = self.seen[n]
            self.find_most(i, columns, n + 1 == len(self.seen) or self.seen[n + 1][0] > i)
        self.done = max(self.done, min(to, len(self.seen)))

    def find_most(self, i: int, columns: Span, ends: bool) -> None:
        """The greatest score of each query of a tile among keys, the last ones if it `ends`."""
        tile = self.tiles[i]
        scores_psum = nl.ndarray((tile.size, columns.size), nl.float32, buffer=nl.psum)
        query_sb = self.query(self.keys.head_dim, tile)
        nisa.nc_matmul(scores_psum, query_sb, self.keys.columns(columns), accumulate=False)
        if ends:
            size = tile.size
            diagonal = scores_psum[:, columns.size - size : columns.size]
            identity_sb, mask_sb = self.masks.identity_sb, self.masks.mask_sb
            nisa.nc_matmul(
                diagonal, identity_sb[0:size, 0:size], mask_sb[0:size, 0:size], accumulate=True
            )
        bank = columns.start // BANK_COLUMNS
        nisa.tensor_reduce(self.most_sb[i][:, nl.ds(bank, 1)], nl.maximum, scores_psum, axis=1)
        if ends:
            least_sb = self.least_sb[0][0 : tile.size, nl.ds(i, 1)]
            most_sb = self.most_sb[i][:, 0 : bank + 1]
            nisa.tensor_reduce(least_sb, nl.maximum, most_sb, axis=1, negate=True)

    def finish(self) -> None:
        """Lay the maxima in a row, over `Keys.ones`."""
        dtype = self.queries.q_hbm.dtype
        in_psum = transposed_dtype(dtype)
        row_psum = nl.ndarray((1, self.tokens.size), in_psum, buffer=nl.psum)
        for i in range(len(self.tiles)):
            own = nl.ds(self.tiles[i].start, self.tiles[i].size)
            least_sb = self.least_sb[0][0 : self.tiles[i].size, nl.ds(i, 1)]
            nisa.nc_transpose(row_psum[:, own], least_sb)
        d = self.keys.head_dim
        if self.keys.joined:
            row_sb = self.queries.queries_sb[0][d : d + 1, self.head, :]
        else:
            row_sb = nl.ndarray((1, self.tokens.size), dtype=dtype)
            self.row_sb.append(row_sb)
        nisa.tensor_scalar(row_sb, row_psum, nl.multiply, 1.0 / self.keys.ones)

    # the output

    def weights(self, k: int, scale: float) -> NkiTensor:
        """Probabilities [keys, tokens] of a tile of keys, before they are divided by their sum."""
        first = max(0, k * PARTITIONS - self.tokens.start)
        columns = Span(first, self.tokens.size - first)
        key_sb = self.keys.key(k)
        n = key_sb.shape[1]
        scores_psum = nl.ndarray((n, columns.size), nl.float32, buffer=nl.psum)
        query_sb = self.query(self.queries.rows, columns)
        nisa.nc_matmul(scores_psum, key_sb, query_sb, accumulate=False)
        if not self.keys.joined:
            row_sb = self.row_sb[0][:, nl.ds(first, columns.size)]
            nisa.nc_matmul(scores_psum, self.keys.ones_sb[:, 0:n], row_sb, accumulate=True)
        if k * PARTITIONS >= self.tokens.start:  # its first tokens are those of the keys
            identity_sb, mask_sb = self.masks.identity_sb, self.masks.mask_sb
            nisa.nc_matmul(
                scores_psum[:, 0:n], mask_sb[0:n, 0:n], identity_sb[0:n, 0:n], accumulate=True
            )
        weights_sb = nl.ndarray((n, columns.size), dtype=self.queries.q_hbm.dtype)
        nisa.activation(weights_sb, nl.exp, scores_psum, scale=scale)
        return weights_sb

    def add(self, k: int, weights_sb: NkiTensor) -> None:
        """Add the values of a tile of keys times their probabilities."""
        first = max(0, k * PARTITIONS - self.tokens.start)
        value_sb = self.keys.value(k)
        for i in range(first // PARTITIONS, len(self.tiles)):
            tile = self.tiles[i]
            own = weights_sb[:, nl.ds(tile.start - first, tile.size)]
            sums_psum = self.sums(i)[0 : tile.size, :]
            nisa.nc_matmul(sums_psum, own, value_sb, accumulate=k > 0)

    def sums(self, i: int) -> NkiTensor:
        """[128, head_dim + 1]: the sums of a tile of queries; the last is that of probabilities."""
        width = self.keys.head_dim + 1
        each = BANK_COLUMNS // width
        if len(self.sums_psum) == 0:
            for s in spans(0, len(self.tiles), each):
                shape = (PARTITIONS, s.size, width)
                self.sums_psum.append(nl.ndarray(shape, nl.float32, buffer=nl.psum))
        return self.sums_psum[i // each][:, i % each, :]

    def divide(self) -> None:
        """Divide by the sums of probabilities."""
        d = self.keys.head_dim
        for i in range(len(self.tiles)):
            size = self.tiles[i].size
            sums_psum = self.sums(i)[0:size, :]
            inverse_sb = nl.ndarray((size, 1), dtype=nl.float32)
            nisa.reciprocal(inverse_sb, sums_psum[:, d : d + 1])
            out_sb = self.queries.out_sb[0][0:size, i, nl.ds(self.head * d, d)]
            nisa.activation(out_sb, nl.copy, sums_psum[:, 0:d], scale=inverse_sb)

    def run(self, following: list[Block], scale: float) -> None:
        """Compute the output, and the maxima of the block that follows, if any, meanwhile."""
        tiles = self.key_tiles
        weights_sb: list[NkiTensor] = []
        for block in following:
            block.begin()
        for t in range(tiles + AHEAD):
            if t < tiles:
                weights_sb.append(self.weights(t, scale))
            for block in following:
                block.advance(tiles_in((t + 1) * len(block.seen), max(1, tiles - EARLY)))
                if t == tiles:
                    block.finish()
            if t >= AHEAD:
                self.add(t - AHEAD, weights_sb[t - AHEAD])
        self.divide()
        if self.head + 1 == self.queries.q_hbm.shape[0]:
            self.queries.store()


def mode_of(hbm: NkiTensor) -> nisa.dge_mode:
    """Static descriptors, unless the place is known on the device only."""
    return nisa.dge_mode.unknown if hbm.is_indirect() else nisa.dge_mode.none


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
                blocks.append(Block(queries, head, keys, masks))
    run_blocks(blocks, d**-0.5)
    return out_hbm


def run_blocks(blocks: list[Block], scale: float) -> None:
    """Run blocks in order, the maxima of each one ahead."""
    if len(blocks) > 0:
        blocks[0].begin()
        blocks[0].advance(len(blocks[0].seen))
        blocks[0].finish()
    for n in range(len(blocks)):
        blocks[n].run(blocks[n + 1 : n + 2], scale)
