"""Low-rank projections to query, key and value, prefill: three pairs of factors in one launch."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.prefill import Operand, own_tokens, project, write_rows
from neuronmm_ops.kernels.stages.tiling import Span, check_pair, spans


def check_factors(K: int, us: list[NkiTensor], vs: list[NkiTensor]) -> None:
    """Check the sizes of u and v of query, key and value, for x of K features."""
    for i in range(len(us)):
        check_pair(K, us[i].shape[0], 0, 0)
        check_pair(us[i].shape[1], vs[i].shape[0], 0, 0)


def side_by_side(x: NkiTensor, vs: list[NkiTensor]) -> tuple[NkiTensor, list[NkiTensor]]:
    """The result [M, N_q + N_k + N_v] in HBM, and the columns of it that each v makes."""
    ends: list[int] = [0]
    for v in vs:
        ends.append(ends[len(ends) - 1] + v.shape[1])
    out_hbm = nl.ndarray((x.shape[0], ends[len(vs)]), dtype=x.dtype, buffer=nl.shared_hbm)
    parts_hbm: list[NkiTensor] = []
    for i in range(len(vs)):
        parts_hbm.append(out_hbm[:, nl.ds(ends[i], vs[i].shape[1])])
    return out_hbm, parts_hbm


@jit
def svd_qkv(
    x: NkiTensor,
    u_query: NkiTensor,
    v_query: NkiTensor,
    u_key: NkiTensor,
    v_key: NkiTensor,
    u_value: NkiTensor,
    v_value: NkiTensor,
    token_block: int = 512,
    layout: str = "dma",
    resident: int = 1024,
    u_block: int = 1024,
    v_block: int = 1024,
    tokens: int = 512,
    token_tiles: int = 2,
    banks: int = 8,
    engines: int = 1,
) -> NkiTensor:
    """out = [query(x), key(x), value(x)] side by side, each a low-rank pair.

    Dimensions:
        M: tokens. K: input features. N_q, N_k, N_v: output features. Any sizes of at least 1. Any
        three ranks.

    Args:
        x: [M, K].
        u_query: [K, r_q], dtype of x, as all factors.
        v_query: [r_q, N_q].
        u_key: [K, r_k].
        v_key: [r_k, N_k].
        u_value: [K, r_v].
        v_value: [r_v, N_v].
        token_block: tokens whose products with the u are in SBUF at a time.
        layout: "dma" or "pe" transposes x.
        resident: x^T tiles of 128 rows that stay in SBUF; the rest is loaded again for each use.
        u_block: columns of a u that are loaded together, a multiple of 128 unless they are all.
        v_block: columns of a v.
        tokens: of the block, that one group of PSUM tiles of x @ u covers.
        token_tiles: of 128, in a group of PSUM tiles of the output.
        banks: PSUM tiles in a group.
        engines: that evict PSUM: 1 ScalarE, 2 ScalarE and VectorE.

    Returns:
        [M, N_q + N_k + N_v] in shared HBM, dtype of x.

    Notes:
        Two cores share the tokens. x^T is loaded once for all three. Each x @ u is rounded once, to
        x's dtype.

    Pseudocode:
        for each block of tokens:
            query, key, value = (x . u_query)^T, (x . u_key)^T, (x . u_value)^T
            out = [query^T . v_query, key^T . v_key, value^T . v_value]
    """
    M, K = x.shape
    us, vs = [u_query, u_key, u_value], [v_query, v_key, v_value]
    check_factors(K, us, vs)
    out_hbm, parts_hbm = side_by_side(x, vs)
    own = own_tokens(M)
    for t in spans(own.start, own.size, token_block):
        xt = Operand(x, Span(0, K), t, resident, layout)
        low: list[Operand] = []
        for u in us:
            low.append(project(xt, u, u_block, tokens, banks, engines))
        for i in range(len(low)):
            part_hbm, xu, v = parts_hbm[i], low[i], vs[i]
            write_rows(part_hbm, xu, v, None, t.start, v_block, token_tiles, banks, engines)
    return out_hbm
