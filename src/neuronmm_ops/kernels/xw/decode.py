"""Dense matmul, decode form: the honest baseline, and the path of layers kept dense."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.chunks import pieces_of
from neuronmm_ops.kernels.stages.decode import blocks_of, own, write_columns
from neuronmm_ops.kernels.stages.tiling import P, Span, check_pair


@jit
def xw_decode(
    x: NkiTensor,
    w: NkiTensor,
    bias: NkiTensor | None = None,
    span: int = 1024,
    block: int = 1024,
    last: int = 1024,
    chunk: int = 16384,
    keep: bool = False,
) -> NkiTensor:
    """out = x @ w + bias for up to 128 tokens, every byte of w loaded once.

    Dimensions:
        M: tokens, 1 to 128. K: input features. N: output features. Any of at least 1.

    Args:
        x: [M, K].
        w: [K, N], dtype of x.
        bias: [N] of that dtype, or None.
        span: columns of x that are transposed together.
        block: columns of w whose sums are in PSUM together.
        last: columns of the last block.
        chunk: bytes a partition of a weight tile, more where one row is longer.
        keep: x^T stays in SBUF; else x is loaded and transposed again for each block.

    Returns:
        [M, N] in shared HBM, dtype of x.

    Notes:
        Sums are fp32 in PSUM over the whole contraction. Two cores share N.

    Pseudocode:
        for each block of columns:
            for each span of x:
                x^T = transpose(x[:, span])
                psum[M, block] += x^T (stationary) . w[span, block] (moving)
            out[:, block] = psum + bias
    """
    M, K = x.shape
    assert M <= P, f"at most {P} tokens, got {M}; use xw"
    check_pair(K, w.shape[0], w.shape[1], bias.shape[0] if bias != None else 0)  # noqa: E711
    out = nl.ndarray((M, w.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    pieces = pieces_of(x, 0, Span(0, K), span)
    blocks = blocks_of(own(w.shape[1]), block, last)
    write_columns(out, pieces, w, bias, blocks, chunk, keep)
    return out
