"""Low-rank projections to query, key and value, prefill: three pairs of factors in one launch."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.operands import Operand, Weight
from neuronmm_ops.kernels.stages.prefill import TokenBlocks, project, write_rows
from neuronmm_ops.kernels.stages.tiling import Span, check_pair


def check_factors(K: int, us: list[NkiTensor], vs: list[NkiTensor]) -> None:
    """Check the sizes of u and v of query, key and value, for x of K features."""
    for i in range(len(us)):
        check_pair(K, us[i].shape[0], 0, 0)
        check_pair(us[i].shape[1], vs[i].shape[0], 0, 0)


class Stages(nl.NKIObject):
    """What `svd_qkv` does with a block of tokens.

    Args:
        us: [K, r] each.
        vs: [r, N] each.
        arguments: of `svd_qkv`, by name.
    """

    def __init__(self, us: list[NkiTensor], vs: list[NkiTensor], arguments: dict[str, Any]) -> None:
        self.us = us
        self.vs = vs
        self.arguments = arguments

    def prepare(self, rows: int) -> None:
        """Nothing stays in SBUF."""

    def run(self, out_hbm: NkiTensor, x_hbm: NkiTensor, t: Span) -> None:
        """out[t] = [query(x[t]), key(x[t]), value(x[t])]."""
        a = self.arguments
        xt = Operand(x_hbm, Span(0, x_hbm.shape[1]), t, a["resident"], a["layout"])
        low: list[Operand] = []
        for u in self.us:
            w = Weight(u, None, x_hbm.dtype)
            low.append(project(xt, w, a["u_block"], a["tokens"], a["banks"], a["engines"]))
        first = 0
        for i in range(len(low)):
            v = self.vs[i]
            write_rows(
                out_hbm[:, nl.ds(first, v.shape[1])],
                low[i],
                Weight(v, None, x_hbm.dtype),
                None,
                t.start,
                a["v_block"],
                a["token_tiles"],
                a["banks"],
                a["engines"],
            )
            first = first + v.shape[1]


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
    device_loop: bool = False,
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
        device_loop: full blocks of tokens are a loop on the device, of which the compiler gets the
            body once.

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
    N = v_query.shape[1] + v_key.shape[1] + v_value.shape[1]
    out_hbm = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    arguments = {
        "layout": layout,
        "resident": resident,
        "u_block": u_block,
        "v_block": v_block,
        "tokens": tokens,
        "token_tiles": token_tiles,
        "banks": banks,
        "engines": engines,
    }
    TokenBlocks(Stages(us, vs, arguments), out_hbm, x, token_block).run(device_loop)
    return out_hbm
