"""Plans of `svd_mlp` in both phases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from neuronmm_ops.kernels.planner.instructions import load_ns
from neuronmm_ops.kernels.planner.prefill import (
    NOTHING,
    Blocks,
    Costs,
    Loads,
    Moving,
    in_sbuf,
    plan_of,
    project_steps,
    write_steps,
)
from neuronmm_ops.kernels.planner.problem import Plan, Problem
from neuronmm_ops.kernels.planner.search import fitting_residents
from neuronmm_ops.kernels.planner.timeline import Program, Step, sbuf_peak
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    HIDDEN_TILES,
    PARTITIONS,
    TAIL_TILES,
    sizes,
    tiles_in,
    transposed_groups,
)
from neuronmm_ops.kernels.svd_mlp import plan_decode

WIDTHS = (2048, 1024, 512)
"""Tokens of a block."""
SMALL_WIDTHS = (384, 256, 128, 64, 32, 16)
"""Where no larger one fits."""
ARGUMENTS = (
    *("tokens", "resident", "spill", "resident_spilled"),
    *("u_block", "v_block", "down_block", "out_block"),
)
"""Arguments of the kernel that the problem and `token_block` leave open, as `_Form` has them."""
STAGES = {
    "gate": ("resident", "u_block"),
    "up": ("resident", "u_block"),
    "gated": ("v_block", "spill"),
    "down": ("down_block", "spill", "resident_spilled"),
    "out": ("out_block",),
}
"""Methods of `_Form` in the kernel's order, and what each depends on."""
AHEAD_BYTES = 8192
"""SBUF per partition that a hidden block which spills leaves to loads ahead."""


def candidates(problem: Problem) -> list[Plan]:
    """All plans that fit."""
    found = plan_decode.candidates(problem)
    for widths in (WIDTHS, SMALL_WIDTHS):
        prefill = [plan for form in _forms(problem, widths) for plan in form.plans()]
        if prefill:
            return found + prefill
    return found


def plan_with(problem: Problem, blocks: Blocks) -> Plan | None:
    """The plan of these arguments of the prefill kernel; None where it does not fit."""
    numbers = [int(blocks[name]) for name in ("token_block", *ARGUMENTS)]
    return _Form(Costs(problem), *numbers).plan()


def _forms(problem: Problem, widths: tuple[int, ...]) -> Iterator[_Form]:
    costs, most = Costs(problem), problem.core_tokens[0]
    for width in sorted({min(w, most) for w in widths}):
        for tokens in sorted({min(width, BANK_COLUMNS), min(width, 2 * BANK_COLUMNS)}):
            yield _Form(costs, width, tokens)


@dataclass(frozen=True)
class _Form:
    """The kernel's arguments, and its stages for blocks of `width` tokens.

    Attributes:
        costs: of the problem.
        width: token_block.
        tokens: of a group of PSUM tiles with transposed results.
        resident, spill, resident_spilled, u_block, v_block, down_block, out_block: as the
            kernel's.
    """

    costs: Costs
    width: int
    tokens: int
    resident: int = 0
    spill: int = 0
    resident_spilled: int = 0
    u_block: int = 0
    v_block: int = 0
    down_block: int = 0
    out_block: int = 0

    @property
    def token_tiles(self) -> int:
        """Of a group of PSUM tiles of the output."""
        return min(2, tiles_in(self.width, PARTITIONS))

    def bytes_of(self, size: int, width: int) -> int:
        """SBUF per partition of [size, width]."""
        return tiles_in(size, PARTITIONS) * width * self.costs.item

    def stages(self, width: int) -> list[Program]:
        """A block of `width` tokens."""
        return [self.program(stage, width) for stage in STAGES]

    def program(self, stage: str, width: int) -> Program:
        """One of `STAGES`; forms with the same arguments for it share it."""
        chosen = [getattr(self, name) for name in STAGES[stage]]
        key = (stage, width, self.width, self.tokens, *chosen)
        programs = self.costs.programs
        if key not in programs:
            programs[key] = getattr(self, stage)(width)
        return programs[key]

    def gate(self, width: int) -> Program:
        """The product of x with u_gate."""
        c, problem = self.costs, self.costs.problem
        x = Moving(c.tokens(self.resident), stays=True)
        blocks = (self.u_block, self.tokens, c.banks)
        return project_steps(c, width, problem.K, problem.ranks[0], x, *blocks)

    def up(self, width: int) -> Program:
        """The product of x with u_up."""
        c, problem = self.costs, self.costs.problem
        loads = c.tokens(self.resident)
        first = loads(problem.K, width, False)
        x = Moving(loads, seen=True, frees=first.fills - first.passing)
        blocks = (self.u_block, self.tokens, c.banks)
        return project_steps(c, width, problem.K, problem.ranks[1], x, *blocks)

    def gated(self, width: int) -> Program:
        """`gated`: of each group of PSUM tiles a step of the gate, then one of up."""
        program, c, inner = Program(), self.costs, self.costs.problem.inner
        gate, up, _ = c.problem.ranks
        side = in_sbuf(self._side_tiles * width * c.item, self.tokens)
        blocks = sizes(inner, self.v_block)
        made = 0  # tiles of the hidden block
        for b, columns in enumerate(blocks):
            tiles = tiles_in(columns, PARTITIONS)
            slots = self._slots(made + tiles) - self._slots(made)
            stored = self._stored(made + tiles) - self._stored(made)
            key = (columns, b == 0, b + 1 == len(blocks), made % HIDDEN_TILES, slots, stored)
            if program.again(key):
                made += tiles
                continue
            groups = transposed_groups(columns, width, self.tokens, c.banks)
            many = len(groups) > 1
            for g, group in enumerate(groups):
                loads = [NOTHING, NOTHING]
                if g == 0:
                    loads = [c.weights(r, columns, len(groups), TAIL_TILES) for r in (gate, up)]
                step = c.step(gate, group, loads[:1], TAIL_TILES)
                c.evict(step, group.columns.size, "scalar")
                acts = step.rows * group.columns.size * 4
                c.results(step, acts)
                program.add(step)
                step = c.step(up, group, loads[1:], TAIL_TILES)
                c.evict(step, group.columns.size, "vector")
                if b + g == 0:  # a step of the gate lies between
                    side.wait(step, width, group.columns, tiles_in(up, PARTITIONS), 2)
                if group.columns.start == 0:
                    slots = self._slots(made + step.rows) - self._slots(made)
                    made += step.rows
                    c.results(step, slots * width * c.item)
                step.frees += acts
                if g + 1 == len(groups):
                    step.frees += many * self.costs.item * columns * self._side_tiles
                    self._store(step, stored, width)
                    if b + 1 == len(blocks):
                        step.frees += side.frees
                program.add(step)
        return program

    @property
    def _side_tiles(self) -> int:
        return sum([tiles_in(r, PARTITIONS) for r in self.costs.problem.ranks[:2]])

    def _slots(self, tiles: int) -> int:
        """Tiles of the groups of the hidden block that the first `tiles` are in."""
        count = tiles_in(self.costs.problem.inner, PARTITIONS)
        return min(count, tiles_in(tiles, HIDDEN_TILES) * HIDDEN_TILES)

    def _stored(self, tiles: int) -> int:
        """Groups that spill and are complete with the first `tiles`."""
        return min(self.spill, tiles // HIDDEN_TILES)

    def _store(self, step: Step, groups: int, width: int) -> None:
        """Store so many groups after a step."""
        size = self._group_bytes(width)
        step.store_ns = groups * load_ns(self.costs.machine, PARTITIONS, size)
        step.stored = groups * size
        step.hbm_bytes += groups * size * PARTITIONS
        step.instructions += groups

    def _group_bytes(self, width: int) -> int:
        return HIDDEN_TILES * width * self.costs.item

    def down(self, width: int) -> Program:
        """The product of the hidden block with u_down."""
        c, size = self.costs, self._group_bytes(width)
        row = load_ns(c.machine, PARTITIONS, size)

        def loads(rows: int, tokens: int, seen: bool) -> Loads:
            groups = self.spill - seen * self.resident_spilled
            passing = (self.spill - self.resident_spilled) * size
            moved = groups * size * PARTITIONS
            window = size * (passing > 0)
            return Loads(groups * row, row, 0.0, groups * size, passing, window, moved, groups)

        inner, rank = c.problem.inner, c.problem.ranks[2]
        made = self.bytes_of(inner, width) - self.spill * size
        x = Moving(loads if self.spill else _no_loads, frees=made, made_in=self.tokens)
        return project_steps(c, width, inner, rank, x, self.down_block, self.tokens, c.banks)

    def out(self, width: int) -> Program:
        """The product with v_down."""
        c, rank = self.costs, self.costs.problem.ranks[2]
        x = in_sbuf(self.bytes_of(rank, width), self.tokens)
        blocks = (self.out_block, self.token_tiles, c.banks)
        return write_steps(c, width, rank, c.problem.N, x, *blocks)

    # what to try

    def plans(self) -> Iterator[Plan]:
        """Plans whose hidden block stays in SBUF, and where that costs, spills."""
        problem = self.costs.problem
        rank = problem.ranks[2]
        fixed = self._with_output()
        sides = list(self._with_sides()) if fixed else []
        if not fixed or not sides:
            return
        wide = fixed._ordered("v_block", problem.inner)
        for (u_block, resident), form in product(sides, _spread(wide)):
            for found in form._with_hidden(rank):
                plan = replace(found, u_block=u_block, resident=resident).plan()
                if plan:
                    yield plan

    def _with_output(self) -> _Form | None:
        """With the columns of v_down of the least DMA time that fit."""
        N, room = self.costs.problem.N, self.costs.machine.usable_sbuf_bytes
        live = self.bytes_of(self.costs.problem.ranks[2], self.width)
        blocks = sorted({min(b, N) for b in (128, 512, 1024, 2048, N) if b <= 4096})
        forms = [replace(self, out_block=block) for block in blocks]
        fitting = [f for f in forms if sbuf_peak([f.program("out", self.width)], live) <= room]
        return min(fitting, key=lambda f: self._load_ns(N, f.out_block), default=None)

    def _with_sides(self) -> Iterator[tuple[int, int]]:
        """Columns of u_gate and u_up, and how much of x may stay in SBUF beside them."""
        c, K = self.costs, self.costs.problem.K
        left = 2
        for form in self._ordered("u_block", max(c.problem.ranks[:2])):

            def peak(resident: int, form: _Form = form) -> int:
                found = replace(form, resident=resident)
                return sbuf_peak([found.program(side, self.width) for side in ("gate", "up")])

            for resident in fitting_residents(c, K, self.width, peak)[-1:]:
                yield form.u_block, resident
                left -= 1
            if not left:
                return

    def _with_hidden(self, rank: int) -> Iterator[_Form]:
        """With the columns of u_down, the hidden block spilling as little as needed."""
        room = self.costs.machine.usable_sbuf_bytes
        spilled: list[_Form] = []
        for form in self._ordered("down_block", rank):
            if max(form._gated_peak(), form._down_peak()) <= room:
                yield form
                break
            spilled = spilled or list(form._spilled(room))
        yield from spilled

    def _spilled(self, room: int) -> Iterator[_Form]:
        """With as few groups of the hidden block spilled as fit, some of which stay after."""
        size, inner = self._group_bytes(self.width), self.costs.problem.inner
        spill = 0
        while spill <= inner // (HIDDEN_TILES * PARTITIONS):
            found = replace(self, spill=spill)
            over = max(found._gated_peak(), found._down_peak()) + AHEAD_BYTES - room
            if over <= 0 and spill:
                most = min(spill, (room - AHEAD_BYTES - found._down_peak()) // size)
                for again in sorted({most, most * 5 // 8}):  # fewer leave room for loads
                    yield replace(found, resident_spilled=again)
                return
            spill += max(1, tiles_in(over, size))

    def _gated_peak(self) -> int:
        return sbuf_peak(
            [self.program("gated", self.width)], self._side_tiles * self.width * self.costs.item
        )

    def _down_peak(self) -> int:
        made = self.bytes_of(self.costs.problem.inner, self.width)
        live = made - self.spill * self._group_bytes(self.width)
        return sbuf_peak([self.program("down", self.width)], live)

    def _ordered(self, name: str, size: int) -> list[_Form]:
        """With widths of a block of `size` columns, least DMA time first, then room."""
        tiles = tiles_in(size, PARTITIONS)
        group = self.costs.banks // tiles_in(self.tokens, BANK_COLUMNS)
        widths = {group, 2 * group, 4, 8, 12, 16}
        widths.update([tiles_in(tiles, shares) for shares in (1, 2, 3, 4)])
        blocks = sorted({min(w, tiles) * PARTITIONS for w in widths if min(w, tiles) <= 32})
        ordered = sorted(blocks, key=lambda block: (self._load_ns(size, block), block))
        return [replace(self, **{name: block}) for block in ordered]

    def _load_ns(self, size: int, block: int) -> float:
        """DMA time of a row tile of [128, size], a block at a time."""
        return sum([self.costs.rows_ns(PARTITIONS, columns) for columns in sizes(size, block)])

    def plan(self) -> Plan | None:
        """What it comes to; None where it does not fit."""
        c = self.costs
        blocks: Blocks = {
            "token_block": self.width,
            "layout": c.layout,
            **{name: getattr(self, name) for name in ARGUMENTS},
            "token_tiles": self.token_tiles,
            "banks": c.banks,
            "engines": c.engines,
        }
        width = min(self.width, c.problem.core_tokens[0])
        return plan_of(c.problem, blocks, self.stages, width)


def _no_loads(rows: int, tokens: int, seen: bool) -> Loads:
    return NOTHING


def _spread(forms: list[_Form]) -> list[_Form]:
    """The one with the least DMA time, the one with the narrowest block, and one between."""
    narrow = min(forms, key=lambda form: form.v_block)
    between = [form for form in forms if form.v_block <= 2 * narrow.v_block][:1]
    return list(dict.fromkeys([forms[0], *between, narrow]))
