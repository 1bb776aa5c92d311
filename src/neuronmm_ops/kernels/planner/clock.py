"""Modelled time, memory and traffic of the decode kernels, stage by stage.

`Clock` follows a kernel through the stages of `stream` on two resources: the DMA engines, which run
ahead, and TensorE, which waits for whole weight tiles. All times are modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from neuronmm_ops.hardware import DMA_START_NS, MIN_CYCLES, RESULT_CYCLES, Engine
from neuronmm_ops.kernels.planner.problem import Block, Problem
from neuronmm_ops.kernels.stages.tiling import ALIGN, COLUMNS, HALF, SMALL, P, spans, tiles_in

SUM_BANKS = 6
"""Banks for sums; the other two are for transposes."""
Blocks = dict[str, Block]


def rounded_up(size: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `size`."""
    return tiles_in(size, unit) * unit


def cut_sizes(size: int, span: int) -> list[int]:
    """Sizes of the tiles of `span` that cover `size`."""
    return [s.size for s in spans(0, size, span)]


@dataclass(frozen=True)
class Shape:
    """Sizes and times that follow from the problem alone."""

    problem: Problem

    @cached_property
    def item(self) -> int:
        """Bytes of an element."""
        return self.problem.itemsize

    @cached_property
    def passes(self) -> int:
        """TensorE passes of a matmul."""
        return 4 if self.problem.dtype == "float32" else 1

    @cached_property
    def load_lanes(self) -> int:
        """As `pieces.load_lanes`."""
        M = self.problem.M
        return 4 if M <= 32 else 2 if M <= 64 else 1

    @cached_property
    def lanes(self) -> int:
        """As `stream.matmul_lanes`."""
        return min(2, self.load_lanes) if self.problem.target == "trn1" else self.load_lanes

    @cached_property
    def most(self) -> int:
        """Columns whose sums fit in the banks for sums."""
        return SUM_BANKS * COLUMNS * self.lanes

    @cached_property
    def step(self) -> int:
        """As `stream.matmul_columns`."""
        wide = self.problem.target == "trn3" and self.load_lanes == 1
        return 4 * COLUMNS if wide else COLUMNS

    @property
    def room(self) -> int:
        """SBUF bytes per partition."""
        return self.problem.machine.usable_sbuf_bytes

    def own(self, size: int) -> int:
        """The larger of the cores' parts; as `stream.own`."""
        if self.problem.lnc == 1:
            return size
        unit = P if size >= 2 * P else 1
        return min(size, rounded_up(size, 2 * unit) // 2)

    def lane(self, size: int, unit: int) -> int:
        """Width of a lane of sums; as `stream.Sums`."""
        return min(size, rounded_up(size, unit * self.lanes) // self.lanes)

    def lane_widths(self, size: int, unit: int) -> list[int]:
        """Widths of all lanes of sums."""
        return cut_sizes(size, self.lane(size, unit))

    def banks(self, size: int, unit: int) -> int:
        """Banks of PSUM that sums take."""
        return tiles_in(self.lane(size, unit), COLUMNS)

    # SBUF, bytes per partition

    def natural(self, size: int) -> int:
        """Sums rounded, with both fp32 sides of an exchange."""
        cut = self.lane(size, P)
        return cut * (self.item + (8 if self.problem.lnc == 2 else 0))

    def turned(self, pieces: list[int]) -> int:
        """All pieces transposed."""
        return sum(tiles_in(size, P) for size in pieces) * self.problem.M * self.item

    def buffers(self, pieces: list[int]) -> int:
        """Two pieces, as tokens and transposed."""
        most = sorted(pieces)[-2:]
        return sum(most) * self.item + self.turned(most)

    # times

    def matmul_ns(self, pieces: list[int], size: int, unit: int, step: int) -> float:
        """All contraction tiles of the pieces against `size` columns."""
        return sum(tiles_in(k, P) for k in pieces) * self._tile_ns(size, unit, step)

    def _tile_ns(self, size: int, unit: int, step: int) -> float:
        machine = self.problem.machine
        overhead, least = machine.matmul_overhead_cycles, min(MIN_CYCLES, self.problem.M)
        lane = self.lane(size, unit)
        cycles = sum(max(least, w) * self.passes + overhead for w in cut_sizes(lane, step))
        used = tiles_in(size, lane)
        if used > 1:
            cycles = max(cycles, tiles_in(lane, step) * used * (MIN_CYCLES + overhead))
        return machine.ns(Engine.TENSOR, cycles)

    def turn_ns(self, size: int) -> float:
        """TensorE's part of the transposes of `size` columns."""
        machine = self.problem.machine
        passes = 1 if self.passes == 1 else 4 if machine.generation < 3 else 2
        cycles = max(self.problem.M, MIN_CYCLES) * passes + machine.matmul_overhead_cycles
        return tiles_in(size, P) * machine.ns(Engine.TENSOR, cycles)

    def evict_ns(self, size: int, unit: int) -> float:
        """PSUM to SBUF of [M, size], from the last matmul to the first use."""
        machine = self.problem.machine
        lane = self.lane(size, unit)
        widths = [w for w in cut_sizes(lane, COLUMNS) for _ in range(tiles_in(size, lane))]
        scalar, vector = Engine.SCALAR, Engine.VECTOR
        if machine.shared_ports:
            busy = machine.ns(scalar, sum(widths))
        else:
            busy = max(machine.ns(vector, sum(widths[::2])), machine.ns(scalar, sum(widths[1::2])))
        return busy + machine.ns(scalar, RESULT_CYCLES[scalar])

    def stream_ns(self, pieces: list[int], size: int, columns: int, chunk: int) -> float:
        """DMA time of `size` of a weight's columns, for all rows of the pieces."""
        row_ns = self.problem.machine.dma_row_ns
        width = size * self.item
        rows = max(1, chunk // width) if size == columns else 1
        total = 0.0
        for k in pieces:
            full, rest = divmod(k // P, rows)
            total += 8 * (full * row_ns(rows * width) + (row_ns(rest * width) if rest else 0.0))
            total += min(8, k % P) * row_ns(width)
        return total

    def load_ns(self, pieces: list[int]) -> float:
        """DMA time of tokens on the busiest engines."""
        row_ns = self.problem.machine.dma_row_ns
        total = sum(row_ns(size * self.item) for size in pieces[:: self.load_lanes])
        return min(8, self.problem.M) * total


class Clock:
    """A kernel on its way: time of both resources, and what it holds and moves."""

    def __init__(self, s: Shape, blocks: Blocks) -> None:
        self.s, self.blocks = s, blocks
        self.span, self.chunk = int(blocks["span"]), int(blocks["chunk"])
        self.dma = self.pe = self.end_ns = DMA_START_NS
        self.dma_ns = self.pe_ns = self.tail_ns = 0.0
        p = s.problem
        self.hbm_bytes = p.least_bytes
        self.held = self.sbuf_bytes = 0
        self.psum_banks = 1
        self.evicted = 0.0
        self.known: dict[tuple[int, ...], tuple[int, float, float]] = {}

    def hold(self, size: int) -> None:
        """SBUF that stays taken."""
        self.held += size
        self.sbuf_bytes = max(self.sbuf_bytes, self.held)

    def release(self, size: int) -> None:
        """SBUF that is free again."""
        self.held -= size

    def needs(self, size: int) -> None:
        """SBUF that a stage takes for itself."""
        self.sbuf_bytes = max(self.sbuf_bytes, self.held + size)

    def move(self, ns: float) -> None:
        """Keep the DMA engines busy."""
        self.dma += ns
        self.dma_ns += ns

    def load_x(self, pieces: list[int], start: bool) -> None:
        """Load tokens; TensorE waits for the first piece at the `start`."""
        if start and pieces:
            self.pe = max(self.pe, self.dma + self.s.load_ns(pieces[:1]))
            self.turn(pieces[0])
        self.move(self.s.load_ns(pieces))

    def turn(self, size: int) -> None:
        """Transpose `size` columns of activations."""
        ns = self.s.turn_ns(size)
        self.pe += ns
        self.pe_ns += ns

    def stage(
        self, pieces: list[int], size: int, columns: int, unit: int, first: bool, last: bool
    ) -> None:
        """Stream `size` of `columns` columns of a weight through TensorE.

        The `first` and the `last` tile may be small, as in `stream.Sums.add_piece`.
        """
        s = self.s
        step = COLUMNS if last else s.step
        self.psum_banks = max(self.psum_banks, s.banks(size, unit))
        width = size * s.item
        rows = max(1, (SMALL if last else self.chunk) // width)
        row_ns = s.problem.machine.dma_row_ns
        usual = max(1, min(self.chunk // width, pieces[0] // P))
        ahead = min(usual, max(1, SMALL // width)) if first else usual
        one_run = size == columns
        first_ns, usual_ns = (
            8 * (row_ns(n * width) if one_run else n * row_ns(width)) for n in (ahead, usual)
        )
        key = (*pieces, size, columns, unit, step)
        if key not in self.known:
            moved = s.stream_ns(pieces, size, columns, self.chunk)
            tiles = sum(tiles_in(k, P) for k in pieces)
            self.known[key] = tiles, s.matmul_ns(pieces, size, unit, step), moved
        tiles, ns, moved = self.known[key]
        arrives = self.dma + first_ns
        again = arrives + (usual_ns if tiles > ahead else 0.0)  # the second tile
        self.move(moved)
        self.tail_ns = s.matmul_ns([min(rows * P, pieces[-1])], size, unit, step)
        self.pe_ns += ns
        rest_ns = ns * max(0, tiles - ahead) / tiles
        self.pe = max(max(self.pe, arrives) + ns, again + rest_ns, self.dma + self.tail_ns)
        self.needs(2 * max(self.chunk, width))

    def project(
        self, pieces: list[int], ranks: list[int], together: bool, source: int
    ) -> list[list[int]]:
        """As `stream.project`; returns the pieces of each rank.

        `source`: columns that both cores together load for each pass, 0 if they are in SBUF.
        """
        s, found = self.s, list[list[int]]()
        cut = max(ranks) if together else int(self.blocks["ranks"])
        passes = 0
        for r in ranks:
            parts: list[int] = []
            for columns in cut_sizes(r, cut):
                if pieces:
                    if passes == 0 or not together:
                        if source:
                            self.load_x(pieces, start=passes == 0)
                        for size in pieces[1:]:
                            self.turn(size)
                    passes += 1
                    self.stage(pieces, columns, r, P, first=True, last=False)
                parts.extend(s.lane_widths(columns, P))
                self.finish(columns)
            found.append(parts)
        if together:
            self.psum_banks = max(self.psum_banks, sum(s.banks(r, P) for r in ranks))
        else:
            loads = sum(len(cut_sizes(r, cut)) for r in ranks)
            self.hbm_bytes += (loads - 1) * s.problem.M * source * s.item
        return found

    def finish(self, size: int) -> None:
        """Sums to SBUF, over both cores, and transposed."""
        s = self.s
        self.pe += s.evict_ns(size, P)
        if s.problem.lnc == 2:
            lane = s.lane(size, P)
            moved = min(8, s.problem.M) * s.problem.machine.dma_row_ns(4 * lane)
            self.move(moved)
            self.pe += DMA_START_NS + moved + s.evict_ns(size, P)
        for width in s.lane_widths(size, P):
            self.turn(width)

    def gated(self, low: list[list[int]], size: int, spill: bool) -> None:
        """One block of act(gate) * up."""
        s = self.s
        lane = s.lane(size, P)
        self.needs(lane * (4 + 2 * s.item) + 2 * max(self.chunk, size * s.item))
        for pieces in low:
            self.stage(pieces, size, s.problem.inner, P, first=True, last=False)
        self.hold(lane * (4 + s.item))
        self.release(lane * (4 + s.item))
        if spill:
            self.move(s.load_ns([lane]))

    def write(self, pieces: list[int], columns: int, blocks: list[int], turns: int) -> None:
        """As `stream.write_columns`."""
        s = self.s
        self.turn(turns)
        for i, size in enumerate(blocks):
            lane = s.lane(size, ALIGN)
            last = i + 1 == len(blocks)
            self.hold(lane * s.item + 2 * size * s.item)
            self.stage(pieces, size, columns, ALIGN, i == 0, last)
            self.release(lane * s.item + 2 * size * s.item)
            out = s.load_ns([lane])
            evict = s.evict_ns(size, ALIGN)
            self.evicted = (self.evicted if last else max(self.evicted, self.pe)) + evict
            if not last and s.banks(size, ALIGN) > 4:
                self.pe += evict  # the next block waits for banks
            if last:
                self.end_ns = max(self.last_evicted(size), self.evicted) + DMA_START_NS + out
            else:
                self.move(out)

    def last_evicted(self, size: int) -> float:
        """When the last block is in SBUF: its last tile comes in two parts if it is wide."""
        s = self.s
        evict = s.evict_ns(size, ALIGN)
        if size * s.item < 2 * HALF or self.pe > self.dma + self.tail_ns + 1:
            return self.pe + evict
        row_ns = s.problem.machine.dma_row_ns
        half = 8 * row_ns(size * s.item // 2)
        self.move(2 * half - 8 * row_ns(size * s.item))
        share = 0.5 if s.lanes == 1 else 1.0
        first = self.dma - half + share * self.tail_ns + evict / 2
        return max(first, self.dma + share * self.tail_ns) + evict / 2

    def blocks_of(self, size: int) -> list[int]:
        """As `stream.blocks_of`."""
        rest = max(0, size - int(self.blocks["last"]))
        return [*cut_sizes(rest, int(self.blocks["block"])), *([size - rest] if size else [])]
