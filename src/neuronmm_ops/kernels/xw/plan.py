"""Plans of `xw` in both phases."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

from neuronmm_ops.kernels.planner import decode
from neuronmm_ops.kernels.planner.prefill import (
    Blocks,
    Costs,
    Moving,
    fitting_residents,
    plan_of,
    quickest_stages,
    token_blocks,
    write_steps,
)
from neuronmm_ops.kernels.planner.problem import Plan, Problem
from neuronmm_ops.kernels.planner.timeline import Program, sbuf_peak
from neuronmm_ops.kernels.stages.tiling import PARTITIONS

BLOCKS = (512, 1024, 2048, 4096)
TOKEN_TILES = (1, 2, 4, 8)
STAGES = 6
"""Plans for each width of a token block."""


def candidates(problem: Problem) -> list[Plan]:
    """All plans that fit."""
    found = decode.candidates(problem)
    for widths in token_blocks(problem):
        prefill = [plan for width in widths for plan in _prefill(problem, width)]
        if prefill:
            return found + prefill
    return found


def _prefill(problem: Problem, token_block: int) -> list[Plan]:
    """Plans for blocks of so many tokens."""
    c, K, N = Costs(problem), problem.K, problem.N
    width = min(token_block, problem.core_tokens[0])

    @cache
    def stage(width: int, resident: int, block: int, token_tiles: int) -> Program:
        x = Moving(c.tokens(resident))
        return write_steps(c, width, K, N, x, block, token_tiles, c.banks)

    def arguments() -> Iterator[tuple[int, int, int]]:
        for block, token_tiles in product(sorted({min(b, N) for b in BLOCKS}), TOKEN_TILES):
            if token_tiles > c.banks or (
                token_tiles > 1 and token_tiles // 2 * PARTITIONS >= width
            ):
                continue

            def peak(resident: int, chosen: tuple[int, int] = (block, token_tiles)) -> int:
                return sbuf_peak([stage(width, resident, *chosen)])

            for resident in fitting_residents(c, K, width, peak):
                yield resident, block, token_tiles

    found: list[Plan] = []
    for chosen in quickest_stages(c.machine, arguments(), lambda a: stage(width, *a))[:STAGES]:

        def stages(size: int, chosen: tuple[int, int, int] = chosen) -> list[Program]:
            return [stage(size, *chosen)]

        resident, block, token_tiles = chosen
        blocks: Blocks = {
            "token_block": token_block,
            "layout": c.layout,
            "resident": resident,
            "block": block,
            "token_tiles": token_tiles,
            "banks": c.banks,
            "engines": c.engines,
        }
        plan = plan_of(problem, blocks, stages, width)
        found += [plan] if plan else []
    return found
