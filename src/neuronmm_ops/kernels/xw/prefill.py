"""Dense matmul, prefill: the honest baseline, and the path of layers kept dense."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.prefill import Operand, own_tokens, write_rows
from neuronmm_ops.kernels.stages.tiling import Span, check_pair, spans


@jit
def xw(
    x: NkiTensor,
    w: NkiTensor,
    bias: NkiTensor | None = None,
    token_block: int = 512,
    layout: str = "dma",
    resident: int = 1024,
    block: int = 1024,
    token_tiles: int = 4,
    banks: int = 8,
    engines: int = 1,
) -> NkiTensor:
    """out = x @ w + bias, with fp32 sums in PSUM over the whole contraction.

    Dimensions:
        M: tokens. K: contraction. N: output features. Any sizes of at least 1.

    Args:
        x: [M, K].
        w: [K, N], dtype of x.
        bias: [N] or None.
        token_block: tokens whose x^T is in SBUF at a time.
        layout: "dma" or "pe" transposes x.
        resident: x^T tiles of 128 rows that stay in SBUF; the rest is loaded again per group.
        block: columns of w that are loaded together.
        token_tiles: of 128, in a group of PSUM tiles.
        banks: PSUM tiles in a group.
        engines: that evict PSUM: 1 ScalarE, 2 ScalarE and VectorE.

    Returns:
        [M, N] in shared HBM, dtype of x.

    Notes:
        Two cores share the tokens.

    Pseudocode:
        for each block of tokens:
            for each block of columns of w:
                for each group of token tiles:
                    psum[token tile, 512 columns] += x^T tile (stationary) . w tile, over K
                    out = psum + bias
    """
    M, K = x.shape
    N = w.shape[1]
    check_pair(K, w.shape[0], N, bias.shape[0] if bias != None else 0)  # noqa: E711
    out_hbm = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    own = own_tokens(M)
    for t in spans(own.start, own.size, token_block):
        xt = Operand(x, Span(0, K), t, resident, layout)
        write_rows(out_hbm, xt, w, bias, t.start, block, token_tiles, banks, engines)
    return out_hbm
