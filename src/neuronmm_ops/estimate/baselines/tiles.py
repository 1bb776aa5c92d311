"""What the published kernels share: tiles of zeros, loaded tiles, and products added to a sum."""

from __future__ import annotations

from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.memory.tensor import NkiTensor

Tiles = list[NkiTensor]
P = 128
"""Partitions of a tile."""
COLUMNS = 512
"""fp32 columns of a PSUM bank: the largest moving side of a matmul."""


def zero_tiles(count: int, rows: int, columns: int, dtype: nl.DType) -> Tiles:
    """`count` tiles [rows, columns] of zeros in SBUF."""
    tiles_sb: Tiles = []
    for _i in range(count):
        tile_sb = nl.ndarray((rows, columns), dtype=dtype)
        nisa.memset(tile_sb, 0.0)
        tiles_sb.append(tile_sb)
    return tiles_sb


def load_tiles(
    source_hbm: NkiTensor, row: int, count: int, rows: int, column: int, columns: int
) -> Tiles:
    """`count` tiles [rows, columns] below each other, zero outside the source."""
    tiles_sb: Tiles = []
    real_columns = min(columns, source_hbm.shape[1] - column)
    for i in range(count):
        first = row + i * rows
        real_rows = min(rows, source_hbm.shape[0] - first)
        tile_sb = nl.ndarray((rows, columns), dtype=source_hbm.dtype)
        if real_rows < rows or real_columns < columns:
            nisa.memset(tile_sb, 0.0)
        if real_rows > 0:
            real_hbm = source_hbm[nl.ds(first, real_rows), nl.ds(column, real_columns)]
            nisa.dma_copy(tile_sb[0:real_rows, 0:real_columns], real_hbm)
        tiles_sb.append(tile_sb)
    return tiles_sb


def load_transposed(x_hbm: NkiTensor, feature: int, count: int, token: int, tokens: int) -> Tiles:
    """x [M, K] as `count` tiles [128 features, tokens], zero outside x."""
    tiles_sb: Tiles = []
    real_tokens = min(tokens, x_hbm.shape[0] - token)
    for i in range(count):
        first = feature + i * P
        real = min(P, x_hbm.shape[1] - first)
        tile_sb = nl.ndarray((P, tokens), dtype=x_hbm.dtype)
        if real < P or real_tokens < tokens:
            nisa.memset(tile_sb, 0.0)
        if real > 0:
            block_hbm = x_hbm[nl.ds(token, real_tokens), nl.ds(first, real)]
            nisa.dma_transpose(tile_sb[0:real, 0:real_tokens], block_hbm)
        tiles_sb.append(tile_sb)
    return tiles_sb


def multiply(
    stationary: Tiles, column: int, columns: int, moving: Tiles, first: int, size: int
) -> NkiTensor:
    """The PSUM tile stationary[:, column:].T @ moving[:, first:], summed over the tiles of K."""
    product_psum = nl.ndarray((columns, size), dtype=nl.float32, buffer=nl.psum)
    for k in range(len(stationary)):
        left = stationary[k][:, nl.ds(column, columns)]
        nisa.nc_matmul(product_psum, left, moving[k][:, nl.ds(first, size)])
    return product_psum


def add(total_sb: NkiTensor, part: NkiTensor) -> None:
    """Add a product in PSUM or SBUF to a sum in SBUF, rounded to the sum's dtype."""
    nisa.tensor_tensor(total_sb, total_sb, part, nl.add)
