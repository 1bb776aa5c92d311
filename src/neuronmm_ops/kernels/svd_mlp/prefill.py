"""Low-rank gated MLP, prefill: down(act(gate(x)) * up(x)) in one launch."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.shim import NkiTensor, jit, nisa, nl
from neuronmm_ops.kernels.stages.double_row import (
    Rounding,
    project_rounded,
    rounded_rows,
    write_rounded,
)
from neuronmm_ops.kernels.stages.hidden import Hidden, activated, function_of
from neuronmm_ops.kernels.stages.operands import TiledOperand, Tiles, Weight, fp8
from neuronmm_ops.kernels.stages.prefill import (
    TokenBlocks,
    accumulate,
    keep_scales,
    project,
    write_rows,
)
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    HIDDEN_TILES,
    PARTITIONS,
    TAIL_TILES,
    Group,
    Span,
    check_pair,
    spans,
    tiles_in,
    transposed_groups,
)
from neuronmm_ops.kernels.stages.weights import rows_of
from neuronmm_ops.kernels.svd_mlp.doubled import gated_rounded


def load_table(activation: str) -> None:
    """Let ScalarE load the function's table now, while it waits for the first weights anyway."""
    one_sb = nl.ndarray((1, 1), dtype=nl.float32)
    nisa.memset(one_sb, 0.0)
    nisa.activation(one_sb, function_of(activation), one_sb)


def check_factors(K: int, factors: Tiles) -> None:
    """Check the sizes of u and v of gate, up and down, for x of K features."""
    gate, up, down = factors[0:2], factors[2:4], factors[4:6]
    inner = gate[1].shape[1]
    for pair in [gate, up]:
        check_pair(K, rows_of(pair[0]), 0, 0)
        check_pair(pair[0].shape[1], rows_of(pair[1]), 0, 0)
    check_pair(up[1].shape[1], inner, 0, 0)
    check_pair(inner, rows_of(down[0]), 0, 0)
    check_pair(down[0].shape[1], rows_of(down[1]), 0, 0)


def gated(
    hidden: Hidden,
    sides: list[TiledOperand],
    factors: list[Weight],
    activation: str,
    block: int,
    tokens: int,
    banks: int,
) -> None:
    """hidden = act(v_gate.T @ gate) * (v_up.T @ up), of intermediates in SBUF.

    Args:
        hidden: [I, width], filled.
        sides: gate [r_g, width] and up [r_u, width].
        factors: v_gate [r_g, I] and v_up [r_u, I].
        activation: name of act.
        block: columns of both factors that are loaded together.
        tokens: columns of the hidden block that one group of PSUM tiles covers.
        banks: PSUM tiles in a group.
    """
    for b in spans(0, hidden.size, block):
        gate = factors[0].block(Span(0, sides[0].size), b)
        up = factors[1].block(Span(0, sides[1].size), b)
        for group in transposed_groups(b.size, hidden.width, tokens, banks):
            first = (b.start + group.rows.start) // PARTITIONS
            gate_psum = accumulate(gate, sides[0], group, TAIL_TILES)
            acts_sb = activated(gate_psum, activation, factors, first)
            up_psum = accumulate(up, sides[1], group, TAIL_TILES)
            multiply(hidden, up_psum, acts_sb, first, group)
        for t in range(tiles_in(b.size, PARTITIONS)):
            hidden.store(b.start // PARTITIONS + t)


def multiply(
    hidden: Hidden, sums_psum: list[Tiles], acts_sb: list[Tiles], first: int, group: Group
) -> None:
    """hidden = sums * acts, for the columns of a group and its rows from tile `first`."""
    columns = spans(group.columns.start, group.columns.size, BANK_COLUMNS)
    for i in range(len(sums_psum)):
        slot_sb = hidden.slot(first + i)
        for j in range(len(columns)):
            dst_sb = slot_sb[:, nl.ds(columns[j].start, columns[j].size)]
            nisa.tensor_tensor(dst_sb, sums_psum[i][j], acts_sb[i][j], nl.multiply)


class SVDMLPStages(nl.NKIObject):
    """What `svd_mlp` does with a block of tokens.

    Args:
        factors: u and v of gate, up and down.
        scratch_hbm: see `Hidden`.
        arguments: of `svd_mlp`, by name.
    """

    def __init__(
        self, factors: list[Weight], scratch_hbm: Tiles, arguments: dict[str, Any]
    ) -> None:
        self.factors = factors
        self.scratch_hbm = scratch_hbm
        self.arguments = arguments
        self.rounding: list[Rounding] = []
        if arguments["double_row"]:
            self.rounding.append(Rounding(fp8(factors)))

    def prepare(self, rows: int) -> None:
        """Load the scales that stay in SBUF."""
        keep_scales(self.factors, rows)

    def run(self, out_hbm: NkiTensor, x_hbm: NkiTensor, t: Span) -> None:
        """out[t] = down(act(gate(x[t])) * up(x[t]))."""
        if len(self.rounding) > 0:
            self.run_rounded(self.rounding[0], out_hbm, x_hbm, t)
            return
        a = self.arguments
        gates, ups, downs = self.factors[0:2], self.factors[2:4], self.factors[4:6]
        tokens, banks, engines = a["tokens"], a["banks"], a["engines"]
        xt = TiledOperand(x_hbm, Span(0, x_hbm.shape[1]), t, a["resident"], a["layout"])
        gate = project(xt, gates[0], a["u_block"], tokens, banks, engines)
        up = project(xt, ups[0], a["u_block"], tokens, banks, engines)
        hidden = Hidden(
            x_hbm.dtype,
            self.scratch_hbm,
            downs[0].size,
            t.size,
            a["spill"],
            a["resident_spilled"],
        )
        sides = [gates[1], ups[1]]
        gated(hidden, [gate, up], sides, a["activation"], a["v_block"], tokens, banks)
        down = project(hidden, downs[0], a["down_block"], tokens, banks, engines)
        write_rows(
            out_hbm,
            down,
            downs[1],
            None,
            t.start,
            a["out_block"],
            a["token_tiles"],
            banks,
            engines,
        )

    def run_rounded(self, shared: Rounding, out_hbm: NkiTensor, x_hbm: NkiTensor, t: Span) -> None:
        """The same where activations are rounded to fp8."""
        a, f = self.arguments, self.factors
        dtype, block = x_hbm.dtype, a["u_block"]
        xs = rounded_rows(shared, x_hbm, t, a["layout"])
        gates = project_rounded(shared, xs, f[0], block, dtype, True)
        ups = project_rounded(shared, xs, f[2], block, dtype, False)
        arguments = [a["activation"], a["v_block"], a["spill"]]
        sides, scratch_hbm = [f[1], f[3]], self.scratch_hbm
        hidden = gated_rounded(shared, gates, ups, sides, dtype, scratch_hbm, arguments, [])
        low = project_rounded(shared, hidden, f[4], a["down_block"], dtype, False)
        write_rounded(
            shared, out_hbm, low, f[5], None, t.start, a["out_block"], a["token_tiles"], False
        )


@jit
def svd_mlp(
    x: NkiTensor,
    u_gate: NkiTensor,
    v_gate: NkiTensor,
    u_up: NkiTensor,
    v_up: NkiTensor,
    u_down: NkiTensor,
    v_down: NkiTensor,
    u_gate_scale: NkiTensor | None = None,
    v_gate_scale: NkiTensor | None = None,
    u_up_scale: NkiTensor | None = None,
    v_up_scale: NkiTensor | None = None,
    u_down_scale: NkiTensor | None = None,
    v_down_scale: NkiTensor | None = None,
    activation: str = "silu",
    token_block: int = 512,
    layout: str = "dma",
    resident: int = 1024,
    spill: int = 0,
    resident_spilled: int = 0,
    u_block: int = 1024,
    v_block: int = 1024,
    down_block: int = 1024,
    out_block: int = 1024,
    tokens: int = 512,
    token_tiles: int = 4,
    banks: int = 8,
    engines: int = 1,
    double_row: bool = False,
    device_loop: bool = False,
    fingerprint: str = "",
) -> NkiTensor:
    """out = down(act(gate(x)) * up(x)), each a low-rank pair.

    Dimensions:
        M: tokens. K: input features. I: features between. N: output features. Any sizes of at
        least 1. Any three ranks.

    Args:
        x: [M, K].
        u_gate: [K, r_g], dtype of x, float8_e4m3fn of values up to 240, or int8, as all factors.
        v_gate: [r_g, I].
        u_up: [K, r_u].
        v_up: [r_u, I].
        u_down: [I, r_d].
        v_down: [r_d, N].
        u_gate_scale: [r_g], fp32, of u_gate's columns where factors have one byte; else None.
        v_gate_scale: [I], the same of v_gate, and so on.
        u_up_scale: [r_u].
        v_up_scale: [I].
        u_down_scale: [r_d].
        v_down_scale: [N].
        activation: silu, gelu, gelu_tanh or relu.
        token_block: tokens that are in SBUF at a time.
        layout: "dma" or "pe" transposes x.
        resident: x^T tiles of 128 rows that stay in SBUF; the rest is loaded again per group.
        spill: groups of 4 tiles of the hidden block that go through private HBM; 0: none.
        resident_spilled: how many of those stay in SBUF once they are back.
        u_block: columns of u_gate and u_up that are loaded together.
        v_block: columns of v_gate and v_up.
        down_block: columns of u_down.
        out_block: columns of v_down.
        tokens: of the block, in a group of PSUM tiles with transposed results.
        token_tiles: of 128, in a group of PSUM tiles of the output.
        banks: PSUM tiles in a group.
        engines: that evict PSUM: 1 ScalarE, 2 ScalarE and VectorE.
        double_row: both sides of every product are fp8, two rows of the contraction a partition:
            activations are rounded token by token; trn2 and trn3, factors in float8_e4m3fn.
        device_loop: full blocks of tokens are a loop on the device, of which the compiler gets the
            body once.
        fingerprint: of all kernels' source, for caches that know one function's alone; not read.

    Returns:
        [M, N] in shared HBM, dtype of x.

    Notes:
        Two cores share the tokens. Intermediates are rounded once, to x's dtype; the activation
        stays in fp32. x^T is loaded once for gate and up.

    Pseudocode:
        for each block of tokens:
            gate, up = (x . u_gate)^T, (x . u_up)^T
            for each block of columns of v_gate and v_up:
                hidden = act(v_gate^T . gate) * (v_up^T . up)
                its first groups of tiles go to HBM
            down = (hidden^T . u_down)^T, hidden tiles from SBUF or HBM
            out = down^T . v_down
    """
    M, K = x.shape
    N = v_down.shape[1]
    factors = [u_gate, v_gate, u_up, v_up, u_down, v_down]
    check_factors(K, factors)
    scales: list[Any] = [
        u_gate_scale,
        v_gate_scale,
        u_up_scale,
        v_up_scale,
        u_down_scale,
        v_down_scale,
    ]
    weights: list[Weight] = []
    for i in range(len(factors)):
        weights.append(Weight(factors[i], scales[i], x.dtype))
    load_table(activation)
    out_hbm = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
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
        "u_block": u_block,
        "v_block": v_block,
        "down_block": down_block,
        "out_block": out_block,
        "tokens": tokens,
        "token_tiles": token_tiles,
        "banks": banks,
        "engines": engines,
        "double_row": double_row,
    }
    stages = SVDMLPStages(weights, scratch_hbm, arguments)
    TokenBlocks(stages, out_hbm, x, token_block).run(device_loop)
    return out_hbm
