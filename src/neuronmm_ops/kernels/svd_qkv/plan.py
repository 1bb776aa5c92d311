"""Plans of `svd_qkv` in both phases."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from neuronmm_ops.kernels.planner import decode_search, prefill_search
from neuronmm_ops.kernels.planner.decode import Blocks, Stages
from neuronmm_ops.kernels.planner.prefill import Moving, in_sbuf, project_steps, write_steps
from neuronmm_ops.kernels.planner.prefill_doubled import Doubled, blocks_of
from neuronmm_ops.kernels.planner.prefill_search import Arguments
from neuronmm_ops.kernels.planner.problem import Plan, Problem
from neuronmm_ops.kernels.planner.timeline import Program
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    DOUBLED_BANKS,
    DOUBLED_TOKENS,
    PARTITIONS,
    SQUARES_OF_LOW,
    SUM_BANKS,
    tiles_in,
)

BLOCKS = (512, 1024, 2048)
TOKEN_TILES = (1, 2, 4)

# --- decode


def decode(problem: Problem) -> list[Plan]:
    """The best plans of the decode kernel that fit, the fastest first."""
    costs = decode_search.DecodeCosts(problem)
    ranks = problem.ranks
    first: Blocks = {"rank_block": decode_search.even(max(ranks), costs.most_columns)}
    fits = sum([costs.sums(r, r).banks for r in ranks]) <= SUM_BANKS
    return decode_search.best_plans(costs, decode_stages, {**first, "fuse": fits})


def decode_stages(s: Stages) -> None:
    """The stages of the decode kernel."""
    problem = s.problem
    chunks = s.chunks(s.own(problem.K))
    s.hold(sum([s.natural(r) for r in problem.ranks]) + s.buffers(chunks))
    low = s.project(chunks, "hbm", problem.ranks, bool(s.blocks["fuse"]))
    s.hold(-s.buffers(chunks))
    for number, tiles in enumerate(low):
        s.hold(s.transposed(tiles))
        s.write(tiles, "sums", resident=True, number=number)


# --- prefill


class Qkv(NamedTuple):
    """Arguments of the prefill kernel."""

    token_block: int
    resident: int
    u_block: int
    v_block: int
    tokens: int
    token_tiles: int
    banks: int


class Prefill(prefill_search.Prefill):
    """The prefill kernel: three products of x for each block of tokens, then three of those."""

    names = Qkv._fields

    def __init__(self, problem: Problem, layout: str) -> None:
        super().__init__(problem, layout)
        self.project, self.write = cache(self._project), cache(self._write)

    def stages(self, width: int, arguments: Arguments) -> list[Program]:
        """The kernel for a block of `width` tokens."""
        a = Qkv(*arguments)
        return [
            *self.sides(width, a.u_block, a.tokens, a.resident),
            *[self.write(width, a.v_block, a.token_tiles, n) for n in range(3)],
        ]

    def sides(self, width: int, u_block: int, tokens: int, resident: int) -> list[Program]:
        """The products of x with the three u."""
        return [self.project(width, u_block, tokens, resident, n) for n in range(3)]

    def _project(
        self, width: int, u_block: int, tokens: int, resident: int, number: int
    ) -> Program:
        c, problem = self.costs, self.problem
        x = Moving(c.tokens(resident), seen=number > 0, stays=number < 2)
        if number == 2:
            first = x.loads(problem.K, width, False)
            x = x._replace(frees=first.fills - first.passing)
        blocks = (f"u{number}", u_block, tokens, c.banks)
        return project_steps(c, width, problem.K, problem.ranks[number], x, *blocks)

    def _write(self, width: int, v_block: int, token_tiles: int, number: int) -> Program:
        """A product with a v; what it reads is there, the last one's but for two others."""
        c, rank = self.costs, self.problem.ranks[number]
        x = in_sbuf(tiles_in(rank, PARTITIONS) * width * c.item, 0)
        blocks = (f"v{number}", v_block, token_tiles, c.banks)
        return write_steps(c, width, rank, self.problem.outputs[number], x, *blocks)

    def choices(self, token_block: int, width: int) -> Iterator[Qkv]:
        """All that fit."""
        widest = max(self.problem.outputs)
        v_blocks = sorted({min(block, widest) for block in BLOCKS})
        token_tiles = [n for n in TOKEN_TILES if n == 1 or n // 2 * PARTITIONS < width]
        for first, v_block, tiles in product(list(self._firsts(width)), v_blocks, token_tiles):
            resident, u_block, tokens = first
            yield Qkv(token_block, resident, u_block, v_block, tokens, tiles, self.costs.banks)

    def _firsts(self, width: int) -> Iterator[tuple[int, int, int]]:
        """x^T tiles that stay, and columns of a u and tokens of a group."""
        widest = max(self.problem.ranks)
        u_blocks = sorted({min(block, widest) for block in BLOCKS})
        groups = sorted({min(tokens, width) for tokens in (BANK_COLUMNS, 2 * BANK_COLUMNS)})
        for u_block, tokens in product(u_blocks, groups):

            def programs(resident: int, u_block: int = u_block, tokens: int = tokens):
                return self.sides(width, u_block, tokens, resident)

            for resident in self.residents(self.problem.K, width, programs):
                yield resident, u_block, tokens

    # with rows of fp8 doubled

    def doubled(self, width: int, arguments: Arguments) -> list[Program]:
        """The kernel with `double_row`."""
        a, d, p = Qkv(*arguments), Doubled(self.costs, width), self.problem
        programs = [d.project(p.K, r, f"u{n}", a.u_block, x=n == 0) for n, r in enumerate(p.ranks)]
        for n, (r, columns) in enumerate(zip(p.ranks, p.outputs, strict=True)):
            programs.append(d.write(r, columns, f"v{n}", a.v_block, a.token_tiles))
        constants = d.constants() + sum([d.squares_bytes(r, SQUARES_OF_LOW) for r in p.ranks])
        for program, held in zip(programs, self._held(d), strict=True):
            program.held = held + constants
        return programs

    def _held(self, d: Doubled) -> list[int]:
        """SBUF of activations in each stage with `double_row`."""
        p = self.problem
        query, key, value = [d.held(rank) for rank in p.ranks]
        query_made, key_made, value_made = [d.held(rank, p.itemsize) for rank in p.ranks]
        x = d.held(p.K)
        return [
            d.held_x(p.K, p.ranks[0]),
            x + query_made + query + key_made,
            x + query + key_made + key + value_made,
            query + key + value_made + value,
            key + value_made + value,
            value_made + value,
        ]

    def doubled_choices(self, token_block: int, width: int) -> Iterator[Qkv]:
        """Blocks of columns of all u, and of all v."""
        tiles, tokens = tiles_in(self.problem.K, PARTITIONS), min(DOUBLED_TOKENS, width)
        widest = max(self.problem.outputs)
        u_blocks = blocks_of(max(self.problem.ranks), 4)
        v_blocks = sorted({min(block, widest) for block in BLOCKS})
        for u_block, v_block, token_tiles in product(u_blocks, v_blocks, (1, 2)):
            blocks = (u_block, v_block, tokens, token_tiles, DOUBLED_BANKS)
            yield Qkv(token_block, tiles, *blocks)
