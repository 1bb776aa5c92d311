"""The hidden block of a gated MLP where activations are rounded to fp8."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.shim import nisa, nl
from neuronmm_ops.kernels.stages.double_row import Rounded, Rounding, load_next
from neuronmm_ops.kernels.stages.hidden import Hidden, function_of
from neuronmm_ops.kernels.stages.operands import Tiles, Weight
from neuronmm_ops.kernels.stages.prefill import accumulate
from neuronmm_ops.kernels.stages.tiling import (
    DOUBLED_BANKS,
    DOUBLED_TOKENS,
    HIDDEN_TILES,
    PARTITIONS,
    SQUARES,
    TAIL_TILES,
    Group,
    Span,
    spans,
)


def gated_rounded(
    shared: Rounding,
    gates: list[Rounded],
    ups: list[Rounded],
    factors: list[Weight],
    dtype: nl.DType,
    scratch_hbm: Tiles,
    arguments: list[Any],
    loaded: list[list[Rounded]],
) -> list[Rounded]:
    """act(v_gate.T @ gate) * (v_up.T @ up), of all tokens; up's scales stay on it.

    Args:
        shared: what is common to all.
        gates: [r_g, tokens], some tokens each.
        ups: [r_u, tokens].
        factors: v_gate [r_g, I] and v_up [r_u, I].
        dtype: of the hidden block before it is rounded.
        scratch_hbm: see `Hidden`.
        arguments: the name of act, columns of both factors that are loaded together, and how many
            groups of each part of the hidden block go through HBM.
        loaded: which of gates and ups come from HBM and are used for the first time.
    """
    activation, block, spill = arguments
    size = factors[0].width
    hidden_rows: list[Rounded] = []
    for c in range(len(gates)):
        first = c * spill * HIDDEN_TILES * DOUBLED_TOKENS
        hidden = Hidden(dtype, scratch_hbm, size, gates[c].width, spill, 0, first)
        hidden_rows.append(Rounded(shared, hidden, ups[c], 1, SQUARES))
    inverses_sb: Tiles = []
    made: list[list[Any]] = []
    for b in spans(0, size, block):
        gate, up = factors[0].paired(b), factors[1].paired(b)
        for c in range(len(hidden_rows)):
            if c == len(inverses_sb):
                for sources in loaded:
                    load_next(sources, c)
                gates[c].finish()
                ups[c].finish()
                inverses_sb.append(gates[c].inverse())
            for rows in spans(0, b.size, DOUBLED_BANKS * PARTITIONS):
                group = Group(rows, Span(0, gates[c].width))
                first = (b.start + rows.start) // PARTITIONS
                gate_psum = accumulate(gate, gates[c], group, TAIL_TILES, shared)
                acts_sb: Tiles = []
                for i in range(len(gate_psum)):
                    shape = gate_psum[i][0].shape
                    gate_sb = nl.ndarray(shape, dtype=nl.float32)
                    inverse_sb = inverses_sb[c][: shape[0], :]
                    nisa.tensor_tensor(gate_sb, gate_psum[i][0], inverse_sb, nl.multiply)
                    act_sb = nl.ndarray(shape, dtype=nl.float32)
                    scale_sb = factors[0].column_scale(first + i)
                    nisa.activation(act_sb, function_of(activation), gate_sb, scale=scale_sb)
                    acts_sb.append(act_sb)
                for i in range(len(acts_sb)):
                    scale_sb = factors[1].column_scale(first + i)
                    nisa.activation(acts_sb[i], nl.copy, acts_sb[i], scale=scale_sb)
                add_squares(made)
                made = []
                up_psum = accumulate(up, ups[c], group, TAIL_TILES, shared)
                for i in range(len(up_psum)):
                    slot_sb = hidden_rows[c].source.slot(first + i)
                    nisa.tensor_tensor(slot_sb, up_psum[i][0], acts_sb[i], nl.multiply)
                    hidden_rows[c].source.store(first + i)
                    made.append([hidden_rows[c], first + i, slot_sb])
    add_squares(made)
    return hidden_rows


def add_squares(made: list[list[Any]]) -> None:
    """Take the squares of tiles made before: when VectorE need not wait for them."""
    for tile in made:
        tile[0].add(tile[1], tile[2])
