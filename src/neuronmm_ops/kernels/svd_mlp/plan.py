"""Plans of `svd_mlp` in both phases."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from typing import NamedTuple

from neuronmm_ops.kernels.planner import decode_search, prefill_search
from neuronmm_ops.kernels.planner.decode import Blocks, Stages
from neuronmm_ops.kernels.planner.decode_costs import SCALAR, VECTOR, Chunk, Source
from neuronmm_ops.kernels.planner.decode_search import even, rounded_up
from neuronmm_ops.kernels.planner.hidden import TOKENS, HiddenBlock, gated_steps
from neuronmm_ops.kernels.planner.prefill import (
    Moving,
    in_sbuf,
    project_steps,
    write_steps,
)
from neuronmm_ops.kernels.planner.prefill_search import Arguments
from neuronmm_ops.kernels.planner.problem import Plan, Problem
from neuronmm_ops.kernels.planner.timeline import Program, sbuf_peak
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    DOUBLED_BANKS,
    DOUBLED_TOKENS,
    PARTITIONS,
    SUM_BANKS,
    sizes,
    tiles_in,
)
from neuronmm_ops.kernels.svd_mlp.plan_doubled import doubled_blocks, doubled_stages

TOKEN_TILES = 2
"""Of a group of PSUM tiles of the output."""
TABLE_INSTRUCTIONS = 2
"""Of `load_table`."""
AHEAD_BYTES = 8192
"""SBUF per partition that a hidden block which spills leaves to loads ahead."""

# --- decode


def decode(problem: Problem) -> list[Plan]:
    """The best plans of the decode kernel that fit, the fastest first."""
    costs = decode_search.DecodeCosts(problem)
    gate, up, down = problem.ranks
    fuse = sum([costs.sums(r, r).banks for r in (gate, up)]) <= SUM_BANKS
    first: Blocks = {
        "rank_block": even(down if fuse else max(gate, up, down), costs.most_columns),
        "fuse_gate_up": fuse,
    }
    width = rounded_up(costs.own(problem.inner), PARTITIONS)
    bank = BANK_COLUMNS * costs.groups
    inners = sorted({min(count * bank, width) for count in range(1, SUM_BANKS + 1)})
    hidden: list[Blocks] = [
        {"inner_block": inner, "spill": spill} for inner in inners for spill in (True, False)
    ]
    return decode_search.best_plans(costs, decode_stages, {**first, **hidden[0]}, [hidden])


def decode_stages(s: Stages) -> None:
    """The stages of the decode kernel."""
    gate, up, down = s.problem.ranks
    s.instructions += TABLE_INSTRUCTIONS
    chunks = s.chunks(s.own(s.problem.K))
    natural = s.natural(gate) + s.natural(up)
    s.hold(natural + s.buffers(chunks))
    low = s.project(chunks, "hbm", (gate, up), bool(s.blocks["fuse_gate_up"]))
    s.hold(-s.buffers(chunks))
    transposed = s.transposed(low[0]) + s.transposed(low[1])
    s.hold(transposed)
    h_chunks, h_bytes = decode_hidden(s, low, ("sums", "sums"), bool(s.blocks["spill"]))
    s.hold(-(transposed + natural))
    source: Source = "sums"
    if s.blocks["spill"]:
        h_chunks, source = s.chunks(s.own(s.problem.inner)), "stored"
        s.timeline.reload(s.costs.load_x(h_chunks[:1], source))
    s.hold(s.buffers(h_chunks, source))
    (d_chunks,) = s.project(h_chunks, source, [down])
    s.hold(-(s.buffers(h_chunks, source) + h_bytes))
    s.hold(s.transposed(d_chunks) + s.natural(down))
    s.write(d_chunks, "sums", resident=True)


def decode_hidden(
    s: Stages, low: list[list[Chunk]], sources: tuple[Source, Source], spill: bool
) -> tuple[list[Chunk], int]:
    """act(gate) * up, block after block; its K chunks, and their SBUF where they stay there.

    Gate and up contract `low`, which are where `sources` say.
    """
    costs, h_bytes = s.costs, 0
    h_chunks: list[Chunk] = []
    for columns in sizes(s.own(s.problem.inner), int(s.blocks["inner_block"])):
        of = s.problem.inner
        gate = costs.sums(columns, of, engines=SCALAR, queue="v0", scaled=costs.scaled)
        up = costs.sums(columns, of, engines=VECTOR, queue="v1")
        acts, h = up.width * 4 + s.rows(gate), up.width * costs.sums_itemsize
        if costs.scaled:  # activations follow the scales
            s.instructions += len(gate.parts)
        s.hold(acts + h)
        s.run(low[0], sources[0], gate)
        s.run(low[1], sources[1], up)
        if spill:
            s.store(up, itemsize=costs.sums_itemsize)
            s.hold(-(acts + h))
        else:
            s.hold(-acts)
            h_bytes += h
        h_chunks.extend(up.chunks)
        sources = ("transposed", "transposed")
    return h_chunks, h_bytes


# --- prefill


class Mlp(NamedTuple):
    """Arguments of the prefill kernel."""

    token_block: int
    tokens: int
    resident: int
    spill: int
    resident_spilled: int
    u_block: int
    v_block: int
    down_block: int
    out_block: int
    token_tiles: int
    banks: int


class Prefill(prefill_search.Prefill):
    """The prefill kernel: five stages for each block of tokens."""

    names = Mlp._fields
    setup_instructions = TABLE_INSTRUCTIONS
    widths = (512, 1024)
    tie_to_traffic = False  # its plan of least traffic is the slowest to start

    def __init__(self, problem: Problem, layout: str) -> None:
        super().__init__(problem, layout)
        self.side_tiles = sum([tiles_in(r, PARTITIONS) for r in problem.ranks[:2]])
        self.hidden = HiddenBlock(self.costs)
        self.side, self.out = cache(self._side), cache(self._out)
        self.gated, self.down = cache(self._gated), cache(self._down)

    def stages(self, width: int, arguments: Arguments) -> list[Program]:
        """The kernel for a block of `width` tokens."""
        a = Mlp(*arguments)
        return [
            *self.sides(width, a.u_block, a.resident),
            self.gated(width, a.v_block, a.spill),
            self.down(width, a.down_block, a.spill, a.resident_spilled),
            self.out(width, a.out_block),
        ]

    def sides(self, width: int, u_block: int, resident: int) -> list[Program]:
        """The products of x with u_gate and u_up."""
        return [self.side(width, u_block, resident, n) for n in range(2)]

    def _side(self, width: int, u_block: int, resident: int, number: int) -> Program:
        """The first or the second product of x."""
        c, problem = self.costs, self.problem
        x = Moving(c.tokens(resident), stays=True)
        if number:
            first = x.loads(problem.K, width, False)
            x = Moving(x.loads, seen=True, frees=first.fills - first.passing)
        blocks = (f"u{number}", u_block, TOKENS, c.banks)
        return project_steps(c, width, problem.K, problem.ranks[number], x, *blocks)

    def _gated(self, width: int, v_block: int, spill: int) -> Program:
        """The hidden block."""
        gate, up, _ = self.problem.ranks
        sides = in_sbuf(self.side_tiles * width * self.costs.item, TOKENS)
        return gated_steps(self.hidden, width, (gate, up), [sides], v_block, spill)

    def _down(self, width: int, down_block: int, spill: int, resident_spilled: int) -> Program:
        """The product of the hidden block with u_down."""
        c, x = self.costs, self.hidden.moving(width, spill, resident_spilled)
        blocks = ("u2", down_block, TOKENS, c.banks)
        return project_steps(c, width, self.problem.inner, self.problem.ranks[2], x, *blocks)

    def _out(self, width: int, out_block: int) -> Program:
        """The product with v_down."""
        c, rank = self.costs, self.problem.ranks[2]
        x = in_sbuf(tiles_in(rank, PARTITIONS) * width * c.item, TOKENS)
        blocks = ("v2", out_block, TOKEN_TILES, c.banks)
        return write_steps(c, width, rank, self.problem.N, x, *blocks)

    # with rows of fp8 doubled

    def doubled(self, width: int, arguments: Arguments) -> list[Program]:
        """The kernel with `double_row`."""
        a = Mlp(*arguments)
        blocks = (a.u_block, a.v_block, a.down_block, a.out_block)
        return doubled_stages(self.costs, width, blocks, a.token_tiles, a.spill)

    def doubled_choices(self, token_block: int, width: int) -> Iterator[Mlp]:
        """Blocks of a few groups of PSUM tiles, and as little spilled as fits."""
        tiles = tiles_in(self.problem.K, PARTITIONS)
        for blocks, spill in doubled_blocks(self.costs, width, TOKEN_TILES, self.room):
            yield Mlp(
                *(token_block, DOUBLED_TOKENS, tiles, spill, 0),
                *(*blocks, TOKEN_TILES, DOUBLED_BANKS),
            )

    # what to try

    def choices(self, token_block: int, width: int) -> Iterator[Mlp]:
        """With as much in SBUF as fits, blocks of the least DMA time first, then narrow ones."""
        out_block = self._out_block(width)
        if not out_block:
            return
        # narrow blocks leave more SBUF to loads ahead
        blocks = dict.fromkeys([b for narrow in (False, True) for b in self._widths(width, narrow)])
        for u_block, resident, v_block, down_block, spill, again in blocks:
            yield Mlp(
                *(token_block, TOKENS, resident, spill, again),
                *(u_block, v_block, down_block, out_block, TOKEN_TILES, self.costs.banks),
            )

    def _widths(self, width: int, narrow: bool) -> Iterator[tuple[int, ...]]:
        """Blocks of the first four stages, and what stays in SBUF."""
        ordered = self._blocks(self.problem.inner, narrow)
        least = min(ordered)
        between = [block for block in ordered if block <= 2 * least][:1]
        v_blocks = dict.fromkeys([ordered[0], *between, least])
        for side, v_block in product(self._sides(width, narrow), v_blocks):
            for hidden in self._hidden(width, v_block, narrow):
                yield (*side, v_block, *hidden)

    def _out_block(self, width: int) -> int:
        """Columns of v_down of the least DMA time that fit; 0: none."""
        N = self.problem.N
        live = tiles_in(self.problem.ranks[2], PARTITIONS) * width * self.costs.item
        blocks = sorted({min(b, N) for b in (128, 512, 1024, 2048, N) if b <= 4096})
        fitting = [b for b in blocks if sbuf_peak([self.out(width, b)], live) <= self.room]
        return min(fitting, key=lambda block: self._load_ns(N, block), default=0)

    def _sides(self, width: int, narrow: bool) -> list[tuple[int, int]]:
        """Two widths of u_gate and u_up, and how much of x may stay in SBUF beside them."""
        found: list[tuple[int, int]] = []
        for block in self._blocks(max(self.problem.ranks[:2]), narrow):

            def programs(resident: int, block: int = block) -> list[Program]:
                return self.sides(width, block, resident)

            residents = self.residents(self.problem.K, width, programs)
            found.extend([(block, resident) for resident in residents[-1:]])
            if len(found) == 2:
                break
        return found

    def _hidden(self, width: int, v_block: int, narrow: bool) -> Iterator[tuple[int, int, int]]:
        """Columns of u_down, and how many groups of the hidden block spill and stay after."""
        spilled: list[tuple[int, int, int]] = []
        for block in self._blocks(self.problem.ranks[2], narrow):
            if max(self._peaks(width, v_block, block, 0)) <= self.room:
                yield block, 0, 0
                break
            spilled = spilled or list(self._spilled(width, v_block, block))
        yield from spilled

    def _spilled(self, width: int, v_block: int, block: int) -> Iterator[tuple[int, int, int]]:
        """As few groups of the hidden block spilled as fit, some of which stay after."""
        room = self.room - AHEAD_BYTES
        peaks = partial(self._peaks, width, v_block, block)
        for spill, again in self.hidden.spilled(width, room, peaks):
            yield block, spill, again

    def _peaks(self, width: int, v_block: int, down_block: int, spill: int) -> tuple[int, int]:
        """SBUF of `gated` and of `down`."""
        sides = self.side_tiles * width * self.costs.item
        gated = sbuf_peak([self.gated(width, v_block, spill)], sides)
        down = self.down(width, down_block, spill, 0)
        return gated, sbuf_peak([down], self.hidden.made(width, spill))

    def _blocks(self, size: int, narrow: bool) -> list[int]:
        """Widths of a block of `size` columns, least DMA time first or narrow ones first."""
        tiles, group = tiles_in(size, PARTITIONS), self.costs.banks
        widths = {group, 2 * group, 4, 8, 12, 16}
        widths.update([tiles_in(tiles, shares) for shares in (1, 2, 3, 4)])
        blocks = {min(w, tiles) * PARTITIONS for w in widths if min(w, tiles) <= 32}
        if narrow:
            return sorted(blocks)
        return sorted(blocks, key=lambda block: (self._load_ns(size, block), block))

    def _load_ns(self, size: int, block: int) -> float:
        """DMA time of a row tile of [128, size], a block at a time, each an interval at least."""
        times = [self.costs.weight_ns(PARTITIONS, columns) for columns in sizes(size, block)]
        return sum([max(ns, self.costs.machine.dma.interval_ns) for ns in times])
