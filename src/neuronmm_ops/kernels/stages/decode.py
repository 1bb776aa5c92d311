"""Stages of the decode kernels: tokens are stationary and every weight byte streams past them once.

A weight tile is the moving operand and x^T the stationary one, so that sums come out as tokens
[M, columns] and are transposed by TensorE where they are contracted next. Up to 64 tokens fill a
part of the PE columns only: two or four *lanes* of them then take different weight columns at the
same time, which keeps TensorE ahead of the DMA engines.
"""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.chunks import Piece, again, evict, item_bytes, load_lanes
from neuronmm_ops.kernels.stages.tiling import ALIGN, COLUMNS, HALF, SMALL, P, Span, spans, tiles_in

Part = tuple[int, int, int]
"""Lane, first column in it, and columns."""


def matmul_lanes(M: int) -> int:
    """Parts of the PE columns that work side by side: of 32 columns, on trn1 of 64."""
    if nisa.get_nc_version() == nisa.nc_version.gen2:
        return min(2, load_lanes(M))
    return load_lanes(M)


def matmul_columns(M: int) -> int:
    """Columns of a matmul: a bank, on trn3 several where no lanes share the issue overhead."""
    if nisa.get_nc_version() == nisa.nc_version.gen4 and load_lanes(M) == 1:
        return 4 * COLUMNS
    return COLUMNS


def own(size: int) -> Span:
    """This core's range of a dimension; halves are multiples of 128 where it is large enough."""
    if nl.num_programs(0) == 1:
        return Span(0, size)
    unit = P if size >= 2 * P else 1
    half = min(size, tiles_in(size, 2 * unit) * unit)
    if nl.program_id(0) == 0:
        return Span(0, half)
    return Span(half, size - half)


class Sums(nl.NKIObject):
    """Sums in PSUM of [M, size], for columns `part` of a weight, in lanes of equal width.

    Args:
        weight: [K, N] in HBM.
        part: its columns.
        M: tokens.
        unit: the width of a lane is a multiple of it.
        step: columns of a matmul, whole banks.
    """

    def __init__(self, weight: NkiTensor, part: Span, M: int, unit: int, step: int) -> None:
        self.weight = weight
        self.start = part.start
        self.size = part.size
        self.tokens = M
        self.step = step
        count = matmul_lanes(M)
        self.rows = P // count
        self.width = min(part.size, tiles_in(part.size, unit * count) * unit)
        self.lanes = spans(0, part.size, self.width)
        self.partitions = (len(self.lanes) - 1) * self.rows + M
        self.banks: list[NkiTensor] = []
        for s in spans(0, self.width, step):
            self.banks.append(nl.ndarray((self.partitions, s.size), nl.float32, buffer=nl.psum))
        self.started = False

    def parts(self, step: int) -> list[Part]:
        """The sums cut into `step` columns; neighbours are in different lanes."""
        found: list[Part] = []
        for s in spans(0, self.width, step):
            for i in range(len(self.lanes)):
                width = min(s.size, self.lanes[i].size - s.start)
                if width > 0:
                    found.append((i, s.start, width))
        return found

    def in_order(self) -> list[Part]:
        """The sums cut into banks, in the order of columns."""
        found: list[Part] = []
        for i in range(len(self.lanes)):
            for s in spans(0, self.lanes[i].size, COLUMNS):
                found.append((i, s.start, s.size))
        return found

    def halves(self) -> list[Span]:
        """Columns in two parts that are loaded one after the other, if both make long rows."""
        if self.size * item_bytes(self.weight.dtype) < 2 * HALF:
            return [Span(0, self.size)]
        first = tiles_in(self.size, 2 * self.step) * self.step
        if len(self.lanes) > 1:
            first = self.lanes[len(self.lanes) // 2].start
        return [Span(0, first), Span(first, self.size - first)]

    def sums(self, part: Part) -> NkiTensor:
        """[M, columns] of a part, in PSUM."""
        first, at = part[0] * self.rows, part[1] % self.step
        return self.banks[part[1] // self.step][first : first + self.tokens, at : at + part[2]]

    def like(self, tile: NkiTensor, part: Part) -> NkiTensor:
        """[M, columns] of a part, in a tile of `new_tile`."""
        first = part[0] * self.rows
        return tile[first : first + self.tokens, part[1] : part[1] + part[2]]

    def lane(self, tile: NkiTensor, i: int) -> NkiTensor:
        """[M, width] of a lane, in a tile of `new_tile`."""
        return self.like(tile, (i, 0, self.lanes[i].size))

    def new_tile(self, dtype: nl.DType) -> NkiTensor:
        """A tile in SBUF for all sums, laid out as they are."""
        return nl.ndarray((self.partitions, self.width), dtype=dtype)

    def add(self, stationary: NkiTensor, moving: NkiTensor, start: int, more: bool) -> None:
        """sums[:, start :] += stationary [k, M]^T . moving [k, columns].

        The first products overwrite, unless there are `more` in these columns already.
        """
        add = self.started or more
        for part in self.parts(self.step):
            first = self.lanes[part[0]].start + part[1] - start
            if first < 0 or first >= moving.shape[1]:
                continue
            columns = moving[:, first : first + part[2]]
            if self.rows == P:
                nisa.nc_matmul(self.sums(part), stationary, columns, accumulate=add)
            else:
                nisa.nc_matmul(
                    self.sums(part),
                    stationary,
                    columns,
                    accumulate=add,
                    tile_position=(0, part[0] * self.rows),
                    tile_size=(P, self.rows),
                )
        self.started = self.started or start + moving.shape[1] == self.size

    def add_bias(self, bias: NkiTensor) -> None:
        """sums += bias [N]: a matmul of ones [1, M] and the bias, which broadcasts it."""
        ones = nl.ndarray((1, self.tokens), dtype=bias.dtype)
        nisa.memset(ones, 1.0)
        row = nl.ndarray((1, self.size), dtype=bias.dtype)
        nisa.dma_copy(row, bias[self.start : self.start + self.size])
        self.add(ones, row, 0, False)

    def add_piece(self, piece: Piece, chunk: int, first: bool, last: bool) -> None:
        """Stream a piece's weight rows, `chunk` bytes a partition at a time (at least one row).

        The `first` or `last` tile of all may be small: TensorE waits for whole tiles.
        """
        tiles = piece.size // P
        whole = tiles * P
        cut = last and whole == piece.size
        if tiles > 0:
            rows = piece.rows_of(self.weight)
            row_bytes = self.size * item_bytes(self.weight.dtype)
            few = max(1, min(chunk, SMALL) // row_bytes)
            head, tail = min(tiles, few) if first else 0, few if cut else 0
            for s in ramp(tiles, head, max(1, chunk // row_bytes), tail):
                ends = cut and s.start + s.size == tiles
                self.add_rows(
                    rows[:, s.start : s.start + s.size, :], piece.turned[0], s.start, ends
                )
        if whole < piece.size:
            rows = self.weight[piece.start + whole : piece.start + piece.size, :].expand_dim(1)
            self.add_rows(rows, piece.turned[len(piece.turned) - 1], 0, last)

    def add_rows(self, rows: NkiTensor, turned: NkiTensor, at: int, last: bool) -> None:
        """Load weight rows [k, count, N], the `last` in two parts, and multiply tiles from `at`."""
        for part in self.halves() if last else [Span(0, self.size)]:
            tile = nl.ndarray((rows.shape[0], rows.shape[1], part.size), dtype=self.weight.dtype)
            nisa.dma_copy(tile, rows[:, :, nl.ds(self.start + part.start, part.size)])
            for j in range(rows.shape[1]):
                self.add(turned[:, at + j, :], tile[:, j, :], part.start, j > 0)

    def rounded(self, dtype: nl.DType) -> NkiTensor:
        """The sums in SBUF."""
        tile = self.new_tile(dtype)
        parts = self.in_order()
        for i in range(len(parts)):
            evict(self.like(tile, parts[i]), self.sums(parts[i]), i)
        return tile

    def exchanged(self, dtype: nl.DType) -> NkiTensor:
        """The sums of both cores together, in SBUF: fp32 until they are added."""
        sent, received = self.new_tile(nl.float32), self.new_tile(nl.float32)
        parts = self.in_order()
        for i in range(len(parts)):
            if self.started:
                evict(self.like(sent, parts[i]), self.sums(parts[i]), i)
            else:  # this core has no part of the contraction
                nisa.memset(self.like(sent, parts[i]), 0.0)
        other = 1 - nl.program_id(0)
        for i in range(len(self.lanes)):
            nisa.sendrecv(self.lane(sent, i), self.lane(received, i), other, other, 0)
        tile = self.new_tile(dtype)
        for part in parts:
            own_sums = self.sums(part) if self.started else self.like(sent, part)
            nisa.tensor_tensor(self.like(tile, part), self.like(received, part), own_sums, nl.add)
        return tile

    def pieces(self, tile: NkiTensor) -> list[Piece]:
        """What is in a tile, as pieces of a contraction over the columns of the weight."""
        found: list[Piece] = []
        for i in range(len(self.lanes)):
            found.append(Piece(self.start + self.lanes[i].start, self.lane(tile, i), True, 0))
        return found

    def store(self, to: NkiTensor, first: int, tile: NkiTensor) -> None:
        """Store a tile; `to` is [M, N] in HBM, its column 0 is column `first` of the weight."""
        for i in range(len(self.lanes)):
            columns = nl.ds(self.start - first + self.lanes[i].start, self.lanes[i].size)
            nisa.dma_copy(to[:, columns], self.lane(tile, i))


def ramp(size: int, head: int, step: int, tail: int) -> list[Span]:
    """Cut [0, size) into `head`, steps, and `tail` (0: none)."""
    found = spans(0, head, max(1, head))
    end = max(head, size - tail)
    found.extend(spans(head, end - head, step))
    found.extend(spans(end, size - end, max(1, size - end)))
    return found


def contract(pieces: list[Piece], sums: list[Sums], chunk: int, first: bool, last: bool) -> None:
    """Add all pieces to all sums; each is transposed while the one before it is multiplied.

    `chunk` bytes a partition are a weight tile, less for the `first` and the `last` of the kernel.
    """
    if len(pieces) > 0:
        pieces[0].turn()
    for i in range(len(pieces)):
        if i + 1 < len(pieces):
            pieces[i + 1].turn()
        for s in sums:
            s.add_piece(pieces[i], chunk, first and i == 0, last and i + 1 == len(pieces))


def project(
    pieces: list[Piece], weights: list[NkiTensor], ranks: int, together: bool, chunk: int, M: int
) -> list[list[Piece]]:
    """For each weight [K, r] its product with the pieces, over both cores, as pieces of r.

    `ranks` columns of a weight are summed in a pass; `together`: all weights share the one pass.
    """
    found: list[list[Piece]] = []
    step = matmul_columns(M)
    if together:
        sums: list[Sums] = []
        for w in weights:
            sums.append(Sums(w, Span(0, w.shape[1]), M, P, step))
        contract(pieces, sums, chunk, True, False)
        for s in sums:
            found.append(s.pieces(finished(s)))
        return found
    for w in weights:
        parts: list[Piece] = []
        for columns in spans(0, w.shape[1], ranks):
            s = Sums(w, columns, M, P, step)
            contract(again(pieces), [s], chunk, True, False)
            parts.extend(s.pieces(finished(s)))
        found.append(parts)
    return found


def finished(sums: Sums) -> NkiTensor:
    """The sums rounded to the dtype of the weight, of both cores where two run."""
    if nl.num_programs(0) == 1:
        return sums.rounded(sums.weight.dtype)
    return sums.exchanged(sums.weight.dtype)


def blocks_of(part: Span, block: int, last: int) -> list[Span]:
    """Cut a range into blocks, the last of `last` columns."""
    rest = max(0, part.size - last)
    found = spans(part.start, rest, block)
    if part.size > 0:
        found.append(Span(part.start + rest, part.size - rest))
    return found


def write_columns(
    out: NkiTensor,
    pieces: list[Piece],
    w: NkiTensor,
    bias: NkiTensor | None,
    blocks: list[Span],
    chunk: int,
    keep: bool,
) -> None:
    """out[:, blocks] = pieces . w + bias. `keep`: pieces stay transposed from block to block.

    The last tiles of w are small, so that little is left to do when the last byte has come.
    """
    M = out.shape[0]
    for i in range(len(blocks)):
        ends = i + 1 == len(blocks)
        sums = Sums(w, blocks[i], M, ALIGN, COLUMNS if ends else matmul_columns(M))
        if bias != None:  # noqa: E711 - strict NKI has no `is`
            sums.add_bias(bias)
        contract(pieces if keep else again(pieces), [sums], chunk, i == 0, ends)
        sums.store(out, 0, sums.rounded(out.dtype))
