"""What a search may vary of `xuv`'s kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuronmm_ops.kernels.knobs import (
    DOUBLED_GAIN,
    WIDTHS,
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
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    DOUBLED_BANKS,
    DOUBLED_TOKENS,
    PARTITIONS,
    tiles_in,
)

if TYPE_CHECKING:
    from neuronmm_ops.kernels.problem import Problem

K_BLOCKS = (512, 1024, 2048)


def decode(problem: Problem) -> list[Knobs]:
    """Knobs of `xuv_decode`."""
    start: Arguments = {"rank_block": even(problem.ranks[0], sum_columns(problem))}
    return decode_knobs(problem, [start], stationary=start)


def prefill(problem: Problem) -> list[Knobs]:
    """Knobs of `xuv`, without and with `double_row`."""
    K, rank = problem.K, problem.ranks[0]
    resident = resident_axis(K)
    u_blocks = axis("u_block", widths(rank, (*WIDTHS, even(rank, 512), even(rank, 1024))))
    v_blocks = axis("v_block", widths(problem.N))
    token_axis = axis("token_block", token_blocks(problem))
    ways: list[Arguments] = [{**way, "v_banks": way["banks"]} for way in layouts(problem)]
    start: Arguments = {
        **token_axis[0],
        **resident[0],
        "u_block": even(rank, 1024),
        "tokens": BANK_COLUMNS,
        "k_block": 0,
        "bf16_partial_sums": problem.bf16_partial_sums,
        **v_blocks[0],
        "token_tiles": 1,
        **ways[0],
    }
    rows = [size for size in K_BLOCKS if size < K <= 16 * size]
    parts: list[Arguments] = [
        {"k_block": size, "resident": tiles_in(size, PARTITIONS)} for size in rows
    ]
    # groups of half the banks leave the others to slow additions in SBUF
    halves: list[Arguments] = [{**part, "banks": 4} for part in parts]
    parts.insert(0, {"k_block": 0, **resident[0]})

    def in_parts(arguments: Arguments) -> list[Arguments]:
        banks: Arguments = {"banks": arguments["v_banks"]}
        blocks = pairs_of(token_axis, [*[{**part, **banks} for part in parts], *halves])
        # a wide block pays where its tokens also meet a block of u together
        together = [{**one, "tokens": one["token_block"]} for one in token_axis[1:]]
        return [*blocks, *[{**one, **parts[0], **banks} for one in together]]

    def allows(arguments: Arguments) -> bool:
        tokens, width = int(arguments["tokens"]), int(arguments["token_block"])
        in_psum = tiles_in(tokens, BANK_COLUMNS) <= int(arguments["banks"])
        return in_psum and tokens <= max(BANK_COLUMNS, width) and fits_groups(problem, arguments)

    axes = [
        in_parts,
        u_blocks,
        v_blocks,
        pairs_of(axis("token_tiles", (1, 2, 4)), axis("tokens", (512, 1024, 2048))),
        pairs_of(ways, axis("token_tiles", (1, 2))),
        resident,
    ]
    starts = narrower(
        [start, {**start, "resident": 0}, *[{**start, **half} for half in halves[-1:]]]
    )
    forms = [Knobs("xuv", starts, axes, allows)]
    if doubled := doubled_layout(problem):
        start = {
            **start,
            **doubled,
            "tokens": min(DOUBLED_TOKENS, problem.core_tokens[0]),
            "v_banks": DOUBLED_BANKS,
            "u_block": doubled_widths(rank)[0],
        }
        axes = [
            token_axis,
            axis("u_block", doubled_widths(rank)),
            v_blocks,
            axis("token_tiles", (1, 2)),
        ]
        forms.append(Knobs("xuv", narrower([start]), axes, gain=DOUBLED_GAIN))
    return forms
