"""The matmul that NeuronMM's end-to-end baseline computes every Linear of the dense MLP with."""

from __future__ import annotations

from neuroncore import isa as nisa
from neuroncore import jit
from neuroncore import language as nl
from neuronmm_ops.estimate.baselines.tiles import (
    COLUMNS,
    NkiTensor,
    P,
    Tiles,
    add,
    load_tiles,
    multiply,
    zero_tiles,
)


@jit
def tutorial_fitted(lhsT: NkiTensor, rhs: NkiTensor) -> NkiTensor:
    """lhsT [K, M], rhs [K, N] -> [M, N], any sizes: the blocked step, its blocks cut to the sizes.

    Of AWS's matmul tutorial (SDK 2.26). Blocks that hang over an edge are multiplied whole, zeros
    filled in. It rounds sums to the dtype of lhsT after every block of K, as the original.
    """
    K, M = lhsT.shape
    N = rhs.shape[1]
    out_hbm = nl.ndarray((M, N), dtype=lhsT.dtype, buffer=nl.shared_hbm)
    rows, tiles_m = _fitted(M, P, 16)
    columns, tiles_n = _fitted(N, COLUMNS, 2)
    depth, tiles_k = _fitted(K, P, 8)
    height, width = rows * tiles_m, columns * tiles_n
    for n in range(0, N, width):
        real = min(width, N - n)
        sums_sb: list[Tiles] = []
        for _m in range(0, M, height):
            sums_sb.append(zero_tiles(tiles_m, rows, width, lhsT.dtype))
        for k in range(0, K, depth * tiles_k):
            b_sb = load_tiles(rhs, k, tiles_k, depth, n, width)
            for m in range(len(sums_sb)):
                a_sb = load_tiles(lhsT, k, tiles_k, depth, m * height, height)
                for j in range(tiles_n):
                    for i in range(tiles_m):
                        part = multiply(a_sb, i * rows, rows, b_sb, j * columns, columns)
                        add(sums_sb[m][i][:, nl.ds(j * columns, columns)], part)
        for m in range(len(sums_sb)):
            for i in range(tiles_m):
                row = m * height + i * rows
                if row < M:
                    last = min(rows, M - row)
                    real_hbm = out_hbm[nl.ds(row, last), nl.ds(n, real)]
                    nisa.dma_copy(real_hbm, sums_sb[m][i][0:last, 0:real])
    return out_hbm


def _fitted(size: int, tile: int, tiles: int) -> tuple[int, int]:
    """Tile size and tiles in a block, no larger than the size has whole ones of."""
    return (size, 1) if size < tile else (tile, min(tiles, size // tile))
