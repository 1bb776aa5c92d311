"""What a search may vary of `svd_qkv`'s kernels."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from neuronmm_ops.kernels.knobs import (
    DOUBLED_GAIN,
    Arguments,
    Knobs,
    axis,
    decode_knobs,
    doubled_layout,
    doubled_widths,
    even,
    fits_groups,
    layouts,
    narrower,
    pairs_of,
    resident_axis,
    sum_columns,
    token_blocks,
    widths,
)
from neuronmm_ops.kernels.stages.tiling import DOUBLED_TOKENS

if TYPE_CHECKING:
    from neuronmm_ops.kernels.problem import Problem

BLOCKS = (512, 1024, 2048)


def decode(problem: Problem) -> list[Knobs]:
    """Knobs of `svd_qkv_decode`."""
    most, ranks = sum_columns(problem), problem.ranks
    fuse = sum(ranks) <= most
    rank_block = even(max(ranks), most)
    starts = [{"rank_block": rank_block, **each} for each in axis("fuse", (fuse, False))]
    return decode_knobs(problem, starts, [axis("fuse", (fuse, False))], starts[-1])


def prefill(problem: Problem) -> list[Knobs]:
    """Knobs of `svd_qkv`, without and with `double_row`."""
    resident = resident_axis(problem.K)
    u_blocks = axis("u_block", widths(max(problem.ranks), BLOCKS))
    v_blocks = axis("v_block", widths(max(problem.outputs), BLOCKS))
    token_axis = axis("token_block", token_blocks(problem))
    start: Arguments = {
        **token_axis[0],
        **resident[0],
        **u_blocks[0],
        **v_blocks[0],
        "tokens": 512,
        "token_tiles": 1,
        **layouts(problem)[0],
    }
    axes = [
        token_axis,
        u_blocks,
        v_blocks,
        pairs_of(axis("token_tiles", (1, 2, 4)), axis("tokens", (512, 1024))),
        pairs_of(layouts(problem), axis("token_tiles", (1, 2))),
        resident,
        # a narrow block pays where its weights are as wide as they can be
        pairs_of(token_axis, [{**u_blocks[-1], **v_blocks[-1]}]),
    ]
    starts = narrower([start, {**start, "resident": 0}])
    forms = [Knobs("svd_qkv", starts, axes, partial(fits_groups, problem))]
    if doubled := doubled_layout(problem):
        u_blocks = axis("u_block", doubled_widths(max(problem.ranks)))
        tokens = min(DOUBLED_TOKENS, problem.core_tokens[0])
        start = {**start, **doubled, **u_blocks[0], "tokens": tokens}
        axes = [token_axis, u_blocks, v_blocks, axis("token_tiles", (1, 2))]
        forms.append(Knobs("svd_qkv", narrower([start]), axes, gain=DOUBLED_GAIN))
    return forms
