"""Stages of the prefill kernels: a block of tokens stays in SBUF while weights stream past it.

Every sum is held in PSUM (fp32) over its whole contraction. Tiles are loaded where they are first
used, each into SBUF of its own, so that they are fetched ahead as far as there is room.
"""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    PARTITIONS,
    STAGED_TILES,
    Group,
    Span,
    core_span,
    looped_tokens,
    natural_groups,
    spans,
    tiles_in,
    transposed_groups,
)

Tiles = list[NkiTensor]


class Operand(nl.NKIObject):
    """One side of a matmul, [size, width], in tiles of 128 rows of the contraction.

    Args:
        source_hbm: tensor in HBM, or None where `tiles_sb` holds everything.
        rows: of the contraction, in `source_hbm`.
        columns: of `source_hbm`; of x, tokens.
        resident: how many tiles stay in SBUF; the others are loaded again for each use.
        layout: how `source_hbm` lies: "rows" [size, columns], or tokens first [columns, size],
            transposed by the "dma" engines or by the "pe".
        split: each group of tokens has tiles of its own.
    """

    def __init__(
        self,
        source_hbm: NkiTensor | None,
        rows: Span,
        columns: Span,
        resident: int,
        layout: str = "rows",
        split: bool = False,
    ) -> None:
        self.source_hbm: Any = source_hbm
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

    def part(self, rows: Span, columns: Span) -> Operand:
        """Some rows and columns with tiles of their own; itself where it is not split."""
        if not self.split:
            return self
        own_rows = Span(self.rows.start + rows.start, rows.size)
        own_columns = Span(self.columns.start + columns.start, columns.size)
        return Operand(self.source_hbm, own_rows, own_columns, self.resident, self.layout)

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
        size = min(PARTITIONS, self.size - k * PARTITIONS)
        rows = nl.ds(self.rows.start + k * PARTITIONS, size)
        columns = nl.ds(self.columns.start, self.width)
        tile_sb = nl.ndarray((size, self.width), dtype=self.source_hbm.dtype)
        if self.layout == "rows":
            nisa.dma_copy(tile_sb, self.source_hbm[rows, columns], dge_mode=nisa.dge_mode.none)
        elif self.layout == "dma":
            nisa.dma_transpose(tile_sb, self.source_hbm[columns, rows])
        else:
            self.stage(k // STAGED_TILES)
            self.transpose(tile_sb, k)
        return tile_sb

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
            bank_psum = nl.ndarray((size, c.size), transposed_dtype(tile_sb), buffer=nl.psum)
            for t in spans(0, c.size, PARTITIONS):
                rows_sb = self.staged_sb[(c.start + t.start) // PARTITIONS]
                nisa.nc_transpose(bank_psum[:, nl.ds(t.start, t.size)], rows_sb[:, own])
            evict(tile_sb[:, nl.ds(c.start, c.size)], bank_psum, 0, 1)


def transposed_dtype(source: NkiTensor) -> nl.DType:
    """Dtype of a transpose in PSUM: TensorE of trn1 writes fp32 only."""
    if nisa.get_nc_version() == nisa.nc_version.gen2:
        return nl.float32
    return source.dtype


def weights(w_hbm: NkiTensor, rows: Span, columns: Span) -> Operand:
    """A block of w [K, N]; all its tiles stay while they are used."""
    return Operand(w_hbm, rows, columns, tiles_in(rows.size, PARTITIONS))


def in_sbuf(tiles_sb: Tiles, size: int) -> Operand:
    """An operand of `tiles_sb`, 128 rows each, [size, width] together."""
    found = Operand(None, Span(0, size), Span(0, tiles_sb[0].shape[1]), len(tiles_sb))
    found.tiles_sb = tiles_sb
    return found


class TokenBlocks(nl.NKIObject):
    """This core's tokens, a block at a time: each runs a kernel's stages on rows of x and out.

    Args:
        stages: an object whose `run(out_hbm, x_hbm, tokens)` computes rows `tokens` of out from
            those of x.
        out_hbm: [M, N].
        x_hbm: [M, K].
        size: tokens of a block.
    """

    def __init__(self, stages: Any, out_hbm: NkiTensor, x_hbm: NkiTensor, size: int) -> None:
        self.stages = stages
        self.out_hbm = out_hbm
        self.x_hbm = x_hbm
        self.size = size

    def run(self, device_loop: bool) -> None:
        """Run all blocks; with `device_loop` those of full size are a loop on the device."""
        own = core_span(self.x_hbm.shape[0], nl.program_id(0), nl.num_programs(0))
        looped = looped_tokens(own.size, self.size) if device_loop else 0
        if looped > 0:
            nl.fori_loop(own.start, own.start + looped, self.block_at, step=self.size)
        for tokens in spans(own.start + looped, own.size - looped, self.size):
            self.stages.run(self.out_hbm, self.x_hbm, tokens)

    def block_at(self, first: Any) -> None:
        """The body of the loop on the device: the block from token `first`, a register, on."""
        out_hbm = self.rows_at(self.out_hbm, first)
        self.stages.run(out_hbm, self.rows_at(self.x_hbm, first), Span(0, self.size))

    def rows_at(self, source_hbm: NkiTensor, first: Any) -> NkiTensor:
        """The block's rows of a tensor [M, columns]."""
        columns = source_hbm.shape[1]
        pattern = [[columns, self.size], [1, columns]]
        return source_hbm.ap(pattern, scalar_offset=first, indirect_dim=0)


def accumulate(stationary: Any, moving: Any, group: Group, tail: int = 1) -> list[Tiles]:
    """PSUM tiles stationary[:, group.rows].T @ moving[:, group.columns], fp32, row by row.

    All PSUM tiles take a tile of the contraction before any takes the next, except for the last
    `tail`: these, one PSUM tile takes after the other, which spreads the evictions.
    """
    rows = spans(group.rows.start, group.rows.size, PARTITIONS)
    columns = spans(group.columns.start, group.columns.size, BANK_COLUMNS)
    sums_psum: list[Tiles] = []
    for i in rows:
        row_psum: Tiles = []
        for j in columns:
            row_psum.append(nl.ndarray((i.size, j.size), dtype=nl.float32, buffer=nl.psum))
        sums_psum.append(row_psum)
    for part in contraction_parts(stationary.count, tail):
        stationary_sb: Tiles = []
        moving_sb: Tiles = []
        for k in range(part.start, part.start + part.size):
            stationary_sb.append(stationary.tile(k))
            moving_sb.append(moving.tile(k))
        for i in range(len(rows)):
            for j in range(len(columns)):
                for k in range(part.size):
                    nisa.nc_matmul(
                        sums_psum[i][j],
                        stationary_sb[k][:, nl.ds(rows[i].start, rows[i].size)],
                        moving_sb[k][:, nl.ds(columns[j].start, columns[j].size)],
                        accumulate=part.start + k > 0,
                    )
    return sums_psum


def contraction_parts(count: int, tail: int) -> list[Span]:
    """Tiles of a contraction, one by one but the last `tail`."""
    found = spans(0, max(0, count - tail), 1)
    found.append(Span(max(0, count - tail), min(tail, count)))
    return found


def evict(dst_sb: NkiTensor, sums_psum: NkiTensor, number: int, engines: int) -> None:
    """PSUM to SBUF: by ScalarE, every other `number` by VectorE where two engines share."""
    if number % engines == 0:
        nisa.activation(dst_sb, nl.copy, sums_psum)
    else:
        nisa.tensor_copy(dst_sb, sums_psum)


def evict_row(dst_sb: NkiTensor, row_psum: Tiles, number: int, engines: int) -> None:
    """dst [<=128, columns] = PSUM tiles of 512 columns side by side."""
    for j in range(len(row_psum)):
        own = nl.ds(j * BANK_COLUMNS, row_psum[j].shape[1])
        evict(dst_sb[:, own], row_psum[j], number + j, engines)


def add_row(dst_sb: NkiTensor, before_sb: NkiTensor, row_psum: Tiles) -> None:
    """dst = before + PSUM tiles of 512 columns side by side, on VectorE."""
    for j in range(len(row_psum)):
        own = nl.ds(j * BANK_COLUMNS, row_psum[j].shape[1])
        nisa.tensor_tensor(dst_sb[:, own], before_sb[:, own], row_psum[j], nl.add)


def new_tiles(size: int, width: int, dtype: nl.DType) -> Tiles:
    """SBUF tiles of 128 rows each, [size, width] together."""
    found: Tiles = []
    for t in spans(0, size, PARTITIONS):
        found.append(nl.ndarray((t.size, width), dtype=dtype))
    return found


def project(
    x: Any,
    w_hbm: NkiTensor,
    block: int,
    tokens: int,
    banks: int,
    engines: int,
    k_block: int = 0,
    bf16_partial_sums: bool = False,
) -> Operand:
    """(x @ w)^T [N, width] in SBUF, of w's dtype: w stationary, x moving.

    Args:
        x: [K, width], an Operand or an object with its methods.
        w_hbm: [K, N].
        block: columns of w that are loaded together.
        tokens: columns of x that one group of PSUM tiles covers.
        banks: PSUM tiles in a group.
        engines: that evict.
        k_block: rows of the contraction that a pass over all columns covers; 0 for all. Partial
            sums of several passes are kept in SBUF.
        bf16_partial_sums: partial sums are rounded to w's dtype, instead of fp32.
    """
    K, N = w_hbm.shape
    passes = spans(0, K, k_block if k_block > 0 else K)
    result_sb: Tiles = []
    for n in range(len(passes)):
        x_parts: list[Any] = []
        before_sb = result_sb
        last = n + 1 == len(passes)
        if n == 0 or (last and not bf16_partial_sums):
            exact = not last and not bf16_partial_sums
            result_sb = new_tiles(N, x.width, nl.float32 if exact else w_hbm.dtype)
        for b in spans(0, N, block):
            w_block = weights(w_hbm, passes[n], b)
            for group in transposed_groups(b.size, x.width, tokens, banks):
                own = nl.ds(group.columns.start, group.columns.size)
                at = group.columns.start // tokens
                if at == len(x_parts):
                    x_parts.append(x.part(passes[n], group.columns))
                if x.split:  # the tokens of the group are all that the part has
                    group = Group(group.rows, Span(0, group.columns.size))
                sums_psum = accumulate(w_block, x_parts[at], group)
                for i in range(len(sums_psum)):
                    tile = (b.start + group.rows.start) // PARTITIONS + i
                    dst_sb = result_sb[tile][:, own]
                    if n == 0:
                        evict_row(dst_sb, sums_psum[i], i * len(sums_psum[i]), engines)
                    else:
                        add_row(dst_sb, before_sb[tile][:, own], sums_psum[i])
    return in_sbuf(result_sb, N)


def write_rows(
    out_hbm: NkiTensor,
    x: Operand,
    w_hbm: NkiTensor,
    bias_hbm: NkiTensor | None,
    start: int,
    block: int,
    token_tiles: int,
    banks: int,
    engines: int,
) -> None:
    """out[start : start + width] = x.T @ w + bias: x stationary, w moving.

    Args:
        out_hbm: [M, N].
        x: [K, width] operand.
        w_hbm: [K, N].
        bias_hbm: [N] or None.
        start: first token in out.
        block: columns of w that are loaded, and of out that are stored, together.
        token_tiles: of 128, that one group of PSUM tiles covers.
        banks: PSUM tiles in a group.
        engines: that evict.
    """
    K, N = w_hbm.shape
    mode = nisa.dge_mode.none
    if out_hbm.is_indirect():  # in a loop of the device
        mode = nisa.dge_mode.unknown
    for b in spans(0, N, block):
        w_block = weights(w_hbm, Span(0, K), b)
        added_sb = load_bias(bias_hbm, b, min(PARTITIONS, x.width)) if bias_hbm != None else None  # noqa: E711
        results_sb: Tiles = []
        for group in natural_groups(x.width, b.size, token_tiles, banks):
            if group.columns.start == 0:
                results_sb = new_tiles(group.rows.size, b.size, out_hbm.dtype)
            sums_psum = accumulate(x, w_block, group)
            for i in range(len(sums_psum)):
                dst_sb = results_sb[i][:, nl.ds(group.columns.start, group.columns.size)]
                if added_sb != None:  # noqa: E711
                    rows = results_sb[i].shape[0]
                    own_sb = added_sb[:rows, nl.ds(group.columns.start, group.columns.size)]
                    add_row(dst_sb, own_sb, sums_psum[i])
                else:
                    evict_row(dst_sb, sums_psum[i], i * len(sums_psum[i]), engines)
            if group.columns.start + group.columns.size == b.size:
                tokens = spans(start + group.rows.start, group.rows.size, PARTITIONS)
                for i in range(len(tokens)):
                    rows = nl.ds(tokens[i].start, tokens[i].size)
                    own_hbm = out_hbm[rows, nl.ds(b.start, b.size)]
                    nisa.dma_copy(own_hbm, results_sb[i], dge_mode=mode)


def load_bias(bias_hbm: NkiTensor, columns: Span, rows: int) -> NkiTensor:
    """bias[columns] on each of `rows` partitions."""
    bias_sb = nl.ndarray((rows, columns.size), dtype=bias_hbm.dtype)
    row = bias_hbm.reshape((1, bias_hbm.shape[0]))[:, nl.ds(columns.start, columns.size)]
    nisa.dma_copy(bias_sb, row.broadcast(0, rows), dge_mode=nisa.dge_mode.none)
    return bias_sb
