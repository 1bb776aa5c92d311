"""Low-rank matmul, prefill: (x @ u) @ v in one launch, the intermediate never in HBM."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.prefill import Operand, own_tokens, project, write_rows
from neuronmm_ops.kernels.stages.tiling import Span, check_pair, spans


@jit
def xuv(
    x: NkiTensor,
    u: NkiTensor,
    v: NkiTensor,
    bias: NkiTensor | None = None,
    token_block: int = 512,
    layout: str = "dma",
    resident: int = 8,
    u_block: int = 512,
    tokens: int = 512,
    banks: int = 8,
    k_block: int = 0,
    bf16_partial_sums: bool = False,
    v_block: int = 512,
    token_tiles: int = 2,
    v_banks: int = 8,
    engines: int = 1,
) -> NkiTensor:
    """out = (x @ u) @ v + bias, a block of tokens at a time.

    Dimensions:
        M: tokens. K: input features. r: rank. N: output features. Any sizes of at least 1.

    Args:
        x: [M, K].
        u: [K, r], dtype of x.
        v: [r, N], dtype of x.
        bias: [N] or None.
        token_block: tokens whose (x @ u)^T is in SBUF at a time.
        layout: "dma" or "pe" transposes x.
        resident: x^T tiles of 128 rows that stay in SBUF; the rest is loaded again per group.
        u_block: columns of u that are loaded together.
        tokens: of the block, that one group of PSUM tiles of x @ u covers.
        banks: PSUM tiles in a group of x @ u.
        k_block: rows of the contraction K whose sums PSUM holds, the partial sums of several
            such blocks being added in SBUF in fp32; 0 for all of K.
        bf16_partial_sums: partial sums in SBUF are rounded to x's dtype: half the room, so wider
            blocks of tokens.
        v_block: columns of v that are loaded together.
        token_tiles: of 128, in a group of PSUM tiles of the output.
        v_banks: PSUM tiles in a group of the output.
        engines: that evict PSUM: 1 ScalarE, 2 ScalarE and VectorE.

    Returns:
        [M, N] in shared HBM, dtype of x.

    Notes:
        x @ u is rounded once, to x's dtype. u as stationary operand makes (x @ u)^T [r, tokens],
        which lies as the second matmul wants it: nothing is transposed but x. Two cores share the
        tokens.

    Pseudocode:
        for each block of tokens:
            for each block of columns of u, group of token and rank tiles:
                psum[rank tile, 512 tokens] += u tile (stationary) . x^T tile, over K
                xu = psum
            for each block of columns of v, group of token tiles:
                psum[token tile, 512 columns] += xu tile (stationary) . v tile, over r
                out = psum + bias
    """
    M, K = x.shape
    r, N = v.shape
    check_pair(K, u.shape[0], 0, 0)
    check_pair(u.shape[1], r, N, bias.shape[0] if bias != None else 0)  # noqa: E711
    out_hbm = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    own = own_tokens(M)
    for t in spans(own.start, own.size, token_block):
        xt = Operand(x, Span(0, K), t, resident, layout, split=True)
        xu = project(xt, u, u_block, tokens, banks, engines, k_block, bf16_partial_sums)
        write_rows(out_hbm, xu, v, bias, t.start, v_block, token_tiles, v_banks, engines)
    return out_hbm
