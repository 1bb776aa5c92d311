"""Plans of `svd_mlp` whose activations are rounded to fp8."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from neuronmm_ops.kernels.planner.prefill import PrefillCosts
from neuronmm_ops.kernels.planner.prefill_doubled import Doubled, blocks_of
from neuronmm_ops.kernels.planner.timeline import Program, sbuf_peak
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    HIDDEN_TILES,
    PARTITIONS,
    SQUARES,
    SQUARES_OF_LOW,
    tiles_in,
)

WeightBlocks = tuple[int, int, int, int]
"""Columns of u_gate and u_up, of v_gate and v_up, of u_down, of v_down that are loaded together."""


def doubled_stages(
    costs: PrefillCosts, width: int, blocks: WeightBlocks, token_tiles: int, spill: int
) -> list[Program]:
    """The stages for a block of `width` tokens, `spill` groups of the hidden block in HBM."""
    d, p = Doubled(costs, width), costs.problem
    (gate, up, down), low_lag = p.ranks, d.lag_ns(SQUARES_OF_LOW)
    programs = [
        d.project(p.K, gate, "u0", blocks[0], x=True),
        d.project(p.K, up, "u1", blocks[0]),
        d.gated((gate, up), p.inner, blocks[1], spill, low_lag),
        d.project(p.inner, down, "u2", blocks[2], lag_ns=d.lag_ns(SQUARES)),
        d.write(down, p.N, "v2", blocks[3], token_tiles, lag_ns=low_lag),
    ]
    if spill:
        d.reload(programs[3], spill)
    for program, held in zip(programs, _held(d, spill), strict=True):
        program.held = held + d.constants()
    return programs


def _held(d: Doubled, spill: int) -> list[int]:
    """SBUF of activations in each stage."""
    p, item = d.costs.problem, d.costs.item
    natural = [d.held(rank, item) for rank in p.ranks]
    rounded = [d.held(rank) for rank in p.ranks]
    low = [d.squares_bytes(rank, SQUARES_OF_LOW) for rank in p.ranks]
    sides = rounded[0] + rounded[1]
    both = sides + natural[0] + natural[1]
    spilled = spill * HIDDEN_TILES * d.width
    hidden = d.held(p.inner, item) - spilled * item
    squares = d.squares_bytes(p.inner, SQUARES)
    window = 2 * HIDDEN_TILES * min(d.width, BANK_COLUMNS) * (item + 1)
    return [
        d.held_x(p.K, p.ranks[0]) + low[0],
        d.held(p.K) + natural[0] + rounded[0] + natural[1] + low[0] + low[1],
        max(both + low[0] + low[1], (both if len(d.parts) > 1 else sides) + hidden + squares),
        max(hidden + spilled + squares + window, d.held(p.inner) + natural[2] + low[2]),
        natural[2] + rounded[2] + low[2],
    ]


def doubled_blocks(
    costs: PrefillCosts, width: int, token_tiles: int, room: int
) -> Iterator[tuple[WeightBlocks, int]]:
    """Blocks of a few groups of PSUM tiles, and as little spilled as fits `room`."""
    p = costs.problem
    outs = sorted({min(b, p.N) for b in (512, 1024, 2048)})
    sides, downs = (blocks_of(size, 2) for size in (max(p.ranks[:2]), p.ranks[2]))
    most = p.inner // (HIDDEN_TILES * PARTITIONS)
    size = HIDDEN_TILES * width * (p.itemsize - 1)
    for blocks in product(sides, blocks_of(p.inner, 4), downs, outs):
        spill = 0
        while spill <= most:
            over = sbuf_peak(doubled_stages(costs, width, blocks, token_tiles, spill)) - room
            if over <= 0:
                yield blocks, spill
            if over <= 0 or spill == most:
                break
            spill = min(most, spill + max(1, tiles_in(over, size)))
