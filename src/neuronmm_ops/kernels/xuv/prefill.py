"""Low-rank matmul, prefill: (x @ u) @ v in one launch, the intermediate never in HBM."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.double_row import (
    Rounding,
    project_rounded,
    rounded_rows,
    write_rounded,
)
from neuronmm_ops.kernels.stages.operands import TiledOperand, Weight, fp8
from neuronmm_ops.kernels.stages.prefill import TokenBlocks, keep_scales, project, write_rows
from neuronmm_ops.kernels.stages.tiling import Span, check_pair


class XuvStages(nl.NKIObject):
    """What `xuv` does with a block of tokens.

    Args:
        u: [K, r].
        v: [r, N].
        bias: [N] or None.
        arguments: of `xuv`, by name.
    """

    def __init__(
        self, u: Weight, v: Weight, bias: NkiTensor | None, arguments: dict[str, Any]
    ) -> None:
        self.u = u
        self.v = v
        self.bias = bias
        self.arguments = arguments
        self.rounding: list[Rounding] = []
        if arguments["double_row"]:
            self.rounding.append(Rounding(fp8([u, v])))

    def prepare(self, rows: int) -> None:
        """Load the scales that stay in SBUF."""
        keep_scales([self.u, self.v], rows)

    def run(self, out_hbm: NkiTensor, x_hbm: NkiTensor, t: Span) -> None:
        """out[t] = (x[t] @ u) @ v + bias."""
        a = self.arguments
        if len(self.rounding) > 0:
            shared = self.rounding[0]
            xs = rounded_rows(shared, x_hbm, t, a["layout"])
            low = project_rounded(shared, xs, self.u, a["u_block"], x_hbm.dtype, True)
            write_rounded(
                shared,
                out_hbm,
                low,
                self.v,
                self.bias,
                t.start,
                a["v_block"],
                a["token_tiles"],
                False,
            )
            return
        K = x_hbm.shape[1]
        xt = TiledOperand(x_hbm, Span(0, K), t, a["resident"], a["layout"], split=True)
        xu = project(
            xt,
            self.u,
            a["u_block"],
            a["tokens"],
            a["banks"],
            a["engines"],
            a["k_block"],
            a["bf16_partial_sums"],
        )
        write_rows(
            out_hbm,
            xu,
            self.v,
            self.bias,
            t.start,
            a["v_block"],
            a["token_tiles"],
            a["v_banks"],
            a["engines"],
        )


@jit
def xuv(
    x: NkiTensor,
    u: NkiTensor,
    v: NkiTensor,
    bias: NkiTensor | None = None,
    u_scale: NkiTensor | None = None,
    v_scale: NkiTensor | None = None,
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
    double_row: bool = False,
    device_loop: bool = False,
    fingerprint: str = "",
) -> NkiTensor:
    """out = (x @ u) @ v + bias, a block of tokens at a time.

    Dimensions:
        M: tokens. K: input features. r: rank. N: output features. Any sizes of at least 1.

    Args:
        x: [M, K].
        u: [K, r], dtype of x, float8_e4m3fn of values up to 240, or int8.
        v: [r, N], dtype of u.
        bias: [N] or None.
        u_scale: [r], fp32, of u's columns where u has one byte; else None.
        v_scale: [N], the same of v.
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
        double_row: both sides of every product are fp8, two rows of the contraction a partition:
            activations are rounded token by token; trn2 and trn3, weights in float8_e4m3fn.
        device_loop: full blocks of tokens are a loop on the device, of which the compiler gets the
            body once.
        fingerprint: of all kernels' source, for caches that know one function's alone; not read.

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
                xu = psum * u_scale
            for each block of columns of v, group of token tiles:
                psum[token tile, 512 columns] += xu tile (stationary) . v tile, over r
                out = psum * v_scale + bias
    """
    M, K = x.shape
    N = v.shape[1]
    weights = [Weight(u, u_scale, x.dtype), Weight(v, v_scale, x.dtype)]
    check_pair(K, weights[0].size, 0, 0)
    check_pair(u.shape[1], weights[1].size, N, bias.shape[0] if not is_none(bias) else 0)
    out_hbm = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    arguments = {
        "layout": layout,
        "resident": resident,
        "u_block": u_block,
        "tokens": tokens,
        "banks": banks,
        "k_block": k_block,
        "bf16_partial_sums": bf16_partial_sums,
        "v_block": v_block,
        "token_tiles": token_tiles,
        "v_banks": v_banks,
        "engines": engines,
        "double_row": double_row,
    }
    stages = XuvStages(weights[0], weights[1], bias, arguments)
    TokenBlocks(stages, out_hbm, x, token_block).run(device_loop)
    return out_hbm
