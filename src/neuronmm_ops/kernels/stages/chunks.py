"""K chunks: activations of the decode kernels, transposed by TensorE a range of K at a time."""

from __future__ import annotations

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.decode_tiling import column_groups, transposes_in_bank
from neuronmm_ops.kernels.stages.facts import facts, transposed_dtype
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, KPart, Span, chunk_parts, spans


class Stack(nl.NKIObject):
    """Sums of a weight in one byte that lie one below the other: column groups of one width.

    TensorE transposes them together, and VectorE multiplies them by their scale.

    Args:
        start: the column of the weight that the first sums are of.
        source: fp32 [groups x lanes, size] in SBUF, whose partitions beyond the tokens are zero.
        groups: how many.
        lanes: partitions of each.
        tokens: of `lanes`.
        dtype: of the transposes.
        scale: fp32 [N], a factor of each column of the weight.
    """

    def __init__(
        self,
        start: int,
        source: NkiTensor,
        groups: int,
        lanes: int,
        tokens: int,
        dtype: nl.DType,
        scale: NkiTensor,
    ) -> None:
        self.start = start
        self.source = source
        self.groups = groups
        self.lanes = lanes
        self.tokens = tokens
        self.dtype = dtype
        self.scale = scale
        # [128, groups, size // 128, lanes] and [size % 128, groups, 1, lanes], those not empty
        self.transposed_sb: list[NkiTensor] = []

    def transpose(self) -> None:
        """Fill `transposed_sb`, unless that is done."""
        if len(self.transposed_sb) > 0:
            return
        size = self.source.shape[1]
        tiles = size // PARTITIONS
        whole = tiles * PARTITIONS
        if tiles > 0:
            self.transpose_columns(0, PARTITIONS, tiles)
        if whole < size:
            self.transpose_columns(whole, size - whole, 1)

    def transpose_columns(self, start: int, rows: int, tiles: int) -> None:
        """As `KChunk.transpose_columns`, all groups at once."""
        G, M, partitions = self.groups, self.tokens, self.source.shape[0]
        to_sb = nl.ndarray((rows, G, tiles, self.lanes), dtype=self.dtype)
        if self.lanes > M:
            nisa.memset(to_sb[:, 0, 0, :], 0.0, engine=nisa.gpsimd_engine)
        scale_sb = self.load_scale(start, rows, tiles)
        for group in spans(0, tiles, transposes_in_bank(partitions, 4)):
            shape = (rows, group.size, partitions + partitions % 2)
            bank_psum = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
            for i in range(group.size):
                columns = self.source[:, start + group.start + i : start + rows * tiles : tiles]
                nisa.nc_transpose(bank_psum[:, i, 0:partitions], columns)
            own = nl.ds(group.start, group.size)
            sums_psum = bank_psum[:, :, 0:partitions].reshape_dim(2, (G, self.lanes))
            factors = scale_sb[:, :, own].expand_dim(3).broadcast(3, M)
            nisa.tensor_tensor(
                to_sb[:, :, own, 0:M],
                sums_psum[:, :, :, 0:M].permute((0, 2, 1, 3)),
                factors,
                nl.multiply,
            )
        self.transposed_sb.append(to_sb)

    def load_scale(self, start: int, rows: int, tiles: int) -> NkiTensor:
        """Load the factors of sums from column `start` of each group on, as they are transposed."""
        scale_sb = nl.ndarray((rows, self.groups, tiles), dtype=nl.float32)
        size = self.source.shape[1]
        scale_hbm = self.scale[nl.ds(self.start, self.groups * size)]
        of_groups = scale_hbm.reshape_dim(0, (self.groups, size))[:, nl.ds(start, rows * tiles)]
        of_groups = of_groups.reshape_dim(1, (rows, tiles)).permute((1, 0, 2))
        nisa.dma_copy(scale_sb, of_groups, dge_mode=nisa.dge_mode.none)
        return scale_sb


class KChunk(nl.NKIObject):
    """A range of a contraction: activations [M, size], and their transposes for TensorE.

    Row p * tiles + j of the range belongs to partition p of K tile j, so that each partition reads
    neighbouring rows of the weight in one long run. What is left below 128 rows is a tile of its
    own.

    Args:
        start: the row of the weight that belongs to the first activation.
        source: [M, size] activations in HBM or SBUF.
        in_sbuf: whether they are in SBUF.
        group: the group of partitions that activations from HBM are loaded to.
        dtype: of their transposes.
        scale: fp32 [N], a factor of each activation where they are sums of a weight [K, N] in one
            byte: `start` is that of the first. They are fp32 until then.
        lanes: columns of a transpose, zero beyond the tokens in the first tile; 0: the tokens only.
        stack: what the activations are transposed with, if any.
        number: in the stack.
        scaled_rows: of the weight, that share a scale; 0: all.
    """

    def __init__(
        self,
        start: int,
        source: NkiTensor,
        in_sbuf: bool,
        group: int,
        dtype: nl.DType,
        scale: NkiTensor | None = None,
        lanes: int = 0,
        stack: Stack | None = None,
        number: int = 0,
        scaled_rows: int = 0,
    ) -> None:
        self.start = start
        self.source = source
        self.in_sbuf = in_sbuf
        self.group = group
        self.dtype = dtype
        self.scale = scale
        self.stack = stack
        self.number = number
        self.tokens = source.shape[0]
        self.lanes = max(lanes, self.tokens)
        self.size = source.shape[1]
        self.scaled_rows = scaled_rows
        self.parts = chunk_parts(self.size, scaled_rows)
        # [rows, tiles, lanes] of each part
        self.transposed_sb: list[NkiTensor] = []

    def transpose(self) -> None:
        """Fill `transposed_sb`, unless that is done."""
        if len(self.transposed_sb) > 0:
            return
        stack = self.stack
        if not is_none(stack):
            stack.transpose()
            for tiles_sb in stack.transposed_sb:
                self.transposed_sb.append(tiles_sb[:, self.number, :, :])
            return
        tokens_sb = self.source if self.in_sbuf else self.load()
        for part in self.parts:
            self.transpose_columns(tokens_sb, part.start, part.rows, part.tiles)

    def load(self) -> NkiTensor:
        """Load the activations to the partitions of the group."""
        first = self.group * PARTITIONS // column_groups(self.tokens, facts().pe_tile)
        tile_sb = nl.ndarray((first + self.tokens, self.size), dtype=self.source.dtype)
        tokens_sb = tile_sb[first : first + self.tokens, :]
        nisa.dma_copy(tokens_sb, self.source, dge_mode=nisa.dge_mode.none)
        return tokens_sb

    def transpose_columns(self, tokens_sb: NkiTensor, start: int, rows: int, tiles: int) -> None:
        """Transpose `tiles` tiles of every tiles-th column, several through one bank of PSUM.

        On gen2 TensorE writes fp32 only; the copy to SBUF converts back without loss. Factors are
        multiplied there.
        """
        M = self.tokens
        to_sb = nl.ndarray((rows, tiles, self.lanes), dtype=self.dtype)
        if self.lanes > M:
            nisa.memset(to_sb[:, 0, :], 0.0, engine=nisa.gpsimd_engine)
        scale_sb: NkiTensor | None = None
        if not is_none(self.scale):
            scale_sb = self.load_scale(self.scale, start, rows, tiles)
        in_psum = transposed_dtype(self.source.dtype)
        for group in spans(0, tiles, transposes_in_bank(M, itemsize(in_psum))):
            bank_psum = nl.ndarray((rows, group.size, M + M % 2), dtype=in_psum, buffer=nl.psum)
            for i in range(group.size):
                columns = tokens_sb[:, start + group.start + i : start + rows * tiles : tiles]
                nisa.nc_transpose(bank_psum[:, i, 0:M], columns)
            own = nl.ds(group.start, group.size)
            if is_none(scale_sb):
                evict(to_sb[:, own, 0:M], bank_psum[:, :, 0:M], 0)
            else:
                factors = scale_sb[:, own].expand_dim(2).broadcast(2, M)
                nisa.tensor_tensor(to_sb[:, own, 0:M], bank_psum[:, :, 0:M], factors, nl.multiply)
        self.transposed_sb.append(to_sb)

    def load_scale(self, scale: NkiTensor, start: int, rows: int, tiles: int) -> NkiTensor:
        """Load the factors of activations from column `start` on, laid out as their transposes."""
        scale_sb = nl.ndarray((rows, tiles), dtype=nl.float32)
        scale_hbm = scale[nl.ds(self.start + start, rows * tiles)]
        nisa.dma_copy(
            scale_sb, scale_hbm.reshape_dim(0, (rows, tiles)), dge_mode=nisa.dge_mode.none
        )
        return scale_sb

    def again(self) -> KChunk:
        """The same activations, not transposed: SBUF of their transposes can be freed."""
        return KChunk(
            self.start,
            self.source,
            self.in_sbuf,
            self.group,
            self.dtype,
            self.scale,
            self.lanes,
            self.stack,
            self.number,
            self.scaled_rows,
        )


class TransposedChunk(nl.NKIObject):
    """A K chunk of activations that are made transposed.

    Args:
        start: of the rows of a weight that they are multiplied by.
        parts: of those rows.
        tokens: M.
        lanes: as of `KChunk`.
    """

    def __init__(self, start: int, parts: list[KPart], tokens: int, lanes: int) -> None:
        self.start = start
        self.parts = parts
        self.tokens = tokens
        self.lanes = max(lanes, tokens)
        # [rows, tiles, lanes] of each part
        self.transposed_sb: list[NkiTensor] = []

    def add(self, part: KPart, dtype: nl.DType) -> NkiTensor:
        """Add the next part, [rows, tiles, M], which has yet to be written."""
        to_sb = nl.ndarray((part.rows, part.tiles, self.lanes), dtype=dtype)
        if self.lanes > self.tokens:
            nisa.memset(to_sb[:, 0, :], 0.0, engine=nisa.gpsimd_engine)
        self.transposed_sb.append(to_sb)
        return to_sb[:, :, 0 : self.tokens]

    def transpose(self) -> None:
        """All are."""

    def again(self) -> TransposedChunk:
        """Itself: nothing is made again."""
        return self


Chunk = KChunk | TransposedChunk
"""What a product contracts."""


def chunks_of(
    x_hbm: NkiTensor,
    part: Span,
    start: int,
    width: int,
    dtype: nl.DType,
    scale: NkiTensor | None = None,
    lanes: int = 0,
    scaled_rows: int = 0,
) -> list[Chunk]:
    """Columns `part` of activations [M, K] in HBM as K chunks of `width`.

    `start` is the row of the weight that belongs to column 0. `dtype`, `scale`, `lanes` and
    `scaled_rows` are as in `KChunk`.
    """
    chunks: list[Chunk] = []
    groups = column_groups(x_hbm.shape[0], facts().pe_tile)
    for s in spans(part.start, part.size, width):
        group = groups - 1 - len(chunks) % groups
        columns_hbm = x_hbm[:, nl.ds(s.start, s.size)]
        at = start + s.start
        chunk = KChunk(at, columns_hbm, False, group, dtype, scale, lanes, scaled_rows=scaled_rows)
        chunks.append(chunk)
    return chunks


def evict(to_sb: NkiTensor, bank_psum: NkiTensor, number: int) -> None:
    """Copy PSUM to SBUF: on ScalarE, every even `number` on VectorE.

    Where the two exclude each other on PSUM, all on ScalarE, which is the faster.
    """
    if facts().shared_ports or number % 2 == 1:
        nisa.activation(to_sb, nl.copy, bank_psum)
    else:
        nisa.tensor_copy(to_sb, bank_psum)


def itemsize(dtype: nl.DType) -> int:
    """Bytes of an element."""
    if dtype == nl.bfloat16 or dtype == nl.float16:
        return 2
    return 4 if dtype == nl.float32 else 1
