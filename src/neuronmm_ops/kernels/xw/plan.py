"""Plans of `xw` in both phases."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from neuronmm_ops.kernels.planner import decode_search, prefill_search
from neuronmm_ops.kernels.planner.decode import Blocks, Stages
from neuronmm_ops.kernels.planner.prefill import Moving, write_steps
from neuronmm_ops.kernels.planner.prefill_search import Arguments
from neuronmm_ops.kernels.planner.problem import Plan, Problem
from neuronmm_ops.kernels.planner.timeline import Program
from neuronmm_ops.kernels.stages.tiling import PARTITIONS

BLOCKS = (512, 1024, 2048, 4096)
TOKEN_TILES = (1, 2, 4, 8)
PLANS = 4
"""For each width of a token block."""


def decode(problem: Problem) -> list[Plan]:
    """The best plans of the decode kernel that fit, the fastest first."""
    resident: list[Blocks] = [{"resident": False}, {"resident": True}]
    costs = decode_search.DecodeCosts(problem)
    return decode_search.best_plans(costs, decode_stages, resident[0], [resident])


def decode_stages(s: Stages) -> None:
    """The stages of the decode kernel."""
    chunks, resident = s.chunks(s.problem.K), bool(s.blocks["resident"])
    widest = max(chunks).size * s.problem.itemsize
    s.hold(s.transposed(chunks) + widest if resident else s.buffers(chunks))
    s.write(chunks, "hbm", resident)


class Dense(NamedTuple):
    """Arguments of the prefill kernel."""

    token_block: int
    resident: int
    block: int
    token_tiles: int
    banks: int


class Prefill(prefill_search.Prefill):
    """The prefill kernel, of one stage."""

    names = Dense._fields

    def __init__(self, problem: Problem, layout: str) -> None:
        super().__init__(problem, layout)
        self.stage = cache(self._stage)

    def _stage(self, width: int, a: Dense) -> Program:
        p, x = self.problem, Moving(self.costs.tokens(a.resident))
        return write_steps(self.costs, width, p.K, p.N, x, "w", *a[2:])

    def stages(self, width: int, arguments: Arguments) -> list[Program]:
        """The kernel for a block of `width` tokens."""
        return [self.stage(width, Dense(*arguments))]

    def choices(self, token_block: int, width: int) -> list[Dense]:
        """The quickest for the first block of tokens."""
        tried = self._fitting(token_block, width)
        return self.quickest(tried, lambda a: self.stage(width, a))[:PLANS]

    def _fitting(self, token_block: int, width: int) -> Iterator[Dense]:
        blocks = sorted({min(b, self.problem.N) for b in BLOCKS})
        in_psum = [tiles for tiles in TOKEN_TILES if tiles <= self.costs.banks]
        for block, token_tiles in product(blocks, in_psum):
            if token_tiles == 1 or token_tiles // 2 * PARTITIONS < width:
                a = Dense(token_block, 0, block, token_tiles, self.costs.banks)

                def programs(resident: int, a: Dense = a) -> list[Program]:
                    return [self.stage(width, a._replace(resident=resident))]

                for resident in self.residents(self.problem.K, width, programs):
                    yield a._replace(resident=resident)
