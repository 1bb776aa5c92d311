"""Tile arithmetic that the kernels and their planners share. Pure: no instruction, no tensor."""

from __future__ import annotations

from neuroncore.hardware import PARTITIONS
from neuronmm_ops.kernels.nki_object import NKIObject

BANK_COLUMNS = 512
"""fp32 columns of a PSUM bank: the largest moving side of a matmul."""
OUTPUT_UNIT = 32
"""Columns that a column group of the output of decode, and a core's part, is a multiple of."""


class Span(NKIObject):
    """A range of one dimension: [start, start + size)."""

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.size = size


def tiles_in(size: int, tile: int) -> int:
    """How many tiles cover `size`, the last one cut at the edge."""
    return (size + tile - 1) // tile


def spans(start: int, size: int, tile: int) -> list[Span]:
    """Cut [start, start + size) into tiles; the last one ends at the edge."""
    parts: list[Span] = []
    for i in range(tiles_in(size, tile)):
        parts.append(Span(start + i * tile, min(tile, size - i * tile)))
    return parts


def sizes(size: int, tile: int) -> list[int]:
    """The sizes of `spans`."""
    widths = [tile] * (size // tile)
    if size % tile > 0:
        widths.append(size % tile)
    return widths


class Group(NKIObject):
    """PSUM tiles that are summed together: `rows` of the stationary, `columns` of the moving side.

    They are cut into tiles of 128 by 512.
    """

    def __init__(self, rows: Span, columns: Span) -> None:
        self.rows = rows
        self.columns = columns


def transposed_groups(features: int, tokens: int, token_group: int, banks: int) -> list[Group]:
    """Groups of at most `banks` PSUM tiles that cover [features, tokens], token group first."""
    groups: list[Group] = []
    for columns in spans(0, tokens, token_group):
        step = max(1, banks // tiles_in(columns.size, BANK_COLUMNS)) * PARTITIONS
        for rows in spans(0, features, step):
            groups.append(Group(rows, columns))
    return groups


def natural_groups(tokens: int, features: int, token_tiles: int, banks: int) -> list[Group]:
    """Groups of at most `banks` PSUM tiles that cover [tokens, features], `token_tiles` first."""
    groups: list[Group] = []
    for rows in spans(0, tokens, token_tiles * PARTITIONS):
        step = max(1, banks // tiles_in(rows.size, PARTITIONS)) * BANK_COLUMNS
        for columns in spans(0, features, step):
            groups.append(Group(rows, columns))
    return groups


class KPart(NKIObject):
    """Rows of a K chunk from `start` on: `rows` partitions, each of `tiles` neighbouring rows."""

    def __init__(self, start: int, rows: int, tiles: int) -> None:
        self.start = start
        self.rows = rows
        self.tiles = tiles


GROUP_TILES = (128, 64, 32, 16, 8, 4, 2)


def chunk_parts(size: int, group: int) -> list[KPart]:
    """Parts of a K chunk: as many rows a partition as there are, and what is left below 128.

    Where a `group` of 128 rows shares scales, a partition's rows are of one group, and even: two
    are in a byte.
    """
    parts: list[KPart] = []
    if group == 0:
        tiles = size // PARTITIONS
        if tiles > 0:
            parts.append(KPart(0, PARTITIONS, tiles))
        if size > tiles * PARTITIONS:
            parts.append(KPart(tiles * PARTITIONS, size - tiles * PARTITIONS, 1))
        return parts
    start = 0
    for tiles in GROUP_TILES:
        for _ in range((size - start) // (tiles * PARTITIONS)):
            parts.append(KPart(start, PARTITIONS, tiles))
            start += tiles * PARTITIONS
    if start < size:
        parts.append(KPart(start, (size - start) // 2, 2))
    return parts


def core_span(size: int, core: int, cores: int, group: int = 0) -> Span:
    """A core's range of a dimension; two cores split at a multiple of 128 if it is large enough.

    They always do where a `group` of 128 shares scales.
    """
    unit = PARTITIONS if group > 0 or size >= 2 * PARTITIONS else 1
    return _shared(size, core, cores, unit)


def core_columns(size: int, core: int, cores: int, ahead: int = 0) -> Span:
    """A core's columns of an output; of two the first gets fewer by the work that it is `ahead`.

    They need not be a multiple of 128, as what is contracted next is.

    Args:
        size: columns.
        core: which.
        cores: 1 or 2.
        ahead: columns that take as long as what the first core has done beyond the other.
    """
    return _shared(size, core, cores, OUTPUT_UNIT if size >= 2 * PARTITIONS else 1, ahead)


def _shared(size: int, core: int, cores: int, unit: int, ahead: int = 0) -> Span:
    if cores == 1:
        return Span(0, size)
    half = min(size, tiles_in(max(0, size - ahead), 2 * unit) * unit)
    return Span(0, half) if core == 0 else Span(half, size - half)


def looped_tokens(tokens: int, block: int) -> int:
    """How many of a core's tokens a loop on the device runs over: full blocks, if two or more."""
    blocks = tokens // block
    return blocks * block if blocks > 1 else 0


STAGED_TILES = 4
"""Contraction tiles of x that are loaded together where TensorE transposes them."""
KEPT_COLUMNS = 4096
"""Of an output, at most, whose scales stay in SBUF on every partition for a whole kernel."""
HIDDEN_TILES = 4
"""Tiles of svd_mlp's hidden block that lie side by side, so that their rows in HBM are long."""


TAIL_TILES = 4
"""Last tiles of a contraction that one PSUM tile of svd_mlp's takes after the other."""


def check_pair(size: int, rows: int, columns: int, bias: int) -> None:
    """Check sizes: a contraction on both sides, and the columns that a bias is for (0: none)."""
    assert size == rows, (
        f"a contraction has {size} features and {rows} rows; pass u [K, r], v [r, N]"
    )
    assert bias == 0 or bias == columns, f"bias must be [{columns}], got [{bias}]"


# --- double_row: two rows of the contraction a partition, in fp8

DOUBLED_TOKENS = 512
"""Of activations that are rounded to fp8 together: while some are, others are multiplied."""
DOUBLED_BANKS = 5
"""PSUM tiles in a group of products of fp8; the others hold scales of tokens."""
DOUBLED_FEATURES = 57600
"""Most features of a token that cannot exceed 240 once it is scaled."""
SQUARES = 8
"""Tiles of squares of the hidden block that are summed before TensorE sums over partitions."""
SQUARES_OF_LOW = 4
"""The same of low-rank intermediates."""
SQUARES_OF_X = 2
"""The same of x, which is waited for."""
SETTLED_MATMULS = 24
"""Matmuls after which what was evicted before them has been squared and added up."""
ROUNDED_AHEAD = 2
"""Units of the contraction that are rounded after each group of products."""


def units_in(size: int) -> int:
    """Matmuls that contract `size` rows: 256 each, and what is left in tiles of 128."""
    return size // (2 * PARTITIONS) + tiles_in(size % (2 * PARTITIONS), PARTITIONS)


def unit_tiles(size: int, unit: int) -> Span:
    """The tiles of 128 rows that a matmul contracts, one or two."""
    pairs = size // (2 * PARTITIONS)
    return Span(2 * unit, 2) if unit < pairs else Span(pairs + unit, 1)
