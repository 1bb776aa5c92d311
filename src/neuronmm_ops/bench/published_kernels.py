"""Published kernels, rewritten from their descriptions, to check the simulated core's clock with.

The four steps of AWS's matmul tutorial (SDK 2.26, and again in the 2.32 optimisation guide), the
hand-tuned lhs @ rhs of awslabs/nki-autotune, and the unfused pair that NeuronMM (arXiv 2510.25977)
is compared with; its own kernels are in `published_mlp`. They keep what the originals do, bfloat16
partial sums included: they are measured here, not recommended.
"""

from __future__ import annotations

from neuronmm_ops.neuroncore import isa as nisa
from neuronmm_ops.neuroncore import jit
from neuronmm_ops.neuroncore import language as nl
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor

Tiles = list[NkiTensor]
P = 128
COLUMNS = 512


@jit
def tutorial_tiled(lhsT: NkiTensor, rhs: NkiTensor) -> NkiTensor:
    """lhsT [K, M], rhs [K, N] -> [M, N]: one tile at a time, operands loaded for each matmul."""
    K, M = lhsT.shape
    N = rhs.shape[1]
    result = nl.ndarray((M, N), dtype=lhsT.dtype, buffer=nl.shared_hbm)
    for m in range(M // P):
        for n in range(N // COLUMNS):
            acc = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
            for k in range(K // P):
                a = nl.ndarray((P, P), dtype=lhsT.dtype)
                b = nl.ndarray((P, COLUMNS), dtype=rhs.dtype)
                nisa.dma_copy(a, lhsT[k * P : (k + 1) * P, m * P : (m + 1) * P])
                nisa.dma_copy(b, rhs[k * P : (k + 1) * P, n * COLUMNS : (n + 1) * COLUMNS])
                nisa.nc_matmul(acc, a, b)
            _evict(result, acc, m, n)
    return result


def _evict(result: NkiTensor, acc: NkiTensor, m: int, n: int) -> None:
    """Copy a finished PSUM tile to SBUF and store it."""
    out = nl.ndarray((P, COLUMNS), dtype=result.dtype)
    nisa.tensor_copy(out, acc)
    nisa.dma_copy(result[m * P : (m + 1) * P, n * COLUMNS : (n + 1) * COLUMNS], out)


@jit
def tutorial_hoisted(lhsT: NkiTensor, rhs: NkiTensor) -> NkiTensor:
    """lhsT [K, M], rhs [K, N] -> [M, N]: operands of a row of tiles are loaded before its loop."""
    K, M = lhsT.shape
    N = rhs.shape[1]
    result = nl.ndarray((M, N), dtype=lhsT.dtype, buffer=nl.shared_hbm)
    for m in range(M // P):
        a = _load_column(lhsT, K, m * P, P)
        for n in range(N // COLUMNS):
            b = _load_column(rhs, K, n * COLUMNS, COLUMNS)
            _matmul_column(result, a, b, m, n)
    return result


def _load_column(source: NkiTensor, K: int, start: int, width: int) -> Tiles:
    """All K tiles of `width` columns from `start`."""
    tiles: Tiles = []
    for k in range(K // P):
        tile = nl.ndarray((P, width), dtype=source.dtype)
        nisa.dma_copy(tile, source[k * P : (k + 1) * P, start : start + width])
        tiles.append(tile)
    return tiles


def _matmul_column(result: NkiTensor, a: Tiles, b: Tiles, m: int, n: int) -> None:
    """One result tile over the whole contraction."""
    acc = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
    for k in range(len(a)):
        nisa.nc_matmul(acc, a[k], b[k])
    _evict(result, acc, m, n)


@jit
def tutorial_blocked(lhsT: NkiTensor, rhs: NkiTensor) -> NkiTensor:
    """lhsT [K, M], rhs [K, N] -> [M, N]: blocks of 2 x 2 tiles share their operands."""
    K, M = lhsT.shape
    N = rhs.shape[1]
    result = nl.ndarray((M, N), dtype=lhsT.dtype, buffer=nl.shared_hbm)
    for m in range(M // (2 * P)):
        a: list[Tiles] = []
        for i in range(2):
            a.append(_load_column(lhsT, K, (2 * m + i) * P, P))
        for n in range(N // (2 * COLUMNS)):
            b: list[Tiles] = []
            for j in range(2):
                b.append(_load_column(rhs, K, (2 * n + j) * COLUMNS, COLUMNS))
            for i in range(2):
                for j in range(2):
                    _matmul_column(result, a[i], b[j], 2 * m + i, 2 * n + j)
    return result


@jit
def tutorial_blocked_k(
    lhsT: NkiTensor, rhs: NkiTensor, tiles_m: int = 16, tiles_n: int = 2, tiles_k: int = 8
) -> NkiTensor:
    """lhsT [K, M], rhs [K, N] -> [M, N]: all three dimensions blocked, partial sums in SBUF."""
    K, M = lhsT.shape
    N = rhs.shape[1]
    result = nl.ndarray((M, N), dtype=lhsT.dtype, buffer=nl.shared_hbm)
    for n in range(N // (tiles_n * COLUMNS)):
        sums = _zero_tiles(M // P, tiles_n, lhsT.dtype)
        for k in range(K // (tiles_k * P)):
            b = _load_rows(rhs, k * tiles_k, tiles_k, n * tiles_n * COLUMNS, tiles_n * COLUMNS)
            for m in range(M // (tiles_m * P)):
                a = _load_rows(lhsT, k * tiles_k, tiles_k, m * tiles_m * P, tiles_m * P)
                _add_block(sums, a, b, m * tiles_m, tiles_m, tiles_n)
        for m in range(M // P):
            packed = nl.ndarray((P, tiles_n * COLUMNS), dtype=result.dtype)
            for j in range(tiles_n):
                columns = packed[:, j * COLUMNS : (j + 1) * COLUMNS]
                nisa.activation(columns, nl.copy, sums[m][j])
            columns = nl.ds(n * tiles_n * COLUMNS, tiles_n * COLUMNS)
            nisa.dma_copy(result[m * P : (m + 1) * P, columns], packed)
    return result


def _zero_tiles(rows: int, columns: int, dtype: nl.DType) -> list[Tiles]:
    """rows x columns tiles [128, 512] of zeros."""
    tiles: list[Tiles] = []
    for _i in range(rows):
        row: Tiles = []
        for _j in range(columns):
            tile = nl.ndarray((P, COLUMNS), dtype=dtype)
            nisa.memset(tile, 0.0)
            row.append(tile)
        tiles.append(row)
    return tiles


def _load_rows(source: NkiTensor, first: int, count: int, start: int, width: int) -> Tiles:
    """`count` tiles [128, width] below each other, from row tile `first` and column `start`."""
    tiles: Tiles = []
    for i in range(count):
        tile = nl.ndarray((P, width), dtype=source.dtype)
        rows = nl.ds((first + i) * P, P)
        nisa.dma_copy(tile, source[rows, start : start + width])
        tiles.append(tile)
    return tiles


def _add_block(
    sums: list[Tiles], a: Tiles, b: Tiles, first: int, tiles_m: int, tiles_n: int
) -> None:
    """sums += a.T @ b for a block of result tiles, each through one PSUM tile."""
    for j in range(tiles_n):
        for i in range(tiles_m):
            acc = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
            for k in range(len(a)):
                nisa.nc_matmul(
                    acc,
                    a[k][:, i * P : (i + 1) * P],
                    b[k][:, j * COLUMNS : (j + 1) * COLUMNS],
                )
            total = sums[first + i][j]
            nisa.tensor_tensor(total, total, acc, nl.add)


@jit
def autotune_lhs_rhs(lhs: NkiTensor, rhs: NkiTensor) -> NkiTensor:
    """lhs [M, K] @ rhs [K, N], 2048^3: DMA transposes, 8 x 1 tiles a block, deep buffers."""
    M, K = lhs.shape
    N = rhs.shape[1]
    result = nl.ndarray((M, N), dtype=lhs.dtype, buffer=nl.shared_hbm)
    rows = 8
    for m in range(M // (rows * P)):
        sums: Tiles = []
        for _i in range(rows):
            total = nl.ndarray((P, N), dtype=lhs.dtype)
            nisa.memset(total, 0.0)
            sums.append(total)
        for n in range(N // COLUMNS):
            for k in range(K // (8 * P)):
                a: Tiles = []
                for i in range(8):
                    tile = nl.ndarray((P, rows * P), dtype=lhs.dtype)
                    block = lhs[nl.ds(m * rows * P, rows * P), nl.ds((8 * k + i) * P, P)]
                    nisa.dma_transpose(tile, block)
                    a.append(tile)
                b = _load_rows(rhs, 8 * k, 8, n * COLUMNS, COLUMNS)
                for i in range(rows):
                    acc = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
                    for j in range(8):
                        nisa.nc_matmul(acc, a[j][:, i * P : (i + 1) * P], b[j])
                    part = nl.ndarray((P, COLUMNS), dtype=lhs.dtype)
                    nisa.tensor_copy(part, acc)
                    total = sums[i][:, n * COLUMNS : (n + 1) * COLUMNS]
                    nisa.tensor_tensor(total, total, part, nl.add)
            for i in range(rows):
                columns = nl.ds(n * COLUMNS, COLUMNS)
                nisa.dma_copy(result[nl.ds((m * rows + i) * P, P), columns], sums[i][:, columns])
    return result


@jit
def unfused_xuv(x: NkiTensor, u: NkiTensor, v: NkiTensor) -> NkiTensor:
    """x [M, K], u [K, r], v [r, N] -> [M, N]: two blocked matmuls, (x u) through HBM."""
    return _matmul_from_rows(_matmul_from_rows(x, u, nl.private_hbm), v, nl.shared_hbm)


def _matmul_from_rows(lhs: NkiTensor, rhs: NkiTensor, buffer: nl.MemoryRegion) -> NkiTensor:
    """lhs [M, K] @ rhs [K, N], transposed on the way in; the tutorial's blocks of 16, 2, 8."""
    M, K = lhs.shape
    N = rhs.shape[1]
    result = nl.ndarray((M, N), dtype=lhs.dtype, buffer=buffer)
    for n in range(N // (2 * COLUMNS)):
        sums = _zero_tiles(M // P, 2, lhs.dtype)
        for k in range(K // (8 * P)):
            b = _load_rows(rhs, k * 8, 8, n * 2 * COLUMNS, 2 * COLUMNS)
            for m in range(M // (16 * P)):
                a: Tiles = []
                for i in range(8):
                    tile = nl.ndarray((P, 16 * P), dtype=lhs.dtype)
                    block = lhs[nl.ds(m * 16 * P, 16 * P), nl.ds((8 * k + i) * P, P)]
                    nisa.dma_transpose(tile, block)
                    a.append(tile)
                _add_block(sums, a, b, m * 16, 16, 2)
        for m in range(M // P):
            for j in range(2):
                columns = nl.ds((2 * n + j) * COLUMNS, COLUMNS)
                nisa.dma_copy(result[m * P : (m + 1) * P, columns], sums[m][j])
    return result


@jit
def autotune_transposed_lhs(lhsT: NkiTensor, rhs: NkiTensor) -> NkiTensor:
    """lhsT [K, M], rhs [K, N] -> [M, N], 2048^3: 4 x 1 tiles a block, 8 deep, all output held."""
    K, M = lhsT.shape
    N = rhs.shape[1]
    result = nl.ndarray((M, N), dtype=lhsT.dtype, buffer=nl.shared_hbm)
    for n in range(N // COLUMNS):
        sums = _zero_tiles(M // P, 1, lhsT.dtype)
        for k in range(K // (8 * P)):
            b = _load_rows(rhs, 8 * k, 8, n * COLUMNS, COLUMNS)
            for m in range(M // (4 * P)):
                a = _load_rows(lhsT, 8 * k, 8, m * 4 * P, 4 * P)
                for i in range(4):
                    acc = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
                    for j in range(8):
                        nisa.nc_matmul(acc, a[j][:, i * P : (i + 1) * P], b[j])
                    part = nl.ndarray((P, COLUMNS), dtype=lhsT.dtype)
                    nisa.tensor_copy(part, acc)
                    total = sums[4 * m + i][0]
                    nisa.tensor_tensor(total, total, part, nl.add)
        for m in range(M // P):
            rows, columns = nl.ds(m * P, P), nl.ds(n * COLUMNS, COLUMNS)
            nisa.dma_copy(result[rows, columns], sums[m][0])
    return result
