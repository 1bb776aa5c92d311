"""What a search may vary of `mlp`'s kernels."""

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
    fits_groups,
    hidden_axis,
    inner_blocks,
    kept_axis,
    layouts,
    narrower,
    pairs_of,
    resident_axis,
    stationary_inner,
    widths,
)
from neuronmm_ops.kernels.stages.tiling import DOUBLED_TOKENS

if TYPE_CHECKING:
    from neuronmm_ops.kernels.problem import Problem

TOKENS = 1024
"""Of a group of PSUM tiles with transposed results."""


def decode(problem: Problem) -> list[Knobs]:
    """Knobs of `mlp_decode`; two cores exchange the hidden block through HBM."""
    _check(problem)
    inners = axis("inner_block", inner_blocks(problem))
    spills = axis("spill", (True, False) if problem.lnc == 1 else (True,))
    start: Arguments = {**inners[0], "spill": True}
    stationary = {**stationary_inner(problem), "spill": problem.lnc == 2}
    return decode_knobs(problem, [start], [inners, spills, balances(problem)], stationary)


def prefill(problem: Problem) -> list[Knobs]:
    """Knobs of `mlp`, without and with `double_row`."""
    _check(problem)
    K = max([rows for rows, _ in problem.matrices[:2]])
    hidden, resident = hidden_axis(problem), resident_axis(K)
    inners = axis("inner_block", widths(problem.inner, (256, 512, 1024, 2048)))
    blocks = axis("block", widths(problem.N, (512, 1024, 2048)))
    start: Arguments = {
        **hidden[0],
        "tokens": TOKENS,
        **resident[0],
        **inners[min(1, len(inners) - 1)],
        **blocks[0],
        "token_tiles": 2,
        **layouts(problem)[0],
    }
    widest = start["token_block"]
    same_width = [each for each in hidden if each["token_block"] == widest]
    starts = [
        *[{**start, **each} for each in same_width],
        {**start, **same_width[-1], **inners[0]},
        {**start, **same_width[-1], **inners[0], "resident": 0},
    ]
    axes = [
        hidden,
        pairs_of(layouts(problem), inners),
        pairs_of(layouts(problem), blocks),
        pairs_of(inners, blocks[-1:]),
        axis("token_tiles", (2, 4)),
        kept_axis,
        resident,
    ]

    def allows(arguments: Arguments) -> bool:
        return arguments["token_tiles"] == 2 or fits_groups(problem, arguments)

    forms = [Knobs("mlp", narrower(starts), axes, allows)]
    if doubled := doubled_layout(problem):
        inners = axis("inner_block", doubled_widths(problem.inner))
        start = {**start, **doubled, **inners[0], **blocks[0], "tokens": DOUBLED_TOKENS}
        starts = [{**start, **each} for each in same_width]
        axes = [hidden, inners, blocks, axis("token_tiles", (1, 2))]
        forms.append(Knobs("mlp", narrower(starts), axes, gain=DOUBLED_GAIN))
    return forms


def _check(problem: Problem) -> None:
    """Refuse weights of gate and up that contract different features, where both contract x."""
    (K, _), (K_up, _), _ = problem.matrices
    if K_up != K and not problem.others:
        raise ValueError(
            f"without x_up gate and up contract the same features, got {K} and {K_up}; "
            f'use others=(("x_up", (-1, {K_up}), ""),)'
        )
