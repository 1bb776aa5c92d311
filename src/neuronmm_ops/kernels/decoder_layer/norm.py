"""RMSNorm of a few tokens, whose result lies as TensorE takes it."""

from __future__ import annotations

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, ncc, nisa, nl
from neuronmm_ops.kernels.stages.chunks import Chunk, TransposedChunk
from neuronmm_ops.kernels.stages.outputs import Kept
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, KPart, Span, chunk_parts


class Residual(nl.NKIObject):
    """The residual stream of all tokens, in SBUF.

    Feature start + p * tiles + j of a part is on partition p, as transposes of a K chunk lie, so
    that its norm needs none, nor a way through HBM.

    Args:
        hbm: [M, H] of its dtype, or what all ranks have of it; `load` reads it.
        ranges: of H, each of which is a K chunk; together all of it.
        group: rows of the weights that share a scale; 0: all.
    """

    def __init__(self, hbm: NkiTensor, ranges: list[Span], group: int) -> None:
        self.hbm = hbm
        self.tokens = hbm.shape[0]
        self.dtype = hbm.dtype
        self.ranges = ranges
        self.group = group
        self.features = 0
        self.parts: list[list[KPart]] = []
        for s in ranges:
            self.features += s.size
            self.parts.append(chunk_parts(s.size, group))
        # [rows, M, tiles] of each part of each range
        self.parts_sb: list[list[NkiTensor]] = []
        # and the sums of its squares, [rows, M] fp32, once they are needed
        self.squares_sb: list[list[NkiTensor]] = []

    def load(self, added_hbm: NkiTensor | None) -> None:
        """Load it, with what is added to it, if anything: of ranks the columns of this one."""
        for n in range(len(self.ranges)):
            start = self.ranges[n].start
            parts_sb: list[NkiTensor] = []
            for part in self.parts[n]:
                part_sb = self.loaded(self.hbm, start, part)
                if not is_none(added_hbm):
                    added_sb = self.loaded(added_hbm, start, part)
                    nisa.tensor_tensor(part_sb, part_sb, added_sb, nl.add)
                parts_sb.append(part_sb)
            self.parts_sb.append(parts_sb)

    def plus(self, kept: Kept) -> Residual:
        """The stream after a product whose columns each core has kept, its range.

        A core squares its own part while the other one's is on its way.
        """
        residual = Residual(self.hbm, self.ranges, self.group)
        added = kept.of_cores()
        own = nl.program_id(0) if len(added) > 1 else 0
        first = self.sums(own, added[own])
        residual.parts_sb = [first]
        residual.squares_sb = [square_sums(first)]
        if len(added) > 1:
            second = self.sums(1 - own, added[1 - own])
            at = 1 - own
            residual.parts_sb.insert(at, second)
            residual.squares_sb.insert(at, square_sums(second))
        return residual

    def sums(self, number: int, added: list[NkiTensor]) -> list[NkiTensor]:
        """The parts of a range, each plus [rows, tiles, M]."""
        sums_sb: list[NkiTensor] = []
        for i in range(len(added)):
            part_sb = self.parts_sb[number][i]
            sum_sb = nl.ndarray(part_sb.shape, dtype=self.dtype)
            nisa.tensor_tensor(sum_sb, part_sb, added[i].permute((0, 2, 1)), nl.add)
            sums_sb.append(sum_sb)
        return sums_sb

    def chunk(self, number: int, lanes: int) -> TransposedChunk:
        """The K chunk of a range, to which parts have yet to be added."""
        return TransposedChunk(self.ranges[number].start, self.parts[number], self.tokens, lanes)

    def loaded(self, hbm: NkiTensor, start: int, part: KPart) -> NkiTensor:
        """As `loaded`, of a stream."""
        whole = hbm.shape[1]
        if whole == self.features:
            return loaded(hbm, start, part)
        sb = nl.ndarray((part.rows, self.tokens, part.tiles), dtype=hbm.dtype)
        by_rank = hbm.reshape_dim(1, (whole // self.features, self.features))
        pattern = [[part.tiles, part.rows], [whole, self.tokens], [1, part.tiles]]
        first = start + part.start
        own_hbm = by_rank.ap(pattern, first, scalar_offset=ncc.rank_id(), indirect_dim=1)
        nisa.dma_copy(sb, own_hbm)
        return sb

    def store(self, hbm: NkiTensor) -> None:
        """Write the stream to [M, H]."""
        for n in range(len(self.ranges)):
            for i in range(len(self.parts[n])):
                place_hbm = place(hbm, self.ranges[n].start, self.parts[n][i])
                nisa.dma_copy(place_hbm, self.parts_sb[n][i], dge_mode=nisa.dge_mode.none)

    def normed(
        self, weight_hbm: NkiTensor, eps: float, numbers: list[int], lanes: int
    ) -> list[Chunk]:
        """The features of ranges, over their root mean square and times a weight [H]."""
        inverse_sb = self.inverse(eps)
        chunks: list[Chunk] = []
        for number in numbers:
            chunk = self.chunk(number, lanes)
            for i in range(len(chunk.parts)):
                part = chunk.parts[i]
                weight_sb = loaded(weight_hbm.expand_dim(0), chunk.start, part)
                add_normed(chunk, part, self.parts_sb[number][i], inverse_sb, weight_sb)
            chunks.append(chunk)
        return chunks

    def weighted(self, weight_hbm: NkiTensor, lanes: int) -> TransposedChunk:
        """The features times a weight [H], of one range: a rank's, before its norm is known."""
        chunk = self.chunk(0, lanes)
        for i in range(len(chunk.parts)):
            part = chunk.parts[i]
            weight_sb = loaded(weight_hbm.expand_dim(0), chunk.start, part)
            add_scaled(chunk, part, self.parts_sb[0][i], weight_sb.broadcast(1, chunk.tokens))
        return chunk

    def squares(self, ranks: int) -> NkiTensor:
        """A rank's part of mean(x^2) of each token in shared HBM, [1, M] fp32; one core writes."""
        mean_psum = self.mean(ranks)
        M = mean_psum.shape[1]
        mean_sb = nl.ndarray((1, M), dtype=nl.float32)
        hbm = nl.ndarray((1, M), dtype=nl.float32, buffer=nl.shared_hbm)
        if nl.program_id(0) == 0:
            nisa.tensor_copy(mean_sb, mean_psum[0:1, :])
            nisa.dma_copy(hbm, mean_sb)
        return hbm

    def inverse(self, eps: float) -> NkiTensor:
        """1 / sqrt(mean(x^2) + eps) of each token on every partition, [128, M] fp32."""
        return root(self.mean(1), eps)

    def mean(self, ranks: int) -> NkiTensor:
        """mean(x^2) of each token on every partition, [128, M] fp32, or what one rank adds."""
        M, H = self.tokens, self.features
        shares_sb = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.float32)
        nisa.memset(shares_sb, 1.0 / (H * ranks), engine=nisa.gpsimd_engine)
        mean_psum = nl.ndarray((PARTITIONS, M), dtype=nl.float32, buffer=nl.psum)
        started = False
        for n in range(len(self.parts_sb)):
            if n == len(self.squares_sb):
                self.squares_sb.append(square_sums(self.parts_sb[n]))
            for sums_sb in self.squares_sb[n]:
                own_sb = shares_sb[0 : sums_sb.shape[0], :]
                nisa.nc_matmul(mean_psum, own_sb, sums_sb, accumulate=started)
                started = True
        return mean_psum


def square_sums(parts_sb: list[NkiTensor]) -> list[NkiTensor]:
    """Sums of squares of each token, [rows, M] fp32, of parts [rows, M, tiles]."""
    sums_of_parts_sb: list[NkiTensor] = []
    for part_sb in parts_sb:
        squares_sb = nl.ndarray(part_sb.shape, dtype=nl.float32)
        sums_sb = nl.ndarray((part_sb.shape[0], part_sb.shape[1]), dtype=nl.float32)
        nisa.tensor_tensor(squares_sb, part_sb, part_sb, nl.multiply)
        nisa.tensor_reduce(sums_sb, nl.add, squares_sb, axis=2)
        sums_of_parts_sb.append(sums_sb)
    return sums_of_parts_sb


def root(mean: NkiTensor, eps: float) -> NkiTensor:
    """1 / sqrt(mean + eps), [128, M] fp32."""
    inverse_sb = nl.ndarray(mean.shape, dtype=nl.float32)
    nisa.tensor_scalar(inverse_sb, mean, nl.add, eps, op1=nl.power, operand1=-0.5)
    return inverse_sb


def root_of(squares_hbm: NkiTensor, eps: float) -> NkiTensor:
    """As `root`, of [1, M] in HBM, on every partition."""
    mean_sb = nl.ndarray((PARTITIONS, squares_hbm.shape[1]), dtype=nl.float32)
    nisa.dma_copy(mean_sb, squares_hbm.broadcast(0, PARTITIONS))
    return root(mean_sb, eps)


def add_normed(
    chunk: TransposedChunk,
    part: KPart,
    part_sb: NkiTensor,
    inverse_sb: NkiTensor,
    weight_sb: NkiTensor,
) -> None:
    """Add a part [rows, M, tiles], times 1 / its root mean square and a weight, to its chunk."""
    M = chunk.tokens
    scaled_sb = nl.ndarray(part_sb.shape, dtype=part_sb.dtype)
    nisa.tensor_tensor(scaled_sb, part_sb, of_tokens(inverse_sb, part), nl.multiply)
    add_scaled(chunk, part, scaled_sb, weight_sb.broadcast(1, M))


def of_tokens(inverse_sb: NkiTensor, part: KPart) -> NkiTensor:
    """A scale of each token, [128, M], for the features of a part [rows, M, tiles]."""
    return inverse_sb[0 : part.rows, :].expand_dim(2).broadcast(2, part.tiles)


def turned_chunk(
    hbm: NkiTensor, own: Span, lanes: int, group: int, inverse_sb: NkiTensor | None = None
) -> TransposedChunk:
    """Features of [M, K] in HBM, for a few tokens: a K chunk that TensorE need not transpose.

    Each token's times its `inverse_sb` [128, M].
    """
    chunk = TransposedChunk(own.start, chunk_parts(own.size, group), hbm.shape[0], lanes)
    for part in chunk.parts:
        part_sb = loaded(hbm, own.start, part)
        scale = None if is_none(inverse_sb) else of_tokens(inverse_sb, part)
        add_scaled(chunk, part, part_sb, scale)
    return chunk


def add_scaled(
    chunk: TransposedChunk, part: KPart, part_sb: NkiTensor, scale: NkiTensor | None
) -> None:
    """Add the transposes of a part [rows, M, tiles] to its chunk, times a scale of that shape."""
    tokens_sb = chunk.add(part, part_sb.dtype).permute((0, 2, 1))
    if is_none(scale):
        nisa.tensor_copy(tokens_sb, part_sb)
    else:
        nisa.tensor_tensor(tokens_sb, part_sb, scale, nl.multiply)


def place(hbm: NkiTensor, start: int, part: KPart) -> NkiTensor:
    """[rows, tokens, tiles] of a part of a K chunk that begins at `start`, in HBM."""
    own_hbm = hbm[:, nl.ds(start + part.start, part.rows * part.tiles)]
    return own_hbm.reshape_dim(1, (part.rows, part.tiles)).permute((1, 0, 2))


def loaded(hbm: NkiTensor, start: int, part: KPart) -> NkiTensor:
    """[rows, tokens, tiles] of a part of a K chunk that begins at `start`, in SBUF."""
    sb = nl.ndarray((part.rows, hbm.shape[0], part.tiles), dtype=hbm.dtype)
    nisa.dma_copy(sb, place(hbm, start, part), dge_mode=nisa.dge_mode.none)
    return sb
