"""Plans of `xuv` in both phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, product
from typing import NamedTuple

from neuronmm_ops.kernels.planner import decode
from neuronmm_ops.kernels.planner.prefill import (
    Blocks,
    Costs,
    Moving,
    fitting_residents,
    in_sbuf,
    plan_of,
    project_steps,
    quickest_stages,
    token_blocks,
    write_steps,
)
from neuronmm_ops.kernels.planner.problem import Plan, Problem
from neuronmm_ops.kernels.planner.timeline import Program, Timeline, sbuf_peak
from neuronmm_ops.kernels.stages.tiling import BANK_COLUMNS, PARTITIONS, PSUM_BANKS, tiles_in

BLOCKS = (512, 1024, 2048, 4096)
K_BLOCKS = (512, 1024, 2048, 4096)
WAITS = 1.05
"""Time over that of TensorE from which on blocks of K are tried."""
FIRST, SECOND = 8, 3
"""Stages of each product that plans are made of."""


def candidates(problem: Problem) -> list[Plan]:
    """All plans that fit."""
    found = decode.candidates(problem)
    for widths in token_blocks(problem):
        prefill = [plan for width in widths for plan in _Stages(problem).plans(width)]
        if prefill:
            return found + prefill
    return found


def plan_with(problem: Problem, blocks: Blocks) -> Plan | None:
    """The plan of these arguments of the prefill kernel; None where it does not fit."""
    first = First(*[int(blocks[name]) for name in First._fields])
    second = Second(*[int(blocks[name]) for name in Second._fields])
    return _Stages(problem).plan(int(blocks["token_block"]), first, second)


class First(NamedTuple):
    """The kernel's arguments for x @ u."""

    resident: int
    u_block: int
    tokens: int
    banks: int
    k_block: int


class Second(NamedTuple):
    """The kernel's arguments for xu @ v."""

    v_block: int
    token_tiles: int


class _Stages:
    """The two products for blocks of tokens, by the kernel's arguments."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.costs = problem, Costs(problem)
        self.project, self.write = cache(self._project), cache(self._write)

    def _project(self, width: int, first: First) -> Program:
        """x @ u."""
        p = self.problem
        x = Moving(self.costs.tokens(first.resident), split=True)
        return project_steps(self.costs, width, p.K, p.ranks[0], x, *first[1:], p.bf16_partial_sums)

    def _write(self, width: int, second: Second, tokens: int) -> Program:
        """xu @ v, where groups of `tokens` have made xu."""
        c, r = self.costs, self.problem.ranks[0]
        x = in_sbuf(tiles_in(r, PARTITIONS) * width * c.item, tokens)
        return write_steps(c, width, r, self.problem.N, x, *second, c.banks)

    def firsts(self, width: int, k_block: int) -> Iterator[First]:
        """Arguments of x @ u worth trying, that fit."""
        c, K, r = self.costs, self.problem.K, self.problem.ranks[0]
        tiles = tiles_in(r, PARTITIONS)
        even = [tiles_in(tiles, tiles_in(tiles, most)) * PARTITIONS for most in (4, 8, tiles)]
        widths = sorted({min(b, tiles * PARTITIONS) for b in (*BLOCKS, *even)})
        groups = sorted({min(BANK_COLUMNS, width), min(2 * BANK_COLUMNS, width), width})
        # groups of half the banks leave the others to slow additions in SBUF
        all_banks = (c.banks, PSUM_BANKS // 2) if k_block else (c.banks,)
        for tokens, banks, block in product(groups, all_banks, widths):
            if tiles_in(tokens, BANK_COLUMNS) > banks:
                continue
            first = First(0, block, tokens, banks, k_block)

            def peak(resident: int, first: First = first) -> int:
                return sbuf_peak([self.project(width, first._replace(resident=resident))])

            parts = tiles_in(width, tokens)
            for resident in fitting_residents(c, k_block or K, tokens, peak, parts):
                yield first._replace(resident=resident)

    def quickest_firsts(self, width: int) -> list[First]:
        """The quickest for x @ u. Blocks of K are tried where x does not stay, or is waited for."""

        def quickest(arguments: Iterable[First]) -> list[First]:
            return quickest_stages(c.machine, arguments, lambda a: self.project(width, a))

        c, K = self.costs, self.problem.K
        whole = quickest(self.firsts(width, 0))
        if whole and whole[0].resident == tiles_in(K, PARTITIONS):
            timeline = Timeline(c.machine)
            timeline.repeat([self.project(width, whole[0])], 1)
            if timeline.end_ns <= WAITS * timeline.work_ns:
                return whole[:FIRST]
        item = c.item if self.problem.bf16_partial_sums else 4
        partial = tiles_in(self.problem.ranks[0], PARTITIONS) * width * item
        if partial > 0.8 * c.machine.usable_sbuf_bytes:
            return whole[:FIRST]
        tried = [self.firsts(width, k_block) for k_block in K_BLOCKS if k_block < K <= 16 * k_block]
        return quickest(chain(whole[:FIRST], *tried))[:FIRST]

    def seconds(self, width: int) -> Iterator[Second]:
        """Arguments of xu @ v."""
        for block in sorted({min(b, self.problem.N) for b in BLOCKS}):
            for token_tiles in (1, 2, 4):
                if token_tiles == 1 or token_tiles // 2 * PARTITIONS < width:
                    yield Second(block, token_tiles)

    def plans(self, token_block: int) -> Iterator[Plan]:
        """The quickest for blocks of so many tokens."""
        c = self.costs
        width = min(token_block, self.problem.core_tokens[0])
        live = tiles_in(self.problem.ranks[0], PARTITIONS) * width * c.item
        seconds = quickest_stages(
            c.machine, self.seconds(width), lambda b: self.write(width, b, width), live
        )[:SECOND]
        firsts = self.quickest_firsts(width) if seconds else []
        for n, (first, second) in enumerate(product(firsts, seconds)):
            if n < SECOND or second == seconds[0]:  # the stages hardly interact
                plan = self.plan(token_block, first, second)
                if plan:
                    yield plan

    def plan(self, token_block: int, first: First, second: Second) -> Plan | None:
        """What these arguments come to."""
        c, p = self.costs, self.problem
        blocks: Blocks = {"token_block": token_block, "layout": c.layout, **first._asdict()}
        if p.bf16_partial_sums:
            blocks["bf16_partial_sums"] = True
        blocks.update(second._asdict(), v_banks=c.banks, engines=c.engines)

        def both(size: int) -> list[Program]:
            return [self.project(size, first), self.write(size, second, first.tokens)]

        return plan_of(p, blocks, both, min(token_block, p.core_tokens[0]))
