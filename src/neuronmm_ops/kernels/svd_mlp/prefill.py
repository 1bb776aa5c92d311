"""Low-rank gated MLP, prefill form: down(act(gate(x)) * up(x)) in one launch."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, jit, nisa, nl
from neuronmm_ops.kernels.stages.prefill import (
    Operand,
    held,
    own_tokens,
    project,
    weights,
    write_rows,
)
from neuronmm_ops.kernels.stages.tiling import COLUMNS, P, Span, check_pair, spans, tiles_in

Tiles = list[NkiTensor]
GROUP = 4
"""Tiles of the hidden strip that lie side by side, so that their rows in HBM are long."""
TAIL = 4
"""Last tiles of a contraction that one PSUM tile takes after the other, for even evictions."""


class Whole(Operand):
    """An operand whose tiles all projections share."""

    def part(self, rows: Span, columns: Span) -> Operand:
        """Itself: projections take the whole contraction and choose among its columns."""
        return self


class Hidden(Whole):
    """The hidden strip [I, width]: its last groups of tiles in SBUF, the first through HBM.

    Args:
        like: tensor of the strip's dtype.
        scratch: private HBM [128, columns] of the groups that leave SBUF, or nothing.
        size: I.
        width: tokens.
        spill: how many groups go through HBM.
        keep: how many of those stay in SBUF once they are back.
    """

    def __init__(
        self, like: NkiTensor, scratch: Tiles, size: int, width: int, spill: int, keep: int
    ) -> None:
        self.source = None
        self.scratch = scratch
        self.dtype = like.dtype
        self.size = size
        self.width = width
        self.spill = spill
        self.keep = keep
        self.count = tiles_in(size, P)
        self.made: Tiles = []
        self.kept: Tiles = []
        self.again: Tiles = []

    def slot(self, k: int) -> NkiTensor:
        """Where tile k is to be written, [<=128, width]; tiles are first asked for in order."""
        group = k // GROUP
        if group == len(self.made):
            tiles = min(GROUP, self.count - k)
            rows = min(P, self.size - k * P)
            self.made.append(nl.ndarray((rows, tiles * self.width), dtype=self.dtype))
        return self.view(self.made[group], k)

    def view(self, group: NkiTensor, k: int) -> NkiTensor:
        """Tile k in its group."""
        rows = min(P, self.size - k * P)
        return group[:rows, nl.ds((k % GROUP) * self.width, self.width)]

    def place(self, group: int) -> NkiTensor:
        """A group's place in HBM."""
        return self.scratch[0][:, nl.ds(group * GROUP * self.width, GROUP * self.width)]

    def written(self, k: int) -> None:
        """Tile k is complete: with the last one of a group that spills, store the group."""
        if k % GROUP == GROUP - 1 and k // GROUP < self.spill:
            nisa.dma_copy(self.place(k // GROUP), self.made[k // GROUP])

    def tile(self, k: int) -> NkiTensor:
        """Tile k in SBUF, in order."""
        group = k // GROUP
        if group >= self.spill:
            return self.view(self.made[group], k)
        if group < len(self.kept):
            return self.view(self.kept[group], k)
        if k % GROUP == 0:
            found = nl.ndarray((P, GROUP * self.width), dtype=self.dtype)
            nisa.dma_copy(found, self.place(group))
            self.again = [found]
        found = self.again[0]
        if k % GROUP == GROUP - 1 and group < self.keep:
            self.kept.append(found)
        return self.view(found, k)


def sums_of(stationary: Operand, moving: Operand, rows: list[Span], columns: list[Span]) -> Tiles:
    """PSUM tiles stationary[:, rows].T @ moving[:, columns], fp32, over all tiles.

    The last tiles of the contraction come one PSUM tile after the other, so that evictions keep
    up with TensorE without banks to spare.
    """
    sums: Tiles = []
    for i in rows:
        for j in columns:
            sums.append(nl.ndarray((i[1], j[1]), dtype=nl.float32, buffer=nl.psum))
    split = max(0, stationary.count - TAIL)
    for k in range(split):
        s, m = stationary.tile(k), moving.tile(k)
        for n in range(len(sums)):
            i, j = rows[n // len(columns)], columns[n % len(columns)]
            nisa.nc_matmul(
                sums[n], s[:, nl.ds(i[0], i[1])], m[:, nl.ds(j[0], j[1])], accumulate=k > 0
            )
    left: Tiles = []
    right: Tiles = []
    for k in range(split, stationary.count):
        left.append(stationary.tile(k))
        right.append(moving.tile(k))
    for n in range(len(sums)):
        i, j = rows[n // len(columns)], columns[n % len(columns)]
        for k in range(len(left)):
            nisa.nc_matmul(
                sums[n],
                left[k][:, nl.ds(i[0], i[1])],
                right[k][:, nl.ds(j[0], j[1])],
                accumulate=split + k > 0,
            )
    return sums


def function_of(activation: str) -> object:
    """The activation function of this name."""
    if activation == "gelu":
        return nl.gelu
    if activation == "gelu_tanh":
        return nl.gelu_apprx_tanh
    if activation == "relu":
        return nl.relu
    assert activation == "silu", "activation must be silu, gelu, gelu_tanh or relu"
    return nl.silu


def check_factors(K: int, factors: Tiles) -> None:
    """Check the sizes of u and v of gate, up and down, for x of K features."""
    gate, up, down = factors[0:2], factors[2:4], factors[4:6]
    inner = gate[1].shape[1]
    for pair in [gate, up]:
        check_pair(K, pair[0].shape[0], 0, 0)
        check_pair(pair[0].shape[1], pair[1].shape[0], 0, 0)
    check_pair(up[1].shape[1], inner, 0, 0)
    check_pair(inner, down[0].shape[0], 0, 0)
    check_pair(down[0].shape[1], down[1].shape[0], 0, 0)


def on_partitions(bias: NkiTensor | None) -> NkiTensor | None:
    """bias [I] as fp32 columns [128, tiles of I]: feature i on partition i % 128."""
    if bias == None:  # noqa: E711
        return None
    size = bias.shape[0]
    found = nl.ndarray((min(P, size), tiles_in(size, P)), dtype=nl.float32)
    full = size // P
    for t in spans(0, full, P):
        rows = nl.ndarray((t[1], P), dtype=bias.dtype)
        part = bias[nl.ds(t[0] * P, t[1] * P)]
        nisa.dma_copy(rows, part.reshape((t[1], P)))
        turn_over(found[:, nl.ds(t[0], t[1])], rows)
    if size > full * P:
        rest = size - full * P
        row = nl.ndarray((1, rest), dtype=bias.dtype)
        nisa.dma_copy(row, bias.reshape((1, size))[:, nl.ds(full * P, rest)])
        turn_over(found[:rest, nl.ds(full, 1)], row)
    return found


def turn_over(dst: NkiTensor, rows: NkiTensor) -> None:
    """dst = rows.T in fp32, by TensorE."""
    turned = nl.ndarray(dst.shape, dtype=rows.dtype, buffer=nl.psum)
    nisa.nc_transpose(turned, rows)
    nisa.tensor_copy(dst, turned)


def gated(
    hidden: Hidden,
    sides: list[Operand],
    factors: list[NkiTensor],
    biases: list[NkiTensor | None],
    activation: str,
    block: int,
    tokens: int,
    banks: int,
) -> None:
    """hidden = act(v_gate.T @ gate + bias) * (v_up.T @ up + bias), of intermediates in SBUF.

    Args:
        hidden: [I, width], filled.
        sides: gate [r_g, width] and up [r_u, width].
        factors: v_gate [r_g, I] and v_up [r_u, I].
        biases: of gate and of up, as `on_partitions` gives them.
        activation: name of act.
        block: columns of both factors that are loaded together.
        tokens: columns of the strip that one group of PSUM tiles covers.
        banks: PSUM tiles in a group.
    """
    for b in spans(0, hidden.size, block):
        gate = weights(factors[0], b, (0, sides[0].size))
        up = weights(factors[1], b, (0, sides[1].size))
        tiles = tiles_in(b[1], P)
        for g in spans(0, hidden.width, tokens):
            columns = spans(g[0], g[1], COLUMNS)
            for r in spans(0, tiles, max(1, banks // len(columns))):
                group = spans(r[0] * P, min(r[1] * P, b[1] - r[0] * P), P)
                first = b[0] // P + r[0]
                sums = sums_of(gate, sides[0], group, columns)
                acts = activated(sums, first, len(columns), biases[0], activation)
                sums = sums_of(up, sides[1], group, columns)
                multiply(hidden, sums, acts, first, columns, biases[1])
        for t in range(tiles):
            hidden.written(b[0] // P + t)


def activated(
    sums: Tiles, first: int, columns: int, bias: NkiTensor | None, activation: str
) -> Tiles:
    """act(sums + bias) in fp32: PSUM tiles of the rows from tile `first`, `columns` to a row."""
    found: Tiles = []
    for n in range(len(sums)):
        acted = nl.ndarray(sums[n].shape, dtype=nl.float32)
        if bias != None:  # noqa: E711
            place = first + n // columns
            own = bias[: sums[n].shape[0], nl.ds(place, 1)]
            nisa.activation(acted, function_of(activation), sums[n], bias=own)
        else:
            nisa.activation(acted, function_of(activation), sums[n])
        found.append(acted)
    return found


def multiply(
    hidden: Hidden,
    sums: Tiles,
    acts: Tiles,
    first: int,
    columns: list[Span],
    bias: NkiTensor | None,
) -> None:
    """hidden = (sums + bias) * acts, for the rows from tile `first`."""
    for n in range(len(sums)):
        place, j = first + n // len(columns), columns[n % len(columns)]
        dst = hidden.slot(place)[:, nl.ds(j[0], j[1])]
        if bias != None:  # noqa: E711
            own = bias[: dst.shape[0], nl.ds(place, 1)]
            nisa.scalar_tensor_tensor(dst, sums[n], nl.add, own, nl.multiply, acts[n])
        else:
            nisa.tensor_tensor(dst, sums[n], acts[n], nl.multiply)


@jit
def svd_mlp(
    x: NkiTensor,
    u_gate: NkiTensor,
    v_gate: NkiTensor,
    u_up: NkiTensor,
    v_up: NkiTensor,
    u_down: NkiTensor,
    v_down: NkiTensor,
    bias_gate: NkiTensor | None = None,
    bias_up: NkiTensor | None = None,
    bias_down: NkiTensor | None = None,
    activation: str = "silu",
    strip: int = 512,
    layout: str = "dma",
    keep: int = 1024,
    spill: int = 0,
    keep_spilled: int = 0,
    u_block: int = 1024,
    v_block: int = 1024,
    down_block: int = 1024,
    out_block: int = 1024,
    tokens: int = 512,
    rows: int = 4,
    banks: int = 8,
    engines: int = 1,
) -> NkiTensor:
    """out = down(act(gate(x)) * up(x)), each a low-rank pair.

    Dimensions:
        M: tokens. K: input features. I: features between. N: output features. Any sizes of at
        least 1. Any three ranks.

    Args:
        x: [M, K].
        u_gate: [K, r_g], dtype of x, as all factors.
        v_gate: [r_g, I].
        u_up: [K, r_u].
        v_up: [r_u, I].
        u_down: [I, r_d].
        v_down: [r_d, N].
        bias_gate: [I] or None.
        bias_up: [I] or None.
        bias_down: [N] or None.
        activation: silu, gelu, gelu_tanh or relu.
        strip: tokens that are in SBUF at a time.
        layout: "dma" or "pe" transposes x.
        keep: x^T tiles of 128 rows that stay in SBUF; the rest is loaded again per group.
        spill: groups of 4 tiles of the hidden strip that go through private HBM; 0: none.
        keep_spilled: how many of those stay in SBUF once they are back.
        u_block: columns of u_gate and u_up that are loaded together.
        v_block: columns of v_gate and v_up.
        down_block: columns of u_down.
        out_block: columns of v_down.
        tokens: of the strip, in a group of PSUM tiles with transposed results.
        rows: token tiles of 128 in a group of PSUM tiles of the output.
        banks: PSUM tiles in a group.
        engines: that evict PSUM: 1 ScalarE, 2 ScalarE and VectorE.

    Returns:
        [M, N] in shared HBM, dtype of x.

    Notes:
        Two cores share the tokens. Intermediates are rounded once, to x's dtype; the activation
        stays in fp32. x^T is loaded once for gate and up.

    Pseudocode:
        for each strip of tokens:
            gate, up = (x . u_gate)^T, (x . u_up)^T
            for each block of columns of v_gate and v_up:
                hidden = act(v_gate^T . gate + bias) * (v_up^T . up + bias)
                its first groups of tiles go to HBM
            down = (hidden^T . u_down)^T, hidden tiles from SBUF or HBM
            out = down^T . v_down + bias
    """
    K, inner = u_gate.shape[0], v_gate.shape[1]
    check_factors(x.shape[1], [u_gate, v_gate, u_up, v_up, u_down, v_down])
    out = nl.ndarray((x.shape[0], v_down.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    scratch: Tiles = []
    if spill > 0:
        columns = spill * GROUP * strip
        scratch.append(nl.ndarray((P, columns), dtype=x.dtype, buffer=nl.private_hbm))
    biases = [on_partitions(bias_gate), on_partitions(bias_up)]
    start, size = own_tokens(x.shape[0])
    for s in spans(start, size, strip):
        xt = Whole(x, K, s[0], s[1], keep, layout)
        gate = held(project(xt, u_gate, u_block, tokens, banks, engines), u_gate.shape[1])
        up = held(project(xt, u_up, u_block, tokens, banks, engines), u_up.shape[1])
        hidden = Hidden(x, scratch, inner, s[1], spill, keep_spilled)
        gated(hidden, [gate, up], [v_gate, v_up], biases, activation, v_block, tokens, banks)
        down = held(project(hidden, u_down, down_block, tokens, banks, engines), u_down.shape[1])
        write_rows(out, down, v_down, bias_down, s[0], out_block, rows, banks, engines)
    return out
