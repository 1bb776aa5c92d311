"""Stages of the decode kernels as steps on a timeline.

`DecodeCosts` turns a stage into steps, `Stages` runs them in the order of the kernel. Times are
modelled, in ns; SBUF is in bytes per partition.
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
from neuronmm_ops.kernels.planner.problem import SCALE_BYTES, Block, Problem
from neuronmm_ops.kernels.planner.timeline import RowLoads, Step, Timeline
from neuronmm_ops.kernels.stages import tiling
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    OUTPUT_UNIT,
    PARTITIONS,
    SHUFFLED,
    Span,
    sizes,
    tiles_in,
)

Blocks = dict[str, Block]
Source = Literal["hbm", "stored", "sums", "transposed"]
"""Where the activations of K chunks are when a stage begins; `stored`: in HBM, by this kernel."""
IN_HBM = ("hbm", "stored")
BOTH, SCALAR, VECTOR = (Engine.VECTOR, Engine.SCALAR), (Engine.SCALAR,), (Engine.VECTOR,)


class Tile(NamedTuple):
    """Some K tiles: what TensorE does with them, their load or eviction, and their SBUF.

    `queue` loads them; `casts` are instructions, of which a K tile's take
    `cast_ns` until TensorE may use it.
    """

    k_tiles: int
    work_ns: float
    move_ns: float
    size: int
    queue: str = ""
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
    ) -> None:
        machine = problem.machine
        self.queue = queue
        step = step or tiling.matmul_columns(problem.M, machine.generation)
        shared = machine.shared_ports and engines == BOTH
        self.engines = VECTOR if scaled else SCALAR if shared else engines
        tiles = tiling.SumTiling(columns, problem.M, machine.generation, unit, step)
        self.columns, self.adjoin = columns, columns == of
        self.row_bytes = columns * problem.weight_itemsize
        self.width, self.chunks = tiles.width, [Chunk(group.size) for group in tiles.groups]
        self.banks = tiles_in(tiles.width, BANK_COLUMNS)
        stacked, self.stacks = bool(problem.weight_dtype), len(tiles.groups)
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
        self.lanes = tiling.lanes_of(self.M, generation) if self.scaled else self.M
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
        if not self.scaled:
            return 0, 0
        heads = [chunk.size for chunk in chunks if chunk.together]
        parts = sum([(size >= PARTITIONS) + (size % PARTITIONS > 0) for size in heads])
        zeros, loads = parts * (self.lanes > self.M), parts * (source != "hbm")
        return zeros + loads, SCALE_BYTES * sum([c.size for c in chunks]) * (source != "hbm")

    def _weight_tiles(
        self, s: Sums, rows: int, tile_bytes: int, first: bool, last: bool, waited: bool
    ) -> list[Tile]:
        """The weight tiles of a K chunk; as `stages.decode.Sums.add_chunk`."""
        tiles, rest = divmod(rows, PARTITIONS)
        ends = last and rest == 0
        first = first and not self.scaled
        generation = self.machine.generation
        least = tiling.waited_bytes(generation) if waited and self.scaled else 0
        spans = tiling.weight_tiles(tiles, s.row_bytes, tile_bytes, first, ends, least)
        found = [self.weight_tile(s, PARTITIONS, span.size, s.columns) for span in spans]
        if rest:
            found.append(self.weight_tile(s, rest, 1, s.columns))
        if last:
            count, k = found.pop().k_tiles, rest or PARTITIONS
            found.extend([self.weight_tile(s, k, count, columns) for columns in s.halves])
        return found

    def _weight_tile(self, s: Sums, rows: int, count: int, columns: int) -> Tile:
        row, whole = columns * self.problem.weight_itemsize, columns == s.columns
        runs, run = (1, count * row) if s.adjoin and whole else (count, row)
        share = 1.0 if self.groups > 1 else columns / s.columns
        load = load_ns(self.machine, rows, run, runs)
        size, casts = count * row, 0
        if self.casts:
            shares = tiling.cast_shares(columns, self.machine.generation)
            casts = count * len(shares)
            each = max(cast_ns(self.machine, [part.size for part in shares]))
            size += count * columns * self.itemsize
            work = count * max(s.ns * share, each)
            return Tile(count, work, load, size, s.queue, casts, each + self.cast_seen)
        return Tile(count, count * s.ns * share, load, size, s.queue)

    def _steps(
        self,
        chunks: tuple[Chunk, ...],
        source: Source,
        sums: tuple[Sums, ...],
        tile_bytes: int,
        first: bool,
        last: bool,
        waited: bool,
    ) -> list[Step]:
        """K chunks times columns of weights, as `stages.decode.contract`, then the evictions.

        The `first` weight tile is small; so is the `last`, which is loaded in two halves. Traffic
        and instructions are in the first step.
        """
        tiles: list[Tile] = []
        for n, chunk in enumerate(chunks):
            at, ends = len(tiles), n + 1 == len(chunks)
            edges = first and n == 0, last and ends, waited and ends
            for s in sums:
                tiles.extend(self.weight_tiles(s, chunk.size, tile_bytes, *edges))
            if n and not ends and source != "transposed":  # the next K chunk goes before this one
                loads = source in IN_HBM and (n + 1) % self.groups == 0
                tiles[at] = self._after(tiles[at], chunks[n + 1], source, loads)
        halves = len(sums[0].halves) if last else 1
        end = max(1, len(tiles) - halves) if last else len(tiles)
        parts = [tiles[:1], tiles[1:end], *[[tile] for tile in tiles[end:]]]
        steps = [_stream(part) for part in parts if part]
        for step in steps[1:]:
            step.cast_ns = 0.0  # casts are one tile ahead
        for step in steps[-halves:]:
            self._evict(step, sums, halves)
        k_tiles = sum([tiles_in(chunk.size, PARTITIONS) for chunk in chunks])
        rows = sum([chunk.size for chunk in chunks])
        instructions = len(tiles) + sum([tile.casts for tile in tiles])
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
            each = [evict_ns(self.machine, engine, size) for size in parts]
            evict[engine] = sum(each[n :: len(engines)]) / tiles_in(tiles - n, len(engines))
        step.vector_ns, step.scalar_ns = evict.values()


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
    step.queues = tuple(Counter([tile.queue for tile in tiles]).items())
    return step


class Stages:
    """The stages of one core's kernel on a timeline.

    Attributes:
        timeline: when they run.
        sbuf_bytes: the most that is in use.
        psum_banks: the most that sums take.
        hbm_bytes, instructions: of all stages.
    """

    def __init__(self, costs: DecodeCosts, blocks: Blocks, core: int) -> None:
        self.costs, self.blocks, self.core = costs, blocks, core
        self.problem = costs.problem
        self.timeline = Timeline(costs.machine)
        self.psum_banks = 1
        self.live = self.sbuf_bytes = self.hbm_bytes = self.instructions = 0

    def chunks(self, size: int) -> list[Chunk]:
        """K chunks of activations in HBM."""
        return [Chunk(width) for width in sizes(size, int(self.blocks["k_chunk"]))]

    def own(self, size: int) -> int:
        """The core's part of a dimension."""
        return self.costs.own(size, self.core)

    # SBUF

    def hold(self, size: int) -> None:
        """Take SBUF for what stays; a negative size gives it back."""
        self.live += size
        self.sbuf_bytes = max(self.sbuf_bytes, self.live)
        self.timeline.hold(size)

    def transposed(self, chunks: list[Chunk]) -> int:
        """SBUF of all K chunks transposed."""
        tiles = sum([tiles_in(chunk.size, PARTITIONS) for chunk in chunks])
        # their scales, too
        return tiles * (self.costs.lanes * self.costs.itemsize + SCALE_BYTES * self.costs.scaled)

    def buffers(self, chunks: list[Chunk], source: Source = "hbm") -> int:
        """SBUF of two K chunks, as tokens and transposed; all of those that are kept."""
        if self.costs.scaled and source == "sums":
            return self.transposed(chunks)
        most = sorted(chunks)[-2:]
        size = sum([chunk.size for chunk in most])
        return size * self.costs.itemsize_of(source) + self.transposed(most)

    def natural(self, size: int) -> int:
        """SBUF of sums rounded, with both fp32 sides of an exchange."""
        each = self.costs.sums_itemsize + (8 if self.problem.lnc == 2 else 0)
        return self.costs.sums(size, size).width * each

    def rows(self, s: Sums) -> int:
        """SBUF of the rows that sums are multiplied with, before and after they are copied."""
        return SCALE_BYTES * s.width * (bool(s.rows) + bool(s.more))

    # stages

    def run(
        self,
        chunks: list[Chunk],
        source: Source,
        *sums: Sums,
        first: bool = True,
        last: bool = False,
        waited: bool = False,
    ) -> None:
        """Contract and evict; the arguments are as in `DecodeCosts.steps`."""
        tile_bytes = int(self.blocks["tile_bytes"])
        self.psum_banks = max(self.psum_banks, sum([s.banks for s in sums]))
        if chunks:
            needs = 2 * max(tile_bytes, *[s.row_bytes for s in sums])
            if self.costs.casts:
                most = max([tile_bytes, *[s.row_bytes for s in sums]])
                needs += 2 * self.costs.itemsize * most
            self.sbuf_bytes = max(self.sbuf_bytes, self.live + needs)
            edges = first, last, waited
            self._run(self.costs.steps(tuple(chunks), source, sums, tile_bytes, *edges))

    def _run(self, steps: list[Step]) -> None:
        self.hbm_bytes += steps[0].hbm_bytes
        self.instructions += steps[0].instructions
        self.timeline.run(steps)

    def project(
        self, chunks: list[Chunk], source: Source, ranks: Sequence[int], fuse: bool = False
    ) -> list[list[Chunk]]:
        """As `stages.decode.project`; returns the K chunks of each rank."""
        if fuse:
            fused = [self.costs.sums(r, r, queue=f"u{n}") for n, r in enumerate(ranks)]
            self._sum(chunks, source, fused)
            return [s.chunks for s in fused]
        found: list[list[Chunk]] = []
        for n, r in enumerate(ranks):
            found.append([])
            for columns in sizes(r, int(self.blocks["rank_block"])):
                s = self.costs.sums(columns, r, queue=f"u{n}")
                self._sum(chunks, source, [s], waited=True)
                found[-1].extend(s.chunks)
                if self.costs.scaled and source == "sums":
                    source = "transposed"
        return found

    def _sum(
        self, chunks: list[Chunk], source: Source, sums: list[Sums], waited: bool = False
    ) -> None:
        """Sums over both cores; as `stages.decode.Sums.exchanged`."""
        self.run(chunks, source, *sums, waited=waited)
        if self.problem.lnc == 1:
            return
        machine, parts = self.costs.machine, [size for s in sums for size in s.parts]
        # a core without a part of the contraction sends zeros
        self.instructions += len(parts) * (1 if chunks else 2) + sum([s.stacks for s in sums])
        send_ns = load_ns(machine, self.costs.lanes, 4 * sum([s.width for s in sums]))
        add_ns = sum([evict_ns(machine, Engine.VECTOR, size) for size in parts])
        sends = sum([s.stacks for s in sums])
        self.timeline.exchange(send_ns, sends, add_ns)

    def write(
        self,
        chunks: list[Chunk],
        source: Source,
        resident: bool,
        number: int = 0,
    ) -> None:
        """As `stages.decode.write_block` for all blocks of one of the problem's outputs."""
        costs, outputs = self.costs, self.problem.outputs
        N, first, last = outputs[number], number == 0, number + 1 == len(outputs)
        block, last_block = int(self.blocks["block"]), int(self.blocks["last_block"])
        blocks = tiling.output_blocks(Span(0, self.own(N)), block, last_block if last else 0)
        for i, columns in enumerate(blocks):
            ends = last and i + 1 == len(blocks)
            step = BANK_COLUMNS if ends else 0
            s = costs.sums(columns.size, N, OUTPUT_UNIT, step, scaled=costs.scaled, last=ends)
            size = (s.columns if ends else s.width) * costs.itemsize + 2 * s.row_bytes
            size += self.rows(s)
            self.hold(size)
            self.run(chunks, source, s, first=first and i == 0, last=ends)
            self.hold(-size)
            groups = tiling.groups_in_store(len(s.chunks), costs.M, costs.scaled)
            self.store(s, groups if ends else 1)
            if resident:
                source = "transposed"

    def store(self, s: Sums, groups: int = 1, itemsize: int = 0) -> None:
        """Store evicted sums, so many PE column groups by a DMA, in the dtype of x or another."""
        costs, stores = self.costs, tiles_in(len(s.chunks), groups)
        itemsize = itemsize or costs.itemsize
        width = min(s.columns, groups * s.width)
        ns = load_ns(costs.machine, costs.M, width * itemsize)
        step = Step(0.0, store_ns=ns, hbm_bytes=costs.M * s.columns * itemsize)
        step.stores = stores
        step.instructions = stores
        self._run([step])
