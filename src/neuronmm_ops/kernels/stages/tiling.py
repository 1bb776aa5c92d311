"""Tile arithmetic shared by the kernels."""

P = 128
"""Partitions: the largest contraction and the largest stationary side of a matmul."""
COLUMNS = 512
"""fp32 columns of a PSUM bank: the largest moving side of a matmul."""
BANKS = 8
"""PSUM banks."""

ALIGN = 32
"""Columns that a decode kernel's lane of the output is a multiple of."""
SMALL = 4096
"""Bytes a partition of a decode kernel's first and last weight tiles: TensorE waits for whole."""
HALF = 2560
"""Bytes of a row of its last tile, at least, where that is loaded in two parts."""

Span = tuple[int, int]
"""Start and size of a tile along one dimension."""


PACKED_RUN = 4096
"""Bytes of a DMA's contiguous runs that loads of a packed factor aim at (96 % of the peak)."""


def tiles_in(size: int, tile: int) -> int:
    """How many tiles cover `size`, the last one cut at the edge."""
    return (size + tile - 1) // tile


def check_pair(size: int, rows: int, columns: int, bias: int) -> None:
    """Check sizes: a contraction on both sides, and the columns that a bias is for (0: none)."""
    assert size == rows, (
        f"a contraction has {size} features and {rows} rows; pass u [K, r], v [r, N]"
    )
    assert bias == 0 or bias == columns, f"bias must be [{columns}], got [{bias}]"


def packed_tiles(row_bytes: int) -> int:
    """Tiles of a packed u that are loaded together: its rows in a partition are neighbours."""
    return tiles_in(PACKED_RUN, row_bytes)


def spans(start: int, size: int, tile: int) -> list[Span]:
    """Cut [start, start + size) into tiles; the last one ends at the edge."""
    found: list[Span] = []
    for i in range(tiles_in(size, tile)):
        found.append((start + i * tile, min(tile, size - i * tile)))
    return found
