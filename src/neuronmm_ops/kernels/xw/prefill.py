"""Dense matmul, prefill form: the honest baseline, and the path of layers kept dense."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.prefill import Operand, own_tokens, write_rows
from neuronmm_ops.kernels.stages.tiling import check_pair, spans


@jit
def xw(
    x: NkiTensor,
    w: NkiTensor,
    bias: NkiTensor | None = None,
    strip: int = 512,
    layout: str = "dma",
    keep: int = 1024,
    block: int = 1024,
    rows: int = 4,
    banks: int = 8,
    engines: int = 1,
) -> NkiTensor:
    """out = x @ w + bias, with fp32 sums in PSUM over the whole contraction.

    Dimensions:
        M: tokens. K: contraction. N: output features. Any sizes of at least 1.

    Args:
        x: [M, K], or [K, M] with layout "rows".
        w: [K, N], dtype of x.
        bias: [N] or None.
        strip: tokens whose x^T is in SBUF at a time.
        layout: how x comes: "dma" or "pe" transposes [M, K]; "rows" takes x as [K, M].
        keep: x^T tiles of 128 rows that stay in SBUF; the rest is loaded again per group.
        block: columns of w that are loaded together.
        rows: token tiles of 128 in a group of PSUM tiles.
        banks: PSUM tiles in a group.
        engines: that evict PSUM: 1 ScalarE, 2 ScalarE and VectorE.

    Returns:
        [M, N] in shared HBM, dtype of x.

    Notes:
        Two cores share the tokens.

    Pseudocode:
        for each strip of tokens:
            for each block of columns of w:
                for each group of token tiles:
                    psum[token tile, 512 columns] += x^T tile (stationary) . w tile, over K
                    out = psum + bias
    """
    K, N = w.shape
    M, size = (x.shape[1], x.shape[0]) if layout == "rows" else x.shape
    check_pair(size, K, N, bias.shape[0] if bias != None else 0)  # noqa: E711
    out = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    start, size = own_tokens(M)
    for s in spans(start, size, strip):
        xt = Operand(x, K, s[0], s[1], keep, layout)
        write_rows(out, xt, w, bias, s[0], block, rows, banks, engines)
    return out
