"""What a search may vary of `svd_mlp`'s kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuronmm_ops.kernels.knobs import (
    DOUBLED_GAIN,
    Arguments,
    Knobs,
    axis,
    balances,
    decode_knobs,
    doubled_layout,
    doubled_widths,
    even,
    hidden_axis,
    inner_blocks,
    kept_axis,
    layouts,
    narrower,
    pairs_of,
    resident_axis,
    stationary_inner,
    sum_columns,
    widths,
)
from neuronmm_ops.kernels.stages.tiling import DOUBLED_TOKENS

if TYPE_CHECKING:
    from neuronmm_ops.kernels.problem import Problem

TOKENS = 1024
"""Of a group of PSUM tiles with transposed results."""
TOKEN_TILES = 2
"""Of a group of PSUM tiles of the output."""


def decode(problem: Problem) -> list[Knobs]:
    """Knobs of `svd_mlp_decode`."""
    most, (gate, up, down) = sum_columns(problem), problem.ranks
    fuse = gate + up <= most
    inners = axis("inner_block", inner_blocks(problem))
    rank_block = even(down if fuse else max(gate, up, down), most)
    start: Arguments = {"rank_block": rank_block, "fuse_gate_up": fuse, **inners[0], "spill": True}
    inner = stationary_inner(problem)
    stationary: Arguments = {**start, "fuse_gate_up": False, "spill": False, **inner}
    axes = [inners, axis("spill", (True, False)), balances(problem)]
    return decode_knobs(problem, [start], axes, stationary)


def prefill(problem: Problem) -> list[Knobs]:
    """Knobs of `svd_mlp`, without and with `double_row`."""
    side, down = max(problem.ranks[:2]), problem.ranks[2]
    hidden, resident = hidden_axis(problem), resident_axis(problem.K)
    out_blocks = axis("out_block", widths(problem.N, (512, 1024, 2048)))
    start: Arguments = {
        **hidden[0],
        "tokens": TOKENS,
        **resident[0],
        "u_block": even(side, 512),
        "v_block": even(problem.inner, 1024),
        "down_block": even(down, 512),
        **out_blocks[-1],
        "token_tiles": TOKEN_TILES,
        **layouts(problem)[0],
    }
    starts = [
        *[{**start, **each} for each in hidden if each["token_block"] == start["token_block"]],
        {**start, **hidden[-1], "token_block": start["token_block"], "v_block": 512},
        {**start, **hidden[-1], "token_block": start["token_block"], "resident": 0, "v_block": 512},
    ]
    axes = [
        hidden,
        axis("v_block", widths(problem.inner, (512, 1024, 2048))),
        axis("down_block", _sides(down)),
        pairs_of(layouts(problem), axis("u_block", _sides(side))),
        out_blocks,
        kept_axis,
        resident,
    ]
    forms = [Knobs("svd_mlp", narrower(starts), axes)]
    if doubled := doubled_layout(problem):
        u_blocks = axis("u_block", doubled_widths(side, 2))
        v_blocks = axis("v_block", doubled_widths(problem.inner))
        down_blocks = axis("down_block", doubled_widths(down, 2))
        blocks = {**u_blocks[0], **v_blocks[0], **down_blocks[0], **out_blocks[0]}
        starts = [{**each, **doubled, **blocks, "tokens": DOUBLED_TOKENS} for each in starts[:-1]]
        axes = [hidden, v_blocks, u_blocks, down_blocks, out_blocks]
        forms.append(Knobs("svd_mlp", narrower(starts), axes, gain=DOUBLED_GAIN))
    return forms


def _sides(rank: int) -> list[int]:
    """Widths of a u: equal parts of the rank, and a few tiles."""
    return widths(rank, (256, *[even(rank, most) for most in (512, 1024, 2048)]))
