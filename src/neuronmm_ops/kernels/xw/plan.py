"""Plans of `xw` in both phases."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

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


class Arguments(NamedTuple):
    """The kernel's arguments, those left out that the problem decides."""

    token_block: int
    resident: int
    block: int
    token_tiles: int


def candidates(problem: Problem) -> list[Plan]:
    """All plans that fit."""
    found = decode.candidates(problem)
    for widths in token_blocks(problem):
        prefill = [plan for width in widths for plan in _Dense(problem).plans(width)]
        if prefill:
            return found + prefill
    return found


def plan_with(problem: Problem, blocks: Blocks) -> Plan | None:
    """The plan of these arguments of the prefill kernel; None where it does not fit."""
    return _Dense(problem).plan(Arguments(*[int(blocks[name]) for name in Arguments._fields]))


class _Dense:
    """The one stage of `xw`, by the kernel's arguments."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.costs = problem, Costs(problem)
        self.tokens = problem.core_tokens[0]
        self.stage = cache(self._stage)

    def _stage(self, width: int, a: Arguments) -> Program:
        c, p = self.costs, self.problem
        x = Moving(c.tokens(a.resident))
        return write_steps(c, width, p.K, p.N, x, a.block, a.token_tiles, c.banks)

    def plan(self, a: Arguments) -> Plan | None:
        """What these arguments come to."""
        c = self.costs
        blocks: Blocks = {**a._asdict(), "layout": c.layout, "banks": c.banks, "engines": c.engines}
        width = min(a.token_block, self.tokens)
        return plan_of(self.problem, blocks, lambda size: [self.stage(size, a)], width)

    def plans(self, token_block: int) -> list[Plan]:
        """The quickest for blocks of so many tokens."""
        width = min(token_block, self.tokens)
        found = quickest_stages(
            self.costs.machine, self._arguments(token_block, width), lambda a: self.stage(width, a)
        )
        plans = [self.plan(a) for a in found[:STAGES]]
        return [plan for plan in plans if plan]

    def _arguments(self, token_block: int, width: int) -> Iterator[Arguments]:
        c, K, N = self.costs, self.problem.K, self.problem.N
        for block, token_tiles in product(sorted({min(b, N) for b in BLOCKS}), TOKEN_TILES):
            if token_tiles > c.banks or (
                token_tiles > 1 and token_tiles // 2 * PARTITIONS >= width
            ):
                continue
            wanted = Arguments(token_block, 0, block, token_tiles)

            def peak(resident: int, wanted: Arguments = wanted) -> int:
                return sbuf_peak([self.stage(width, wanted._replace(resident=resident))])

            for resident in fitting_residents(c, K, width, peak):
                yield wanted._replace(resident=resident)
