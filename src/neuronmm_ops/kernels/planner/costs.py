"""What prefill costs: single instructions, passes of TensorE over operands, and stages of passes.

Modelled times, from the facts of `hardware`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from neuronmm_ops.hardware import DMA_TRANSPOSE_SHARE, Engine, Machine
from neuronmm_ops.kernels.planner.instructions import load_ns, matmul_ns
from neuronmm_ops.kernels.planner.problem import Block
from neuronmm_ops.kernels.stages.tiling import BANKS, COLUMNS, P, tiles_in

EVICT_LATENCY_NS = 150.0
"""From the last matmul of a PSUM tile to its eviction, and to the next matmul into its bank."""


@dataclass(frozen=True)
class Pass:
    """One group of PSUM tiles over the contraction: TensorE's, DMA's and the evictions' time."""

    pe_ns: float
    load_ns: float
    evict_ns: float
    steps: int
    """Contraction tiles: operands arrive one by one."""
    load_bytes: int = 0
    """SBUF per partition that its loads fill."""
    tiles: int = 1
    """PSUM tiles, a bank each."""
    store_ns: float = 0.0
    """DMA time of its results, for which nothing waits."""

    @cached_property
    def stall_ns(self) -> float:
        """How long the next pass waits for banks: evicted one by one, wanted one by one."""
        waits = 2 * self.tiles - BANKS
        if waits <= 0:
            return 0.0
        matmul_ns = self.pe_ns / self.steps / self.tiles
        evicted = waits * self.evict_ns / self.tiles + EVICT_LATENCY_NS
        return max(0.0, evicted - (2 * self.tiles - 2) * matmul_ns)

    @property
    def work_ns(self) -> float:
        """What it takes when its operands are there."""
        return max(self.pe_ns, self.evict_ns)


@dataclass(frozen=True)
class Stage:
    """A stage of one strip and what it holds."""

    blocks: tuple[tuple[str, Block], ...]
    passes: tuple[Pass, ...]
    hbm_bytes: int
    sbuf_bytes: int
    """Per partition at its peak, the operand that comes from an earlier stage included."""
    tail_ns: float = 0.0
    room_bytes: int = 0
    """SBUF per partition that is left to fetch ahead into."""

    again: tuple[Pass, ...] = ()
    """Passes of the other column blocks, `times` over: their operand is there already."""
    times: float = 0.0

    @property
    def dma_ns(self) -> float:
        """DMA time of a strip."""
        once = [p.load_ns + p.store_ns for p in self.passes]
        return self._sum(once, [p.load_ns + p.store_ns for p in self.again])

    @property
    def pe_ns(self) -> float:
        """TensorE's time, or that of the evictions where they take longer."""
        return self._sum([p.work_ns for p in self.passes], [p.work_ns for p in self.again])

    @property
    def loaded_bytes(self) -> float:
        """Bytes per partition that are loaded."""
        return self._sum([p.load_bytes for p in self.passes], [p.load_bytes for p in self.again])

    def _sum(self, passes: list[float], again: list[float]) -> float:
        return sum(passes) + self.times * sum(again)

    @cached_property
    def first_ns(self) -> float:
        """Time of the first strip: the first operands arrive one by one."""
        first = self.passes[0]
        return (first.load_ns + first.work_ns) / first.steps + self.time(0.0)[0]

    def time(self, fetched: float) -> tuple[float, float]:
        """(time, DMA done ahead for what follows), with `fetched` ns of DMA done, or owed."""
        total, fetched = self._run(self.passes, fetched)
        for times in (min(1.0, self.times), self.times - 1):
            if times > 0:
                ran, fetched = self._run(self.again, fetched)
                total += ran * times
        return total, fetched

    def _run(self, passes: tuple[Pass, ...], fetched: float) -> tuple[float, float]:
        total = evicting = stall = 0.0
        for n, p in enumerate(passes):
            # PSUM tiles are evicted while the next pass runs
            took = max(p.pe_ns + stall, evicting, p.load_ns - fetched)
            evicting, stall = p.evict_ns, p.stall_ns
            total += took
            # while this pass ran, DMA also fetched for later ones, as far as there is room
            spare = fetched + took - p.load_ns - p.store_ns
            fetched = min(spare, self._room_ns(passes, n + 1))
        return total, fetched

    def _room_ns(self, passes: tuple[Pass, ...], n: int) -> float:
        """DMA time that fits into the free room before pass n."""
        for p in (*passes[n:], *(self.again or passes)):
            if p.load_bytes:
                return p.load_ns * self.room_bytes / p.load_bytes
        return 0.0


@dataclass(frozen=True)
class Costs:
    """Times of single instructions for a problem's dtype and target, in ns."""

    machine: Machine
    item: int
    bf16_partial_sums: bool = False
    """Partial sums in SBUF have the dtype's size instead of fp32's."""

    @property
    def passes(self) -> int:
        """Passes of a matmul: fp32 takes four."""
        return 4 if self.item == 4 else 1

    @property
    def engines(self) -> int:
        """Engines that evict PSUM together: on gen2 they exclude each other."""
        return 1 if self.machine.shared_ports else 2

    @property
    def layout(self) -> str:
        """DMA transposes of 4 bytes need NeuronCore-v3."""
        return "pe" if self.item == 4 and self.machine.generation < 3 else "dma"

    @property
    def banks(self) -> int:
        """PSUM tiles in a group: TensorE's own transposes take two banks."""
        return BANKS - 2 if self.layout == "pe" else BANKS

    def staging(self, tokens: int) -> int:
        """SBUF per partition of the token rows that TensorE transposes, twice."""
        return 2 * tiles_in(tokens, P) * 4 * P * self.item if self.layout == "pe" else 0

    def matmuls(self, stationary: int, moving: int) -> float:
        """All matmuls of one contraction tile: tiles of 128 by tiles of 512."""
        total = 0.0
        for width, times in edges(moving, COLUMNS):
            for side, count in edges(stationary, P):
                total += times * count * matmul_ns(self.machine, side, width, self.passes)
        return total

    def evict(self, columns: int, adds: bool = False) -> float:
        """One PSUM tile to SBUF; sums with what is in SBUF are VectorE's."""
        vector = self.machine.ns(Engine.VECTOR, max(64, columns))
        if adds:
            return vector
        scalar = self.machine.ns(Engine.SCALAR, max(64, columns))
        return scalar if self.engines == 1 else 1 / (1 / scalar + 1 / vector)

    def load(self, rows: int, columns: int) -> float:
        """A tile of a matrix with `columns` columns taken together."""
        return load_ns(self.machine, min(P, rows), columns * self.item)

    def transposed(self, rows: int, tokens: int) -> float:
        """DMA time of an x^T tile [rows, tokens]."""
        if self.layout == "pe":  # natural rows of up to four tiles
            return tiles_in(tokens, P) * load_ns(self.machine, P, 4 * P * self.item) / 4
        rate = self.machine.dma_peak_gbps * DMA_TRANSPOSE_SHARE["hbm"]
        return rows * tokens * self.item / rate

    def turned(self, tokens: int) -> float:
        """TensorE time of an x^T tile that it transposes itself."""
        if self.layout == "dma":
            return 0.0
        return tiles_in(tokens, P) * matmul_ns(self.machine, P, P, self.passes)


def edges(size: int, tile: int) -> Iterator[tuple[int, int]]:
    """(size, count) of the full tiles and of the one at the edge."""
    if size >= tile:
        yield tile, size // tile
    if size % tile:
        yield size % tile, 1
