"""The rank of a layer: the compression ratio's, rounded to whole blocks."""

import math
from collections.abc import Iterable

from neuronmm_ops.storages import dtype_name, factor_bytes, matrix_bytes

# Blocks are multiples of this.
STEP = 8


def aligned_rank(K: int, N: int, ratio: float, block: int = 128, alpha: float = 0.5) -> int | None:
    """Return the block-aligned rank for a `[K, N]` matrix, or None where it must stay dense.

    `r = floor(K*N*(1-ratio) / ((K+N)*block) + alpha) * block` (NeuronMM, arXiv 2510.25977, Eq. 5),
    at least one block. A pair with `r*(K+N) >= K*N` would be no smaller than the matrix: None.

    Args:
        K: rows, the contraction.
        N: columns.
        ratio: fraction of the parameters to remove, in (0, 1).
        block: the rank is a multiple of it.
        alpha: rounding threshold; 0.5 rounds to nearest.
    """
    blocks = math.floor(K * N * (1 - ratio) / ((K + N) * block) + alpha)
    rank = max(1, blocks) * block
    return None if parameter_count(K, N, rank) >= K * N else rank


def largest_block(sizes: Iterable[tuple[int, int]], ratio: float, alpha: float = 0.5) -> int | None:
    """Return the largest block with which every matrix gets a rank, or None if there is none.

    Args:
        sizes: `(K, N)` of the matrices; those too small for any rank are left out of account.
        ratio: as for `aligned_rank`.
        alpha: as for `aligned_rank`.
    """
    fitting = {size for size in sizes if aligned_rank(*size, ratio, STEP, alpha) is not None}
    if not fitting:
        return None
    # Ranks below K*N / (K+N) save parameters; that bound is below min(K, N).
    largest = min(min(size) for size in fitting) // STEP * STEP
    for block in range(largest, 0, -STEP):
        if all(aligned_rank(*size, ratio, block, alpha) is not None for size in fitting):
            return block
    return None


def parameter_count(K: int, N: int, r: int | None) -> int:
    """Return the parameters of a pair `u[K, r]`, `v[r, N]`, or of the dense matrix for None."""
    return K * N if r is None else r * (K + N)


def pair_bytes(K: int, N: int, r: int | None, itemsize: int, storage: str | None) -> int:
    """Return the bytes of a pair of rank r, or for None of the dense matrix, scales included."""
    if r is None:
        return matrix_bytes((K, N), itemsize, dtype_name(storage))
    return factor_bytes(K, N, r, itemsize, storage)
