"""The Linears of a layer that read the same activations, and their knobs."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.decoder_layer.norm import Residual, root_of, turned_chunk
from neuronmm_ops.kernels.decoder_layer.ranks import TensorParallel
from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, nl
from neuronmm_ops.kernels.stages.chunks import Chunk, chunks_of
from neuronmm_ops.kernels.stages.linears import LinearKnobs, write_dense, write_pairs
from neuronmm_ops.kernels.stages.outputs import each_to_hbm
from neuronmm_ops.kernels.stages.tiling import Span, core_span
from neuronmm_ops.kernels.stages.weights import DecodeWeight, check_one_dtype, lanes_for

KNOBS = (
    *("k_chunk", "dma_cast", "inner_block", "spill"),
    *("rank_block", "fuse", "block", "last_block", "tile_bytes", "stationary", "balance"),
)
"""Of a stage, as the ops' kernels have them; it does not read what its Linears have no use for."""

TURNED = 8
"""Tokens up to which a DMA transposes activations: its rows of few bytes are as many."""


class StageKnobs(nl.NKIObject):
    """Knobs of the Linears that read the same activations, from a tuple in the order of `KNOBS`.

    The launch `opens` with them, or `ends`.
    """

    def __init__(self, values: tuple[int, ...], opens: bool = False, ends: bool = False) -> None:
        assert len(values) == len(KNOBS), f"{len(KNOBS)} knobs of a stage, got {len(values)}"
        self.k_chunk = values[0]
        self.dma_cast = values[1]
        self.inner_block = values[2]
        self.spill = values[3] > 0
        self.linear = LinearKnobs(
            values[4], values[5] > 0, values[6], values[7], values[8], values[9] > 0, opens, ends
        )
        self.balance = values[10] > 0


class Stage(nl.NKIObject):
    """Linears that read the same activations, pairs of factors or dense.

    Args:
        matrices: u and v of each pair; None and the weight where they are dense.
        scales: of each matrix, or none.
        dtype: of the activations.
        knobs: of all of them.
        ranks: of tensor parallel.
    """

    def __init__(
        self,
        matrices: tuple[NkiTensor | None, ...],
        scales: tuple[NkiTensor | None, ...],
        dtype: nl.DType,
        knobs: StageKnobs,
        ranks: TensorParallel,
    ) -> None:
        self.ranks = ranks
        self.us: list[DecodeWeight] = []
        self.vs: list[DecodeWeight] = []
        # of each Linear
        self.is_pair: list[bool] = []
        for n in range(len(matrices)):
            matrix, scale = matrices[n], None
            if len(scales) > 0:
                scale = scales[n]
            if not is_none(matrix):
                weight = DecodeWeight(matrix, dtype, scale, knobs.dma_cast)
                if n % 2 == 0:
                    self.us.append(weight)
                else:
                    self.vs.append(weight)
            if n % 2 == 0:
                self.is_pair.append(not is_none(matrix))
        self.low_rank = len(self.us) > 0
        self.is_mixed = self.low_rank and len(self.us) < len(self.vs)
        assert ranks.count == 1 or not self.is_mixed, (
            "with ranks, Linears of a stage must all be pairs, or all dense"
        )
        # what reads the activations
        self.first = self.us if self.low_rank else self.vs
        check_one_dtype(self.us)
        check_one_dtype(self.vs)
        self.group = self.first[0].group
        self.features = self.us[0].rows if self.is_pair[0] else self.vs[0].rows
        self.knobs = knobs
        # a rank has rows of each u and columns of each v
        self.divided = self.low_rank and ranks.count > 1
        self.by_cores = self.low_rank and not self.divided and not self.is_mixed
        self.out_features = 0
        for w in self.vs:
            self.out_features += w.hbm.shape[1]

    def lanes(self, M: int) -> int:
        """Lanes of the K chunks of M tokens."""
        return 0 if self.knobs.linear.stationary else lanes_for(self.first, M)

    def ranges(self, size: int) -> list[Span]:
        """What cores contract: each its part, or all of it where they share columns."""
        if not self.by_cores:
            return [Span(0, size)]
        ranges: list[Span] = []
        for core in range(nl.num_programs(0)):
            ranges.append(core_span(size, core, nl.num_programs(0), self.group))
        return ranges

    def own(self) -> int:
        """The number of this core's range."""
        return nl.program_id(0) if self.by_cores else 0

    def normed(self, stream: Residual, weight_hbm: NkiTensor, eps: float) -> list[Chunk]:
        """What this core contracts: its range of the stream, or all, its own first."""
        numbers = [nl.program_id(0) if len(stream.ranges) > 1 else 0]
        if not self.by_cores and len(stream.ranges) > 1:
            numbers.append(1 - nl.program_id(0))
        return stream.normed(weight_hbm, eps, numbers, self.lanes(stream.tokens))

    def low(self, chunks: list[Chunk], us: list[DecodeWeight]) -> NkiTensor:
        """Products with u side by side, which cores share the columns of: [M, r] in HBM."""
        size = 0
        for w in us:
            size += w.hbm.shape[1]
        low_hbm = nl.ndarray((chunks[0].tokens, size), dtype=us[0].dtype, buffer=nl.shared_hbm)
        outs = each_to_hbm(side_by_side(low_hbm, us))
        write_dense(outs, [chunks], us, [None] * len(us), self.knobs.linear)
        return low_hbm

    def normed_sides(
        self, stream: Residual, weight_hbm: NkiTensor, eps: float, count: int
    ) -> list[list[Chunk]]:
        """What each of the first weights of `vs` contracts of a stream's norm.

        Where ranks have parts of the stream: the norm is a factor of each token, which may follow
        the product with u, and ranks sum the squares with that.
        """
        if not self.divided:
            return self.sides(self.normed(stream, weight_hbm, eps), count)
        us = self.us[0:count]
        low_hbm = self.low([stream.weighted(weight_hbm, self.lanes(stream.tokens))], us)
        sums = self.ranks.summed([low_hbm, stream.squares(self.ranks.count)])
        inverse_sb = root_of(sums[1], eps)
        sides: list[list[Chunk]] = []
        for each in side_by_side(sums[0], us):
            sides.append(self.chunks(each, inverse_sb))
        return sides

    def sides(self, chunks: list[Chunk], count: int) -> list[list[Chunk]]:
        """What each of the first weights of `vs` contracts, for cores that share columns."""
        us: list[DecodeWeight] = []
        for n in range(count):
            if self.is_pair[n]:
                us.append(self.us[len(us)])
        low: list[NkiTensor] = []
        if len(us) > 0:
            low = side_by_side(self.ranks.summed([self.low(chunks, us)])[0], us)
        sides: list[list[Chunk]] = []
        pair = 0
        for n in range(count):
            if self.is_pair[n]:
                sides.append(self.chunks(low[pair]))
                pair += 1
            else:
                sides.append(chunks)
        return sides

    def chunks(self, hbm: NkiTensor, inverse_sb: NkiTensor | None = None) -> list[Chunk]:
        """This core's part of [M, K] in HBM; each token's times its `inverse_sb` [128, M]."""
        M, K = hbm.shape
        lanes, own = self.lanes(M), self.ranges(K)[self.own()]
        if M <= TURNED or not is_none(inverse_sb):
            return [turned_chunk(hbm, own, lanes, self.group, inverse_sb)]
        return chunks_of(hbm, own, 0, self.knobs.k_chunk, hbm.dtype, None, lanes, self.group)

    def write_normed(
        self,
        outs: list[Any],
        stream: Residual,
        weight_hbm: NkiTensor,
        eps: float,
        biases: list[NkiTensor | None],
    ) -> None:
        """As `write`, of a stream's norm."""
        if not self.divided:
            self.write(outs, self.normed(stream, weight_hbm, eps), biases)
            return
        sides = self.normed_sides(stream, weight_hbm, eps, len(self.vs))
        write_dense(outs, sides, self.vs, biases, self.knobs.linear)

    def write(self, outs: list[Any], chunks: list[Chunk], biases: list[NkiTensor | None]) -> None:
        """Write the product [M, N] of each Linear to its output, as `write_pairs`."""
        if self.by_cores:
            write_pairs(outs, chunks, self.us, self.vs, biases, self.knobs.linear)
            return
        sides = [chunks]
        if self.low_rank:
            sides = self.sides(chunks, len(self.vs))
        write_dense(outs, sides, self.vs, biases, self.knobs.linear)


def side_by_side(hbm: NkiTensor, weights: list[DecodeWeight]) -> list[NkiTensor]:
    """The columns of [M, ...] in HBM that are those of each weight."""
    parts_hbm: list[NkiTensor] = []
    start = 0
    for w in weights:
        parts_hbm.append(hbm[:, nl.ds(start, w.hbm.shape[1])])
        start += w.hbm.shape[1]
    return parts_hbm
