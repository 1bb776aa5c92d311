"""The decode kernels on a timeline: `Stages` runs their stages in the order of the kernel.

Times are modelled, in ns; SBUF is in bytes per partition.
"""

from __future__ import annotations

from collections.abc import Sequence

from neuronmm_ops.hardware import Engine
from neuronmm_ops.kernels.planner.decode_costs import Chunk, DecodeCosts, Source, Sums
from neuronmm_ops.kernels.planner.instructions import evict_ns, load_ns
from neuronmm_ops.kernels.planner.problem import SCALE_BYTES, Block
from neuronmm_ops.kernels.planner.timeline import Step, Timeline
from neuronmm_ops.kernels.stages import tiling
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    OUTPUT_UNIT,
    PARTITIONS,
    Span,
    sizes,
    tiles_in,
)

Blocks = dict[str, Block]


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
            edges = first, last, waited, int(self.blocks.get("dma_cast", 0))
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
        """Sums over both cores, as `stages.decode.of_both_cores`.

        The next stage begins with the first of several: what it waits for is all but the last.
        """
        self.run(chunks, source, *sums, waited=waited)
        if self.problem.lnc == 1:
            return
        machine, parts = self.costs.machine, [size for s in sums for size in s.parts]
        # a core without a part of the contraction sends zeros
        self.instructions += len(parts) * (1 if chunks else 2) + sum([s.stacks for s in sums])
        send_ns = load_ns(machine, self.costs.lanes, 4 * sum([s.width for s in sums]))
        add_ns = sum([evict_ns(machine, Engine.VECTOR, size) for size in sums[0].parts])
        waited_for = sums[:-1] or sums
        self.timeline.exchange(send_ns, sum([s.stacks for s in waited_for]), add_ns)

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
            self.store(s, groups if ends or costs.M == 1 else 1)
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
