"""Low-rank matmul, prefill form: (x @ u) @ v in one launch, the intermediate never in HBM."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.prefill import (
    Operand,
    held,
    own_tokens,
    project,
    write_columns,
    write_rows,
)
from neuronmm_ops.kernels.stages.tiling import BANKS, check_pair, spans


@jit
def xuv(
    x: NkiTensor,
    u: NkiTensor,
    v: NkiTensor,
    bias: NkiTensor | None = None,
    strip: int = 512,
    layout: str = "dma",
    keep: int = 8,
    u_block: int = 512,
    tokens: int = 512,
    banks: int = 8,
    k_block: int = 0,
    rounds: bool = False,
    v_block: int = 512,
    rows: int = 2,
    engines: int = 1,
    transposed: bool = False,
    packed: bool = False,
) -> NkiTensor:
    """out = (x @ u) @ v + bias, a strip of tokens at a time.

    Dimensions:
        M: tokens. K: input features. r: rank. N: output features. Any sizes of at least 1.

    Args:
        x: [M, K], or [K, M] with layout "rows".
        u: [K, r], dtype of x.
        v: [r, N], dtype of x.
        bias: [N] or None.
        strip: tokens whose (x @ u)^T is in SBUF at a time.
        layout: how x comes: "dma" or "pe" transposes [M, K]; "rows" takes x as [K, M].
        keep: x^T tiles of 128 rows that stay in SBUF; the rest is loaded again per group.
        u_block: columns of u that are loaded together.
        tokens: of the strip that one group of PSUM tiles of x @ u covers.
        banks: PSUM tiles in a group of x @ u; of the output too where TensorE turns x.
        k_block: rows of the contraction K whose sums PSUM holds, the partial sums of several
            such blocks being added in SBUF in fp32; 0 for all of K.
        rounds: partial sums in SBUF are rounded to x's dtype: half the room, so wider strips.
        v_block: columns of v that are loaded together.
        rows: token tiles of 128 in a group of PSUM tiles of the output.
        engines: that evict PSUM: 1 ScalarE, 2 ScalarE and VectorE.
        transposed: out is [N, M].
        packed: u's rows are in the order of `SVDLinear.pack_`; K is a multiple of 128.

    Returns:
        [M, N] in shared HBM, dtype of x, or [N, M].

    Notes:
        x @ u is rounded once, to x's dtype. u as stationary operand makes (x @ u)^T [r, tokens],
        which lies as the second matmul wants it: nothing is transposed but x. Two cores share the
        tokens.

    Pseudocode:
        for each strip of tokens:
            for each block of columns of u, group of token and rank tiles:
                psum[rank tile, 512 tokens] += u tile (stationary) . x^T tile, over K
                xu = psum
            for each block of columns of v, group of token tiles:
                psum[token tile, 512 columns] += xu tile (stationary) . v tile, over r
                out = psum + bias
    """
    K, r = u.shape
    N = v.shape[1]
    M, size = (x.shape[1], x.shape[0]) if layout == "rows" else x.shape
    check_pair(size, K, r, 0)
    check_pair(r, v.shape[0], N, bias.shape[0] if bias != None else 0)  # noqa: E711
    shape = (N, M) if transposed else (M, N)
    out = nl.ndarray(shape, dtype=x.dtype, buffer=nl.shared_hbm)
    start, size = own_tokens(M)
    for s in spans(start, size, strip):
        xt = Operand(x, K, s[0], s[1], keep, layout)
        xu = held(project(xt, u, u_block, tokens, banks, engines, k_block, rounds, packed), r)
        if transposed:
            write_columns(out, xu, v, bias, s[0], v_block, banks, engines)
        else:
            all_banks = banks if layout == "pe" else BANKS
            write_rows(out, xu, v, bias, s[0], v_block, rows, all_banks, engines)
    return out
