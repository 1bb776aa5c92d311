"""Matmul kernels whose profiles on trn2 AWS published, after its descriptions of them.

Source: aws-neuron/neuron-agentic-development, skills/neuron-nki-profile-querying/references. Its
first kernel, V0, is the first step of AWS's matmul tutorial. On an instance they are the installed
NKI's; without one, the simulator's.
"""

from __future__ import annotations

from neuroncore.calibration.shim import NkiTensor, jit, nisa, nl

P = 128
"""Partitions of a tile."""
COLUMNS = 512
"""fp32 columns of a PSUM bank: the largest moving side of a matmul."""
BLOCK_M, BLOCK_N = 8 * P, 2 * COLUMNS


@jit
def tiled(lhsT: NkiTensor, rhs: NkiTensor) -> NkiTensor:
    """lhsT [K, M], rhs [K, N] -> [M, N]: one tile at a time, operands loaded for each matmul."""
    (K, M), N = lhsT.shape, rhs.shape[1]
    out_hbm = nl.ndarray((M, N), dtype=lhsT.dtype, buffer=nl.shared_hbm)
    for m in range(0, M, P):
        for n in range(0, N, COLUMNS):
            acc_psum = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
            for k in range(0, K, P):
                a_sb = _load(lhsT, k, m, P)
                b_sb = _load(rhs, k, n, COLUMNS)
                nisa.nc_matmul(acc_psum, a_sb, b_sb, accumulate=k > 0)
            _store(out_hbm, acc_psum, m, n)
    return out_hbm


@jit
def blocked(lhsT: NkiTensor, rhs: NkiTensor, left: int, right: int) -> NkiTensor:
    """lhsT [K, M], rhs [K, N] -> [M, N] in blocks of [1024, 1024], all of K in SBUF: V1 and V2.

    A DMA loads `left` columns of lhsT, or `right` of rhs: 128 and 512 in V1, 1,024 each in V2.
    """
    (K, M), N = lhsT.shape, rhs.shape[1]
    out_hbm = nl.ndarray((M, N), dtype=lhsT.dtype, buffer=nl.shared_hbm)
    for m in range(0, M, BLOCK_M):
        a_sb = _rows(lhsT, m, BLOCK_M, left)
        for n in range(0, N, BLOCK_N):
            b_sb = _rows(rhs, n, BLOCK_N, right)
            for i in range(0, BLOCK_M, P):
                for j in range(0, BLOCK_N, COLUMNS):
                    acc_psum = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
                    for k in range(K // P):
                        left_sb, right_sb = a_sb[k][:, i : i + P], b_sb[k][:, j : j + COLUMNS]
                        nisa.nc_matmul(acc_psum, left_sb, right_sb, accumulate=k > 0)
                    _store(out_hbm, acc_psum, m + i, n + j)
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
                a_sb = _load(lhs, m, k, P)
                turned_psum = nl.ndarray((P, P), dtype=lhs.dtype, buffer=nl.psum)
                nisa.nc_transpose(dst=turned_psum, data=a_sb)
                turned_sb = nl.ndarray((P, P), dtype=lhs.dtype, buffer=nl.sbuf)
                nisa.tensor_copy(dst=turned_sb, src=turned_psum)
                b_sb = _load(rhs, k, n, COLUMNS)
                nisa.nc_matmul(acc_psum, turned_sb, b_sb, accumulate=k > 0)
            _store(out_hbm, acc_psum, m, n)
    return out_hbm


@jit
def resident(
    lhsT: NkiTensor, rhs: NkiTensor, tiles: tuple[tuple[int, int, int], ...], count: int
) -> NkiTensor:
    """lhsT [128, 128], rhs [128, 512] -> [128, 512]: `count` matmuls of each tile (K, M, N).

    The result is the sum of those of the last tile, which must be whole.
    """
    a_sb = _load(lhsT, 0, 0, P)
    b_sb = _load(rhs, 0, 0, COLUMNS)
    out_hbm = nl.ndarray((P, COLUMNS), dtype=lhsT.dtype, buffer=nl.shared_hbm)
    sums_psum = []
    for K, M, N in tiles:
        acc_psum = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
        for i in range(count):
            left_sb, right_sb = a_sb[0:K, 0:M], b_sb[0:K, 0:N]
            nisa.nc_matmul(acc_psum[0:M, 0:N], left_sb, right_sb, accumulate=i > 0)
        sums_psum.append(acc_psum)
    _store(out_hbm, sums_psum[-1], 0, 0)
    return out_hbm


def _load(source_hbm: NkiTensor, row: int, column: int, columns: int) -> NkiTensor:
    """A tile [128, columns]."""
    tile_sb = nl.ndarray((P, columns), dtype=source_hbm.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile_sb, src=source_hbm[row : row + P, column : column + columns])
    return tile_sb


def _rows(source_hbm: NkiTensor, column: int, columns: int, each: int) -> list[NkiTensor]:
    """The tiles [128, columns] of all rows, loaded `each` columns at a time."""
    tiles_sb = []
    for k in range(0, source_hbm.shape[0], P):
        tile_sb = nl.ndarray((P, columns), dtype=source_hbm.dtype, buffer=nl.sbuf)
        for c in range(0, columns, each):
            part_hbm = source_hbm[k : k + P, column + c : column + c + each]
            nisa.dma_copy(dst=tile_sb[:, c : c + each], src=part_hbm)
        tiles_sb.append(tile_sb)
    return tiles_sb


def _store(out_hbm: NkiTensor, acc_psum: NkiTensor, m: int, n: int) -> None:
    """Store a finished PSUM tile, rounded, in row m and column n."""
    out_sb = nl.ndarray((P, COLUMNS), dtype=out_hbm.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=out_sb, src=acc_psum)
    nisa.dma_copy(dst=out_hbm[m : m + P, n : n + COLUMNS], src=out_sb)
