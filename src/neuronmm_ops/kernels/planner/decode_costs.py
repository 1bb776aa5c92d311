"""Stages of the decode kernels as steps of a timeline, and what they cost.

Times are modelled, in ns; SBUF is in bytes per partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from typing import Literal, NamedTuple

from neuronmm_ops.hardware import MIN_CYCLES, Engine
from neuronmm_ops.kernels.planner.instructions import (
    cast_ns,
    evict_ns,
    load_ns,
    matmul_ns,
    matmul_passes,
    result_ns,
    transpose_ns,
)
from neuronmm_ops.kernels.planner.problem import SCALE_BYTES, Problem
from neuronmm_ops.kernels.planner.timeline import RowLoads, Step
from neuronmm_ops.kernels.stages import tiling
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    PARTITIONS,
    SHUFFLED,
    Span,
    sizes,
    tiles_in,
)

Source = Literal["hbm", "stored", "sums", "transposed"]
"""Where the activations of K chunks are when a stage begins; `stored`: in HBM, by this kernel."""
IN_HBM = ("hbm", "stored")
BOTH, SCALAR, VECTOR = (Engine.VECTOR, Engine.SCALAR), (Engine.SCALAR,), (Engine.VECTOR,)


class Tile(NamedTuple):
    """Some K tiles: what TensorE does with them, their load or eviction, and their SBUF.

    `queue` loads them, by `loads` DMAs; `casts` are instructions, of which a K tile's take
    `cast_ns` until TensorE may use it.
    """

    k_tiles: int
    work_ns: float
    move_ns: float
    size: int
    queue: str = ""
    loads: int = 1
    casts: int = 0
    cast_ns: float = 0.0


class Chunk(NamedTuple):
    """A K chunk, and how many from it on are transposed together; 0: with one before."""

    size: int
    together: int = 1


class Sums:
    """Sums [M, columns] of some of the `of` columns of a weight.

    Attributes:
        row_bytes: of a row of the weight's columns; `adjoin`: the next row follows it in HBM.
        width: columns of a PE column group; `chunks`: of each group, as K chunks.
        banks: of PSUM.
        stacks: of column groups that are evicted and transposed together.
        parts: columns of each eviction, by `engines` in turns.
        matmuls: of a K tile; `ns`: their time.
        queue: loads the weight.
        rows: loads of the rows of scales that the sums are multiplied by; 0 where there are none.
        rows_ns: DMA time of the engine that loads most of them.
        more: instructions that the rows take beyond their loads.
        passes: of an engine over each part: evictions, or searches of the greatest.
    """

    def __init__(
        self,
        problem: Problem,
        columns: int,
        of: int,
        unit: int = PARTITIONS,
        step: int = 0,
        engines: tuple[Engine, ...] = BOTH,
        queue: str = "w",
        scaled: bool = False,
        last: bool = False,
        passes: int = 1,
    ) -> None:
        machine = problem.machine
        self.passes = passes
        self.queue = queue
        step = step or tiling.matmul_columns(problem.M, machine.generation)
        shared = machine.shared_ports and engines == BOTH
        self.engines = VECTOR if scaled else SCALAR if shared else engines
        tiles = tiling.SumTiling(columns, problem.M, machine.generation, unit, step)
        self.columns, self.adjoin = columns, columns == of
        self.row_bytes = columns * problem.weight_itemsize
        self.width, self.chunks = tiles.width, [Chunk(group.size) for group in tiles.groups]
        self.banks = tiles_in(tiles.width, BANK_COLUMNS)
        stacked, self.stacks = problem.stacks, len(tiles.groups)
        parts = tiles.stacked_evictions() if stacked and not last else tiles.evictions()
        self.parts = [part.size for part in parts]
        if stacked:
            stacks = tiles.stacks()
            self.stacks = len(stacks)
            together = [n for s in stacks for n in [s.count, *[0] * (s.count - 1)]]
            self.chunks = [
                c._replace(together=n) for c, n in zip(self.chunks, together, strict=True)
            ]
        self.halves = [half.size for half in tiles.halves(problem.weight_itemsize)]
        self.matmuls = len(tiles.matmuls(Span(0, columns)))
        passes = matmul_passes(problem.itemsize)
        self.ns = sum([matmul_ns(machine, problem.M, w, passes) for w in sizes(tiles.width, step)])
        if len(self.chunks) > 1:  # side by side, but issued one after the other
            self.ns = max(self.ns, self.matmuls * matmul_ns(machine, MIN_CYCLES, MIN_CYCLES))
        self.rows = self.rows_bytes = self.more = 0
        self.row_loads: RowLoads | None = None
        self.rows_ns = 0.0
        if scaled:
            self._load_rows(problem)

    def _load_rows(self, problem: Problem) -> None:
        """As `stages.decode.Sums.row`."""
        copies = tiles_in(problem.M, SHUFFLED)
        self.rows = len(self.chunks) * copies
        self.rows_bytes = self.columns * SCALE_BYTES * copies
        machine = problem.machine
        self.rows_ns = machine.dma_run_ns(self.width * SCALE_BYTES)
        cycles = max(MIN_CYCLES, self.width)
        clear_ns = machine.ns(Engine.GPSIMD, cycles) + result_ns(machine, Engine.GPSIMD)
        copy_ns = self.stacks * machine.ns(Engine.VECTOR, cycles) * (problem.M > 1)
        self.row_loads = RowLoads(f"{self.queue}s", self.rows, self.rows_ns, clear_ns, copy_ns)
        self.more = self.stacks * (problem.M > 1) + 1


class DecodeCosts:
    """What stages of a problem cost. Many stages of many candidates are the same."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.machine = problem, problem.machine
        self.M, self.itemsize = problem.M, problem.itemsize
        generation = self.machine.generation
        self.groups = tiling.column_groups(self.M, generation)
        self.most_columns = tiling.SUM_BANKS * BANK_COLUMNS * self.groups
        self.scaled, self.casts = bool(problem.weight_dtype), problem.casts
        self.sums_itemsize = 4 if self.scaled else self.itemsize  # of sums until they are scaled
        casting = (Engine.SCALAR, Engine.GPSIMD, Engine.VECTOR)
        self.cast_seen = max([result_ns(self.machine, engine) for engine in casting])
        self.stacks = problem.stacks
        self.lanes = tiling.lanes_of(self.M, generation) if self.stacks else self.M
        self.sums = cache(partial(Sums, problem))
        self.transposes = cache(self._transposes)
        self.weight_tiles = cache(self._weight_tiles)
        self.weight_tile = cache(self._weight_tile)
        self.steps = cache(self._steps)

    def own(self, size: int, core: int = 0) -> int:
        """A core's part of a dimension; as `stages.decode.own`."""
        return tiling.core_span(size, core, self.problem.lnc).size

    def itemsize_of(self, source: Source) -> int:
        """Bytes of an activation before it is transposed."""
        return self.itemsize if source == "hbm" else self.sums_itemsize

    def load_x(self, chunks: Sequence[Chunk], source: Source) -> float:
        """DMA time of tokens on the busiest engines: groups of partitions take chunks in turns."""
        own, itemsize = chunks[:: self.groups], self.itemsize_of(source)
        return sum([load_ns(self.machine, self.M, chunk.size * itemsize) for chunk in own])

    def bank_tiles(self, chunk: Chunk, source: Source) -> int:
        """Transposed tiles in a bank of PSUM."""
        fp32 = self.machine.generation == 2 or self.itemsize_of(source) == 4
        return tiling.transposes_in_bank(self.rows(chunk, source), 4 if fp32 else 2)

    def rows(self, chunk: Chunk, source: Source) -> int:
        """Partitions that a transpose takes: those of all column groups of a stack."""
        return chunk.together * self.lanes if self.scaled and source == "sums" else self.M

    def copier(self, source: Source) -> Engine:
        """What evicts transposes: sums are scaled then, which VectorE does."""
        scales = self.scaled and source != "hbm"
        on_scalar = self.machine.generation == 2 and not scales
        return Engine.SCALAR if on_scalar else Engine.VECTOR

    def _transposes(self, chunk: Chunk, source: Source) -> list[Tile]:
        """The transposes of a K chunk, and of its stack, those of a bank together."""
        found: list[Tile] = []
        if not chunk.together:
            return found
        tiles, rest = divmod(chunk.size, PARTITIONS)
        itemsize = self.itemsize_of(source)
        # VectorE copies 2 bytes twice as fast as 4
        rate = 1 if self.machine.generation == 2 or itemsize == 4 else 2
        for rows, count in ((PARTITIONS, tiles), (rest, int(rest > 0))):
            ns = transpose_ns(self.machine, self.rows(chunk, source), rows, itemsize)
            for n in sizes(count, self.bank_tiles(chunk, source)):
                columns = n * self.M * chunk.together // rate
                evict = evict_ns(self.machine, self.copier(source), columns)
                found.append(Tile(n, n * ns, evict, 0))
        return found

    def _scale_loads(self, chunks: Sequence[Chunk], source: Source) -> tuple[int, int]:
        """Instructions around transposes: loads of scales, and zeros beside the tokens; bytes."""
        if not self.stacks:
            return 0, 0
        heads = [chunk.size for chunk in chunks if chunk.together]
        parts = sum([(size >= PARTITIONS) + (size % PARTITIONS > 0) for size in heads])
        zeros, loads = parts * (self.lanes > self.M), parts * (source != "hbm")
        return zeros + loads, SCALE_BYTES * sum([c.size for c in chunks]) * (source != "hbm")

    def _weight_tiles(
        self,
        s: Sums,
        rows: int,
        tile_bytes: int,
        first: bool,
        last: bool,
        waited: bool,
        seen: int,
        every: int,
    ) -> list[Tile]:
        """The weight tiles of a K chunk after `seen` K tiles; as `stages.decode.Sums.add_chunk`."""
        tiles, rest = divmod(rows, PARTITIONS)
        ends = last and rest == 0
        first = first and not self.stacks
        generation = self.machine.generation
        least = tiling.waited_bytes(generation) if waited and self.scaled else 0
        spans = tiling.weight_tiles(tiles, s.row_bytes, tile_bytes, first, ends, least)
        parts = [(PARTITIONS, span.size) for span in spans] + [(rest, 1)] * (rest > 0)
        found: list[Tile] = []
        for n, (k, count) in enumerate(parts):
            by_dma = tiling.cast_by_dma(seen, count, every)
            seen += count
            cut = s.halves if last and n + 1 == len(parts) else [s.columns]
            found.extend([self.weight_tile(s, k, count, columns, by_dma) for columns in cut])
        return found

    def _weight_tile(self, s: Sums, rows: int, count: int, columns: int, by_dma: int) -> Tile:
        share = 1.0 if self.groups > 1 else columns / s.columns
        work, size = count * s.ns * share, count * columns * self.problem.weight_itemsize
        if not self.casts:
            load = self._load_ns(s, rows, count, columns, self.problem.weight_itemsize)
            return Tile(count, work, load, size, s.queue)
        by_engines = count - by_dma
        load = self._load_ns(s, rows, by_engines, columns, 1)
        load += self._load_ns(s, rows, by_dma, columns, self.itemsize)
        shares = tiling.cast_shares(columns, self.machine.generation)
        each = max(cast_ns(self.machine, [part.size for part in shares]))
        work = max(work, by_engines * each)
        size += count * columns * self.itemsize
        loads = (by_dma > 0) + (by_engines > 0)
        # what the DMA casts comes first
        first = max(0.0, each + self.cast_seen - by_dma * s.ns * share) if by_engines else 0.0
        return Tile(count, work, load, size, s.queue, loads, by_engines * len(shares), first)

    def _load_ns(self, s: Sums, rows: int, count: int, columns: int, itemsize: int) -> float:
        """DMA time of some K tiles of a weight, as wide in SBUF as it says."""
        if not count:
            return 0.0
        row, whole = columns * itemsize, columns == s.columns
        runs, run = (1, count * row) if s.adjoin and whole else (count, row)
        return load_ns(self.machine, rows, run, runs)

    def _steps(
        self,
        chunks: tuple[Chunk, ...],
        source: Source,
        sums: tuple[Sums, ...],
        tile_bytes: int,
        first: bool,
        last: bool,
        waited: bool,
        every: int,
    ) -> list[Step]:
        """K chunks times columns of weights, as `stages.decode.contract`, then the evictions.

        The `first` weight tile is small; so is the `last`, which is loaded in two halves. Traffic
        and instructions are in the first step.
        """
        tiles: list[Tile] = []
        seen = 0
        for n, chunk in enumerate(chunks):
            at, ends = len(tiles), n + 1 == len(chunks)
            edges = first and n == 0, last and ends, waited and ends
            for s in sums:
                tiles.extend(self.weight_tiles(s, chunk.size, tile_bytes, *edges, seen, every))
            if every:
                seen = (seen + tiles_in(chunk.size, PARTITIONS)) % every
            if n and not ends and source != "transposed":  # the next K chunk goes before this one
                loads = source in IN_HBM and (n + 1) % self.groups == 0
                tiles[at] = self._after(tiles[at], chunks[n + 1], source, loads)
        halves = len(sums[0].halves) if last else 1
        end = max(1, len(tiles) - halves) if last else len(tiles)
        parts = [tiles[:1], tiles[1:end], *[[tile] for tile in tiles[end:]]]
        steps = [_stream(part) for part in parts if part]
        for step in steps[1 if tiles[0].casts else 2 :]:
            step.cast_ns = 0.0  # casts are one tile ahead
        if self.casts:  # VectorE does not cast while it copies rows
            steps[-1].work_ns += sum([s.row_loads.after_ns for s in sums if s.row_loads])
        for step in steps[-halves:]:
            self._evict(step, sums, halves)
        k_tiles = sum([tiles_in(chunk.size, PARTITIONS) for chunk in chunks])
        rows = sum([chunk.size for chunk in chunks])
        instructions = sum([tile.loads + tile.casts for tile in tiles])
        instructions += sum([k_tiles * s.matmuls + len(s.parts) + s.rows + s.more for s in sums])
        hbm_bytes = sum([rows * s.row_bytes + s.rows_bytes for s in sums])
        steps[0].load_ns += sum([s.rows_ns for s in sums])
        steps[0].row_loads = sums[0].row_loads
        if source in IN_HBM:
            instructions += len(chunks)
            hbm_bytes += self.M * rows * self.itemsize_of(source)
        if source != "transposed":
            steps.insert(0, self._first_transposes(chunks[:2], source))
            bank_tiles = self.bank_tiles(chunks[0], source)
            self._wait(steps[1], steps[0], tiles[0].k_tiles, bank_tiles)
            banks = [bank for chunk in chunks for bank in self.transposes(chunk, source)]
            scales, scale_bytes = self._scale_loads(chunks, source)
            instructions += sum([bank.k_tiles + 1 for bank in banks]) + scales
            hbm_bytes += scale_bytes
        steps[0].instructions, steps[0].hbm_bytes = instructions, hbm_bytes
        return steps

    def _after(self, tile: Tile, chunk: Chunk, source: Source, loads: bool) -> Tile:
        """A weight tile, and before it the transposes of a K chunk, and its load."""
        work = sum([bank.work_ns for bank in self.transposes(chunk, source)])
        load = self.load_x([chunk], source) if loads else 0.0
        return tile._replace(work_ns=tile.work_ns + work, move_ns=tile.move_ns + load)

    def _first_transposes(self, chunks: tuple[Chunk, ...], source: Source) -> Step:
        """Transposes of the first two K chunks, bank after bank."""
        banks = [bank for chunk in chunks for bank in self.transposes(chunk, source)]
        step = Step(sum([bank.work_ns for bank in banks]), fresh=True)
        step.tiles = step.bank_tiles = len(banks)
        step.last_ns = step.work_ns / len(banks)
        step.waits_ns = step.tail_ns = banks[-1].work_ns
        step.waits = int(source != "hbm")
        evict = sum([bank.move_ns for bank in banks]) / len(banks)
        step.vector_ns, step.scalar_ns = [evict * (e is self.copier(source)) for e in BOTH]
        if source in IN_HBM:
            step.head_ns = self.load_x(chunks[:1], source)
            step.load_ns = self.load_x(chunks, source)
        return step

    def _wait(self, step: Step, transposes: Step, tiles: int, bank_tiles: int) -> None:
        """Let a step of some K tiles wait for the transposes of them."""
        later = transposes.tiles - tiles_in(tiles, bank_tiles)
        spacing = max(transposes.last_ns, transposes.scalar_ns, transposes.vector_ns)
        of_bank = (tiles - 1) % bank_tiles + 1
        step.waits, step.waits_ns = 1, step.work_ns * of_bank / tiles - later * spacing

    def _evict(self, step: Step, sums: tuple[Sums, ...], steps: int) -> None:
        """Let the sums be evicted after a step, those of one of several `steps`."""
        parts = [size for s in sums for size in s.parts]
        banks = sum([s.banks for s in sums])
        engines = sums[0].engines[: len(parts)]
        # two engines share a bank's column groups
        in_bank = 2 if len(engines) > 1 and len(parts) > banks else 1
        tiles = banks * in_bank
        step.bank_tiles, step.fresh = in_bank if steps == 1 else 1, True
        step.tiles = max(1, tiles // steps)
        step.first_ns = step.last_ns = sum([s.ns for s in sums]) / tiles
        evict = dict.fromkeys(BOTH, 0.0)
        for n, engine in enumerate(engines):
            each = [self._pass_ns(engine, size, sums[0].passes) for size in parts]
            evict[engine] = sum(each[n :: len(engines)]) / tiles_in(tiles - n, len(engines))
        step.vector_ns, step.scalar_ns = evict.values()

    def _pass_ns(self, engine: Engine, columns: int, passes: int) -> float:
        """Passes over a part of the sums, each after the one before, and what they found."""
        ns = passes * evict_ns(self.machine, engine, columns)
        return ns + (passes - 1) * result_ns(self.machine, engine)


def _stream(tiles: list[Tile]) -> Step:
    """Weight tiles one after the other as one step."""
    step = Step(0.0, head_ns=tiles[0].move_ns, cast_ns=tiles[0].cast_ns)
    for tile in reversed(tiles):
        # what is left to do when this tile has come, beyond the loads that follow it
        left = step.work_ns + tile.work_ns + tile.cast_ns
        step.tail_ns = max(step.tail_ns, left - step.load_ns)
        step.work_ns += tile.work_ns
        step.load_ns += tile.move_ns
        step.fills += tile.size
    step.frees = step.fills
    step.queues = tuple(Counter([t.queue for t in tiles for _ in range(t.loads)]).items())
    return step
