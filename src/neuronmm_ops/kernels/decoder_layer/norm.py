"""RMSNorm of a few tokens, whose result lies as TensorE takes it."""

from __future__ import annotations

from neuronmm_ops.kernels.decoder_layer.ranks import TensorParallel
from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.chunks import KChunk
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, KPart, Span


class Residual(nl.NKIObject):
    """The residual stream x + added of all tokens, in SBUF.

    Feature start + p * tiles + j of a part is on partition p, as transposes of a K chunk lie, so
    that its norm needs none, nor a way through HBM.

    Args:
        x_hbm: [M, H].
        added_hbm: [M, H], or None.
        ranges: of H, each of which is a K chunk; together all of it.
        lanes: of the K chunks.
        group: rows of the weights that share a scale; 0: all.
    """

    def __init__(
        self,
        x_hbm: NkiTensor,
        added_hbm: NkiTensor | None,
        ranges: list[Span],
        lanes: int,
        group: int,
    ) -> None:
        self.x_hbm = x_hbm
        self.added_hbm = added_hbm
        self.chunks: list[KChunk] = []
        # [rows, M, tiles] of each part of each chunk
        self.parts_sb: list[list[NkiTensor]] = []
        for s in ranges:
            own_hbm = x_hbm[:, nl.ds(s.start, s.size)]
            dtype = x_hbm.dtype
            chunk = KChunk(s.start, own_hbm, False, 0, dtype, None, lanes, scaled_rows=group)
            parts_sb: list[NkiTensor] = []
            for part in chunk.parts:
                part_sb = loaded(x_hbm, s.start, part)
                if not is_none(added_hbm):
                    added_sb = loaded(added_hbm, s.start, part)
                    nisa.tensor_tensor(part_sb, part_sb, added_sb, nl.add)
                parts_sb.append(part_sb)
            self.chunks.append(chunk)
            self.parts_sb.append(parts_sb)

    def store(self, hbm: NkiTensor) -> None:
        """Write the stream to [M, H]."""
        for n in range(len(self.chunks)):
            chunk = self.chunks[n]
            for i in range(len(chunk.parts)):
                place_hbm = place(hbm, chunk.start, chunk.parts[i])
                nisa.dma_copy(place_hbm, self.parts_sb[n][i], dge_mode=nisa.dge_mode.none)

    def normed(self, weight_hbm: NkiTensor, eps: float, number: int) -> KChunk:
        """The features of a range, over their root mean square and times a weight [H]."""
        chunk = self.chunks[number]
        inverse_sb = self.inverse(eps)
        for i in range(len(chunk.parts)):
            part = chunk.parts[i]
            weight_sb = loaded(weight_hbm.expand_dim(0), chunk.start, part)
            add_normed(chunk, part, self.parts_sb[number][i], inverse_sb, weight_sb)
        return chunk

    def normed_of(self, ranks: TensorParallel, weight_hbm: NkiTensor, eps: float) -> KChunk:
        """As `normed`, of this rank's features, from 0 on: its weights have no other rows."""
        whole = self.chunks[0]
        own_hbm = self.x_hbm[:, 0 : self.x_hbm.shape[1] // ranks.count]  # for its shape
        lanes, rows = whole.lanes, whole.scaled_rows
        chunk = KChunk(0, own_hbm, False, 0, own_hbm.dtype, None, lanes, scaled_rows=rows)
        inverse_sb = self.inverse(eps)
        for part in chunk.parts:
            part_sb = ranks.loaded(self.x_hbm, part)
            if not is_none(self.added_hbm):
                added_sb = ranks.loaded(self.added_hbm, part)
                nisa.tensor_tensor(part_sb, part_sb, added_sb, nl.add)
            weight_sb = ranks.loaded(weight_hbm.expand_dim(0), part)
            add_normed(chunk, part, part_sb, inverse_sb, weight_sb)
        return chunk

    def inverse(self, eps: float) -> NkiTensor:
        """1 / sqrt(mean(x^2) + eps) of each token on every partition, [128, M] fp32."""
        M, H = self.x_hbm.shape
        shares_sb = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.float32)
        nisa.memset(shares_sb, 1.0 / H, engine=nisa.gpsimd_engine)
        mean_psum = nl.ndarray((PARTITIONS, M), dtype=nl.float32, buffer=nl.psum)
        started = False
        for parts_sb in self.parts_sb:
            for part_sb in parts_sb:
                rows = part_sb.shape[0]
                squares_sb = nl.ndarray(part_sb.shape, dtype=nl.float32)
                sums_sb = nl.ndarray((rows, M), dtype=nl.float32)
                nisa.tensor_tensor(squares_sb, part_sb, part_sb, nl.multiply)
                nisa.tensor_reduce(sums_sb, nl.add, squares_sb, axis=2)
                nisa.nc_matmul(mean_psum, shares_sb[0:rows, :], sums_sb, accumulate=started)
                started = True
        inverse_sb = nl.ndarray((PARTITIONS, M), dtype=nl.float32)
        nisa.tensor_scalar(inverse_sb, mean_psum, nl.add, eps, op1=nl.power, operand1=-0.5)
        return inverse_sb


def add_normed(
    chunk: KChunk, part: KPart, part_sb: NkiTensor, inverse_sb: NkiTensor, weight_sb: NkiTensor
) -> None:
    """Add a part [rows, M, tiles], times 1 / its root mean square and a weight, to its chunk."""
    M = chunk.tokens
    scaled_sb = nl.ndarray(part_sb.shape, dtype=part_sb.dtype)
    inverse = inverse_sb[0 : part.rows, :].expand_dim(2).broadcast(2, part.tiles)
    nisa.tensor_tensor(scaled_sb, part_sb, inverse, nl.multiply)
    to_sb = nl.ndarray((part.rows, part.tiles, chunk.lanes), dtype=part_sb.dtype)
    if chunk.lanes > M:
        nisa.memset(to_sb[:, 0, :], 0.0, engine=nisa.gpsimd_engine)
    tokens_sb = to_sb[:, :, 0:M].permute((0, 2, 1))
    nisa.tensor_tensor(tokens_sb, scaled_sb, weight_sb.broadcast(1, M), nl.multiply)
    chunk.transposed_sb.append(to_sb)
    chunk.made_transposed = True


def turned_chunk(hbm: NkiTensor, own: Span, lanes: int, group: int) -> KChunk:
    """Features of [M, K] in HBM, for a few tokens: a K chunk that TensorE need not transpose."""
    own_hbm = hbm[:, nl.ds(own.start, own.size)]
    chunk = KChunk(own.start, own_hbm, False, 0, hbm.dtype, None, lanes, scaled_rows=group)
    for part in chunk.parts:
        add_turned(chunk, part, loaded(hbm, own.start, part))
    return chunk


def own_chunk(hbm: NkiTensor, ranks: TensorParallel, lanes: int, group: int) -> KChunk:
    """As `turned_chunk`, of this rank's columns, which its weights have rows of from 0 on."""
    own_hbm = hbm[:, 0 : hbm.shape[1] // ranks.count]  # for its shape
    chunk = KChunk(0, own_hbm, False, 0, hbm.dtype, None, lanes, scaled_rows=group)
    for part in chunk.parts:
        add_turned(chunk, part, ranks.loaded(hbm, part))
    return chunk


def add_turned(chunk: KChunk, part: KPart, part_sb: NkiTensor) -> None:
    """Add the transposes of a part [rows, M, tiles] to its chunk."""
    M = chunk.tokens
    to_sb = nl.ndarray((part.rows, part.tiles, chunk.lanes), dtype=part_sb.dtype)
    if chunk.lanes > M:
        nisa.memset(to_sb[:, 0, :], 0.0, engine=nisa.gpsimd_engine)
    nisa.tensor_copy(to_sb[:, :, 0:M].permute((0, 2, 1)), part_sb)
    chunk.transposed_sb.append(to_sb)
    chunk.made_transposed = True


def place(hbm: NkiTensor, start: int, part: KPart) -> NkiTensor:
    """[rows, tokens, tiles] of a part of a K chunk that begins at `start`, in HBM."""
    own_hbm = hbm[:, nl.ds(start + part.start, part.rows * part.tiles)]
    return own_hbm.reshape_dim(1, (part.rows, part.tiles)).permute((1, 0, 2))


def loaded(hbm: NkiTensor, start: int, part: KPart) -> NkiTensor:
    """[rows, tokens, tiles] of a part of a K chunk that begins at `start`, in SBUF."""
    sb = nl.ndarray((part.rows, hbm.shape[0], part.tiles), dtype=hbm.dtype)
    nisa.dma_copy(sb, place(hbm, start, part), dge_mode=nisa.dge_mode.none)
    return sb
