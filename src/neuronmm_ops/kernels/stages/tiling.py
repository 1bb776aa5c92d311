"""Tile arithmetic that the kernels and their planners share. Pure: no instruction, no tensor."""

from __future__ import annotations

from neuronmm_ops.hardware import PARTITIONS, PSUM_BANKS
from neuronmm_ops.kernels.nki_object import NKIObject

BANK_COLUMNS = 512
"""fp32 columns of a PSUM bank: the largest moving side of a matmul."""

P = PARTITIONS
COLUMNS = BANK_COLUMNS
BANKS = PSUM_BANKS

ALIGN = 32
"""Columns that a decode kernel's lane of the output is a multiple of."""
SMALL = 4096
"""Bytes a partition of a decode kernel's first and last weight tiles: TensorE waits for whole."""
HALF = 2560
"""Bytes of a row of its last tile, at least, where that is loaded in two parts."""


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
    found: list[Span] = []
    for i in range(tiles_in(size, tile)):
        found.append(Span(start + i * tile, min(tile, size - i * tile)))
    return found


def sizes(size: int, tile: int) -> list[int]:
    """The sizes of `spans`."""
    rest = size % tile
    return [tile] * (size // tile) + [rest] * (rest > 0)


class Group(NKIObject):
    """PSUM tiles that are summed together: `rows` of the stationary, `columns` of the moving side.

    They are cut into tiles of 128 by 512.
    """

    def __init__(self, rows: Span, columns: Span) -> None:
        self.rows = rows
        self.columns = columns


def transposed_groups(features: int, tokens: int, token_group: int, banks: int) -> list[Group]:
    """Groups of at most `banks` PSUM tiles that cover [features, tokens], token group first."""
    found: list[Group] = []
    for columns in spans(0, tokens, token_group):
        step = max(1, banks // tiles_in(columns.size, BANK_COLUMNS)) * PARTITIONS
        for rows in spans(0, features, step):
            found.append(Group(rows, columns))
    return found


def natural_groups(tokens: int, features: int, token_tiles: int, banks: int) -> list[Group]:
    """Groups of at most `banks` PSUM tiles that cover [tokens, features], `token_tiles` first."""
    found: list[Group] = []
    for rows in spans(0, tokens, token_tiles * PARTITIONS):
        step = max(1, banks // tiles_in(rows.size, PARTITIONS)) * BANK_COLUMNS
        for columns in spans(0, features, step):
            found.append(Group(rows, columns))
    return found


def core_span(tokens: int, core: int, cores: int) -> Span:
    """The tokens of one core in prefill: whole tiles of 128, the first core has the most."""
    share = tiles_in(tiles_in(tokens, PARTITIONS), cores) * PARTITIONS
    start = min(core * share, tokens)
    return Span(start, min(share, tokens - start))


STAGED_TILES = 4
"""Contraction tiles of x that are loaded together where TensorE transposes them."""
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
