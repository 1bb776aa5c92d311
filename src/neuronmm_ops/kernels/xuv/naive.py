"""Low-rank matmul with visible loops: read it before `prefill.py`; models do not run it."""

from neuronmm_ops.kernels.shim import NkiTensor, jit, nisa, nl

TILE = 128  # partitions of SBUF and PSUM, and columns of a stationary operand
BANK = 512  # fp32 sums of a partition in one PSUM bank, and columns of a moving operand


@jit
def xuv_naive(x: NkiTensor, u: NkiTensor, v: NkiTensor) -> NkiTensor:
    """out = (x @ u) @ v, tile by tile.

    Dimensions:
        M: tokens. K: input features. r: rank. N: output features. Any sizes of at least 1.

    Args:
        x: [M, K].
        u: [K, r], dtype of x.
        v: [r, N], dtype of x.

    Returns:
        [M, N] in shared HBM, dtype of x.
    """
    M, K = x.shape
    r, N = v.shape
    out = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    for m in range(0, M, TILE):
        tokens = min(TILE, M - m)
        # x^T: the contraction K lies on the partitions.
        x_tiles = []
        for k in range(0, K, TILE):
            features = min(TILE, K - k)
            x_tile = nl.ndarray((features, tokens), dtype=x.dtype, buffer=nl.sbuf)
            nisa.dma_transpose(dst=x_tile, src=x[m : m + tokens, k : k + features])
            x_tiles.append(x_tile)
        # (x u)^T = u^T x^T: r lies on the partitions, as the second product needs it.
        hidden_tiles = []
        for j in range(0, r, TILE):
            ranks = min(TILE, r - j)
            sums = nl.ndarray((ranks, tokens), dtype=nl.float32, buffer=nl.psum)
            for i in range(len(x_tiles)):
                k = i * TILE
                u_tile = nl.ndarray((min(TILE, K - k), ranks), dtype=u.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=u_tile, src=u[k : min(k + TILE, K), j : j + ranks])
                nisa.nc_matmul(dst=sums, stationary=u_tile, moving=x_tiles[i], accumulate=i > 0)
            hidden = nl.ndarray((ranks, tokens), dtype=x.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=hidden, src=sums)
            hidden_tiles.append(hidden)
        # out = (x u) v: the tokens lie on the partitions.
        for n in range(0, N, BANK):
            columns = min(BANK, N - n)
            sums = nl.ndarray((tokens, columns), dtype=nl.float32, buffer=nl.psum)
            for i in range(len(hidden_tiles)):
                j = i * TILE
                v_tile = nl.ndarray((min(TILE, r - j), columns), dtype=v.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=v_tile, src=v[j : min(j + TILE, r), n : n + columns])
                nisa.nc_matmul(
                    dst=sums, stationary=hidden_tiles[i], moving=v_tile, accumulate=i > 0
                )
            y = nl.ndarray((tokens, columns), dtype=x.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=y, src=sums)
            nisa.dma_copy(dst=out[m : m + tokens, n : n + columns], src=y)
    return out
