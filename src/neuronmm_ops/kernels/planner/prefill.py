"""Steps of the prefill stages, in the groups and tiles of `stages.tiling` that the kernels run in.

Times in ns, SBUF in bytes per partition. All times are modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

from neuronmm_ops.hardware import Engine
from neuronmm_ops.kernels.planner import instructions
from neuronmm_ops.kernels.planner.instructions import evict_ns, load_ns, matmul_ns
from neuronmm_ops.kernels.planner.loads import NOTHING, Loads
from neuronmm_ops.kernels.planner.problem import SCALE_BYTES, Block, Problem
from neuronmm_ops.kernels.planner.timeline import Program, Section, Step
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    KEPT_COLUMNS,
    PARTITIONS,
    PSUM_BANKS,
    STAGED_TILES,
    TAIL_TILES,
    Group,
    Span,
    natural_groups,
    sizes,
    tiles_in,
    transposed_groups,
)

Blocks = dict[str, Block]


_transposed_groups = cache(transposed_groups)
_natural_groups = cache(natural_groups)


class Moving(NamedTuple):
    """The operand of `project_steps` that is no weight.

    Attributes:
        loads: what arrives for a group, of (rows of the contraction, tokens, seen before).
        split: each group of tokens has tiles of its own.
        seen: it has been in SBUF before.
        frees: SBUF that its last use frees, tiles that stay in SBUF not included.
        stays: it is used again after this stage.
        made_in: tokens of a group of the stage that made it; 0 if it comes from HBM.
    """

    loads: Callable[[int, int, bool], Loads]
    split: bool = False
    seen: bool = False
    frees: int = 0
    stays: bool = False
    made_in: int = 0

    def wait(self, step: Step, width: int, tokens: Span, count: int, back: int = 1) -> None:
        """Let a stage's first step wait for it, made `back` steps before; it reads `tokens`."""
        if self.made_in:
            step.waits = back
            if tokens.start + tokens.size > (width - 1) // self.made_in * self.made_in:
                step.waits_ns = step.work_ns / count


def layouts(problem: Problem) -> tuple[str, ...]:
    """How x may be transposed: by "dma", or by the "pe".

    A DMA transposes 4 bytes from NeuronCore-v3 on (arch, Trainium2).
    """
    dma = problem.itemsize == 2 or problem.machine.generation >= 3
    return ("dma", "pe") if dma else ("pe",)


class PrefillCosts:
    """What prefill costs for one problem, one of whose `layouts` transposes x."""

    def __init__(self, problem: Problem, layout: str) -> None:
        self.problem = problem
        self.machine = machine = problem.machine
        self.item = problem.itemsize
        # weights in SBUF: DMAs cast what TensorE cannot multiply with activations
        mixes = problem.weight_dtype == "float8_e4m3fn" and self.item == 2
        self.weight_item = 1 if mixes else self.item
        self.scaled = bool(problem.weight_dtype)
        self.passes = instructions.matmul_passes(self.item)
        # VectorE and ScalarE of gen2 exclude each other on PSUM
        self.engines = 1 if machine.shared_ports else 2
        self.layout = layout
        self.banks = PSUM_BANKS - 2 if layout == "pe" else PSUM_BANKS  # transposes take two
        self.programs: dict[object, Program] = {}
        self._matmuls: dict[tuple[int, int], tuple[float, int]] = {}

    def matmuls(self, stationary: int, moving: int) -> tuple[float, int]:
        """Time and number of the matmuls of one contraction tile."""
        key = (stationary, moving)
        if key not in self._matmuls:
            rows, columns = sizes(stationary, PARTITIONS), sizes(moving, BANK_COLUMNS)
            times = [matmul_ns(self.machine, i, j, self.passes) for i in rows for j in columns]
            self._matmuls[key] = sum(times), len(times)
        return self._matmuls[key]

    def rows_ns(self, rows: int, columns: int, item: int) -> float:
        """DMA time of [rows, columns] in tiles of 128 rows, of `item` bytes an element in SBUF."""
        full, rest = divmod(rows, PARTITIONS)
        time = full * load_ns(self.machine, PARTITIONS, columns * item)
        return time + (load_ns(self.machine, rest, columns * item) if rest else 0.0)

    def weight_ns(self, rows: int, columns: int) -> float:
        """DMA time of a block of weights."""
        return self.rows_ns(rows, columns, self.weight_item)

    def weight_bytes(self, rows: int, columns: int) -> int:
        """SBUF of a block of weights."""
        return tiles_in(rows, PARTITIONS) * columns * self.weight_item

    def kept(self, rows: int) -> Loads:
        """The scales that stay in SBUF, those of outputs on so many partitions."""
        if not self.scaled:
            return NOTHING
        made = [n for _, n in self.problem.made]
        kept = [n for n in self.problem.outputs if n <= KEPT_COLUMNS]
        fills = SCALE_BYTES * (sum([tiles_in(n, PARTITIONS) for n in made]) + sum(kept))
        moved = SCALE_BYTES * (sum(made) + sum(kept) * rows)
        number = sum([(n >= PARTITIONS) + (n % PARTITIONS > 0) for n in made]) + len(kept)
        return Loads(fills=fills, hbm_bytes=moved, instructions=number)

    def row_scale(self, columns: int, N: int, rows: int) -> Loads:
        """The scales of a block of an output of N columns, where they do not stay in SBUF."""
        if not self.scaled or N <= KEPT_COLUMNS:
            return NOTHING
        size = SCALE_BYTES * columns
        ns = load_ns(self.machine, rows, size)
        return Loads(ns, 0.0, 0.0, size, 0, 0, size * rows, 1, 1, "scale")

    def weights(self, rows: int, columns: int, groups: int, queue: str, tail: int = 1) -> Loads:
        """A block of weights that `groups` groups use; of one group, each tile passes."""
        count, row = tiles_in(rows, PARTITIONS), columns * self.weight_item
        ns = self.weight_ns(rows, columns)
        passing = count * row if groups == 1 else 0
        window = min(tail, count) * row if groups == 1 else 0
        head = min(ns, load_ns(self.machine, min(PARTITIONS, rows), row))
        fills, moved = count * row, rows * columns * self.problem.weight_itemsize
        return Loads(ns, head, 0.0, fills, passing, window, moved, count, count, queue)

    def tokens(self, resident: int, queue: str = "x") -> Callable[[int, int, bool], Loads]:
        """x^T from HBM, of which `resident` tiles stay in SBUF."""

        def loads(rows: int, tokens: int, seen: bool) -> Loads:
            first = resident if seen else 0
            count, size = tiles_in(rows, PARTITIONS), tokens * self.item
            if first >= count:
                return NOTHING
            stays = min(count, resident) - first if resident > first else 0
            passing, window = (count - first - stays) * size, size * (stays + first < count)
            fills = (count - first) * size
            if self.layout == "pe":
                window += size * (count - first - stays > 1)  # a tile ahead
                found = Loads(0, 0, 0, fills, passing, window, queue=queue)
                return self._staged(rows, tokens, first, found)
            moved = (rows - first * PARTITIONS) * size
            ns = instructions.load_transposed_ns(self.machine, moved // self.item, self.item)
            head = ns * min(1.0, PARTITIONS * size / moved)
            loaded = count - first
            return Loads(ns, head, 0.0, fills, passing, window, moved, loaded, loaded, queue)

        return loads

    def _staged(self, rows: int, tokens: int, first: int, found: Loads) -> Loads:
        """Tiles from `first` on, which TensorE transposes; the last staged rows are there still."""
        machine, item = self.machine, self.item
        parts, count = sizes(tokens, PARTITIONS), tiles_in(rows, PARTITIONS)
        chunks = sizes(rows, STAGED_TILES * PARTITIONS)[first // STAGED_TILES :]
        again = first > 0 or found.fills == 0
        if again and len(chunks) == 1:
            chunks = []
        times = [sum([load_ns(machine, t, c * item) for t in parts]) for c in chunks]
        each = sum([instructions.transpose_ns(machine, t, PARTITIONS, item) for t in parts])
        last = sizes(tokens, BANK_COLUMNS)[-1]
        wait = evict_ns(machine, Engine.SCALAR, last)
        wait += sum([instructions.result_ns(machine, e) for e in (Engine.TENSOR, Engine.SCALAR)])
        transfers = len(parts) * len(chunks)
        number = transfers + (count - first) * (len(parts) + tiles_in(tokens, BANK_COLUMNS))
        staging = len(parts) * max([min(c, STAGED_TILES * PARTITIONS) for c in chunks], default=0)
        staging *= item
        stays = staging if found.passing and not again else 0  # some are transposed again
        return Loads(
            sum(times),
            times[0] if times else 0.0,
            (count - first) * each,
            found.fills + staging * len(chunks),
            found.passing + staging * len(chunks) - stays,
            found.window + staging,
            sum(chunks) * tokens * item,
            number,
            transfers,
            found.queue,
            (count - 1) % STAGED_TILES + 1 if chunks else 1,
            wait,
            count - first,
        )

    def step(self, rows: int, group: Group, loads: Iterable[Loads], tail: int = 1) -> Step:
        """A group of PSUM tiles over `rows` of a contraction, not evicted yet."""
        work, tiles = self.matmuls(group.rows.size, group.columns.size)
        count = tiles_in(rows, PARTITIONS)
        found = Step(count * work, tiles=tiles, instructions=count * tiles)
        found.first_ns = (count if count <= tail else 1) * work / tiles
        found.rows = tiles_in(group.rows.size, PARTITIONS)
        found.last_ns = min(tail, count) * work / tiles
        last, after, interval = 1, 0.0, self.machine.dma.interval_ns
        for load in loads:
            found.work_ns += load.work_ns + load.exposed_ns(work)
            found.load_ns += load.ns
            found.head_ns += load.head_ns
            found.fills += load.fills
            found.frees += load.passing
            found.needs += load.fills - load.passing + load.window
            found.hbm_bytes += load.hbm_bytes
            found.instructions += load.instructions
            last = max(last, load.last)
            after += max(load.ns, load.transfers * interval) / count if load.last == 1 else 0.0
            if load.transfers:
                found.queues += ((load.queue, load.transfers),)
        if found.load_ns:
            left = min(count, tail) * work - (min(count, tail) - 1) * work / tiles
            left += found.work_ns / count - work
            # tiles that came together were there while those after them came one by one
            found.tail_ns = max(left, left + (last - 1) * found.work_ns / count - last * after)
        return found

    def evict(self, step: Step, columns: int, engines: str, times: int = 1) -> None:
        """Evict a step's tiles on "scalar", "vector", or "shared" by both where they may share.

        One engine takes `times` as long as for a copy.
        """
        width = min(columns, BANK_COLUMNS)
        if columns > BANK_COLUMNS:  # the mean, where the last tile is cut
            width = columns / tiles_in(columns, BANK_COLUMNS)
        step.instructions += step.tiles
        if engines == "vector" or (engines == "shared" and self.engines == 2):
            step.vector_ns = times * evict_ns(self.machine, Engine.VECTOR, width)
        if engines != "vector":
            step.scalar_ns = times * evict_ns(self.machine, Engine.SCALAR, width)

    def results(self, step: Step, size: int) -> None:
        """SBUF that a step's evictions fill."""
        step.fills += size
        step.needs += size


def project_steps(
    c: PrefillCosts,
    width: int,
    K: int,
    N: int,
    x: Moving,
    queue: str,
    block: int,
    tokens: int,
    banks: int,
    k_block: int = 0,
    bf16_partial_sums: bool = False,
) -> Program:
    """`stages.prefill.project`, of a block of `width` tokens; `queue` loads the weights."""
    program = Program()
    passes, blocks = sizes(K, k_block or K), sizes(N, block)
    partial = width * (c.item if bf16_partial_sums else 4)
    middle: list[Section] = []
    for n, rows in enumerate(passes):
        last = n + 1 == len(passes)
        if n > 1 and not last:  # as the pass before
            program.sections.extend(middle)
            continue
        start = len(program.sections)
        made = width * c.item if last else partial
        makes = n == 0 or (last and not bf16_partial_sums)
        held, seen = 0, [x.seen] * tiles_in(width, tokens if x.split else width)
        for b, columns in enumerate(blocks):
            ends = b + 1 == len(blocks)
            if program.again((n, columns, b == 0, ends)):
                continue
            groups = _transposed_groups(columns, width, tokens, banks)
            for g, group in enumerate(groups):
                at = group.columns.start // tokens if x.split else 0
                arriving = x.loads(rows, group.columns.size if x.split else width, seen[at])
                held += arriving.fills - arriving.passing
                seen[at] = True
                fresh = c.weights(rows, columns, len(groups), queue) if g == 0 else NOTHING
                step = c.step(rows, group, (fresh, arriving))
                times = 2 if n and c.scaled else 1  # of a scaled sum and one before
                c.evict(step, group.columns.size, "vector" if n else "shared", times)
                if n + b + g == 0:
                    x.wait(step, width, group.columns, tiles_in(rows, PARTITIONS))
                if makes and group.columns.start == 0:
                    c.results(step, step.rows * made)
                if makes and n > 0 and group.columns.start + group.columns.size == width:
                    step.frees += step.rows * partial
                if g + 1 == len(groups):
                    step.frees += c.weight_bytes(rows, columns) * (len(groups) > 1)
                    if ends and not x.stays:
                        step.frees += held + x.frees * last
                program.add(step)
        middle = program.sections[start:]
    return program


def write_steps(
    c: PrefillCosts,
    width: int,
    K: int,
    N: int,
    x: Moving,
    queue: str,
    block: int,
    token_tiles: int,
    banks: int,
) -> Program:
    """`stages.prefill.write_rows`, of a block of `width` tokens; `queue` loads the weights."""
    program = Program()
    count, blocks = tiles_in(K, PARTITIONS), sizes(N, block)
    seen, held = x.seen, 0
    tail = TAIL_TILES if c.scaled else 1
    for b, columns in enumerate(blocks):
        ends = b + 1 == len(blocks)
        if program.again((0, columns, b == 0, ends)):
            continue
        kept = 0
        groups = _natural_groups(width, columns, token_tiles, banks)
        for g, group in enumerate(groups):
            arriving = x.loads(K, width, seen)
            held += arriving.fills - arriving.passing
            seen = True
            fresh = c.weights(K, columns, len(groups), queue, tail) if g == 0 else NOTHING
            scale = c.row_scale(columns, N, min(PARTITIONS, width)) if g == 0 else NOTHING
            kept += scale.fills
            step = c.step(K, group, (arriving, fresh, scale), tail)
            c.evict(step, group.columns.size, "vector" if c.scaled else "shared")
            if b + g == 0:
                x.wait(step, width, group.rows, count)
            size = step.rows * columns * c.item
            if group.columns.start == 0:
                c.results(step, size)
            if group.columns.start + group.columns.size == columns:
                step.store_ns = c.rows_ns(group.rows.size, columns, c.item)
                step.stores = step.rows
                step.stored = size
                step.hbm_bytes += group.rows.size * columns * c.item
                step.instructions += step.rows
            if g + 1 == len(groups):
                step.frees += c.weight_bytes(K, columns) * (len(groups) > 1) + kept
                step.frees += (held + x.frees) * ends
            program.add(step)
    return program


def in_sbuf(size: int, made_in: int) -> Moving:
    """An operand of `size` bytes a partition that a stage has made."""
    return Moving(lambda rows, tokens, seen: NOTHING, seen=True, frees=size, made_in=made_in)
