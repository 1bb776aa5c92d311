"""Steps of the prefill stages whose activations are rounded to fp8: `stages.double_row`.

Activations that are in SBUF are counted whole (`Doubled.held`), beside weights that stream past.
"""

from __future__ import annotations

from copy import copy

from neuronmm_ops.hardware import Engine
from neuronmm_ops.kernels.planner.instructions import (
    evict_ns,
    load_ns,
    load_transposed_ns,
    matmul_ns,
    result_ns,
)
from neuronmm_ops.kernels.planner.loads import Loads
from neuronmm_ops.kernels.planner.prefill import PrefillCosts
from neuronmm_ops.kernels.planner.timeline import Program, Step
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    DOUBLED_BANKS,
    DOUBLED_TOKENS,
    HIDDEN_TILES,
    PARTITIONS,
    SQUARES_OF_X,
    TAIL_TILES,
    natural_groups,
    sizes,
    tiles_in,
    units_in,
)

CROWDED = 5
"""Exponent of the norm of engines' busy times that a stage takes (fit: on random problems)."""


class Doubled:
    """Costs of rounded activations, and stages of their products.

    Args:
        costs: of the problem.
        width: tokens of a block.
    """

    def __init__(self, costs: PrefillCosts, width: int) -> None:
        self.costs, self.width = copy(costs), width
        self.costs.weight_item = 1  # whatever x has
        self.machine = costs.machine
        self.parts = sizes(width, DOUBLED_TOKENS)

    def matmuls(self, stationary: int, moving: int) -> tuple[float, int]:
        """Time and number of the matmuls of one unit of a contraction: in fp8 one pass."""
        rows, columns = sizes(stationary, PARTITIONS), sizes(moving, BANK_COLUMNS)
        times = [matmul_ns(self.machine, i, j) for i in rows for j in columns]
        return sum(times), len(times)

    def crowded(self, program: Program, vector: float, gpsimd: float, scalar: float) -> None:
        """Lengthen a stage by what its engines wait for each other, columns that each works on.

        Where one has much more to do than the others, they do not show.
        """
        engines = {Engine.VECTOR: vector, Engine.GPSIMD: gpsimd, Engine.SCALAR: scalar}
        tensor = sum([n * sum([s.work_ns for s in steps]) for steps, n in program.sections])
        busy = [tensor, *[self.machine.ns(engine, n) for engine, n in engines.items()]]
        longest = sum([ns**CROWDED for ns in busy]) ** (1 / CROWDED)
        program.again("crowded")
        program.add(Step(longest - tensor))

    def rounding_columns(self, size: int, *, assisted: bool = False) -> tuple[float, float]:
        """Columns that VectorE and GpSimdE work on to round activations of `size` features."""
        tiles, item = tiles_in(size, PARTITIONS), self.costs.item
        square = 0.25 if item == 2 else 1.0
        vector = tiles * (square + (0.5 if assisted else 1.0)) + 3 + assisted
        gpsimd = tiles * (1.0 + 2 * 0.5 * assisted)
        return vector * self.width, gpsimd * self.width

    # what rounding costs

    def rounding_instructions(self, size: int, *, assisted: bool = False) -> int:
        """Instructions that round activations of `size` features, of all parts."""
        # each tile is squared, added up by GpSimdE or TensorE, and rounded
        return len(self.parts) * (3 * tiles_in(size, PARTITIONS) + 3 + assisted)

    def inverse_instructions(self) -> int:
        """Of the factors that undo all scales, tokens on partitions."""
        return 2 * sum([tiles_in(part, PARTITIONS) for part in self.parts])

    def sums_ns(self, size: int, squares: int, tokens: int) -> float:
        """TensorE's time to add up squares."""
        groups = tiles_in(tiles_in(size, PARTITIONS), squares)
        return groups * self.matmuls(PARTITIONS, tokens)[0]

    def chain_ns(self, tokens: int) -> float:
        """From the sum of squares until the first unit is rounded."""
        vector = evict_ns(self.machine, Engine.VECTOR, tokens)
        waits = 3 * result_ns(self.machine, Engine.VECTOR)
        return result_ns(self.machine, Engine.TENSOR) + 4 * vector + waits

    def settled_ns(self, tokens: int, squares: int) -> float:
        """From the last matmul of a part until its squares are added up."""
        machine = self.machine
        engines = (Engine.TENSOR, Engine.SCALAR, Engine.VECTOR)
        waits = sum([result_ns(machine, engine) for engine in engines])
        adds = evict_ns(machine, Engine.GPSIMD, tokens) + result_ns(machine, Engine.GPSIMD)
        evicts = DOUBLED_BANKS * evict_ns(machine, Engine.SCALAR, tokens)
        return waits + evicts + min(2, squares - 1) * adds

    def held(self, size: int, item: int = 1) -> int:
        """SBUF of activations of `size` features, rounded or of so many bytes."""
        return tiles_in(size, PARTITIONS) * self.width * item

    def held_x(self, size: int, made: int) -> int:
        """SBUF where x is rounded, part by part, and `made` features are made of it."""
        item, tiles = self.costs.item, tiles_in(size, PARTITIONS)
        natural = (tiles * item + 4 * (item + 1)) * self.parts[0]
        before = tiles * (self.width - self.parts[0])
        result = self.held(made, item)
        later = before + natural + result if before else 0
        squares = self.squares_bytes(size, 1) // len(self.parts)  # as in a loop of the device
        return max(natural, later, self.held(size) + result) + squares

    def constants(self) -> int:
        """SBUF of the ones, and of what a part's scales and intermediates take at most."""
        bank = BANK_COLUMNS * 2
        intermediates = (DOUBLED_BANKS + 2) * BANK_COLUMNS * self.costs.item + 8 * bank
        return 2 * PARTITIONS + len(self.parts) * 6 * bank + intermediates

    def squares_bytes(self, size: int, squares: int) -> int:
        """SBUF of sums of squares."""
        tiles = tiles_in(tiles_in(size, PARTITIONS), squares)
        return tiles * 2 * sum(self.parts)

    # stages

    def work(self, K: int, group: Step, rows: int, columns: int) -> None:
        """Let a step multiply [K, rows] and [K, columns]."""
        ns, tiles = self.matmuls(rows, columns)
        count = units_in(K)
        group.work_ns = count * ns
        group.tiles, group.instructions = tiles, count * tiles
        group.first_ns, group.last_ns = ns / tiles, ns / tiles
        group.rows = tiles_in(rows, PARTITIONS)

    def _tail(self, step: Step, K: int, tail: int) -> None:
        count = units_in(K)
        each = step.work_ns / count
        step.first_ns = (count if count <= tail else 1) * each / step.tiles
        step.last_ns = min(tail, count) * each / step.tiles

    def _load(self, step: Step, loads: Loads, K: int = 0) -> None:
        step.load_ns += loads.ns
        step.head_ns += loads.head_ns
        step.fills += loads.fills
        step.frees += loads.passing
        step.needs += loads.fills - loads.passing + loads.window
        step.hbm_bytes += loads.hbm_bytes
        step.instructions += loads.instructions
        if loads.transfers:
            step.queues += ((loads.queue, loads.transfers),)
            step.tail_ns = step.work_ns / max(1, units_in(K))

    def weights(self, step: Step, K: int, columns: int, groups: int, queue: str) -> None:
        """Let a step load a block of weights, a unit a time; used by one group, each passes."""
        c, count = self.costs, units_in(K)
        found = c.weights(K, columns, groups, queue, 2 * TAIL_TILES)
        head = min(found.ns, 2 * found.head_ns)
        fewer = found._replace(head_ns=head, instructions=count, transfers=count)
        self._load(step, fewer, K)

    def take_x(self, K: int, tokens: int, *, first: bool, hidden: bool) -> Step:
        """x of a part arrives and is squared; the first part's is waited for."""
        item = self.costs.item
        ns = load_transposed_ns(self.machine, K * tokens, item)
        count = tiles_in(K, PARTITIONS)
        chain = self.chain_ns(tokens) + self.sums_ns(K, SQUARES_OF_X, tokens)
        step = Step(self.sums_ns(K, SQUARES_OF_X, tokens) + (0.0 if hidden else chain))
        step.load_ns, step.head_ns = ns, ns / count
        step.queues = (("x", count),)
        adds = 2 * evict_ns(self.machine, Engine.GPSIMD, tokens)
        step.tail_ns = (chain + adds) if first else step.work_ns
        step.hbm_bytes, step.instructions = K * tokens * item, 4 * count + 3
        return step

    def project(
        self, K: int, N: int, queue: str, block: int, *, x: bool = False, lag_ns: float = 0.0
    ) -> Program:
        """`project_rounded`: [K, N] of weights, x from HBM or made `lag_ns` before."""
        program, c = Program(), self.costs
        blocks = sizes(N, block)
        for b, columns in enumerate(blocks):
            if program.again((columns, b == 0, b + 1 == len(blocks))):
                continue
            rows = sizes(columns, DOUBLED_BANKS * PARTITIONS)
            groups = len(rows) * len(self.parts)
            for n, tokens in enumerate(self.parts):
                if b == 0 and x:
                    program.add(
                        self.take_x(K, tokens, first=n == 0, hidden=n > 0 and len(rows) > 1)
                    )
                elif b + n == 0 and lag_ns:
                    program.add(Step(lag_ns))
                for g, size in enumerate(rows):
                    step = Step(0.0)
                    self.work(K, step, size, tokens)
                    if n + g == 0:
                        self.weights(step, K, columns, groups, queue)
                    c.evict(step, tokens, "scalar")
                    if groups > 1 and n + 1 == len(self.parts) and g + 1 == len(rows):
                        step.frees += c.weight_bytes(K, columns)
                    program.add(step)
        program.sections[-1][0][-1].instructions += self.rounding_instructions(N)
        vector, gpsimd = self.rounding_columns(N)
        if x:
            of_x = self.rounding_columns(K)
            vector, gpsimd = vector + of_x[0], gpsimd + of_x[1]
        self.crowded(program, vector, gpsimd, tiles_in(N, PARTITIONS) * self.width)
        return program

    def write(
        self, K: int, N: int, queue: str, block: int, token_tiles: int,
        *, x: bool = False, lag_ns: float = 0.0,
    ) -> Program:  # fmt: skip
        """`write_rounded`: [K, N] of weights, x from HBM or made `lag_ns` before."""
        program, c = Program(), self.costs
        blocks = sizes(N, block)
        for b, columns in enumerate(blocks):
            if program.again((columns, b == 0, b + 1 == len(blocks))):
                continue
            scale = c.row_scale(columns, N, min(PARTITIONS, self.width))
            for n, tokens in enumerate(self.parts):
                if b == 0 and x:
                    program.add(self.take_x(K, tokens, first=n == 0, hidden=n > 0))
                elif b + n == 0 and lag_ns:
                    program.add(Step(lag_ns))
                groups = natural_groups(tokens, columns, token_tiles, DOUBLED_BANKS)
                for g, group in enumerate(groups):
                    step = Step(0.0)
                    self.work(K, step, group.rows.size, group.columns.size)
                    self._tail(step, K, TAIL_TILES)
                    if n + g == 0:
                        once = len(groups) * len(self.parts)
                        self.weights(step, K, columns, once, queue)
                        self._load(step, scale, K)
                    c.evict(step, group.columns.size, "vector")
                    step.instructions += step.tiles  # ScalarE undoes the tokens' scales
                    size = step.rows * columns * c.item
                    if group.columns.start == 0:
                        c.results(step, size)
                    if group.columns.start + group.columns.size == columns:
                        step.store_ns = c.rows_ns(group.rows.size, columns, c.item)
                        step.stores, step.stored = step.rows, size
                        step.hbm_bytes += group.rows.size * columns * c.item
                        step.instructions += step.rows
                    if n + 1 == len(self.parts) and g + 1 == len(groups):
                        step.frees += scale.fills
                        step.frees += c.weight_bytes(K, columns) * (g + n > 0)
                    program.add(step)
        program.sections[-1][0][-1].instructions += self.inverse_instructions()
        vector, gpsimd = self.rounding_columns(K) if x else (0.0, 0.0)
        out = tiles_in(self.width, PARTITIONS) * N
        self.crowded(program, vector + out, gpsimd, out)
        return program

    def gated(
        self, ranks: tuple[int, int], inner: int, block: int, spill: int, lag_ns: float
    ) -> Program:
        """`gated_rounded`, with stores of `spill` groups of tiles of each part."""
        program, c, machine = Program(), self.costs, self.machine
        blocks = sizes(inner, block)
        stored = 0
        for b, columns in enumerate(blocks):
            made = tiles_in(sum(blocks[: b + 1]), PARTITIONS) // HIDDEN_TILES
            stores, stored = min(spill, made) - stored, min(spill, made)
            if program.again((columns, b == 0, b + 1 == len(blocks), stores)):
                continue
            rows = sizes(columns, DOUBLED_BANKS * PARTITIONS)
            for n, tokens in enumerate(self.parts):
                if b + n == 0 and lag_ns:
                    program.add(Step(lag_ns))
                for g, size in enumerate(rows):
                    for side, rank in enumerate(ranks):
                        step = Step(0.0)
                        self.work(rank, step, size, tokens)
                        self._tail(step, rank, TAIL_TILES)
                        if n + g == 0:
                            once = len(rows) * len(self.parts)
                            self.weights(step, rank, columns, once, f"v{side}")
                        c.evict(step, tokens, "scalar" if side else "vector")
                        if not side:  # VectorE squares and rounds, too
                            step.vector_ns *= 1.5
                        step.instructions += step.tiles
                        if n + 1 == len(self.parts) and g + 1 == len(rows):
                            step.frees += c.weight_bytes(rank, columns) * (n + g > 0)
                        program.add(step)
                size = HIDDEN_TILES * tokens * c.item
                step = program.sections[-1][0][-1]
                step.store_ns += stores * load_ns(machine, PARTITIONS, size)
                step.stores = max(1, stores)
                step.hbm_bytes += stores * size * PARTITIONS
                step.instructions += stores
        last = program.sections[-1][0][-1]
        last.instructions += self.rounding_instructions(inner, assisted=True) + len(self.parts)
        vector, gpsimd = self.rounding_columns(inner, assisted=True)
        hidden = tiles_in(inner, PARTITIONS) * self.width
        self.crowded(program, vector + 2 * hidden, gpsimd, 2 * hidden)
        return program

    def reload(self, program: Program, spill: int) -> None:
        """Before a stage, what of the hidden block went through HBM comes back."""
        step = Step(0.0)
        for tokens in self.parts:
            size = HIDDEN_TILES * tokens * self.costs.item
            ns = spill * load_ns(self.machine, PARTITIONS, size)
            moved = spill * size * PARTITIONS
            self._load(step, Loads(ns, 0.0, 0.0, 0, 0, 0, moved, spill, spill, "h"))
        step.tail_ns = 0.0
        program.sections.insert(0, ([step], 1))

    def lag_ns(self, squares: int) -> float:
        """What products wait for activations made just before; parts hide each other's."""
        tokens = self.parts[-1]
        full = self.settled_ns(tokens, squares) + self.chain_ns(tokens)
        return full if len(self.parts) == 1 else self.chain_ns(tokens) / 2


def blocks_of(size: int, most: int) -> list[int]:
    """Columns of a weight that are loaded together: up to so many groups of PSUM tiles."""
    group = DOUBLED_BANKS * PARTITIONS
    whole = tiles_in(size, PARTITIONS) * PARTITIONS
    found = [groups * group for groups in (1, 2, 4) if groups <= most]
    return sorted({min(block, whole) for block in found})
