"""Steps of the hidden block of a gated MLP, in prefill: `stages.hidden` and what fills it.

Times in ns, SBUF in bytes per partition. All times are modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from neuronmm_ops.kernels.planner.instructions import load_ns
from neuronmm_ops.kernels.planner.loads import NOTHING, Loads
from neuronmm_ops.kernels.planner.prefill import Moving, PrefillCosts
from neuronmm_ops.kernels.planner.timeline import Program, Step
from neuronmm_ops.kernels.stages.tiling import (
    HIDDEN_TILES,
    PARTITIONS,
    TAIL_TILES,
    sizes,
    tiles_in,
    transposed_groups,
)

TOKENS = 1024
"""Of a group of PSUM tiles with transposed results."""


class HiddenBlock:
    """The hidden block of one problem: how much of it is where, and what that costs."""

    def __init__(self, costs: PrefillCosts) -> None:
        self.costs = costs
        self.tiles = tiles_in(costs.problem.inner, PARTITIONS)

    def slots(self, tiles: int) -> int:
        """Tiles of the groups of the hidden block that the first `tiles` are in."""
        return min(self.tiles, tiles_in(tiles, HIDDEN_TILES) * HIDDEN_TILES)

    def store(self, step: Step, groups: int, width: int) -> None:
        """Store so many groups after a step."""
        size = self.group_bytes(width)
        machine = self.costs.machine
        step.store_ns = groups * load_ns(machine, PARTITIONS, size)
        step.stores = max(1, groups)
        step.stored = groups * size
        step.hbm_bytes += groups * size * PARTITIONS
        step.instructions += groups

    def group_bytes(self, width: int) -> int:
        """SBUF of a group of tiles."""
        return HIDDEN_TILES * width * self.costs.item

    def made(self, width: int, spill: int) -> int:
        """SBUF of the hidden block without what spills."""
        return self.tiles * width * self.costs.item - spill * self.group_bytes(width)

    def moving(self, width: int, spill: int, resident_spilled: int) -> Moving:
        """The hidden block as an operand, `resident_spilled` of the spilled groups kept."""
        size = self.group_bytes(width)
        row = load_ns(self.costs.machine, PARTITIONS, size)

        def loads(rows: int, tokens: int, seen: bool) -> Loads:
            groups = spill - seen * resident_spilled
            passing = (spill - resident_spilled) * size
            window, moved = size * (passing > 0), groups * size * PARTITIONS
            head = row * (spill > 0)
            ns, fills = groups * row, groups * size
            return Loads(ns, head, 0.0, fills, passing, window, moved, groups, groups, "h")

        return Moving(loads, frees=self.made(width, spill), made_in=TOKENS)

    def spilled(
        self, width: int, room: int, peaks: Callable[[int], tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """As few groups spilled as fit `room`, and how many of them stay after.

        `peaks` are SBUF of the stages that make and that take the block, of so many spilled.
        """
        size, spill = self.group_bytes(width), 0
        while spill <= self.costs.problem.inner // (HIDDEN_TILES * PARTITIONS):
            gated, down = peaks(spill)
            over = max(gated, down) - room
            if over <= 0 and spill:
                most = min(spill, (room - down) // size)
                for again in sorted({most, most * 5 // 8}):  # fewer leave room for loads
                    yield spill, again
                return
            spill += max(1, tiles_in(over, size))


def gated_steps(
    hidden: HiddenBlock, width: int, rows: tuple[int, int], xs: list[Moving], block: int, spill: int
) -> Program:
    """`gated`: of each group of PSUM tiles a step of the gate, then one of up.

    Args:
        hidden: what is filled.
        width: tokens of the block.
        rows: of the contractions of gate and of up.
        xs: what both multiply, or the products before them; or what gate does, then up.
        block: columns of both weights that are loaded together.
        spill: groups of the hidden block that go through HBM.
    """
    program, c = Program(), hidden.costs
    most = max([tiles_in(size, PARTITIONS) for size in rows])
    weight_tiles = sum([tiles_in(size, PARTITIONS) for size in rows])
    made, held, seen = 0, 0, [x.seen for x in xs]  # tiles of the hidden block, SBUF of x
    blocks = sizes(c.problem.inner, block)
    for b, columns in enumerate(blocks):
        first, last = b == 0, b + 1 == len(blocks)
        before, made = made, made + tiles_in(columns, PARTITIONS)
        slots = hidden.slots(made) - hidden.slots(before)
        stored = min(spill, made // HIDDEN_TILES) - min(spill, before // HIDDEN_TILES)
        if program.again((columns, first, last, before % HIDDEN_TILES, slots, stored)):
            continue
        groups = transposed_groups(columns, width, TOKENS, c.banks)
        for g, group in enumerate(groups):
            fresh = [NOTHING, NOTHING]
            if g == 0:
                fresh = [
                    c.weights(r, columns, len(groups), f"v{n}", TAIL_TILES)
                    for n, r in enumerate(rows)
                ]
            arriving = xs[0].loads(rows[0], width, seen[0])
            held, seen[0] = held + arriving.fills - arriving.passing, True
            step = c.step(rows[0], group, (arriving, fresh[0]), TAIL_TILES)
            c.evict(step, group.columns.size, "scalar")
            step.instructions += c.scaled * step.tiles  # which scale, and wait for nobody
            acts = step.rows * group.columns.size * 4
            c.results(step, acts)
            program.add(step)
            arriving = xs[-1].loads(rows[1], width, seen[-1])
            held, seen[-1] = held + arriving.fills - arriving.passing, True
            step = c.step(rows[1], group, (arriving, fresh[1]), TAIL_TILES)
            c.evict(step, group.columns.size, "vector")
            if first and g == 0:  # a step of the gate lies between
                xs[0].wait(step, width, group.columns, most, 2)
            if group.columns.start == 0:
                slots = hidden.slots(before + step.rows) - hidden.slots(before)
                before += step.rows
                c.results(step, slots * width * c.item)
            step.frees += acts
            if g + 1 == len(groups):
                step.frees += (len(groups) > 1) * c.weight_item * columns * weight_tiles
                step.frees += (held + sum([x.frees for x in xs])) * last
                hidden.store(step, stored, width)
            program.add(step)
    return program
