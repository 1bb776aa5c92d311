"""Low-rank projections to query, key and value, prefill: three pairs of factors in one launch."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.double_row import (
    Rounded,
    Rounding,
    project_rounded,
    rounded_rows,
    write_rounded,
)
from neuronmm_ops.kernels.stages.operands import TiledOperand, Weight, fp8
from neuronmm_ops.kernels.stages.prefill import TokenBlocks, keep_scales, project, write_rows
from neuronmm_ops.kernels.stages.tiling import Span, check_pair
from neuronmm_ops.kernels.stages.weights import rows_of


def check_factors(K: int, us: list[NkiTensor], vs: list[NkiTensor]) -> None:
    """Check the sizes of u and v of query, key and value, for x of K features."""
    for i in range(len(us)):
        check_pair(K, rows_of(us[i]), 0, 0)
        check_pair(us[i].shape[1], rows_of(vs[i]), 0, 0)


def check_biases(vs: list[NkiTensor], biases: list[NkiTensor | None]) -> None:
    """Check the sizes of the biases that are given."""
    for i in range(len(vs)):
        bias = biases[i]
        check_pair(0, 0, vs[i].shape[1], bias.shape[0] if not is_none(bias) else 0)


class SVDQKVStages(nl.NKIObject):
    """What `svd_qkv` does with a block of tokens.

    Args:
        us: [K, r] each.
        vs: [r, N] each.
        biases: [N] or None, each.
        arguments: of `svd_qkv`, by name.
    """

    def __init__(
        self,
        us: list[Weight],
        vs: list[Weight],
        biases: list[NkiTensor | None],
        arguments: dict[str, Any],
    ) -> None:
        self.us = us
        self.vs = vs
        self.biases = biases
        self.arguments = arguments
        self.rounding: list[Rounding] = []
        if arguments["double_row"]:
            factors: list[Weight] = []
            factors.extend(us)
            factors.extend(vs)
            self.rounding.append(Rounding(fp8(factors)))

    def prepare(self, rows: int) -> None:
        """Load the scales that stay in SBUF."""
        for i in range(len(self.us)):
            keep_scales([self.us[i], self.vs[i]], rows)

    def run(self, out_hbm: NkiTensor, x_hbm: NkiTensor, t: Span) -> None:
        """out[t] = [query(x[t]), key(x[t]), value(x[t])]."""
        if len(self.rounding) > 0:
            self.run_rounded(self.rounding[0], out_hbm, x_hbm, t)
            return
        a = self.arguments
        xt = TiledOperand(x_hbm, Span(0, x_hbm.shape[1]), t, a["resident"], a["layout"])
        low: list[TiledOperand] = []
        for u in self.us:
            low.append(project(xt, u, a["u_block"], a["tokens"], a["banks"], a["engines"]))
        first = 0
        for i in range(len(low)):
            v = self.vs[i]
            write_rows(
                out_hbm[:, nl.ds(first, v.width)],
                low[i],
                v,
                self.biases[i],
                t.start,
                a["v_block"],
                a["token_tiles"],
                a["banks"],
                a["engines"],
            )
            first = first + v.width

    def run_rounded(self, shared: Rounding, out_hbm: NkiTensor, x_hbm: NkiTensor, t: Span) -> None:
        """The same where activations are rounded to fp8."""
        a = self.arguments
        xs = rounded_rows(shared, x_hbm, t, a["layout"])
        low: list[list[Rounded]] = []
        for i in range(len(self.us)):
            u = self.us[i]
            low.append(project_rounded(shared, xs, u, a["u_block"], x_hbm.dtype, i == 0))
        first = 0
        for i in range(len(low)):
            v = self.vs[i]
            write_rounded(
                shared,
                out_hbm[:, nl.ds(first, v.width)],
                low[i],
                v,
                self.biases[i],
                t.start,
                a["v_block"],
                a["token_tiles"],
                False,
            )
            first = first + v.width


@jit
def svd_qkv(
    x: NkiTensor,
    u_query: NkiTensor,
    v_query: NkiTensor,
    u_key: NkiTensor,
    v_key: NkiTensor,
    u_value: NkiTensor,
    v_value: NkiTensor,
    bias_query: NkiTensor | None = None,
    bias_key: NkiTensor | None = None,
    bias_value: NkiTensor | None = None,
    u_query_scale: NkiTensor | None = None,
    v_query_scale: NkiTensor | None = None,
    u_key_scale: NkiTensor | None = None,
    v_key_scale: NkiTensor | None = None,
    u_value_scale: NkiTensor | None = None,
    v_value_scale: NkiTensor | None = None,
    token_block: int = 512,
    layout: str = "dma",
    resident: int = 1024,
    u_block: int = 1024,
    v_block: int = 1024,
    tokens: int = 512,
    token_tiles: int = 2,
    banks: int = 8,
    engines: int = 1,
    double_row: bool = False,
    device_loop: bool = False,
    fingerprint: str = "",
) -> NkiTensor:
    """out = [query(x), key(x), value(x)] side by side, each a low-rank pair.

    Dimensions:
        M: tokens. K: input features. N_q, N_k, N_v: output features. Any sizes of at least 1. Any
        three ranks.

    Args:
        x: [M, K].
        u_query: [K, r_q], dtype of x, float8_e4m3fn of values up to 240, or int8, as all factors.
        v_query: [r_q, N_q].
        u_key: [K, r_k].
        v_key: [r_k, N_k].
        u_value: [K, r_v].
        v_value: [r_v, N_v].
        bias_query: [N_q], dtype of x, or None, as the other biases.
        bias_key: [N_k].
        bias_value: [N_v].
        u_query_scale: [r_q], fp32, of u_query's columns where factors have one byte; else None.
        v_query_scale: [N_q], the same of v_query, and so on.
        u_key_scale: [r_k].
        v_key_scale: [N_k].
        u_value_scale: [r_v].
        v_value_scale: [N_v].
        token_block: tokens whose products with the u are in SBUF at a time.
        layout: "dma" or "pe" transposes x.
        resident: x^T tiles of 128 rows that stay in SBUF; the rest is loaded again for each use.
        u_block: columns of a u that are loaded together, a multiple of 128 unless they are all.
        v_block: columns of a v.
        tokens: of the block, that one group of PSUM tiles of x @ u covers.
        token_tiles: of 128, in a group of PSUM tiles of the output.
        banks: PSUM tiles in a group.
        engines: that evict PSUM: 1 ScalarE, 2 ScalarE and VectorE.
        double_row: both sides of every product are fp8, two rows of the contraction a partition:
            activations are rounded token by token; trn2 and trn3, factors in float8_e4m3fn.
        device_loop: full blocks of tokens are a loop on the device, of which the compiler gets the
            body once.
        fingerprint: of all kernels' source, for caches that know one function's alone; not read.

    Returns:
        [M, N_q + N_k + N_v] in shared HBM, dtype of x.

    Notes:
        Two cores share the tokens. x^T is loaded once for all three. Each x @ u is rounded once, to
        x's dtype, after its scale.

    Pseudocode:
        for each block of tokens:
            query, key, value = (x . u_query)^T, (x . u_key)^T, (x . u_value)^T
            out = [query^T . v_query + bias_query, key^T . v_key + bias_key, ...]
    """
    M, K = x.shape
    us, vs = [u_query, u_key, u_value], [v_query, v_key, v_value]
    biases = [bias_query, bias_key, bias_value]
    check_factors(K, us, vs)
    check_biases(vs, biases)
    u_scales = [u_query_scale, u_key_scale, u_value_scale]
    v_scales = [v_query_scale, v_key_scale, v_value_scale]
    first_factors: list[Weight] = []
    second_factors: list[Weight] = []
    for n in range(3):
        first_factors.append(Weight(us[n], u_scales[n], x.dtype))
        second_factors.append(Weight(vs[n], v_scales[n], x.dtype))
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
        "double_row": double_row,
    }
    stages = SVDQKVStages(first_factors, second_factors, biases, arguments)
    TokenBlocks(stages, out_hbm, x, token_block).run(device_loop)
    return out_hbm
