"""Plans of `xuv` in both phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, product
from typing import NamedTuple

from neuronmm_ops.kernels.planner import decode_search, prefill_search
from neuronmm_ops.kernels.planner.decode import Blocks, Stages
from neuronmm_ops.kernels.planner.prefill import Moving, in_sbuf, project_steps, write_steps
from neuronmm_ops.kernels.planner.prefill_doubled import (
    Doubled,
    blocks_of,
)
from neuronmm_ops.kernels.planner.prefill_search import Arguments
from neuronmm_ops.kernels.planner.problem import Plan, Problem
from neuronmm_ops.kernels.planner.timeline import Program, Timeline
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    DOUBLED_BANKS,
    DOUBLED_TOKENS,
    PARTITIONS,
    PSUM_BANKS,
    SQUARES_OF_LOW,
    tiles_in,
)

BLOCKS = (512, 1024, 2048, 4096)
K_BLOCKS = (512, 1024, 2048)
WAITS = 0.005
"""Share of the whole time that the first block waits for DMA, from which blocks of K are tried."""
FIRST, SECOND = 8, 3
"""Stages of each product that plans are made of."""


def decode(problem: Problem) -> list[Plan]:
    """The best plans of the decode kernel that fit, the fastest first."""
    costs = decode_search.DecodeCosts(problem)
    first: Blocks = {"rank_block": decode_search.even(problem.ranks[0], costs.most_columns)}
    return decode_search.best_plans(costs, decode_stages, first)


def decode_stages(s: Stages) -> None:
    """The stages of the decode kernel."""
    chunks = s.chunks(s.own(s.problem.K))
    s.hold(s.buffers(chunks))
    (low,) = s.project(chunks, "hbm", s.problem.ranks)
    s.hold(-s.buffers(chunks))
    s.hold(s.transposed(low) + s.natural(s.problem.ranks[0]))
    s.write(low, "sums", resident=True)


class First(NamedTuple):
    """Arguments of the prefill kernel for x @ u."""

    resident: int
    u_block: int
    tokens: int
    banks: int
    k_block: int
    bf16_partial_sums: bool


class Second(NamedTuple):
    """Arguments of the prefill kernel for xu @ v."""

    v_block: int
    token_tiles: int
    v_banks: int


class Prefill(prefill_search.Prefill):
    """The prefill kernel: two products for each block of tokens."""

    names = ("token_block", *First._fields, *Second._fields)

    def __init__(self, problem: Problem, layout: str) -> None:
        super().__init__(problem, layout)
        self.r_tiles = tiles_in(problem.ranks[0], PARTITIONS)
        self.project, self.write = cache(self._project), cache(self._write)

    def stages(self, width: int, arguments: Arguments) -> list[Program]:
        """The kernel for a block of `width` tokens."""
        first = First._make(arguments[1 : 1 + len(First._fields)])
        second = Second._make(arguments[1 + len(First._fields) :])
        return [self.project(width, first), self.write(width, second, first.tokens)]

    def _project(self, width: int, first: First) -> Program:
        """x @ u."""
        x = Moving(self.costs.tokens(first.resident), split=True)
        return project_steps(
            self.costs, width, self.problem.K, self.problem.ranks[0], x, "u", *first[1:]
        )

    def _write(self, width: int, second: Second, tokens: int) -> Program:
        """xu @ v, where groups of `tokens` have made xu."""
        x = in_sbuf(self.r_tiles * width * self.costs.item, tokens)
        return write_steps(
            self.costs, width, self.problem.ranks[0], self.problem.N, x, "v", *second
        )

    def doubled(self, width: int, arguments: Arguments) -> list[Program]:
        """The kernel with `double_row`."""
        d, p, r = Doubled(self.costs, width), self.problem, self.problem.ranks[0]
        first = First._make(arguments[1 : 1 + len(First._fields)])
        second = Second._make(arguments[1 + len(First._fields) :])
        constants = d.constants() + d.squares_bytes(r, SQUARES_OF_LOW)
        lag = d.lag_ns(SQUARES_OF_LOW)
        programs = [
            d.project(p.K, r, "u", first.u_block, x=True),
            d.write(r, p.N, "v", second.v_block, second.token_tiles, lag_ns=lag),
        ]
        programs[0].held = d.held_x(p.K, r) + constants
        programs[1].held = d.held(r, p.itemsize) + d.held(r) + constants
        return programs

    def doubled_choices(self, token_block: int, width: int) -> Iterator[Arguments]:
        """Blocks of columns of both factors."""
        K_tiles = tiles_in(self.problem.K, PARTITIONS)
        tokens = min(DOUBLED_TOKENS, width)
        for u_block in blocks_of(self.problem.ranks[0], 4):
            first = First(K_tiles, u_block, tokens, DOUBLED_BANKS, 0, bf16_partial_sums=False)
            for v_block in sorted({min(b, self.problem.N) for b in BLOCKS}):
                for token_tiles in (1, 2):
                    yield (token_block, *first, v_block, token_tiles, DOUBLED_BANKS)

    def choices(self, token_block: int, width: int) -> Iterator[Arguments]:
        """The quickest of both products, for the first block of tokens."""
        live = self.r_tiles * width * self.costs.item
        seconds = self.quickest(self._seconds(width), lambda s: self.write(width, s, width), live)
        firsts = self._quickest_firsts(width) if seconds else []
        for n, (first, second) in enumerate(product(firsts, seconds[:SECOND])):
            if n < SECOND or second == seconds[0]:  # the stages hardly interact
                yield (token_block, *first, *second)

    def _seconds(self, width: int) -> Iterator[Second]:
        for block in sorted({min(b, self.problem.N) for b in BLOCKS}):
            for token_tiles in (1, 2, 4):
                if token_tiles == 1 or token_tiles // 2 * PARTITIONS < width:
                    yield Second(block, token_tiles, self.costs.banks)

    def _quickest_firsts(self, width: int) -> list[First]:
        """Blocks of K are tried where x does not stay, or is waited for."""

        def quickest(arguments: Iterable[First]) -> list[First]:
            return self.quickest(arguments, lambda first: self.project(width, first))[:FIRST]

        problem = self.problem
        whole = quickest(self._firsts(width, 0))
        if whole and whole[0].resident == tiles_in(problem.K, PARTITIONS):
            timeline = Timeline(self.costs.machine)
            timeline.repeat([self.project(width, whole[0])], 1)
            if timeline.end_ns - timeline.work_ns <= WAITS * problem.roofline_ms * 1e6:
                return whole
        partial = self.r_tiles * width * (self.costs.item if problem.bf16_partial_sums else 4)
        if partial > 0.8 * self.room:
            return whole
        blocks = [k_block for k_block in K_BLOCKS if k_block < problem.K <= 16 * k_block]
        return quickest(chain(whole, *[self._firsts(width, k_block) for k_block in blocks]))

    def _firsts(self, width: int, k_block: int) -> Iterator[First]:
        """Those that fit."""
        c, r_tiles = self.costs, self.r_tiles
        even = [tiles_in(r_tiles, tiles_in(r_tiles, most)) * PARTITIONS for most in (4, 8, r_tiles)]
        widths = sorted({min(b, r_tiles * PARTITIONS) for b in (*BLOCKS, *even)})
        groups, all_banks = {BANK_COLUMNS, 2 * BANK_COLUMNS, width}, (c.banks,)
        if k_block:  # groups of half the banks leave the others to slow additions in SBUF
            groups, all_banks = {BANK_COLUMNS}, (c.banks, PSUM_BANKS // 2)
        groups = sorted({min(tokens, width) for tokens in groups})
        for tokens, banks, block in product(groups, all_banks, widths):
            if tiles_in(tokens, BANK_COLUMNS) <= banks:
                first = First(0, block, tokens, banks, k_block, self.problem.bf16_partial_sums)

                def programs(resident: int, first: First = first) -> list[Program]:
                    return [self.project(width, first._replace(resident=resident))]

                parts = tiles_in(width, tokens)
                for resident in self.residents(k_block or self.problem.K, tokens, programs, parts):
                    yield first._replace(resident=resident)
