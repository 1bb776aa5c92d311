"""Plans of the prefill kernel `svd_mlp`: candidates with their modelled costs.

A strip is a row of steps, each the sums of one group of PSUM tiles over a whole contraction. The
loads of all steps form one stream, which runs ahead of TensorE as far as there is room in SBUF.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from neuronmm_ops.hardware import DMA_START_NS, Engine
from neuronmm_ops.kernels.planner.costs import EVICT_LATENCY_NS, Costs
from neuronmm_ops.kernels.planner.problem import Plan, Problem
from neuronmm_ops.kernels.stages.tiling import BANKS, COLUMNS, P, tiles_in

GROUP = 4
"""Tiles of the hidden strip that spill together, and of x that TensorE transposes together."""
STRIPS = (2048, 1024, 512)
SMALL_STRIPS = (384, 256, 128, 64, 32, 16)  # where no larger one fits
MARGIN = 4
"""Tiles of a stream that are in SBUF at least: the four last of a contraction."""
NAMES = (  # the kernel's compile-time arguments, in order
    *("token_block", "layout", "resident", "spill", "resident_spilled"),
    *("u_block", "v_block", "down_block", "out_block", "tokens", "token_tiles", "banks", "engines"),
)
AHEAD_BYTES = 8192
"""SBUF per partition that a hidden strip which spills leaves to loads ahead."""


@dataclass(frozen=True, slots=True)
class Step:
    """One group of PSUM tiles over a contraction; SBUF in bytes per partition.

    Attributes:
        work_ns: TensorE, or the evictions where they take longer.
        load_ns, store_ns: DMA.
        fills: SBUF that its loads take.
        frees: SBUF of loads, its own or of steps before, that have their last use here.
        tiles: of the contraction: its operands come one by one.
        room: SBUF that its stage leaves to the stream of loads.
        stage: which product it belongs to; each reads what the one before evicted.
    """

    work_ns: float
    load_ns: float
    store_ns: float
    fills: int
    frees: int
    tiles: int
    room: int
    stage: int


Costing = tuple[float, float, float, int]  # of a step: work, loads, stores in ns, bytes arriving
Arrival = tuple[float, float, int]  # of an operand: TensorE's and DMA's ns, bytes a partition


@dataclass(frozen=True)
class Stage:
    """Columns of weights loaded together; SBUF of those in use at once, and of all else."""

    block: int
    live_bytes: int
    base_bytes: int


class Strip:
    """A strip of `width` tokens of a problem; SBUF in bytes per partition.

    Attributes:
        tokens: in a group of PSUM tiles with transposed results; `group` tiles of those.
        rows: token tiles in a group of PSUM tiles of the output.
        banks: PSUM tiles in a group: TensorE's transposes want some too.
        sbuf: what there is, without the biases of gate and up.
        sides, acts, turning, hidden: intermediates of gate and up; activations of a group; token
            rows that TensorE transposes; hidden tiles that spill together.
    """

    def __init__(self, problem: Problem, width: int, tokens: int) -> None:
        machine, item = problem.machine, problem.itemsize
        self.problem, self.width, self.tokens = problem, width, tokens
        self.costs = Costs(machine, item)
        turns = self.costs.layout == "pe"
        self.rows = min(2, tiles_in(width, P))
        self.banks = self.costs.banks
        self.group = self.banks // tiles_in(tokens, COLUMNS)
        self.sbuf = machine.usable_sbuf_bytes - 8 * tiles_in(problem.inner, P)
        self.sides = self.bytes_of(problem.ranks[0]) + self.bytes_of(problem.ranks[1])
        self.acts = self.group * tokens * 4
        self.turning = turns * tiles_in(width, P) * GROUP * P * item
        self.hidden = self.bytes_of(GROUP * P)

    def bytes_of(self, size: int) -> int:
        """A strip [size, width]."""
        return tiles_in(size, P) * self.width * self.costs.item

    def groups(self, width: int, columns: int) -> list[tuple[int, int]]:
        """(tokens, results) of the groups of PSUM tiles that cover [columns, width]."""
        found: list[tuple[int, int]] = []
        for own in _parts(width, self.tokens):
            side = self.banks // tiles_in(own, COLUMNS) * P
            found.extend([(own, part) for part in _parts(columns, side)])
        return found

    def blocks(self, tiles: int, size: int, base: int) -> list[Stage]:
        """Blocks of weights, `tiles` of 128 by `size`, that fit beside `base`, least DMA first."""
        found: list[Stage] = []
        for block in _widths(tiles_in(size, P), self.group):
            once = len(self.groups(self.width, min(block, size))) == 1
            live = (min(tiles, MARGIN) if once else tiles) * min(block, size) * self.costs.item
            found.append(Stage(block, live, base))
        return self._fitting(found, size)

    def out_blocks(self) -> list[Stage]:
        """Blocks of v_down that fit, least DMA time first."""
        tiles, N = tiles_in(self.problem.ranks[2], P), self.problem.N
        found: list[Stage] = []
        for block in sorted({min(b, N) for b in (128, 512, 1024, 2048, N) if b <= 4096}):
            once = self.width <= self.rows * P and self.rows * tiles_in(block, COLUMNS) <= BANKS - 2
            row = block * self.costs.item
            base = self.bytes_of(tiles * P) + (2 * self.rows + 1) * row
            found.append(Stage(block, (min(tiles, MARGIN) if once else tiles) * row, base))
        return self._fitting(found, N)

    def _fitting(self, stages: list[Stage], size: int) -> list[Stage]:
        loads = [sum([self.costs.load(P, c) for c in _parts(size, s.block)]) for s in stages]
        order = sorted(zip(loads, stages, strict=True), key=lambda o: (o[0], o[1].live_bytes))
        return [s for _, s in order if s.base_bytes + s.live_bytes <= self.sbuf]


def _widths(tiles: int, group: int) -> list[int]:
    """Widths of blocks worth trying: whole groups, even shares, and long rows."""
    found = {group, 2 * group, 4, 8, 12, 16}
    found.update([tiles_in(tiles, shares) for shares in (1, 2, 3, 4)])
    return sorted({min(t, tiles) * P for t in found if min(t, tiles) <= 32})


def _parts(size: int, tile: int) -> list[int]:
    """Sizes of the tiles that cover `size`."""
    full, rest = divmod(size, tile)
    return [tile] * full + ([rest] if rest else [])


@dataclass(frozen=True)
class Form:
    """All that the kernel is told; stages of u_gate and u_up, v_gate and v_up, u_down, v_down."""

    strip: Strip
    keep: int
    spill: int
    keep_spilled: int
    stages: tuple[Stage, Stage, Stage, Stage]

    def steps(self, width: int) -> Iterator[Step]:
        """A strip of `width` tokens in order."""
        costs, problem = self.strip.costs, self.strip.problem
        tiles = tiles_in(problem.K, P)
        again = max(0, tiles - self.keep)
        turned, moved = costs.turned(width), costs.transposed(min(P, problem.K), width)
        first = (tiles * turned, tiles * moved, tiles * width * costs.item)
        later = (again * turned, again * moved, again * width * costs.item)
        gate, up, down = problem.ranks
        yield from self._project(width, 0, (problem.K, gate), first, later)
        yield from self._project(width, 0, (problem.K, up), later, later)
        yield from self._gated(width)
        row, size = costs.load(P, GROUP * width), GROUP * width * costs.item
        first = (0.0, self.spill * row, self.spill * size)
        again = self.spill - self.keep_spilled
        later = (0.0, again * row, again * size)
        yield from self._project(width, 2, (problem.inner, down), first, later)
        yield from self._write(width)

    def _block(
        self, stage: int, shape: tuple[int, int], load: float, passes: list[Costing]
    ) -> Iterator[Step]:
        """Steps with weights of `shape` tiles, columns: loaded for the first, used until the last.

        What arrives of an operand, its stage counts as held, or is used in that step only.
        """
        held = shape[0] * shape[1] * self.strip.costs.item
        room = self.strip.sbuf - self.stages[stage].base_bytes
        for n, (work, dma, store, arrives) in enumerate(passes):
            first, last = n == 0, n == len(passes) - 1
            fills, frees = held * first + arrives, held * last + arrives
            yield Step(work, dma + load * first, store, fills, frees, shape[0], room, stage)

    def _project(
        self, width: int, stage: int, shape: tuple[int, int], operand: Arrival, later: Arrival
    ) -> Iterator[Step]:
        """`strip.project`: what the operand takes first, and in later passes."""
        costs = self.strip.costs
        tiles = tiles_in(shape[0], P)
        for columns in _parts(shape[1], self.stages[stage].block):
            passes: list[Costing] = []
            for own, side in self.strip.groups(width, columns):
                work = tiles * costs.matmuls(side, own) + operand[0]
                work = self._paced(work, tiles, tiles_in(side, P) * tiles_in(own, COLUMNS), own)
                passes.append((work, operand[1], 0.0, operand[2]))
                operand = later
            load = tiles * costs.load(shape[0], columns)
            yield from self._block(stage, (tiles, columns), load, passes)

    def _paced(self, work: float, tiles: int, banks: int, columns: int) -> float:
        """TensorE's time, that of the evictions, or with waits for banks that are not spare."""
        evict = banks * self.strip.costs.evict(min(columns, COLUMNS))
        waits = max(0.0, evict - work / tiles * (2 * banks - 1) / banks)
        return max(work, evict) + (waits if 2 * banks > BANKS else 0.0)

    def _gated(self, width: int) -> Iterator[Step]:
        costs, problem = self.strip.costs, self.strip.problem
        ranks = problem.ranks[:2]
        tiles = tiles_in(ranks[0], P) + tiles_in(ranks[1], P)
        row = self.spill * costs.load(P, GROUP * width) / problem.inner
        for columns in _parts(problem.inner, self.stages[1].block):
            passes: list[Costing] = []
            for own, side in self.strip.groups(width, columns):
                banks, size = tiles_in(side, P) * tiles_in(own, COLUMNS), min(own, COLUMNS)
                scalar = costs.machine.ns(Engine.SCALAR, banks * max(64, size))
                vector = costs.machine.ns(Engine.VECTOR, banks * max(64, size))
                evict = scalar + vector if costs.engines == 1 else max(scalar, vector)
                passes.append((max(tiles * costs.matmuls(side, own), evict), 0.0, 0.0, 0))
            passes[-1] = (passes[-1][0], 0.0, columns * row, 0)
            load = sum([tiles_in(r, P) * costs.load(r, columns) for r in ranks])
            yield from self._block(1, (tiles, columns), load, passes)

    def _write(self, width: int) -> Iterator[Step]:
        """`strip.write_rows`."""
        costs, problem = self.strip.costs, self.strip.problem
        rank, tiles = problem.ranks[2], tiles_in(problem.ranks[2], P)
        for columns in _parts(problem.N, self.stages[3].block):
            passes: list[Costing] = []
            for own in _parts(width, self.strip.rows * P):
                banks = tiles_in(own, P) * tiles_in(columns, COLUMNS)
                work = self._paced(tiles * costs.matmuls(own, columns), tiles, banks, columns)
                passes.append((work, 0.0, tiles_in(own, P) * costs.load(own, columns), 0))
            load = tiles * costs.load(rank, columns)
            yield from self._block(3, (tiles, columns), load, passes)

    def tail_ns(self, width: int) -> float:
        """From the last matmul to the last byte: evictions of its group, then their store."""
        costs = self.strip.costs
        own = (width - 1) % (self.strip.rows * P) + 1
        columns = (self.strip.problem.N - 1) % self.stages[3].block + 1
        banks = tiles_in(own, P) * tiles_in(columns, COLUMNS)
        evict = banks * costs.evict(min(columns, COLUMNS)) + EVICT_LATENCY_NS
        return evict + DMA_START_NS + tiles_in(own, P) * costs.load(own, columns)

    def traffic(self, width: int) -> int:
        """HBM bytes of a strip of `width` tokens."""
        problem, passes = self.strip.problem, [0, 0, 0]
        for n, (size, s) in enumerate(zip(problem.ranks, (0, 0, 2), strict=True)):
            for columns in _parts(size, self.stages[s].block):
                passes[n] += len(self.strip.groups(width, columns))
        gate, up, down = passes
        rows = problem.K + (gate + up - 1) * max(0, problem.K - self.keep * P)
        rows += GROUP * P * (2 * self.spill + (down - 1) * (self.spill - self.keep_spilled))
        return problem.itemsize * (width * (rows + problem.N) + problem.weight_elements)


class _Clock:
    """TensorE, and the stream of loads ahead of it."""

    def __init__(self, evict_ns: float) -> None:
        self.pe, self.dma = 0.0, DMA_START_NS
        self.lag = evict_ns + EVICT_LATENCY_NS
        self.loaded = self.freed = self.room = self.at = self.stage = 0
        # (bytes freed before, from when, to when) of each step that freed some
        self.marks = [(0, 0.0, 0.0)]

    def when_freed(self, amount: int) -> float:
        """When so many bytes of the stream have been freed."""
        marks = self.marks
        while self.at + 1 < len(marks) and marks[self.at + 1][0] < amount:
            self.at += 1
        before, start, end = marks[self.at]
        after = marks[self.at + 1][0] if self.at + 1 < len(marks) else self.freed
        return start + (end - start) * min(1.0, max(0, amount - before) / max(1, after - before))

    def run(self, steps: list[Step]) -> float:
        """Let a strip pass; returns its end."""
        for s in steps:
            start, last = self.pe, s.work_ns / s.tiles
            done = start + s.work_ns
            if s.load_ns:
                room = max(s.room, self.room)
                begin = max(self.dma, self.when_freed(self.loaded + s.fills // s.tiles - room))
                self.loaded += s.fills
                self.dma = max(begin + s.load_ns, self.when_freed(self.loaded - room))
                start = max(start, begin + s.load_ns / s.tiles)
                done = max(start + s.work_ns, self.dma + last)
            if s.frees:
                self.marks.append((self.freed, start, done))
                self.freed += s.frees
            if s.stage > self.stage:
                done = max(done, self.pe + self.lag + last)
            self.pe, self.room, self.stage = done, s.room, s.stage
            self.dma += s.store_ns
        return self.pe


def candidates(problem: Problem) -> list[Plan]:
    """All plans that fit, quickest first."""
    tokens = problem.core_tokens[0]
    found: list[Plan] = []
    for strips in (STRIPS, SMALL_STRIPS):
        for width in sorted({min(s, tokens) for s in strips}):
            for group in sorted({min(width, COLUMNS), min(width, 2 * COLUMNS)}):
                found.extend([_plan(form) for form in _fitting(Strip(problem, width, group))])
        if found:
            break
    return sorted(found, key=lambda plan: (plan.time_ms, plan.hbm_bytes, plan.blocks))


def _fitting(strip: Strip) -> Iterator[Form]:
    """Forms of a strip whose hidden strip stays in SBUF, and where that costs, spills."""
    problem = strip.problem
    gate, up, down = problem.ranks
    tiles = tiles_in(gate, P) + tiles_in(up, P)
    inputs, out = _inputs(strip)[:2], strip.out_blocks()
    hidden = strip.bytes_of(problem.inner)
    gated = strip.blocks(tiles, problem.inner, strip.sides + strip.acts + hidden)
    back = strip.blocks(tiles_in(problem.inner, P), down, strip.bytes_of(down) + hidden)
    if back and out:
        for (keep, first), second in product(inputs, _chosen(gated)):
            yield Form(strip, keep, 0, 0, (first, second, back[0], out[0]))
    wanted = strip.blocks(tiles, problem.inner, 0)
    if out and wanted and not (gated and back and gated[0].block == wanted[0].block):
        for (keep, first), block in product(inputs, _chosen(wanted)):
            yield from _spilled(strip, keep, first, block, out[0])


def _chosen(stages: list[Stage]) -> list[Stage]:
    """The one with the least DMA time, the one that needs the least room, and one between."""
    spare = sorted(stages, key=lambda s: (s.live_bytes, -s.block))[:1]
    between = [s for s in stages if s.live_bytes <= 2 * spare[0].live_bytes][:1]
    return list(dict.fromkeys(stages[:1] + between + spare))


def _spilled(strip: Strip, keep: int, first: Stage, gated: Stage, out: Stage) -> Iterator[Form]:
    """Forms whose hidden strip spills as little as needed, and stays as far as it can after."""
    inner, size = strip.problem.inner, strip.hidden
    down = strip.bytes_of(strip.problem.ranks[2])
    least = int(inner % (GROUP * P) > 0)
    passing = tiles_in(gated.block, GROUP * P) + 1
    room = strip.sbuf - AHEAD_BYTES - strip.sides - strip.acts - gated.live_bytes
    fits = strip.blocks(tiles_in(inner, P), strip.problem.ranks[2], down + (least + 2) * size)
    if not fits:
        return
    both = (strip.sbuf - AHEAD_BYTES - down - fits[0].live_bytes) // size - 1
    held = max(least, min(room // size - passing, both))
    spill = tiles_in(inner, GROUP * P) - held
    most = min(spill, max(0, both - held))
    second = replace(gated, base_bytes=strip.sides + strip.acts + (held + passing) * size)
    for again in sorted({most, most * 5 // 8}):  # fewer leave room to fetch ahead
        third = Stage(fits[0].block, fits[0].live_bytes + size, down + (held + again) * size)
        if spill > 0 and max([s.live_bytes + s.base_bytes for s in (second, third)]) <= strip.sbuf:
            yield Form(strip, keep, spill, again, (first, second, third, out))


def _inputs(strip: Strip) -> list[tuple[int, Stage]]:
    """How many tiles of x^T stay, and the blocks of u_gate and u_up."""
    tiles, tile = tiles_in(strip.problem.K, P), strip.bytes_of(P)
    base = strip.sides + strip.turning
    found: list[tuple[int, Stage]] = []
    for stage in strip.blocks(tiles, max(strip.problem.ranks[:2]), base + 2 * tile):
        keep = min(tiles, (strip.sbuf - base - stage.live_bytes) // tile - 2)
        if keep < tiles and strip.turning:
            keep -= keep % GROUP  # tiles that are transposed together are loaded together
        live = stage.live_bytes + (2 * tile if keep < tiles else 0)
        found.append((keep, Stage(stage.block, live, base + keep * tile)))
    return found


def _plan(form: Form) -> Plan:
    problem, strip, costs = form.strip.problem, form.strip, form.strip.costs
    clock = _Clock(costs.machine.ns(Engine.VECTOR, max(64, min(COLUMNS, strip.width))))
    tokens = problem.core_tokens
    full, rest = divmod(tokens[0], strip.width)
    steps = list(form.steps(strip.width))
    ends = [0.0] + [clock.run(steps) for _ in range(min(full, 2))]
    time = max(0, full - 2) * (ends[-1] - ends[-2]) + form.tail_ns(rest or strip.width)
    time += clock.run(list(form.steps(rest)) if rest else [])
    widths = [s.block for s in form.stages]
    kept = (form.keep, form.spill, form.keep_spilled)
    groups = (strip.tokens, strip.rows, strip.banks, costs.engines)
    blocks = zip(NAMES, (strip.width, costs.layout, *kept, *widths, *groups), strict=True)
    transfers = sum([s.load_ns + s.store_ns for s in steps])
    bound = "PE" if sum([s.work_ns for s in steps]) >= transfers else "DMA"
    traffic = sum([t // strip.width for t in tokens]) * form.traffic(strip.width)
    traffic += sum([form.traffic(t % strip.width) for t in tokens if t % strip.width])
    sbuf = max([s.base_bytes + s.live_bytes for s in form.stages])
    sbuf += problem.machine.usable_sbuf_bytes - strip.sbuf
    ms, blocks = time / 1e6, tuple(blocks)
    return Plan(problem, "prefill", "svd_mlp", blocks, ms, traffic, sbuf, BANKS, bound)
