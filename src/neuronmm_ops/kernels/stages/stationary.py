"""Stages of the decode kernels with stationary weights, whose time column groups do not change.

x^T moves past [128, 128] tiles of a weight: 64 cycles of TensorE a tile for up to 64 tokens, which
is less than a tile of one byte takes to load on most cores. Sums come out as [columns, M], as the
next product contracts them; the output alone is transposed back.
"""

from __future__ import annotations

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.chunks import Chunk, evict, itemsize
from neuronmm_ops.kernels.stages.decode_tiling import ColumnTile, Loads, turned_tiles, waited_bytes
from neuronmm_ops.kernels.stages.facts import facts, transposed_dtype
from neuronmm_ops.kernels.stages.tiling import BANK_COLUMNS, PARTITIONS, Span, spans
from neuronmm_ops.kernels.stages.weights import DecodeWeight


class Turned(nl.NKIObject):
    """Activations, transposed: `sb` [rows, tiles, M]; row p of tile j is start + p * tiles + j."""

    def __init__(self, start: int, sb: NkiTensor) -> None:
        self.start = start
        self.sb = sb


class TurnedSums(nl.NKIObject):
    """Sums [columns, M] of some columns of a weight times activations, in PSUM.

    Args:
        weight: of N columns.
        tiles: of N, which columns.
        M: tokens.
    """

    def __init__(self, weight: DecodeWeight, tiles: list[ColumnTile], M: int) -> None:
        assert weight.group == 0, "weights in int4 are not stationary; leave stationary out"
        self.weight = weight
        self.tiles = tiles
        self.tokens = M
        last = tiles[len(tiles) - 1]
        self.columns = Span(tiles[0].start, last.start + last.rows * last.count - tiles[0].start)
        self.slots = last.slot + last.count
        self.banks_psum: list[NkiTensor] = []
        for s in spans(0, self.slots, BANK_COLUMNS // M):
            shape = (PARTITIONS, s.size, M)
            self.banks_psum.append(nl.ndarray(shape, nl.float32, buffer=nl.psum))
        self.started = False
        self.seen = 0  # K tiles
        # of each tile, or none; TensorE transposes them while it waits for the weights
        self.factors_sb: list[NkiTensor] = []
        if not is_none(weight.scale):
            for tile in tiles:
                self.factors_sb.append(self.loaded_factors(weight.scale, tile))
        # by this core, and from the other one
        self.sent_sb: list[NkiTensor] = []
        self.received_sb: list[NkiTensor] = []

    def psum(self, tile: ColumnTile) -> NkiTensor:
        """[rows, count, M] of a tile's sums."""
        per = BANK_COLUMNS // self.tokens
        bank_psum = self.banks_psum[tile.slot // per]
        return bank_psum[0 : tile.rows, nl.ds(tile.slot % per, tile.count), :]

    def add(self, turned: Turned, loads: Loads, first: bool, last: bool, stage_ends: bool) -> None:
        """Stream the weight rows of activations as `loads` cuts them, and multiply them."""
        rows, count, _ = turned.sb.shape
        rows_hbm = self.weight.hbm[nl.ds(turned.start, rows * count), :]
        rows_hbm = rows_hbm.reshape_dim(0, (rows, count))
        row_bytes = self.columns.size * itemsize(self.weight.hbm.dtype)
        least = waited_bytes(facts().slow_short_runs) if stage_ends else 0
        for s in loads.tiles(count, row_bytes, first, last, least):
            by_dma = self.weight.cast_by_dma(self.seen, s.size)
            tile_hbm = rows_hbm[:, nl.ds(s.start, s.size), :]
            loaded = self.weight.loaded(tile_hbm, self.columns, by_dma)
            for j in range(s.size):
                self.add_row(loaded[j], turned.sb[:, s.start + j, :])
            self.seen += s.size

    def add_row(self, weight_sb: NkiTensor, moving_sb: NkiTensor) -> None:
        """sums (+)= weight [k, columns]^T . moving [k, M]."""
        for tile in self.tiles:
            sums_psum = self.psum(tile)
            start = tile.start - self.columns.start
            for i in range(tile.count):
                columns = weight_sb[:, nl.ds(start + i * tile.rows, tile.rows)]
                if tile.strided:
                    end = start + tile.rows * tile.count
                    columns = weight_sb[:, start + i : end : tile.count]
                nisa.nc_matmul(sums_psum[:, i, :], columns, moving_sb, accumulate=self.started)
        self.started = True

    def send(self) -> None:
        """Send the sums, times their factors, to the other core, and receive its, in fp32."""
        shape = (PARTITIONS, self.slots, self.tokens)
        sent_sb = nl.ndarray(shape, dtype=nl.float32)
        received_sb = nl.ndarray(shape, dtype=nl.float32)
        for i in range(len(self.tiles)):
            tile = self.tiles[i]
            if tile.rows < PARTITIONS or not self.started:
                nisa.memset(sent_sb[:, nl.ds(tile.slot, tile.count), :], 0.0)
            if self.started:
                scaled(self.like(sent_sb, tile), self.psum(tile), self.factors(i), i)
        other = 1 - nl.program_id(0)
        nisa.sendrecv(sent_sb, received_sb, other, other, 0)
        self.sent_sb.append(sent_sb)
        self.received_sb.append(received_sb)

    def like(self, tile_sb: NkiTensor, tile: ColumnTile) -> NkiTensor:
        """[rows, count, M] of a tile in SBUF [128, slots, M]."""
        return tile_sb[0 : tile.rows, nl.ds(tile.slot, tile.count), :]

    def rounded(self) -> list[Turned]:
        """The sums, over both cores where they have been sent, as the next product takes them."""
        parts: list[Turned] = []
        for i in range(len(self.tiles)):
            tile = self.tiles[i]
            to_sb = nl.ndarray((tile.rows, tile.count, self.tokens), dtype=self.weight.dtype)
            if len(self.sent_sb) == 0:
                scaled(to_sb, self.psum(tile), self.factors(i), i)
            else:
                mine, other = self.like(self.sent_sb[0], tile), self.like(self.received_sb[0], tile)
                nisa.tensor_tensor(to_sb, other, mine, nl.add)
            parts.append(Turned(tile.start, to_sb))
        return parts

    def factors(self, number: int) -> NkiTensor | None:
        """A weight's scale as a tile's columns lie, [rows, count, M]; None where there is none."""
        return self.factors_sb[number] if len(self.factors_sb) > 0 else None

    def loaded_factors(self, scale: NkiTensor, tile: ColumnTile) -> NkiTensor:
        """A scale [N] as a tile's columns lie, [rows, count, M]."""
        if not tile.strided:
            return spread(turned_row(scale, tile), self.tokens)
        scale_sb = nl.ndarray((tile.rows, tile.count), dtype=nl.float32)
        scale_hbm = scale[nl.ds(tile.start, tile.rows * tile.count)]
        scale_hbm = scale_hbm.reshape_dim(0, (tile.rows, tile.count))
        nisa.dma_copy(scale_sb, scale_hbm, dge_mode=nisa.dge_mode.none)
        return spread(scale_sb, self.tokens)


def spread(factors_sb: NkiTensor, M: int) -> NkiTensor:
    """[rows, count] for each of M tokens."""
    return factors_sb.expand_dim(2).broadcast(2, M)


def scaled(to_sb: NkiTensor, sums: NkiTensor, factors_sb: NkiTensor | None, number: int) -> None:
    """Take sums to SBUF, times their factors, if any; `number` as `evict`."""
    if is_none(factors_sb):
        evict(to_sb, sums, number)
    else:
        nisa.tensor_tensor(to_sb, sums, factors_sb, nl.multiply)


def turned_row(row_hbm: NkiTensor, tile: ColumnTile) -> NkiTensor:
    """Numbers of a tile's columns, which follow one another, as fp32 [rows, count]."""
    lines_sb = nl.ndarray((tile.count, tile.rows), dtype=row_hbm.dtype)
    lines_hbm = row_hbm[nl.ds(tile.start, tile.rows * tile.count)]
    lines_hbm = lines_hbm.reshape_dim(0, (tile.count, tile.rows))
    nisa.dma_copy(lines_sb, lines_hbm, dge_mode=nisa.dge_mode.none)
    shape = (tile.rows, tile.count)
    turned_psum = nl.ndarray(shape, dtype=transposed_dtype(row_hbm.dtype), buffer=nl.psum)
    nisa.nc_transpose(turned_psum, lines_sb)
    turned_sb = nl.ndarray(shape, dtype=nl.float32)
    evict(turned_sb, turned_psum, 0)
    return turned_sb


def turned(chunks: list[Chunk]) -> list[Turned]:
    """K chunks, transposed."""
    parts: list[Turned] = []
    for chunk in chunks:
        chunk.transpose()
        start = chunk.start
        for tiles_sb in chunk.transposed_sb:
            parts.append(Turned(start, tiles_sb))
            start += tiles_sb.shape[0] * tiles_sb.shape[1]
    return parts


def contract_turned(
    activations: list[Turned], sums: TurnedSums, loads: Loads, first: bool, last: bool
) -> None:
    """Add all activations to the sums; `first` and `last` as `write_turned`."""
    for i in range(len(activations)):
        ends = i + 1 == len(activations)
        sums.add(activations[i], loads, first and i == 0, last and ends, ends and not last)


def project_turned(
    activations: list[Turned],
    weights: list[DecodeWeight],
    rank_block: int,
    loads: Loads,
    M: int,
) -> list[list[Turned]]:
    """For each weight [K, r] its product with the activations, over both cores.

    `rank_block` columns of a weight are summed in a pass. All sums are sent before any is added:
    VectorE would wait for what the other core sends before it takes the next ones from PSUM.
    """
    products: list[list[Turned]] = []
    sent: list[list[TurnedSums]] = []
    for w in weights:
        of_weight: list[Turned] = []
        of_sent: list[TurnedSums] = []
        for columns in spans(0, w.hbm.shape[1], rank_block):
            sums = TurnedSums(w, turned_tiles(columns, M), M)
            contract_turned(activations, sums, loads, True, False)
            if nl.num_programs(0) > 1:
                sums.send()
                of_sent.append(sums)
            else:
                of_weight.extend(sums.rounded())
        products.append(of_weight)
        sent.append(of_sent)
    for n in range(len(weights)):
        for sums in sent[n]:
            products[n].extend(sums.rounded())
    return products


def rounded_turned(to_sb: NkiTensor, sums: TurnedSums, number: int, bias: NkiTensor | None) -> None:
    """Take a tile of sums to SBUF [rows, count, M], times their factors and plus a bias [N]."""
    tile = sums.tiles[number]
    if is_none(bias):
        scaled(to_sb, sums.psum(tile), sums.factors(number), 0)
        return
    wide_sb = nl.ndarray(to_sb.shape, dtype=nl.float32)
    scaled(wide_sb, sums.psum(tile), sums.factors(number), 0)
    nisa.tensor_tensor(to_sb, wide_sb, spread(turned_row(bias, tile), sums.tokens), nl.add)


def rounded_output(
    sums: TurnedSums, number: int, bias: NkiTensor | None, dtype: nl.DType
) -> NkiTensor:
    """A tile of the output, [rows, groups, M, lines]: a group's tiles are transposed together."""
    M, tile = sums.tokens, sums.tiles[number]
    lines = tile.lines(M)
    split = (tile.count // lines, lines)
    sums_psum = sums.psum(tile).reshape_dim(1, split)
    factors_sb = sums.factors(number)
    if not is_none(factors_sb):
        factors_sb = factors_sb.reshape_dim(1, split)
    rounded_sb = nl.ndarray((tile.rows, split[0], M, lines), dtype=dtype)
    to_sb = rounded_sb.permute((0, 1, 3, 2))
    if is_none(bias):
        scaled(to_sb, sums_psum, factors_sb, 0)
        return rounded_sb
    bias_sb = spread(turned_row(bias, tile), M).reshape_dim(1, split)
    if not is_none(factors_sb):
        wide_sb = nl.ndarray((tile.rows, split[0], lines, M), dtype=nl.float32)
        scaled(wide_sb, sums_psum, factors_sb, 0)
        sums_psum = wide_sb
    nisa.tensor_tensor(to_sb, sums_psum, bias_sb, nl.add)
    return rounded_sb


def store_turned(out_hbm: NkiTensor, rounded_sb: NkiTensor, tile: ColumnTile) -> None:
    """Store a tile [rows, groups, M, lines] of the output, transposed a group at a time."""
    rows, groups, M, lines = rounded_sb.shape
    shape = (M * lines, groups, rows)
    in_psum = transposed_dtype(out_hbm.dtype)
    lines_psum = nl.ndarray(shape, dtype=in_psum, buffer=nl.psum)
    for g in range(groups):
        nisa.nc_transpose(lines_psum[:, g, :], rounded_sb[:, g, :, :].flatten_dims(1, 2))
    lines_sb = nl.ndarray(shape, dtype=out_hbm.dtype)
    evict(lines_sb, lines_psum, 0)
    columns_hbm = out_hbm[:, nl.ds(tile.start, rows * tile.count)]
    columns_hbm = columns_hbm.reshape_dim(1, (groups, lines, rows)).permute((0, 2, 1, 3))
    nisa.dma_copy(columns_hbm, lines_sb, dge_mode=nisa.dge_mode.none)
