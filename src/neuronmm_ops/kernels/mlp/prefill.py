"""Dense gated MLP, prefill: (act(x Wg) * (x Wu)) Wd in one launch, Wu of x or of an x_up."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.double_row import Rounding, rounded_rows, write_rounded
from neuronmm_ops.kernels.stages.hidden import Hidden
from neuronmm_ops.kernels.stages.operands import TiledOperand, Tiles, Weight, fp8
from neuronmm_ops.kernels.stages.prefill import TokenBlocks, keep_scales, write_rows
from neuronmm_ops.kernels.stages.tiling import HIDDEN_TILES, PARTITIONS, Span, check_pair
from neuronmm_ops.kernels.stages.weights import rows_of
from neuronmm_ops.kernels.svd_mlp.doubled import gated_rounded
from neuronmm_ops.kernels.svd_mlp.prefill import gated, load_table


def check_matrices(x: NkiTensor, x_up: NkiTensor | None, matrices: Tiles) -> None:
    """Check the sizes of w_gate, w_up and w_down, for x and an x_up."""
    second: Any = x if is_none(x_up) else x_up
    assert second.shape[0] == x.shape[0], f"x has {x.shape[0]} tokens and x_up {second.shape[0]}"
    sides, inner = [x, second], rows_of(matrices[2])
    for n in range(2):
        check_pair(sides[n].shape[1], rows_of(matrices[n]), 0, 0)
        check_pair(matrices[n].shape[1], inner, 0, 0)


class MLPStages(nl.NKIObject):
    """What `mlp` does with a block of tokens.

    Args:
        weights: of gate, up and down.
        scratch_hbm: see `Hidden`.
        arguments: of `mlp`, by name.
    """

    def __init__(
        self, weights: list[Weight], scratch_hbm: Tiles, arguments: dict[str, Any]
    ) -> None:
        self.weights = weights
        self.scratch_hbm = scratch_hbm
        self.arguments = arguments
        self.rounding: list[Rounding] = []
        if arguments["double_row"]:
            self.rounding.append(Rounding(fp8(weights)))

    def prepare(self, rows: int) -> None:
        """Load the scales that stay in SBUF."""
        keep_scales(self.weights, rows)

    def run(
        self, out_hbm: NkiTensor, x_hbm: NkiTensor, t: Span, x_up_hbm: NkiTensor | None = None
    ) -> None:
        """out[t] = (act(x[t] @ w_gate) * (x_up[t] @ w_up)) @ w_down, x_up by default x."""
        if len(self.rounding) > 0:
            self.run_rounded(self.rounding[0], out_hbm, x_hbm, t, x_up_hbm)
            return
        a, down = self.arguments, self.weights[2]
        banks = a["banks"]
        sources_hbm: Any = [x_hbm, x_up_hbm]
        xs: list[TiledOperand] = []
        for source_hbm in sources_hbm:
            if is_none(source_hbm):
                xs.append(xs[0])
            else:
                features = Span(0, source_hbm.shape[1])
                xs.append(TiledOperand(source_hbm, features, t, a["resident"], a["layout"]))
        hidden = Hidden(
            x_hbm.dtype,
            self.scratch_hbm,
            down.size,
            t.size,
            a["spill"],
            a["resident_spilled"],
        )
        sides = self.weights[0:2]
        gated(hidden, xs, sides, a["activation"], a["inner_block"], a["tokens"], banks)
        write_rows(
            out_hbm,
            hidden,
            down,
            None,
            t.start,
            a["block"],
            a["token_tiles"],
            banks,
            a["engines"],
        )

    def run_rounded(
        self,
        shared: Rounding,
        out_hbm: NkiTensor,
        x_hbm: NkiTensor,
        t: Span,
        x_up_hbm: NkiTensor | None,
    ) -> None:
        """The same where activations are rounded to fp8."""
        a, w, dtype = self.arguments, self.weights, x_hbm.dtype
        gates = rounded_rows(shared, x_hbm, t, a["layout"])
        ups, loaded = gates, [gates]
        if not is_none(x_up_hbm):
            ups = rounded_rows(shared, x_up_hbm, t, a["layout"])
            loaded.append(ups)
        arguments = [a["activation"], a["inner_block"], a["spill"]]
        hidden = gated_rounded(
            shared, gates, ups, w[0:2], dtype, self.scratch_hbm, arguments, loaded
        )
        tiles = a["token_tiles"]
        write_rounded(shared, out_hbm, hidden, w[2], None, t.start, a["block"], tiles, False)


@jit
def mlp(
    x: NkiTensor,
    w_gate: NkiTensor,
    w_up: NkiTensor,
    w_down: NkiTensor,
    x_up: NkiTensor | None = None,
    w_gate_scale: NkiTensor | None = None,
    w_up_scale: NkiTensor | None = None,
    w_down_scale: NkiTensor | None = None,
    activation: str = "silu",
    token_block: int = 512,
    layout: str = "dma",
    resident: int = 1024,
    spill: int = 0,
    resident_spilled: int = 0,
    inner_block: int = 512,
    block: int = 1024,
    tokens: int = 512,
    token_tiles: int = 4,
    banks: int = 8,
    engines: int = 1,
    double_row: bool = False,
    device_loop: bool = False,
    fingerprint: str = "",
) -> NkiTensor:
    """out = (act(x @ w_gate) * (x_up @ w_up)) @ w_down, x_up by default x; fp32 sums in PSUM.

    Dimensions:
        M: tokens. K: input features, K_up those of up. I: inner features. N: output features. Any
        of at least 1.

    Args:
        x: [M, K].
        w_gate: [K, I], dtype of x, float8_e4m3fn of values up to 240, or int8, as all weights.
        w_up: [K_up, I].
        w_down: [I, N].
        x_up: [M, K_up], dtype of x, or None: x.
        w_gate_scale: [I], fp32, of w_gate's columns where weights have one byte; else None.
        w_up_scale: [I].
        w_down_scale: [N].
        activation: silu, gelu, gelu_tanh or relu.
        token_block: tokens whose hidden activations are in SBUF at a time.
        layout: "dma" or "pe" transposes x.
        resident: tiles of 128 rows of x^T, and of x_up^T, that stay in SBUF; the rest is loaded
            again per group.
        spill: groups of 4 tiles of the hidden block that go through private HBM; 0: none.
        resident_spilled: how many of those stay in SBUF once they are back.
        inner_block: columns of w_gate and w_up that are loaded together.
        block: columns of w_down.
        tokens: of the block, in a group of PSUM tiles of the hidden block.
        token_tiles: of 128, in a group of PSUM tiles of the output.
        banks: PSUM tiles in a group.
        engines: that evict the output: 1 ScalarE, 2 ScalarE and VectorE.
        double_row: both sides of every product are fp8, two rows of the contraction a partition:
            activations are rounded token by token; trn2 and trn3, weights in float8_e4m3fn.
        device_loop: full blocks of tokens are a loop on the device, of which the compiler gets the
            body once.
        fingerprint: of all kernels' source, for caches that know one function's alone; not read.

    Returns:
        [M, N] in shared HBM, dtype of x.

    Notes:
        Two cores share the tokens. act(gate) * up is rounded once, to x's dtype; the activation
        stays in fp32.

    Pseudocode:
        for each block of tokens:
            for each block of columns of I:
                hidden = act(w_gate^T . x^T) * (w_up^T . x_up^T)
                its first groups of tiles go to HBM
            out = hidden^T . w_down
    """
    M = x.shape[0]
    matrices = [w_gate, w_up, w_down]
    check_matrices(x, x_up, matrices)
    scales: list[Any] = [w_gate_scale, w_up_scale, w_down_scale]
    weights: list[Weight] = []
    for i in range(len(matrices)):
        weights.append(Weight(matrices[i], scales[i], x.dtype))
    load_table(activation)
    out_hbm = nl.ndarray((M, w_down.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    scratch_hbm: Tiles = []
    if spill > 0:
        columns = spill * HIDDEN_TILES * token_block
        scratch_hbm.append(nl.ndarray((PARTITIONS, columns), dtype=x.dtype, buffer=nl.private_hbm))
    arguments = {
        "activation": activation,
        "layout": layout,
        "resident": resident,
        "spill": spill,
        "resident_spilled": resident_spilled,
        "inner_block": inner_block,
        "block": block,
        "tokens": tokens,
        "token_tiles": token_tiles,
        "banks": banks,
        "engines": engines,
        "double_row": double_row,
    }
    stages = MLPStages(weights, scratch_hbm, arguments)
    TokenBlocks(stages, out_hbm, x, token_block, x_up).run(device_loop)
    return out_hbm
