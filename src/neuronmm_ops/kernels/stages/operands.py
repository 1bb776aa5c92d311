"""Operands of the prefill kernels: tiles of activations and of weights, loaded where they are used.

Each tile is in SBUF of its own, so that tiles are fetched ahead as far as there is room.
"""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.chunks import itemsize
from neuronmm_ops.kernels.stages.facts import transposed_dtype
from neuronmm_ops.kernels.stages.half_bytes import HalfBytes
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    KEPT_COLUMNS,
    PARTITIONS,
    STAGED_TILES,
    Span,
    spans,
    tiles_in,
    unit_tiles,
    units_in,
)
from neuronmm_ops.kernels.stages.weights import (
    as_read,
    check_scale,
    group_of,
    is_multiplied,
    rows_of,
)

Tiles = list[NkiTensor]


class TiledOperand(nl.NKIObject):
    """One side of a matmul, [size, width], in tiles of 128 rows of the contraction.

    Args:
        source_hbm: tensor in HBM, or None where `tiles_sb` holds everything.
        rows: of the contraction, in `source_hbm`.
        columns: of `source_hbm`; of x, tokens.
        resident: how many tiles stay in SBUF; the others are loaded again for each use.
        layout: how `source_hbm` lies: "rows" [size, columns], or tokens first [columns, size],
            transposed by the "dma" engines or by the "pe".
        split: each group of tokens has tiles of its own.
        dtype: of the tiles, to which DMAs cast; None is that of `source_hbm`.
        halves: what makes tiles of bytes, of a weight in int4.
    """

    def __init__(
        self,
        source_hbm: NkiTensor | None,
        rows: Span,
        columns: Span,
        resident: int,
        layout: str = "rows",
        split: bool = False,
        dtype: nl.DType | None = None,
        halves: HalfBytes | None = None,
    ) -> None:
        self.source_hbm: Any = source_hbm
        self.halves: Any = halves
        self.dtype = dtype
        self.rows = rows
        self.columns = columns
        self.resident = resident
        self.layout = layout
        self.split = split
        self.size = rows.size
        self.width = columns.size
        self.count = tiles_in(rows.size, PARTITIONS)
        self.tiles_sb: Tiles = []
        # the next tile, where TensorE transposes
        self.ahead_sb: Tiles = []
        # token rows that several tiles are transposed from, and the number of these rows
        self.staged_sb: Tiles = []
        self.staged = -1

    def part(self, rows: Span, columns: Span) -> TiledOperand:
        """Some rows and columns with tiles of their own; itself where it is not split."""
        if not self.split:
            return self
        own_rows = Span(self.rows.start + rows.start, rows.size)
        own_columns = Span(self.columns.start + columns.start, columns.size)
        return TiledOperand(self.source_hbm, own_rows, own_columns, self.resident, self.layout)

    def tile(self, k: int) -> NkiTensor:
        """Tile k, [<=128, width], in SBUF; tiles are first asked for in order.

        TensorE transposes a tile ahead, so that it multiplies while that is evicted from PSUM.
        """
        if k < len(self.tiles_sb):
            return self.tiles_sb[k]
        tile_sb = self.ahead_sb[0] if len(self.ahead_sb) > 0 else self.load(k)
        if k < self.resident:
            self.tiles_sb.append(tile_sb)
        self.ahead_sb = []
        if self.layout == "pe" and k + 1 < self.count:
            self.ahead_sb.append(self.load(k + 1))
        return tile_sb

    def load(self, k: int) -> NkiTensor:
        """Tile k from HBM."""
        if not is_none(self.halves):
            return self.unpack(k)
        size = min(PARTITIONS, self.size - k * PARTITIONS)
        rows = nl.ds(self.rows.start + k * PARTITIONS, size)
        columns = nl.ds(self.columns.start, self.width)
        dtype = self.source_hbm.dtype if is_none(self.dtype) else self.dtype
        tile_sb = nl.ndarray((size, self.width), dtype=dtype)
        if self.layout == "rows":
            nisa.dma_copy(tile_sb, self.source_hbm[rows, columns], dge_mode=nisa.dge_mode.none)
        elif self.layout == "dma":
            nisa.dma_transpose(tile_sb, self.source_hbm[columns, rows])
        else:
            self.stage(k // STAGED_TILES)
            self.transpose(tile_sb, k)
        return tile_sb

    def unpack(self, k: int) -> NkiTensor:
        """Tile k of a weight in int4."""
        size = min(PARTITIONS, self.size - k * PARTITIONS)
        start = self.rows.start + k * PARTITIONS
        columns = nl.ds(self.columns.start, self.width)
        bytes_hbm = self.source_hbm[nl.ds(start // 2, size // 2), columns]
        return self.halves.tile(bytes_hbm, start, self.columns)

    def stage(self, number: int) -> None:
        """Load the token rows of `STAGED_TILES` tiles, where they are not in SBUF."""
        if number == self.staged:
            return
        self.staged = number
        self.staged_sb = []
        first = number * STAGED_TILES * PARTITIONS
        size = min(STAGED_TILES * PARTITIONS, self.size - first)
        mode = nisa.dge_mode.none
        if self.source_hbm.is_indirect():  # in a loop of the device: hardware makes the stores'
            mode = nisa.dge_mode.swdge
        for t in spans(self.columns.start, self.width, PARTITIONS):
            rows_sb = nl.ndarray((t.size, size), dtype=self.source_hbm.dtype)
            columns = nl.ds(self.rows.start + first, size)
            nisa.dma_copy(rows_sb, self.source_hbm[nl.ds(t.start, t.size), columns], dge_mode=mode)
            self.staged_sb.append(rows_sb)

    def transpose(self, tile_sb: NkiTensor, k: int) -> None:
        """Fill tile k from staged token rows, by TensorE."""
        size = tile_sb.shape[0]
        own = nl.ds(k % STAGED_TILES * PARTITIONS, size)
        for c in spans(0, self.width, BANK_COLUMNS):
            bank_psum = nl.ndarray((size, c.size), transposed_dtype(tile_sb.dtype), buffer=nl.psum)
            for t in spans(0, c.size, PARTITIONS):
                rows_sb = self.staged_sb[(c.start + t.start) // PARTITIONS]
                nisa.nc_transpose(bank_psum[:, nl.ds(t.start, t.size)], rows_sb[:, own])
            evict(tile_sb[:, nl.ds(c.start, c.size)], bank_psum, 0, 1)


class Weight(nl.NKIObject):
    """A weight [K, N] in HBM and, where it has one byte an element, the scales of its columns.

    Args:
        source_hbm: [K, N], of the dtype of activations or of a storage.
        scale_hbm: [N], fp32, or None.
        dtype: of the activations it is multiplied with, and of the product.
    """

    def __init__(self, source_hbm: NkiTensor, scale_hbm: NkiTensor | None, dtype: nl.DType) -> None:
        self.source_hbm = as_read(source_hbm)
        self.scale_hbm: Any = scale_hbm
        self.scaled = not is_none(scale_hbm)
        self.dtype = dtype
        # DMAs cast what TensorE does not multiply as it is
        self.tile_dtype = dtype
        self.halves: Any = None
        if self.scaled:
            check_scale(source_hbm, self.scale_hbm)
            if is_multiplied(source_hbm, dtype):
                self.tile_dtype = self.source_hbm.dtype
            if group_of(source_hbm) > 0:  # multiplied before the sum, and nobody else sees them
                self.halves = HalfBytes(self.scale_hbm, dtype)
                self.scaled = False
        else:
            assert itemsize(source_hbm.dtype) > 1, (
                f"{source_hbm.dtype} weights need scales of their columns; got none"
            )
        self.size = rows_of(source_hbm)
        self.width = source_hbm.shape[1]
        self.columns_sb: Tiles = []
        self.row_sb: Tiles = []

    def keep(self, rows: int) -> None:
        """Load now what stays in SBUF: scales of columns, or with `rows` the row of scales."""
        if rows == 0:
            self.column_scale(0)
        elif self.width <= KEPT_COLUMNS:
            self.row_scale(Span(0, self.width), rows)

    def block(self, rows: Span, columns: Span) -> TiledOperand:
        """Some rows and columns; all their tiles stay while they are used."""
        count = tiles_in(rows.size, PARTITIONS)
        dtype, halves = self.tile_dtype, self.halves
        return TiledOperand(self.source_hbm, rows, columns, count, dtype=dtype, halves=halves)

    def paired(self, columns: Span) -> PairedWeight:
        """All rows of some columns in fp8, two rows a partition."""
        return PairedWeight(self.source_hbm, columns)

    def column_scale(self, k: int) -> Any:
        """Scales of columns from 128 k on, a partition each, [<=128, 1]; None without scales."""
        if not self.scaled:
            return None
        if len(self.columns_sb) == 0:
            self.load_column_scales()
        rows = min(PARTITIONS, self.width - k * PARTITIONS)
        return self.columns_sb[0][:rows, nl.ds(k, 1)]

    def load_column_scales(self) -> None:
        """Scales of 128 columns side by side; they stay in SBUF for the whole kernel."""
        full, rest = self.width // PARTITIONS, self.width % PARTITIONS
        tile_sb = nl.ndarray((PARTITIONS, full + (rest > 0)), dtype=nl.float32)
        if full > 0:
            pattern = [[1, PARTITIONS], [PARTITIONS, full]]
            source = self.scale_hbm.ap(pattern)
            nisa.dma_copy(tile_sb[:, nl.ds(0, full)], source, dge_mode=nisa.dge_mode.none)
        if rest > 0:
            source = self.scale_hbm.ap([[1, rest], [1, 1]], offset=full * PARTITIONS)
            nisa.dma_copy(tile_sb[:rest, nl.ds(full, 1)], source, dge_mode=nisa.dge_mode.none)
        self.columns_sb.append(tile_sb)

    def row_scale(self, columns: Span, rows: int) -> Any:
        """Scales of `columns` on each of `rows` partitions; None without scales."""
        if not self.scaled:
            return None
        if self.width > KEPT_COLUMNS:
            return load_row(self.scale_hbm, columns, rows)
        if len(self.row_sb) == 0:  # of the first block, no other has more tokens
            self.row_sb.append(load_row(self.scale_hbm, Span(0, self.width), rows))
        return self.row_sb[0][:rows, nl.ds(columns.start, columns.size)]


def fp8(weights: list[Weight]) -> nl.DType:
    """The dtype of weights that are all fp8."""
    for w in weights:
        stored = w.source_hbm.dtype
        is_fp8 = stored == nl.float8_e4m3 or stored == nl.float8_e4m3fn
        assert is_fp8, f"double_row needs float8_e4m3fn weights, got {stored}"
    return weights[0].source_hbm.dtype


class PairedWeight(nl.NKIObject):
    """Columns of a weight in fp8, in tiles [128, 2, width], the last ones [<=128, width].

    Args:
        source_hbm: [K, N].
        columns: of it.
    """

    def __init__(self, source_hbm: NkiTensor, columns: Span) -> None:
        self.source_hbm = source_hbm
        self.columns = columns
        self.count = units_in(source_hbm.shape[0])
        self.tiles_sb: Tiles = []

    def tile(self, unit: int) -> NkiTensor:
        """Rows of a unit in SBUF; units are first asked for in order."""
        if unit == len(self.tiles_sb):
            self.tiles_sb.append(self.load(unit))
        return self.tiles_sb[unit]

    def load(self, unit: int) -> NkiTensor:
        """A unit from HBM."""
        size = self.source_hbm.shape[0]
        tiles = unit_tiles(size, unit)
        first = tiles.start * PARTITIONS
        rows = min(PARTITIONS, size - first)
        columns = nl.ds(self.columns.start, self.columns.size)
        source = self.source_hbm[nl.ds(first, tiles.size * rows), columns]
        shape = (rows, self.columns.size)
        if tiles.size == 2:
            shape = (rows, 2, self.columns.size)
            source = source.reshape_dim(0, (2, rows)).permute((1, 0, 2))
        tile_sb = nl.ndarray(shape, dtype=self.source_hbm.dtype)
        nisa.dma_copy(tile_sb, source, dge_mode=nisa.dge_mode.none)
        return tile_sb


def load_row(row_hbm: NkiTensor, columns: Span, rows: int) -> NkiTensor:
    """row[columns] of a bias or of scales on each of `rows` partitions."""
    row_sb = nl.ndarray((rows, columns.size), dtype=row_hbm.dtype)
    row = row_hbm.reshape((1, row_hbm.shape[0]))[:, nl.ds(columns.start, columns.size)]
    nisa.dma_copy(row_sb, row.broadcast(0, rows), dge_mode=nisa.dge_mode.none)
    return row_sb


def in_sbuf(tiles_sb: Tiles, size: int) -> TiledOperand:
    """An operand of `tiles_sb`, 128 rows each, [size, width] together."""
    operand = TiledOperand(None, Span(0, size), Span(0, tiles_sb[0].shape[1]), len(tiles_sb))
    operand.tiles_sb = tiles_sb
    return operand


def evict(
    dst_sb: NkiTensor, sums_psum: NkiTensor, number: int, engines: int, scale_sb: Any = None
) -> None:
    """PSUM to SBUF: by ScalarE, every other `number` by VectorE where two engines share.

    Each partition is multiplied by its scale in `scale_sb` [<=128, 1], if any.
    """
    if number % engines == 0:
        if is_none(scale_sb):
            nisa.activation(dst_sb, nl.copy, sums_psum)
        else:
            nisa.activation(dst_sb, nl.copy, sums_psum, scale=scale_sb)
    elif is_none(scale_sb):
        nisa.tensor_copy(dst_sb, sums_psum)
    else:
        nisa.tensor_scalar(dst_sb, sums_psum, nl.multiply, scale_sb)
