"""Causal attention of a prompt, or of a chunk of it after what a cache holds, a block at a time.

Scores are computed twice. Queries on the partitions: VectorE takes the maximum of each. Keys on
the partitions: less the maximum, which one more row of the contraction subtracts, ScalarE makes
probabilities of them, and these lie as the product with the values needs them. So nothing is
transposed and nothing is rescaled: sums stay in PSUM from the first key to the last.
"""

from __future__ import annotations

from neuronmm_ops.kernels.attention.earlier import Earlier
from neuronmm_ops.kernels.attention.keys import Keys, Masks, mode_of
from neuronmm_ops.kernels.attention.visible import Seen
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
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


class Bank(nl.NKIObject):
    """Keys that a tile of queries is compared with: the columns of a PSUM bank.

    Args:
        tile: of queries.
        number: among the tile's banks.
        is_earlier: whether the keys are those of the cache.
        keys: their range.
    """

    def __init__(self, tile: int, number: int, is_earlier: bool, keys: Span) -> None:
        self.tile = tile
        self.number = number
        self.is_earlier = is_earlier
        self.keys = keys


class KeyTile(nl.NKIObject):
    """128 keys of the cache or of the block's own tokens.

    Args:
        number: of the tile.
        is_earlier: whether it is the cache's.
    """

    def __init__(self, number: int, is_earlier: bool) -> None:
        self.number = number
        self.is_earlier = is_earlier


class Block(nl.NKIObject):
    """Some tokens of one query head.

    Args:
        queries: of all heads that share its key.
        head: which of them.
        keys: that they share.
        masks: of tiles on the diagonal.
        earlier: tokens before all of these, one or none.
    """

    def __init__(
        self, queries: Queries, head: int, keys: Keys, masks: Masks, earlier: list[Earlier]
    ) -> None:
        self.queries = queries
        self.head = head
        self.keys = keys
        self.masks = masks
        self.earlier = earlier
        self.tokens = queries.tokens
        self.tiles = spans(0, self.tokens.size, PARTITIONS)
        end = self.tokens.start + self.tokens.size
        first = 0  # key that is seen
        self.key_tiles: list[KeyTile] = []
        for each in earlier:
            first = each.first_key(self.tokens.start)
            for n in range(tiles_in(each.keys.tokens, PARTITIONS)):
                self.key_tiles.append(KeyTile(n, True))
        for n in range(first // PARTITIONS, tiles_in(end, PARTITIONS)):
            self.key_tiles.append(KeyTile(n, False))
        self.banks: list[Bank] = []
        self.most = 0  # banks of a tile
        for i in range(len(self.tiles)):
            start = self.tokens.start + self.tiles[i].start
            first = 0
            number = 0
            for each in earlier:
                first = each.first_key(start) // PARTITIONS * PARTITIONS
                for s in spans(0, each.keys.tokens, BANK_COLUMNS):
                    self.banks.append(Bank(i, number, True, s))
                    number += 1
            for s in spans(0, start + self.tiles[i].size, BANK_COLUMNS):
                if s.start + s.size > first:
                    self.banks.append(Bank(i, number, False, s))
                    number += 1
            self.most = max(self.most, number)
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
        for t in self.tiles:
            self.most_sb.append(nl.ndarray((t.size, self.most), dtype=nl.float32))
        dtype = self.queries.q_hbm.dtype
        self.least_sb.append(nl.ndarray((PARTITIONS, len(self.tiles)), dtype=dtype))

    def advance(self, to: int) -> None:
        """Find the maxima of the banks up to number `to`."""
        for n in range(self.done, min(to, len(self.banks))):
            bank = self.banks[n]
            self.find_most(bank, n + 1 == len(self.banks) or self.banks[n + 1].tile > bank.tile)
        self.done = max(self.done, min(to, len(self.banks)))

    def find_most(self, bank: Bank, ends: bool) -> None:
        """The greatest score of each query of a tile in a bank, its last one if it `ends`."""
        tile, columns = self.tiles[bank.tile], bank.keys
        scores_psum = nl.ndarray((tile.size, columns.size), nl.float32, buffer=nl.psum)
        query_sb = self.query(self.keys.head_dim, tile)
        key_sb = self.keys_of(bank.is_earlier).columns(columns)
        nisa.nc_matmul(scores_psum, query_sb, key_sb, accumulate=False)
        if ends:
            size = tile.size
            diagonal = scores_psum[:, columns.size - size : columns.size]
            identity_sb, mask_sb = self.masks.identity_sb, self.masks.mask_sb
            nisa.nc_matmul(
                diagonal, identity_sb[0:size, 0:size], mask_sb[0:size, 0:size], accumulate=True
            )
        most_sb = self.most_sb[bank.tile][:, nl.ds(bank.number, 1)]
        hides: list[Seen] = []
        for each in self.earlier:
            start = self.tokens.start + tile.start
            hides = each.of_queries(Span(start, tile.size), columns, bank.is_earlier)
        if len(hides) > 0:
            seen_sb = nl.ndarray((tile.size, 1, columns.size), dtype=nl.float32)
            hides[0].copy(seen_sb, scores_psum.expand_dim(1), columns.start, most_sb)
        else:
            nisa.tensor_reduce(most_sb, nl.maximum, scores_psum, axis=1)
        if ends:
            least_sb = self.least_sb[0][0 : tile.size, nl.ds(bank.tile, 1)]
            most_sb = self.most_sb[bank.tile][:, 0 : bank.number + 1]
            nisa.tensor_reduce(least_sb, nl.maximum, most_sb, axis=1, negate=True)

    def keys_of(self, is_earlier: bool) -> Keys:
        """The keys of the cache, or of the tokens themselves."""
        return self.earlier[0].keys if is_earlier else self.keys

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

    def first_column(self, tile: KeyTile) -> int:
        """The first of the tokens that sees a tile of keys."""
        return 0 if tile.is_earlier else max(0, tile.number * PARTITIONS - self.tokens.start)

    def weights(self, tile: KeyTile, scale: float) -> NkiTensor:
        """Probabilities [keys, tokens] of a tile of keys, before they are divided by their sum."""
        first, keys = self.first_column(tile), self.keys_of(tile.is_earlier)
        columns = Span(first, self.tokens.size - first)
        key_sb = keys.key(tile.number)
        n = key_sb.shape[1]
        scores_psum = nl.ndarray((n, columns.size), nl.float32, buffer=nl.psum)
        query_sb = self.query(self.queries.rows, columns)
        nisa.nc_matmul(scores_psum, key_sb, query_sb, accumulate=False)
        if not keys.joined:
            row_sb = self.row_sb[0][:, nl.ds(first, columns.size)]
            nisa.nc_matmul(scores_psum, keys.ones_sb[:, 0:n], row_sb, accumulate=True)
        # the first tokens of a tile on the diagonal are those of the keys
        if not tile.is_earlier and tile.number * PARTITIONS >= self.tokens.start:
            identity_sb, mask_sb = self.masks.identity_sb, self.masks.mask_sb
            nisa.nc_matmul(
                scores_psum[:, 0:n], mask_sb[0:n, 0:n], identity_sb[0:n, 0:n], accumulate=True
            )
        weights_sb = nl.ndarray((n, columns.size), dtype=self.queries.q_hbm.dtype)
        tokens = Span(self.tokens.start + first, columns.size)
        for each in self.earlier:
            each.exp(weights_sb, scores_psum, scale, tile.number, tokens, tile.is_earlier)
        if len(self.earlier) == 0:
            nisa.activation(weights_sb, nl.exp, scores_psum, scale=scale)
        return weights_sb

    def add(self, t: int, weights_sb: NkiTensor) -> None:
        """Add the values of a tile of keys, number `t` of all, times their probabilities."""
        key_tile = self.key_tiles[t]
        first = self.first_column(key_tile)
        value_sb = self.keys_of(key_tile.is_earlier).value(key_tile.number)
        for i in range(first // PARTITIONS, len(self.tiles)):
            tile = self.tiles[i]
            own = weights_sb[:, nl.ds(tile.start - first, tile.size)]
            sums_psum = self.sums(i)[0 : tile.size, :]
            nisa.nc_matmul(sums_psum, own, value_sb, accumulate=t > 0)

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
        tiles = len(self.key_tiles)
        weights_sb: list[NkiTensor] = []
        for block in following:
            block.begin()
        for t in range(tiles + AHEAD):
            if t < tiles:
                weights_sb.append(self.weights(self.key_tiles[t], scale))
            for block in following:
                block.advance(tiles_in((t + 1) * len(block.banks), max(1, tiles - EARLY)))
                if t == tiles:
                    block.finish()
            if t >= AHEAD:
                self.add(t - AHEAD, weights_sb[t - AHEAD])
        self.divide()
        if self.head + 1 == self.queries.q_hbm.shape[0]:
            self.queries.store()


def run_blocks(blocks: list[Block], scale: float) -> None:
    """Run blocks in order, the maxima of each one ahead."""
    if len(blocks) > 0:
        blocks[0].begin()
        blocks[0].advance(len(blocks[0].banks))
        blocks[0].finish()
    for n in range(len(blocks)):
        blocks[n].run(blocks[n + 1 : n + 2], scale)
