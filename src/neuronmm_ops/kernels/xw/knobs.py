"""What a search may vary of `xw`'s kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from neuronmm_ops.kernels.knobs import (
    DOUBLED_GAIN,
    Arguments,
    Knobs,
    axis,
    decode_knobs,
    doubled_layout,
    fits_groups,
    layouts,
    narrower,
    pairs_of,
    resident_axis,
    token_blocks,
    widths,
)

if TYPE_CHECKING:
    from neuronmm_ops.kernels.problem import Problem


def decode(problem: Problem) -> list[Knobs]:
    """Knobs of `xw_decode`: tokens that stay in SBUF pay with other blocks, or other chunks."""
    resident = axis("resident", (False, True))
    moving, *stationary = decode_knobs(problem, resident[:1], stationary=resident[1])
    blocks, *casts, chunks = [[*each] for each in moving.axes if not callable(each)]
    axes = [pairs_of(resident, blocks), *casts, pairs_of(resident, chunks)]
    return [replace(moving, axes=axes), *stationary]


def prefill(problem: Problem) -> list[Knobs]:
    """Knobs of `xw`, without and with `double_row`."""
    resident = resident_axis(problem.K)
    blocks = axis("block", widths(problem.N))
    token_axis = axis("token_block", token_blocks(problem))
    start: Arguments = {
        **token_axis[0],
        **resident[0],
        **blocks[0],
        **layouts(problem)[0],
        "token_tiles": 4 if problem.core_tokens[0] > 256 else 1,
    }
    allows = partial(fits_groups, problem)
    token_tiles = axis("token_tiles", (1, 2, 4, 8))
    # groups of 8 tiles fit no layout that leaves TensorE two banks
    ways = pairs_of(layouts(problem), axis("token_tiles", (1, 2, 4)))
    sizes = pairs_of(token_axis, blocks)
    sizes = [*sizes, *pairs_of(sizes, axis("token_tiles", (4,)))]
    axes = [pairs_of(token_axis, token_tiles), sizes, ways, resident]
    forms = [Knobs("xw", narrower([start, {**start, "resident": 0}]), axes, allows)]
    if doubled := doubled_layout(problem):
        start = {**start, **doubled, "token_tiles": 1}
        axes = [token_axis, blocks, axis("token_tiles", (1, 2))]
        forms.append(Knobs("xw", narrower([start]), axes, gain=DOUBLED_GAIN))
    return forms
