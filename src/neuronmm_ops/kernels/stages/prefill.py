"""Stages of the prefill kernels: a strip of tokens stays in SBUF while weights stream past it.

Every sum is held in PSUM (fp32) over its whole contraction. Tiles are loaded where they are first
used, each into SBUF of its own, so that they are fetched ahead as far as there is room.
"""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.tiling import COLUMNS, P, Span, packed_tiles, spans, tiles_in

Tiles = list[NkiTensor]
PE_CHUNK = 4
"""Contraction tiles that are loaded together when TensorE transposes them."""


class Operand(nl.NKIObject):
    """One side of a matmul, [size, width], in tiles of 128 rows of the contraction.

    Args:
        source: HBM tensor, or None where `tiles` holds everything.
        size: the contraction.
        start: first column (first token) in `source`.
        width: columns (tokens).
        keep: how many tiles stay in SBUF; the others are loaded again for each use.
        layout: how `source` lies: "rows" [size, columns], or tokens first [columns, size],
            transposed by the "dma" engines or by the "pe". "packed": rows in the order that
            `SVDLinear.pack_` gives them, row j * 128 + p at p * count + j.
        first: first row of the contraction in `source`.
    """

    def __init__(
        self,
        source: NkiTensor | None,
        size: int,
        start: int,
        width: int,
        keep: int,
        layout: str = "rows",
        first: int = 0,
    ) -> None:
        self.source: Any = source
        self.size = size
        self.start = start
        self.width = width
        self.keep = keep
        self.layout = layout
        self.first = first
        self.count = tiles_in(size, P)
        self.tiles: Tiles = []
        # what several tiles are made of, and the first of them
        self.rows: Tiles = []
        self.chunk = -1

    def part(self, rows: Span, columns: Span) -> Operand:
        """Some rows of the contraction and some columns, loaded by themselves.

        Of an operand that is in SBUF, the tiles of these rows, with all columns.
        """
        if self.source == None:  # noqa: E711
            tiles = self.tiles[rows[0] // P : tiles_in(rows[0] + rows[1], P)]
            return held(tiles, rows[1])
        start = self.start + columns[0]
        first = self.first + rows[0]
        return Operand(self.source, rows[1], start, columns[1], self.keep, self.layout, first)

    def tile(self, k: int) -> NkiTensor:
        """Tile k, [<=128, width], in SBUF; tiles are first asked for in order."""
        if k < len(self.tiles):
            return self.tiles[k]
        found = self.load(k)
        if k < self.keep:
            self.tiles.append(found)
        return found

    def load(self, k: int) -> NkiTensor:
        """Tile k from HBM."""
        size = min(P, self.size - k * P)
        rows = nl.ds(self.first + k * P, size)
        columns = nl.ds(self.start, self.width)
        if self.layout == "packed":
            return self.load_packed(k)
        found = nl.ndarray((size, self.width), dtype=self.source.dtype)
        if self.layout == "rows":
            nisa.dma_copy(found, self.source[rows, columns])
        elif self.layout == "dma":
            nisa.dma_transpose(found, self.source[columns, rows])
        else:
            self.transpose(found, k, size)
        return found

    def load_packed(self, k: int) -> NkiTensor:
        """Tile k of a packed source; tiles whose rows are neighbours come together."""
        size, width = self.source.shape
        item = 4 if self.source.dtype == nl.float32 else 2
        together = packed_tiles(width * item) if self.width == width else 1
        chunk = k - k % together
        if chunk != self.chunk:
            self.chunk = chunk
            count = min(together, self.count - chunk)
            tiles = nl.ndarray((P, count, self.width), dtype=self.source.dtype)
            own = nl.ds(self.first // P + chunk, count)
            columns = nl.ds(self.start, self.width)
            packed = self.source.reshape((P, size // P, width))
            nisa.dma_copy(tiles, packed[:, own, columns])
            self.rows = [tiles]
        return self.rows[0][:, k % together, :]

    def transpose(self, found: NkiTensor, k: int, rows: int) -> None:
        """Fill tile k by TensorE, from token rows that hold `PE_CHUNK` tiles at a time."""
        chunk = k - k % PE_CHUNK
        if chunk != self.chunk:
            self.chunk = chunk
            columns = min(PE_CHUNK * P, self.size - chunk * P)
            self.rows = []
            for t in spans(0, self.width, P):
                block = nl.ndarray((t[1], columns), dtype=self.source.dtype)
                tokens = nl.ds(self.start + t[0], t[1])
                nisa.dma_copy(block, self.source[tokens, nl.ds(self.first + chunk * P, columns)])
                self.rows.append(block)
        for c in spans(0, self.width, COLUMNS):
            turned = nl.ndarray((rows, c[1]), dtype=self.source.dtype, buffer=nl.psum)
            for t in spans(0, c[1], P):
                block = self.rows[(c[0] + t[0]) // P]
                own = nl.ds((k % PE_CHUNK) * P, rows)
                nisa.nc_transpose(turned[:, nl.ds(t[0], t[1])], block[:, own])
            evict(found[:, nl.ds(c[0], c[1])], turned, 0, 1)


def weights(source: NkiTensor, columns: Span, rows: Span, layout: str = "rows") -> Operand:
    """A block of w [K, N]; all its tiles stay while they are used."""
    count = tiles_in(rows[1], P)
    return Operand(source, rows[1], columns[0], columns[1], count, layout, rows[0])


def held(tiles: Tiles, size: int) -> Operand:
    """An operand that is in SBUF: `tiles` of 128 rows each, [size, width] together."""
    found = Operand(None, size, 0, tiles[0].shape[1], len(tiles))
    found.tiles = tiles
    return found


def own_tokens(tokens: int) -> Span:
    """Start and number of this core's tokens: two cores share them in whole tiles of 128."""
    cores = nl.num_programs(0)
    share = tiles_in(tiles_in(tokens, P), cores) * P
    start = min(nl.program_id(0) * share, tokens)
    return start, min(share, tokens - start)


def accumulate(
    stationary: Operand, moving: Operand, rows: list[Span], columns: list[Span]
) -> list[Tiles]:
    """PSUM tiles stationary[:, rows[i]].T @ moving[:, columns[j]], fp32, over all tiles."""
    sums: list[Tiles] = []
    for i in rows:
        row: Tiles = []
        for j in columns:
            row.append(nl.ndarray((i[1], j[1]), dtype=nl.float32, buffer=nl.psum))
        sums.append(row)
    for k in range(stationary.count):
        s, m = stationary.tile(k), moving.tile(k)
        for i in range(len(rows)):
            for j in range(len(columns)):
                nisa.nc_matmul(
                    sums[i][j],
                    s[:, nl.ds(rows[i][0], rows[i][1])],
                    m[:, nl.ds(columns[j][0], columns[j][1])],
                    accumulate=(k > 0),
                )
    return sums


def evict(dst: NkiTensor, total: NkiTensor, turn: int, engines: int) -> None:
    """PSUM to SBUF: by ScalarE, and every other turn by VectorE where two engines may share."""
    if turn % engines == 0:
        nisa.activation(dst, nl.copy, total)
    else:
        nisa.tensor_copy(dst, total)


def project(
    x: Operand,
    w: NkiTensor,
    block: int,
    tokens: int,
    banks: int,
    engines: int,
    k_block: int = 0,
    rounds: bool = False,
    packed: bool = False,
) -> Tiles:
    """(x @ w)^T as SBUF tiles [<=128, width] of w's dtype: w stationary, x moving.

    Args:
        x: [K, width] operand.
        w: [K, N].
        block: columns of w that are loaded together.
        tokens: columns of x that one group of PSUM tiles covers.
        banks: PSUM tiles in a group.
        engines: that evict.
        k_block: rows of the contraction that a pass over all columns covers; 0 for all. Partial
            sums of several passes are kept in SBUF.
        rounds: partial sums are rounded to w's dtype, instead of fp32.
        packed: w's rows are in packed order.
    """
    passes = spans(0, x.size, k_block if k_block > 0 else x.size)
    result: Tiles = []
    for n in range(len(passes)):
        parts: list[Operand] = []
        before = result
        if n == 0 or (n == len(passes) - 1 and not rounds):
            dtype = w.dtype if rounds or n == len(passes) - 1 else nl.float32
            result = make_strip(w.shape[1], x.width, dtype)
        for b in spans(0, w.shape[1], block):
            wb = weights(w, b, passes[n], "packed" if packed else "rows")
            for g in spans(0, x.width, tokens):
                if g[0] // tokens == len(parts):
                    parts.append(x.part(passes[n], g))
                moving = parts[g[0] // tokens]
                columns = spans(0 if moving.width == g[1] else g[0], g[1], COLUMNS)
                step = max(1, banks // len(columns)) * P
                for rows in spans(0, b[1], step):
                    sums = accumulate(wb, moving, spans(rows[0], rows[1], P), columns)
                    first = (b[0] + rows[0]) // P
                    for i in range(len(sums)):
                        dst = result[first + i][:, nl.ds(g[0], g[1])]
                        if n == 0:
                            evict_row(dst, sums[i], i * len(columns), engines)
                        else:
                            add_row(dst, before[first + i][:, nl.ds(g[0], g[1])], sums[i])
    return result


def evict_row(dst: NkiTensor, sums: Tiles, turn: int, engines: int) -> None:
    """dst [<=128, columns] = PSUM tiles of 512 columns side by side."""
    for j in range(len(sums)):
        evict(dst[:, nl.ds(j * COLUMNS, sums[j].shape[1])], sums[j], turn + j, engines)


def add_row(dst: NkiTensor, before: NkiTensor, sums: Tiles) -> None:
    """dst = before + PSUM tiles of 512 columns side by side, on VectorE."""
    for j in range(len(sums)):
        own = nl.ds(j * COLUMNS, sums[j].shape[1])
        nisa.tensor_tensor(dst[:, own], before[:, own], sums[j], nl.add)


def make_strip(size: int, width: int, dtype: nl.DType) -> Tiles:
    """SBUF tiles of 128 rows each, [size, width] together."""
    found: Tiles = []
    for t in spans(0, size, P):
        found.append(nl.ndarray((t[1], width), dtype=dtype))
    return found


def write_rows(
    out: NkiTensor,
    x: Operand,
    w: NkiTensor,
    bias: NkiTensor | None,
    start: int,
    block: int,
    rows: int,
    banks: int,
    engines: int,
) -> None:
    """out[start : start + width] = x.T @ w + bias: x stationary, w moving, natural layout.

    Args:
        out: [M, N] in HBM.
        x: [K, width] operand.
        w: [K, N].
        bias: [N] or None.
        start: first token in out.
        block: columns of w that are loaded, and of out that are stored, together.
        rows: token tiles of 128 that one group of PSUM tiles covers.
        banks: PSUM tiles in a group.
        engines: that evict.
    """
    for b in spans(0, w.shape[1], block):
        wb = weights(w, b, (0, x.size))
        added = load_bias(bias, b, min(P, x.width)) if bias != None else None  # noqa: E711
        for g in spans(0, x.width, rows * P):
            group = spans(g[0], g[1], P)
            results: Tiles = []
            for t in group:
                results.append(nl.ndarray((t[1], b[1]), dtype=out.dtype))
            step = max(1, banks // len(group)) * COLUMNS
            for c in spans(0, b[1], step):
                sums = accumulate(x, wb, group, spans(c[0], c[1], COLUMNS))
                for i in range(len(group)):
                    dst = results[i][:, nl.ds(c[0], c[1])]
                    if added != None:  # noqa: E711
                        add_row(dst, added[: group[i][1], nl.ds(c[0], c[1])], sums[i])
                    else:
                        evict_row(dst, sums[i], i * len(sums[i]), engines)
            for i in range(len(group)):
                tokens = nl.ds(start + group[i][0], group[i][1])
                nisa.dma_copy(out[tokens, nl.ds(b[0], b[1])], results[i])


def write_columns(
    out: NkiTensor,
    x: Operand,
    w: NkiTensor,
    bias: NkiTensor | None,
    start: int,
    block: int,
    banks: int,
    engines: int,
) -> None:
    """out[:, start : start + width] = (x.T @ w + bias)^T: w stationary, x moving.

    Args:
        out: [N, M] in HBM.
        x: [K, width] operand in SBUF.
        w: [K, N].
        bias: [N] or None.
        start: first token in out.
        block: columns of w that are loaded together.
        banks: PSUM tiles in a group.
        engines: that evict.
    """
    columns = spans(0, x.width, COLUMNS)
    step = max(1, banks // len(columns)) * P
    for b in spans(0, w.shape[1], block):
        wb = weights(w, b, (0, x.size))
        for rows in spans(0, b[1], step):
            group = spans(rows[0], rows[1], P)
            sums = accumulate(wb, x, group, columns)
            for i in range(len(group)):
                features = nl.ds(b[0] + group[i][0], group[i][1])
                result = nl.ndarray((group[i][1], x.width), dtype=out.dtype)
                if bias != None:  # noqa: E711
                    shift_row(result, sums[i], bias.reshape((bias.shape[0], 1))[features])
                else:
                    evict_row(result, sums[i], i * len(columns), engines)
                nisa.dma_copy(out[features, nl.ds(start, x.width)], result)


def shift_row(dst: NkiTensor, sums: Tiles, bias: NkiTensor) -> None:
    """dst [n, columns] = PSUM tiles of 512 columns side by side + bias [n, 1], on VectorE."""
    added = nl.ndarray((dst.shape[0], 1), dtype=nl.float32)
    nisa.dma_copy(added, bias)
    for j in range(len(sums)):
        own = nl.ds(j * COLUMNS, sums[j].shape[1])
        nisa.tensor_scalar(dst[:, own], sums[j], nl.add, added)


def load_bias(bias: NkiTensor, columns: Span, rows: int) -> NkiTensor:
    """bias[columns] on each of `rows` partitions."""
    found = nl.ndarray((rows, columns[1]), dtype=bias.dtype)
    row = bias.reshape((1, bias.shape[0]))[:, nl.ds(columns[0], columns[1])]
    nisa.dma_copy(found, row.broadcast(0, rows))
    return found
