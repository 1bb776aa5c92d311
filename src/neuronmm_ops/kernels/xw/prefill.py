"""Dense matmul, prefill: the honest baseline, and the path of layers kept dense."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.double_row import (
    Rounding,
    rounded_rows,
    write_rounded,
)
from neuronmm_ops.kernels.stages.operands import TiledOperand, Weight, fp8
from neuronmm_ops.kernels.stages.prefill import TokenBlocks, keep_scales, write_rows
from neuronmm_ops.kernels.stages.tiling import Span, check_pair


class XwStages(nl.NKIObject):
    """What `xw` does with a block of tokens.

    Args:
        w: [K, N].
        bias: [N] or None.
        arguments: of `xw`, by name.
    """

    def __init__(self, w: Weight, bias: NkiTensor | None, arguments: dict[str, Any]) -> None:
        self.w = w
        self.bias = bias
        self.arguments = arguments
        self.rounding: list[Rounding] = []
        if arguments["double_row"]:
            self.rounding.append(Rounding(fp8([w])))

    def prepare(self, rows: int) -> None:
        """Load the scales that stay in SBUF."""
        keep_scales([self.w], rows)

    def run(self, out_hbm: NkiTensor, x_hbm: NkiTensor, t: Span) -> None:
        """out[t] = x[t] @ w + bias."""
        a = self.arguments
        if len(self.rounding) > 0:
            xs = rounded_rows(self.rounding[0], x_hbm, t, a["layout"])
            write_rounded(
                self.rounding[0],
                out_hbm,
                xs,
                self.w,
                self.bias,
                t.start,
                a["block"],
                a["token_tiles"],
                True,
            )
            return
        xt = TiledOperand(x_hbm, Span(0, x_hbm.shape[1]), t, a["resident"], a["layout"])
        write_rows(
            out_hbm,
            xt,
            self.w,
            self.bias,
            t.start,
            a["block"],
            a["token_tiles"],
            a["banks"],
            a["engines"],
        )


@jit
def xw(
    x: NkiTensor,
    w: NkiTensor,
    bias: NkiTensor | None = None,
    w_scale: NkiTensor | None = None,
    token_block: int = 512,
    layout: str = "dma",
    resident: int = 1024,
    block: int = 1024,
    token_tiles: int = 4,
    banks: int = 8,
    engines: int = 1,
    double_row: bool = False,
    device_loop: bool = False,
    fingerprint: str = "",
) -> NkiTensor:
    """out = x @ w + bias, with fp32 sums in PSUM over the whole contraction.

    Dimensions:
        M: tokens. K: contraction. N: output features. Any sizes of at least 1.

    Args:
        x: [M, K].
        w: [K, N], dtype of x, float8_e4m3fn of values up to 240, or int8; or int4, [K / 2, N].
        bias: [N] or None.
        w_scale: [N], fp32, of w's columns where w has one byte; of int4 [ceil(K / 128), N], of each
            128 rows; else None.
        token_block: tokens whose x^T is in SBUF at a time.
        layout: "dma" or "pe" transposes x.
        resident: x^T tiles of 128 rows that stay in SBUF; the rest is loaded again per group.
        block: columns of w that are loaded together.
        token_tiles: of 128, in a group of PSUM tiles.
        banks: PSUM tiles in a group.
        engines: that evict PSUM: 1 ScalarE, 2 ScalarE and VectorE.
        double_row: both sides of every product are fp8, two rows of the contraction a partition:
            activations are rounded token by token; trn2 and trn3, weights in float8_e4m3fn.
        device_loop: full blocks of tokens are a loop on the device, of which the compiler gets the
            body once.
        fingerprint: of all kernels' source, for caches that know one function's alone; not read.

    Returns:
        [M, N] in shared HBM, dtype of x.

    Notes:
        Two cores share the tokens.

    Pseudocode:
        for each block of tokens:
            for each block of columns of w:
                for each group of token tiles:
                    psum[token tile, 512 columns] += x^T tile (stationary) . w tile, over K
                    out = psum * w_scale + bias
    """
    M, K = x.shape
    N = w.shape[1]
    weight = Weight(w, w_scale, x.dtype)
    check_pair(K, weight.size, N, bias.shape[0] if not is_none(bias) else 0)
    out_hbm = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    arguments = {
        "layout": layout,
        "resident": resident,
        "block": block,
        "token_tiles": token_tiles,
        "banks": banks,
        "engines": engines,
        "double_row": double_row,
    }
    stages = XwStages(weight, bias, arguments)
    TokenBlocks(stages, out_hbm, x, token_block).run(device_loop)
    return out_hbm
