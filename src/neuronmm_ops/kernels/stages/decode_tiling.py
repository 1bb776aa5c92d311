"""Tile arithmetic of decode: tokens are the stationary operand, weights stream past them. Pure."""

from __future__ import annotations

from neuroncore.hardware import PARTITIONS, PSUM_BANK_BYTES, PSUM_BANKS
from neuronmm_ops.kernels.nki_object import NKIObject
from neuronmm_ops.kernels.stages.tiling import BANK_COLUMNS, Span, spans, tiles_in

SUM_BANKS = PSUM_BANKS - 2
"""PSUM banks for sums; the other two are for transposes."""
EDGE_TILE_BYTES = 4096
"""Bytes a partition of the first and of the last load of a launch's weights, at most."""
ISSUED_COLUMNS = 32
"""Columns that TensorE streams at half its rate while it issues a matmul: 64 cycles.

Of few columns, fewer column groups work side by side, and fewer matmuls are issued: as many as
take no longer to issue than a group takes to stream.
"""
SHUFFLED = 32
"""Partitions among which VectorE copies one to the others."""
ONE_STORE_TOKENS = 8
"""Tokens up to which one DMA stores the last sums of a weight in one byte."""
SEARCHED = 8
"""Values that VectorE finds the greatest of at least, and finds at a time."""
HALF_ROW_BYTES = 2560
"""Bytes of a row of the last weight tile, at least, where that is loaded in two halves."""


def column_groups(M: int, pe_tile: int) -> int:
    """Groups of PE columns that work side by side on M tokens: of one or more least PE tiles.

    Activations from HBM are loaded to as many groups of partitions: TensorE reads from no other
    start partition.
    """
    groups = 4 if M <= 32 else 2 if M <= 64 else 1
    return min(PARTITIONS // pe_tile, groups)


def groups_in_store(groups: int, M: int, scaled: bool) -> int:
    """Column groups that one DMA stores: pairs of four.

    One DMA for all four would leave them to too few DMA engines, but for few tokens.
    """
    if M == 1 or (scaled and M <= ONE_STORE_TOKENS):
        return groups
    return 2 if groups == 4 else 1


def lanes_of(M: int, pe_tile: int) -> int:
    """Partitions of a column group with what lies next to its tokens, which stacked sums have."""
    return PARTITIONS // column_groups(M, pe_tile) if column_groups(M, pe_tile) > 1 else M


def matmul_columns(M: int, moving_max: int) -> int:
    """Columns of a matmul: a PSUM bank, or up to four where no group shares the issue overhead."""
    return min(4 * BANK_COLUMNS, moving_max) if M > 64 else BANK_COLUMNS


def transposes_in_bank(M: int, itemsize: int) -> int:
    """Transposed tiles [128, M] that fit in a PSUM bank; those of 2 bytes start on 4 bytes."""
    return PSUM_BANK_BYTES // itemsize // (M + M % 2)


def output_blocks(part: Span, block: int, last_block: int) -> list[Span]:
    """Cut a range of output columns into blocks, the last one of `last_block` columns, if any."""
    rest = max(0, part.size - last_block)
    blocks = spans(part.start, rest, block)
    if part.size > rest:
        blocks.append(Span(part.start + rest, part.size - rest))
    return blocks


class Loads(NKIObject):
    """How the weights of a stage are cut into loads.

    TensorE starts on a load when all of it has arrived. Short ones at the ends of a launch are
    waited for less, and take longer for their bytes: where other stages' weights are on their way
    anyway, nothing waits for them.

    Args:
        tile_bytes: of a load a partition, at most, but at least one K tile.
        opens: no other stage's weights come before in the launch.
        ends: none come after.
    """

    def __init__(self, tile_bytes: int, opens: bool = True, ends: bool = True) -> None:
        self.tile_bytes = tile_bytes
        self.opens = opens
        self.ends = ends

    def tiles(
        self, tiles: int, row_bytes: int, first: bool, last: bool, least_bytes: int = 0
    ) -> list[Span]:
        """Cut `tiles` K tiles of a weight.

        The `first` load of a stage and its `last` are of `EDGE_TILE_BYTES` at most, at the ends of
        a launch. With `least_bytes` the last load is halved twice, as far as the halves have so
        many, if the stage is all of the launch.
        """
        most = self.tile_bytes
        edge = max(1, min(most, EDGE_TILE_BYTES) // row_bytes)
        head = min(tiles, edge) if first and self.opens else 0
        tail = min(tiles - head, edge) if last and self.ends else 0
        cuts = spans(0, head, edge)
        cuts.extend(spans(head, tiles - head - tail, max(1, most // row_bytes)))
        cuts.extend(spans(tiles - tail, tail, edge))
        halved = least_bytes > 0 and self.opens and self.ends
        for _ in range(2 if halved and len(cuts) > 0 else 0):
            whole = cuts[len(cuts) - 1]
            half = whole.size // 2
            if half > 0 and half * row_bytes >= least_bytes:
                cuts = cuts[0 : len(cuts) - 1]
                cuts.append(Span(whole.start, whole.size - half))
                cuts.append(Span(whole.start + whole.size - half, half))
        return cuts


def waited_bytes(slow_short_runs: bool) -> int:
    """Bytes a partition, at least, of the last loads of a u in one byte, which all wait for."""
    return 3072 if slow_short_runs else 1024


def cast_shares(columns: int, weights: tuple[int, ...]) -> list[Span]:
    """Columns of a weight tile that each engine casts, by `weights`: their clocks."""
    total = 0
    for weight in weights:
        total += weight
    shares: list[Span] = []
    start, up_to = 0, 0
    for weight in weights:
        up_to += weight
        end = columns * up_to // total
        if end > start:
            shares.append(Span(start, end - start))
        start = end
    return shares


def cast_by_dma(before: int, tiles: int, every: int) -> int:
    """How many of `tiles` K tiles after `before` others a DMA casts: each `every`-th; 0: none."""
    if every == 0:
        return 0
    return tiles_in(before + tiles, every) - tiles_in(before, every)


class GroupSpan(NKIObject):
    """Columns [start, start + size) of a PE column group, or of `count` neighbours from it on."""

    def __init__(self, group: int, start: int, size: int, count: int = 1) -> None:
        self.group = group
        self.start = start
        self.size = size
        self.count = count


class SumTiling(NKIObject):
    """How sums [M, size] lie in PSUM: in PE column groups of one width, the last one cut.

    A group's sums are in partitions of their own, from column 0 on, in the same banks.

    Args:
        size: columns of the sums.
        M: tokens.
        pe_tile: rows and columns of TensorE's smallest tile.
        unit: the width of a group is a multiple of it.
        step: columns of a matmul, whole banks.
    """

    def __init__(self, size: int, M: int, pe_tile: int, unit: int, step: int) -> None:
        count = column_groups(M, pe_tile)
        self.size = size
        self.step = step
        self.group_partitions = PARTITIONS // count
        while ISSUED_COLUMNS * (count - 1) ** 2 >= size:
            count -= 1
        self.width = min(size, tiles_in(size, unit * count) * unit)
        self.groups = spans(0, size, self.width)
        self.partitions = (len(self.groups) - 1) * self.group_partitions + M

    def matmuls(self, columns: Span) -> list[GroupSpan]:
        """The matmuls of a K tile over `columns`; neighbours are in different groups."""
        parts: list[GroupSpan] = []
        for s in spans(0, self.width, self.step):
            for i in range(len(self.groups)):
                start = self.groups[i].start + s.start - columns.start
                size = min(s.size, self.groups[i].size - s.start)
                if size > 0 and start >= 0 and start < columns.size:
                    parts.append(GroupSpan(i, s.start, size))
        return parts

    def evictions(self) -> list[GroupSpan]:
        """The sums cut into banks, in the order of columns."""
        parts: list[GroupSpan] = []
        for i in range(len(self.groups)):
            for s in spans(0, self.groups[i].size, BANK_COLUMNS):
                parts.append(GroupSpan(i, s.start, s.size))
        return parts

    def stacks(self) -> list[GroupSpan]:
        """The column groups whose sums lie one below the other in the same columns."""
        stacks: list[GroupSpan] = []
        full = self.size // self.width
        if full > 0:
            stacks.append(GroupSpan(0, 0, self.width, full))
        if full < len(self.groups):
            stacks.append(GroupSpan(full, 0, self.groups[full].size))
        return stacks

    def stacked_evictions(self) -> list[GroupSpan]:
        """The sums cut into banks, the groups of a stack together."""
        parts: list[GroupSpan] = []
        for stack in self.stacks():
            for s in spans(0, stack.size, BANK_COLUMNS):
                parts.append(GroupSpan(stack.group, s.start, s.size, stack.count))
        return parts

    def halves(self, itemsize: int) -> list[Span]:
        """The columns in two parts that are loaded one after the other, if both make long rows."""
        if self.size * itemsize < 2 * HALF_ROW_BYTES:
            return [Span(0, self.size)]
        first = tiles_in(self.size, 2 * self.step) * self.step
        if len(self.groups) > 1:
            first = self.groups[len(self.groups) // 2].start
        return [Span(0, first), Span(first, self.size - first)]


# --- decode with stationary weights

TURNED_TILES = 8
"""Tiles of 128 columns whose rows in the next weight are read together, in long runs."""
TURNED_GROUPS = 4
"""Groups of tiles of the output that lie side by side once they are transposed."""


class ColumnTile(NKIObject):
    """`count` tiles of `rows` columns of a weight, each a stationary operand.

    Column p of tile i is start + p * count + i if they are `strided`, else start + i * rows + p.
    The sums of tile i are in slot `slot` + i of PSUM.
    """

    def __init__(self, start: int, rows: int, count: int, strided: bool, slot: int) -> None:
        self.start = start
        self.rows = rows
        self.count = count
        self.strided = strided
        self.slot = slot

    def lines(self, M: int) -> int:
        """Tiles of the output whose M tokens are transposed together."""
        return min(self.count, PARTITIONS // M)


def turned_tiles(columns: Span, M: int) -> list[ColumnTile]:
    """Columns that are contracted next, as tiles whose sums do not cross a PSUM bank."""
    return _column_tiles(columns, M, TURNED_TILES, 1, True)


def output_tiles(columns: Span, M: int) -> list[ColumnTile]:
    """Columns of the output, as tiles in whole groups of `ColumnTile.lines`, as `turned_tiles`."""
    lines = PARTITIONS // M
    return _column_tiles(columns, M, min(PARTITIONS, TURNED_GROUPS * lines), lines, False)


def _column_tiles(columns: Span, M: int, most: int, unit: int, strided: bool) -> list[ColumnTile]:
    tiles: list[ColumnTile] = []
    start, slot, end = columns.start, 0, columns.start + columns.size
    per = BANK_COLUMNS // M
    while start < end:
        rows = min(PARTITIONS, end - start)
        count = min(most, (end - start) // rows, per - slot % per)
        if count > unit:
            count -= count % unit
        tiles.append(ColumnTile(start, rows, count, strided, slot))
        start += rows * count
        slot += count
    return tiles
