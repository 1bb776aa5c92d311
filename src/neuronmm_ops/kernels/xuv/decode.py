"""Low-rank matmul, decode form."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.chunks import pieces_of
from neuronmm_ops.kernels.stages.decode import blocks_of, own, project, write_columns
from neuronmm_ops.kernels.stages.tiling import P, check_pair


@jit
def xuv_decode(
    x: NkiTensor,
    u: NkiTensor,
    v: NkiTensor,
    bias: NkiTensor | None = None,
    span: int = 1024,
    ranks: int = 3072,
    block: int = 1024,
    last: int = 1024,
    chunk: int = 16384,
) -> NkiTensor:
    """out = (x @ u) @ v + bias for up to 128 tokens, every byte of u and v loaded once.

    Dimensions:
        M: tokens, 1 to 128. K: input features. r: rank. N: output features. Any of at least 1.

    Args:
        x: [M, K].
        u: [K, r], dtype of x.
        v: [r, N], dtype of x.
        bias: [N] of that dtype, or None.
        span: columns of x that are transposed together.
        ranks: columns of u whose sums are in PSUM together.
        block: columns of v whose sums are in PSUM together.
        last: columns of the last block.
        chunk: bytes a partition of a weight tile, more where one row is longer.

    Returns:
        [M, N] in shared HBM, dtype of x.

    Notes:
        Sums are fp32 in PSUM over the whole contraction; x @ u is rounded once, to the dtype of x.
        Two cores share K and exchange their sums of x @ u, then share N.

    Pseudocode:
        for each span of x:
            x^T = transpose(x[:, span])
            xu[M, r] += x^T (stationary) . u[span, :] (moving)
        xu^T = transpose(xu)
        for each block of columns:
            out[:, block] = xu^T (stationary) . v[:, block] (moving) + bias
    """
    M, K = x.shape
    assert M <= P, f"at most {P} tokens, got {M}; use xuv"
    check_pair(K, u.shape[0], u.shape[1], 0)
    check_pair(u.shape[1], v.shape[0], v.shape[1], bias.shape[0] if bias != None else 0)  # noqa: E711
    out = nl.ndarray((M, v.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    pieces = pieces_of(x, 0, own(K), span)
    xu = project(pieces, [u], ranks, False, chunk, M)
    blocks = blocks_of(own(v.shape[1]), block, last)
    write_columns(out, xu[0], v, bias, blocks, chunk, True)
    return out
