"""Matmul kernels whose profiles on trn2 AWS published, after its descriptions of them.

Source: aws-neuron/neuron-agentic-development, skills/neuron-nki-profile-querying/references. Its
first kernel, V0, is the tutorial's tiled step.
"""

from __future__ import annotations

from neuroncore import isa as nisa
from neuroncore import jit
from neuroncore import language as nl
from neuronmm_ops.estimate.baselines.tiles import COLUMNS, NkiTensor, P, Tiles, evict, multiply

BLOCK_M, BLOCK_N = 8 * P, 2 * COLUMNS


@jit
def blocked(lhsT: NkiTensor, rhs: NkiTensor, left: int, right: int) -> NkiTensor:
    """lhsT [K, M], rhs [K, N] -> [M, N] in blocks of [1024, 1024], all of K in SBUF: V1 and V2.

    A DMA loads `left` columns of lhsT, or `right` of rhs: 128 and 512 in V1, 1,024 each in V2.
    """
    M, N = lhsT.shape[1], rhs.shape[1]
    out_hbm = nl.ndarray((M, N), dtype=lhsT.dtype, buffer=nl.shared_hbm)
    for m in range(0, M, BLOCK_M):
        a_sb = _rows(lhsT, m, BLOCK_M, left)
        for n in range(0, N, BLOCK_N):
            b_sb = _rows(rhs, n, BLOCK_N, right)
            for i in range(0, BLOCK_M, P):
                for j in range(0, BLOCK_N, COLUMNS):
                    acc_psum = multiply(a_sb, i, P, b_sb, j, COLUMNS)
                    evict(out_hbm, acc_psum, (m + i) // P, (n + j) // COLUMNS)
    return out_hbm


@jit
def transposing(lhs: NkiTensor, rhs: NkiTensor) -> NkiTensor:
    """lhs [M, K], rhs [K, N] -> [M, N]: each tile of lhs transposed on TensorE where it is used."""
    (M, K), N = lhs.shape, rhs.shape[1]
    out_hbm = nl.ndarray((M, N), dtype=lhs.dtype, buffer=nl.shared_hbm)
    for m in range(0, M, P):
        for n in range(0, N, COLUMNS):
            acc_psum = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
            for k in range(0, K, P):
                a_sb = nl.ndarray((P, P), dtype=lhs.dtype)
                nisa.dma_copy(a_sb, lhs[nl.ds(m, P), nl.ds(k, P)])
                turned_psum = nl.ndarray((P, P), dtype=lhs.dtype, buffer=nl.psum)
                nisa.nc_transpose(turned_psum, a_sb)
                turned_sb = nl.ndarray((P, P), dtype=lhs.dtype)
                nisa.tensor_copy(turned_sb, turned_psum)
                b_sb = nl.ndarray((P, COLUMNS), dtype=rhs.dtype)
                nisa.dma_copy(b_sb, rhs[nl.ds(k, P), nl.ds(n, COLUMNS)])
                nisa.nc_matmul(acc_psum, turned_sb, b_sb)
            evict(out_hbm, acc_psum, m // P, n // COLUMNS)
    return out_hbm


@jit
def resident(
    lhsT: NkiTensor, rhs: NkiTensor, tiles: tuple[tuple[int, int, int], ...], count: int
) -> NkiTensor:
    """lhsT [128, 128], rhs [128, 512] -> [128, 512]: `count` matmuls of each tile (K, M, N)."""
    a_sb = nl.ndarray((P, P), dtype=lhsT.dtype)
    b_sb = nl.ndarray((P, COLUMNS), dtype=rhs.dtype)
    nisa.dma_copy(a_sb, lhsT)
    nisa.dma_copy(b_sb, rhs)
    out_hbm = nl.ndarray((P, COLUMNS), dtype=lhsT.dtype, buffer=nl.shared_hbm)
    sums_psum: Tiles = []
    for K, M, N in tiles:
        acc_psum = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
        for _i in range(count):
            nisa.nc_matmul(acc_psum[0:M, 0:N], a_sb[0:K, 0:M], b_sb[0:K, 0:N])
        sums_psum.append(acc_psum)
    evict(out_hbm, sums_psum[-1], 0, 0)
    return out_hbm


def _rows(source_hbm: NkiTensor, column: int, columns: int, each: int) -> Tiles:
    """The tiles [128, columns] of all rows, loaded `each` columns at a time."""
    tiles_sb: Tiles = []
    for k in range(0, source_hbm.shape[0], P):
        tile_sb = nl.ndarray((P, columns), dtype=source_hbm.dtype)
        for c in range(0, columns, each):
            part_hbm = source_hbm[nl.ds(k, P), nl.ds(column + c, each)]
            nisa.dma_copy(tile_sb[:, nl.ds(c, each)], part_hbm)
        tiles_sb.append(tile_sb)
    return tiles_sb
