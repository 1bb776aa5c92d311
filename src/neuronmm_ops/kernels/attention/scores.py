"""Scores of the new token with every key of the cache, and the probabilities made of them."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.heads import NewToken
from neuronmm_ops.kernels.attention.units import CacheBlock
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.chunks import evict, itemsize
from neuronmm_ops.kernels.stages.facts import transposed_dtype
from neuronmm_ops.kernels.stages.tiling import BANK_COLUMNS, PARTITIONS, spans, transposes_in_bank

LOAD_BYTES = 512 * 1024
"""Of a load at least, where the cache has so many: a queue starts one each 830 ns."""
LOWEST = -3.0e38
"""Below every score."""


def lay(
    dst_psum: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    group: int,
    lanes: int,
    accumulate: bool,
) -> None:
    """A matmul in a group of PE columns, to the group's partitions."""
    if lanes == PARTITIONS:
        nisa.nc_matmul(dst_psum, stationary, moving, accumulate=accumulate)
    else:
        nisa.nc_matmul(
            dst_psum,
            stationary,
            moving,
            accumulate=accumulate,
            tile_position=(0, group * lanes),
            tile_size=(PARTITIONS, lanes),
        )


class Scores(nl.NKIObject):
    """Scores of a unit in fp32; tokens of a block are shared by groups of partitions.

    Args:
        new: the unit's query heads and new key.
        keys: [n * head_dim, T] in HBM.
        blocks: of the tokens of the cache.
    """

    def __init__(self, new: NewToken, keys: NkiTensor, blocks: list[CacheBlock]) -> None:
        self.new = new
        self.keys = keys
        self.blocks = blocks
        self.groups = 1
        parts = 0
        for block in blocks:
            self.groups = max(self.groups, block.groups)
            parts += len(block.segments())
        self.partitions = self.groups * new.lanes
        self.most_sb = nl.ndarray((self.partitions, parts), dtype=nl.float32)
        self.sums_sb = nl.ndarray((self.partitions, parts), dtype=nl.float32)
        if parts > 1:  # not all groups have scores in every part
            nisa.memset(self.most_sb, LOWEST, engine=nisa.gpsimd_engine)
            nisa.memset(self.sums_sb, 0.0, engine=nisa.gpsimd_engine)
        self.parts = 0
        self.summed = 0
        # [partitions, rows, width] of each block
        self.scores_sb: list[NkiTensor] = []
        self.least_sb = nl.ndarray((self.partitions, 1), dtype=nl.float32)

    def load(self, block: CacheBlock) -> list[NkiTensor]:
        """Keys of a block in SBUF, [rows of a tile of keys, rows, tiles of tokens] each."""
        found: list[NkiTensor] = []
        if block.size == 1:  # the new token, whose key is not in the cache
            return found
        rows, full = self.new.rows, self.keys.shape[0] // self.new.rows
        columns_hbm = self.keys[:, nl.ds(block.start, block.size)]
        each = max(1, LOAD_BYTES // (rows * block.size * itemsize(self.keys.dtype)))
        shape = (block.rows, block.tiles)
        for s in spans(0, full, each):
            tile_sb = nl.ndarray((rows, s.size, block.size), dtype=self.keys.dtype)
            tile_hbm = columns_hbm[nl.ds(s.start * rows, s.size * rows), :]
            tile_hbm = tile_hbm.reshape_dim(0, (s.size, rows)).permute((1, 0, 2))
            nisa.dma_copy(tile_sb, tile_hbm, dge_mode=nisa.dge_mode.none)
            for i in range(s.size):
                found.append(tile_sb[:, i, :].reshape_dim(1, shape))
        rest = self.keys.shape[0] - full * rows
        if rest > 0:
            tile_sb = nl.ndarray((rest, block.size), dtype=self.keys.dtype)
            tile_hbm = columns_hbm[nl.ds(full * rows, rest), :]
            nisa.dma_copy(tile_sb, tile_hbm, dge_mode=nisa.dge_mode.none)
            found.append(tile_sb.reshape_dim(1, shape))
        return found

    def add(self, block: CacheBlock, scale: float) -> None:
        """Compute the scores of a block and their maxima.

        What the cache holds at the new token's place only reaches the score of that place, and is
        overwritten.
        """
        lanes, width = self.new.lanes, block.width
        tiles_sb = self.load(block)
        scores_sb = nl.ndarray((self.partitions, block.rows, width), dtype=nl.float32)
        banks = spans(0, block.rows, BANK_COLUMNS // width)
        banks_psum: list[NkiTensor] = []
        for s in banks:
            shape = (block.groups * lanes, s.size, width)
            banks_psum.append(nl.ndarray(shape, nl.float32, buffer=nl.psum))
        for t in range(len(tiles_sb)):
            for i in range(len(banks)):
                rows = nl.ds(banks[i].start, banks[i].size)
                for c in range(block.groups):
                    count = block.width_of(c)
                    dst_psum = banks_psum[i][nl.ds(c * lanes, lanes), :, 0:count]
                    moving = tiles_sb[t][:, rows, c : block.tiles : block.groups]
                    lay(dst_psum, self.new.query(t), moving, c, lanes, t > 0)
        if block.last:
            c, place = (block.tiles - 1) % block.groups, (block.tiles - 1) // block.groups
            last_psum = banks_psum[len(banks) - 1]
            row = nl.ds(banks[len(banks) - 1].size - 1, 1)
            last_psum = last_psum[nl.ds(c * lanes, lanes), row, nl.ds(place, 1)]
            for t in range(self.new.tiles):
                lay(last_psum, self.new.query(t), self.new.key(t), c, lanes, t > 0)
        for segment in block.segments():
            partitions = segment.groups * lanes
            columns = nl.ds(segment.first, segment.count)
            many_sb: list[NkiTensor] = []
            most_sb = self.most_sb[0:partitions, nl.ds(self.parts, 1)]
            if len(banks) > 1:
                many_sb.append(nl.ndarray((partitions, len(banks)), dtype=nl.float32))
            for i in range(len(banks)):
                rows = nl.ds(banks[i].start, banks[i].size)
                one_sb = many_sb[0][:, nl.ds(i, 1)] if len(banks) > 1 else most_sb
                nisa.tensor_scalar_reduce(
                    scores_sb[0:partitions, rows, columns],
                    banks_psum[i][0:partitions, :, columns],
                    nl.multiply,
                    scale,
                    nl.maximum,
                    one_sb,
                )
            if len(banks) > 1:
                nisa.tensor_reduce(most_sb, nl.maximum, many_sb[0], axis=1)
            self.parts += 1
        self.scores_sb.append(scores_sb)

    def finish(self) -> None:
        """The maximum of each partition, negated: all blocks have been added."""
        nisa.tensor_reduce(self.least_sb, nl.maximum, self.most_sb, axis=1, negate=True)

    def weights(self, number: int) -> NkiTensor:
        """exp(scores - maximum) of a block, transposed: [rows, width, partitions], keys' dtype."""
        block, lanes = self.blocks[number], self.new.lanes
        scores_sb = self.scores_sb[number]
        weights_sb = nl.ndarray(scores_sb.shape, dtype=self.keys.dtype)
        for segment in block.segments():
            partitions = segment.groups * lanes
            columns = nl.ds(segment.first, segment.count)
            nisa.activation_reduce(
                weights_sb[0:partitions, :, columns],
                nl.exp,
                scores_sb[0:partitions, :, columns],
                nl.add,
                self.sums_sb[0:partitions, nl.ds(self.summed, 1)],
                bias=self.least_sb[0:partitions, :],
            )
            self.summed += 1
        return self.transpose(block, weights_sb)

    def transpose(self, block: CacheBlock, weights_sb: NkiTensor) -> NkiTensor:
        """Tokens of a block on the partitions; several transposes through a bank of PSUM."""
        H = block.groups * self.new.lanes
        to_sb = nl.ndarray((block.rows, block.width, H), dtype=weights_sb.dtype)
        in_psum = transposed_dtype(weights_sb.dtype)
        groups = spans(0, block.width, transposes_in_bank(H, itemsize(in_psum)))
        for n in range(len(groups)):
            group = groups[n]
            shape = (block.rows, group.size, H)
            bank_psum = nl.ndarray(shape, dtype=in_psum, buffer=nl.psum)
            seen = H
            for i in range(group.size):
                seen = block.groups_at(group.start + i) * self.new.lanes
                columns = weights_sb[0:seen, :, group.start + i]
                nisa.nc_transpose(bank_psum[:, i, 0:seen], columns)
            whole = group.size if seen == H else group.size - 1
            if whole > 0:
                own_sb = to_sb[:, nl.ds(group.start, whole), :]
                evict(own_sb, bank_psum[:, 0:whole, :], n)
            if whole < group.size:
                last_sb = to_sb[:, group.start + whole, 0:seen]
                evict(last_sb, bank_psum[:, whole, 0:seen], n)
        return to_sb
