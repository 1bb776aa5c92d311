"""The tutorial's blocked matmul where its sums do not fit in SBUF: what spilling them costs."""

from neuroncore import isa as nisa
from neuroncore import jit
from neuroncore import language as nl
from neuronmm_ops.estimate.baselines.tiles import COLUMNS, NkiTensor, P, add, load_tiles, multiply

ROWS, WIDTH, DEPTH = 16 * P, 2 * COLUMNS, 8 * P


@jit
def tutorial_spilled(lhsT: NkiTensor, rhs: NkiTensor) -> NkiTensor:
    """lhsT [K, M], rhs [K, N] -> [M, N] in the tutorial's blocks.

    Sums go out to the result after each block of K, and come back for the next.
    """
    (K, M), N = lhsT.shape, rhs.shape[1]
    out_hbm = nl.ndarray((M, N), dtype=lhsT.dtype, buffer=nl.shared_hbm)
    for n in range(0, N, WIDTH):
        for k in range(0, K, DEPTH):
            b_sb = load_tiles(rhs, k, DEPTH // P, P, n, WIDTH)
            for m in range(0, M, ROWS):
                a_sb = load_tiles(lhsT, k, DEPTH // P, P, m, ROWS)
                for i in range(0, ROWS, P):
                    sums_hbm = out_hbm[nl.ds(m + i, P), nl.ds(n, WIDTH)]
                    sums_sb = nl.ndarray((P, WIDTH), dtype=lhsT.dtype)
                    if k > 0:
                        nisa.dma_copy(sums_sb, sums_hbm)
                    else:
                        nisa.memset(sums_sb, 0.0)
                    for j in range(0, WIDTH, COLUMNS):
                        part_psum = multiply(a_sb, i, P, b_sb, j, COLUMNS)
                        add(sums_sb[:, nl.ds(j, COLUMNS)], part_psum)
                    nisa.dma_copy(sums_hbm, sums_sb)
    return out_hbm
