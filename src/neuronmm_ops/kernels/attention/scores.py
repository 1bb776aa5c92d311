"""Scores of the new tokens with every key of the cache, and the probabilities made of them."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.heads import NewTokens
from neuronmm_ops.kernels.attention.keys import mode_of
from neuronmm_ops.kernels.attention.units import CacheBlock
from neuronmm_ops.kernels.attention.visible import LOWEST, Seen
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.chunks import evict, itemsize
from neuronmm_ops.kernels.stages.decode_tiling import transposes_in_bank
from neuronmm_ops.kernels.stages.facts import transposed_dtype
from neuronmm_ops.kernels.stages.tiling import BANK_COLUMNS, PARTITIONS, spans

LOAD_BYTES = 512 * 1024
"""Of a load at least, where the cache has so many: a queue starts one each 830 ns."""


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
        new: the unit's query heads and new keys.
        keys: [n * head_dim, T] in HBM.
        blocks: the new tokens and those of the cache.
    """

    def __init__(self, new: NewTokens, keys: NkiTensor, blocks: list[CacheBlock]) -> None:
        self.new = new
        self.keys = keys
        self.blocks = blocks
        self.scale = new.head_dim**-0.5
        self.groups = 1
        for block in blocks:
            self.groups = max(self.groups, block.groups)
        parts = len(blocks)
        self.partitions = self.groups * new.lanes
        self.most_sb = nl.ndarray((self.partitions, parts), dtype=nl.float32)
        self.sums_sb = nl.ndarray((self.partitions, parts), dtype=nl.float32)
        if self.groups > 1:  # not all groups have scores in every block
            nisa.memset(self.most_sb, LOWEST, engine=nisa.gpsimd_engine)
            nisa.memset(self.sums_sb, 0.0, engine=nisa.gpsimd_engine)
        # [partitions, rows, width] of each block
        self.scores_sb: list[NkiTensor] = []
        self.least_sb = nl.ndarray((self.partitions, 1), dtype=nl.float32)

    def load(self, block: CacheBlock) -> list[NkiTensor]:
        """Keys of a block in SBUF, [rows of a tile of keys, rows, tiles of tokens] each."""
        keys_sb: list[NkiTensor] = []
        if block.new:
            for t in range(self.new.tiles):
                keys_sb.append(self.new.key(t).expand_dim(2))
            return keys_sb
        rows, full = self.new.rows, self.keys.shape[0] // self.new.rows
        columns_hbm = self.keys[:, nl.ds(block.start, block.size)]
        each = max(1, LOAD_BYTES // (rows * block.size * itemsize(self.keys.dtype)))
        shape = (block.rows, block.tiles)
        for s in spans(0, full, each):
            tile_sb = nl.ndarray((rows, s.size, block.size), dtype=self.keys.dtype)
            tile_hbm = columns_hbm[nl.ds(s.start * rows, s.size * rows), :]
            tile_hbm = tile_hbm.reshape_dim(0, (s.size, rows)).permute((1, 0, 2))
            nisa.dma_copy(tile_sb, tile_hbm, dge_mode=mode_of(tile_hbm))
            for i in range(s.size):
                keys_sb.append(tile_sb[:, i, :].reshape_dim(1, shape))
        rest = self.keys.shape[0] - full * rows
        if rest > 0:
            tile_sb = nl.ndarray((rest, block.size), dtype=self.keys.dtype)
            tile_hbm = columns_hbm[nl.ds(full * rows, rest), :]
            nisa.dma_copy(tile_sb, tile_hbm, dge_mode=mode_of(tile_hbm))
            keys_sb.append(tile_sb.reshape_dim(1, shape))
        return keys_sb

    def add(self, block: CacheBlock, seen: Seen) -> None:
        """Compute the scores of a block, before they are scaled, and their maxima."""
        lanes, width = self.new.lanes, block.width
        partitions = block.groups * lanes
        tiles_sb = self.load(block)
        scores_sb = nl.ndarray((self.partitions, block.rows, width), dtype=nl.float32)
        banks = spans(0, block.rows, BANK_COLUMNS // width)
        number = len(self.scores_sb)
        most_sb = self.most_sb[0:partitions, nl.ds(number, 1)]
        many_sb = nl.ndarray((partitions, len(banks)), dtype=nl.float32)
        banks_psum: list[NkiTensor] = []
        for s in banks:
            banks_psum.append(nl.ndarray((partitions, s.size, width), nl.float32, buffer=nl.psum))
        for t in range(len(tiles_sb)):
            for i in range(len(banks)):
                rows = nl.ds(banks[i].start, banks[i].size)
                for c in range(block.groups):
                    dst_psum = banks_psum[i][nl.ds(c * lanes, lanes), :, :]
                    moving = tiles_sb[t][:, rows, c : block.tiles : block.groups]
                    lay(dst_psum, self.new.query(t), moving, c, lanes, t > 0)
        for i in range(len(banks)):
            rows = nl.ds(banks[i].start, banks[i].size)
            one_sb = many_sb[:, nl.ds(i, 1)] if len(banks) > 1 else most_sb
            first = banks[i].start * width
            seen.copy(scores_sb[0:partitions, rows, :], banks_psum[i], first, one_sb)
        if len(banks) > 1:
            nisa.tensor_reduce(most_sb, nl.maximum, many_sb, axis=1)
        self.scores_sb.append(scores_sb)

    def finish(self) -> None:
        """The scaled maximum of each partition, negated: all blocks have been added."""
        nisa.tensor_reduce(self.least_sb, nl.maximum, self.most_sb, axis=1, negate=True)
        nisa.tensor_scalar(self.least_sb, self.least_sb, nl.multiply, self.scale)

    def weights(self, number: int) -> NkiTensor:
        """exp(scores - maximum) of a block, transposed: [rows, width, partitions], keys' dtype."""
        block = self.blocks[number]
        scores_sb = self.scores_sb[number]
        partitions = block.groups * self.new.lanes
        weights_sb = nl.ndarray(scores_sb.shape, dtype=self.keys.dtype)
        nisa.activation_reduce(
            weights_sb[0:partitions, :, :],
            nl.exp,
            scores_sb[0:partitions, :, :],
            nl.add,
            self.sums_sb[0:partitions, nl.ds(number, 1)],
            bias=self.least_sb[0:partitions, :],
            scale=self.scale,
        )
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
            for i in range(group.size):
                nisa.nc_transpose(bank_psum[:, i, :], weights_sb[0:H, :, group.start + i])
            evict(to_sb[:, nl.ds(group.start, group.size), :], bank_psum, n)
        return to_sb
