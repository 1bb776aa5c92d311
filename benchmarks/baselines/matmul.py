"""Published matmul kernels, to hold the simulated core's clock against.

The steps of AWS's matmul tutorial (SDK 2.26, and again in the 2.32 optimisation guide) but the
first, `neuroncore.calibration.profiled.tiled` (its blocks cut to any sizes are `tutorial_fitted` of
`neuronmm_ops.estimate.baselines`); the two hand-tuned kernels of awslabs/nki-autotune;
and the unfused pair that NeuronMM (arXiv 2510.25977) is compared with.

Letters: M rows of the result, K the contraction, N columns of the result.
"""

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
    load_transposed,
    multiply,
    zero_tiles,
)


@jit
def tutorial_hoisted(lhsT: NkiTensor, rhs: NkiTensor) -> NkiTensor:
    """lhsT [K, M], rhs [K, N] -> [M, N]: operands of a row of tiles are loaded before its loop."""
    return _matmul_of_columns(lhsT, rhs, 1)


@jit
def tutorial_blocked(lhsT: NkiTensor, rhs: NkiTensor) -> NkiTensor:
    """lhsT [K, M], rhs [K, N] -> [M, N]: blocks of 2 x 2 tiles share their operands."""
    return _matmul_of_columns(lhsT, rhs, 2)


def _matmul_of_columns(lhsT: NkiTensor, rhs: NkiTensor, tiles: int) -> NkiTensor:
    """Blocks of tiles x tiles result tiles, all of K in SBUF."""
    out_hbm = _output(lhsT, rhs)
    for m in range(0, lhsT.shape[1] // P, tiles):
        a_sb = _load_columns(lhsT, m, tiles, P)
        for n in range(0, rhs.shape[1] // COLUMNS, tiles):
            b_sb = _load_columns(rhs, n, tiles, COLUMNS)
            for i in range(tiles):
                for j in range(tiles):
                    acc_psum = multiply(a_sb[i], 0, P, b_sb[j], 0, COLUMNS)
                    _evict(out_hbm, acc_psum, m + i, n + j)
    return out_hbm


@jit
def tutorial_blocked_k(
    lhsT: NkiTensor, rhs: NkiTensor, tiles_m: int = 16, tiles_n: int = 2, tiles_k: int = 8
) -> NkiTensor:
    """lhsT [K, M], rhs [K, N] -> [M, N]: all three dimensions blocked, partial sums in SBUF."""
    out_hbm = _output(lhsT, rhs)
    width = tiles_n * COLUMNS
    for n in range(rhs.shape[1] // width):
        sums_sb = _column_sums(lhsT, rhs, n, tiles_m, tiles_n, tiles_k)
        for m in range(len(sums_sb)):
            row_sb = nl.ndarray((P, width), dtype=out_hbm.dtype)
            for j in range(tiles_n):
                nisa.activation(row_sb[:, nl.ds(j * COLUMNS, COLUMNS)], nl.copy, sums_sb[m][j])
            nisa.dma_copy(out_hbm[nl.ds(m * P, P), nl.ds(n * width, width)], row_sb)
    return out_hbm


@jit
def autotune_lhs_rhs(lhs: NkiTensor, rhs: NkiTensor) -> NkiTensor:
    """lhs [M, K] @ rhs [K, N], 2048^3: DMA transposes, 8 x 1 tiles a block, 8 tiles deep."""
    M, K = lhs.shape
    N = rhs.shape[1]
    out_hbm = nl.ndarray((M, N), dtype=lhs.dtype, buffer=nl.shared_hbm)
    block = 8 * P
    for m in range(M // block):
        sums_sb = zero_tiles(8, P, N, lhs.dtype)
        for n in range(N // COLUMNS):
            for k in range(K // block):
                a_sb = load_transposed(lhs, k * block, 8, m * block, block)
                b_sb = load_tiles(rhs, k * block, 8, P, n * COLUMNS, COLUMNS)
                for i in range(8):
                    part_psum = multiply(a_sb, i * P, P, b_sb, 0, COLUMNS)
                    part_sb = _rounded(part_psum, lhs.dtype)
                    add(sums_sb[i][:, nl.ds(n * COLUMNS, COLUMNS)], part_sb)
            for i in range(8):
                columns = nl.ds(n * COLUMNS, COLUMNS)
                nisa.dma_copy(out_hbm[nl.ds(m * block + i * P, P), columns], sums_sb[i][:, columns])
    return out_hbm


@jit
def autotune_transposed_lhs(lhsT: NkiTensor, rhs: NkiTensor) -> NkiTensor:
    """lhsT [K, M], rhs [K, N] -> [M, N], 2048^3: 4 x 1 tiles a block, 8 deep, sums of all M."""
    out_hbm = _output(lhsT, rhs)
    for n in range(rhs.shape[1] // COLUMNS):
        sums_sb = _column_sums(lhsT, rhs, n, 4, 1, 8, rounds_products=True)
        _store_columns(out_hbm, sums_sb, n * COLUMNS)
    return out_hbm


@jit
def unfused_xuv(x: NkiTensor, u: NkiTensor, v: NkiTensor) -> NkiTensor:
    """x [M, K], u [K, r], v [r, N] -> [M, N]: two blocked matmuls, (x u) through HBM."""
    return _matmul_from_rows(_matmul_from_rows(x, u, nl.private_hbm), v, nl.shared_hbm)


def _matmul_from_rows(lhs: NkiTensor, rhs: NkiTensor, buffer: nl.MemoryRegion) -> NkiTensor:
    """lhs [M, K] @ rhs [K, N], transposed on the way in; the tutorial's blocks of 16, 2, 8."""
    out_hbm = nl.ndarray((lhs.shape[0], rhs.shape[1]), dtype=lhs.dtype, buffer=buffer)
    for n in range(rhs.shape[1] // (2 * COLUMNS)):
        sums_sb = _column_sums(lhs, rhs, n, 16, 2, 8, is_transposed=False)
        _store_columns(out_hbm, sums_sb, n * 2 * COLUMNS)
    return out_hbm


def _column_sums(
    lhs: NkiTensor,
    rhs: NkiTensor,
    n: int,
    tiles_m: int,
    tiles_n: int,
    tiles_k: int,
    is_transposed: bool = True,
    rounds_products: bool = False,
) -> list[Tiles]:
    """Column block n of lhs @ rhs in SBUF: a row of `tiles_n` tiles for each tile of M.

    lhs is [K, M], or [M, K] if it is not transposed. A product over one block of K goes through one
    PSUM tile, and if asked is rounded to the sums' dtype before it is added.
    """
    M = lhs.shape[1] if is_transposed else lhs.shape[0]
    rows, width, depth = tiles_m * P, tiles_n * COLUMNS, tiles_k * P
    sums_sb: list[Tiles] = []
    for _i in range(M // P):
        sums_sb.append(zero_tiles(tiles_n, P, COLUMNS, lhs.dtype))
    for k in range(rhs.shape[0] // depth):
        b_sb = load_tiles(rhs, k * depth, tiles_k, P, n * width, width)
        for m in range(M // rows):
            if is_transposed:
                a_sb = load_tiles(lhs, k * depth, tiles_k, P, m * rows, rows)
            else:
                a_sb = load_transposed(lhs, k * depth, tiles_k, m * rows, rows)
            for j in range(tiles_n):
                for i in range(tiles_m):
                    part = multiply(a_sb, i * P, P, b_sb, j * COLUMNS, COLUMNS)
                    if rounds_products:
                        part = _rounded(part, lhs.dtype)
                    add(sums_sb[m * tiles_m + i][j], part)
    return sums_sb


def _store_columns(out_hbm: NkiTensor, sums_sb: list[Tiles], column: int) -> None:
    for m in range(len(sums_sb)):
        for j in range(len(sums_sb[m])):
            columns = nl.ds(column + j * COLUMNS, COLUMNS)
            nisa.dma_copy(out_hbm[nl.ds(m * P, P), columns], sums_sb[m][j])


def _output(lhsT: NkiTensor, rhs: NkiTensor) -> NkiTensor:
    """The result [M, N] of lhsT [K, M] and rhs [K, N]."""
    return nl.ndarray((lhsT.shape[1], rhs.shape[1]), dtype=lhsT.dtype, buffer=nl.shared_hbm)


def _load_columns(source: NkiTensor, first: int, count: int, width: int) -> list[Tiles]:
    """All tiles [128, width] of `count` columns of tiles."""
    found_sb: list[Tiles] = []
    for column in range(first, first + count):
        found_sb.append(load_tiles(source, 0, source.shape[0] // P, P, column * width, width))
    return found_sb


def _rounded(part_psum: NkiTensor, dtype: nl.DType) -> NkiTensor:
    """A PSUM tile in SBUF, rounded to a dtype."""
    part_sb = nl.ndarray(part_psum.shape, dtype=dtype)
    nisa.tensor_copy(part_sb, part_psum)
    return part_sb


def _evict(out_hbm: NkiTensor, acc_psum: NkiTensor, m: int, n: int) -> None:
    """Copy the finished PSUM tile in row m and column n of tiles to SBUF and store it."""
    out_sb = _rounded(acc_psum, out_hbm.dtype)
    nisa.dma_copy(out_hbm[nl.ds(m * P, P), nl.ds(n * COLUMNS, COLUMNS)], out_sb)
