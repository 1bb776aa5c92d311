"""Modelled times of attention's kernels, in ns, from the facts of `hardware`."""

from __future__ import annotations

from neuronmm_ops.hardware import DMA_DONE_NS, DMA_START_NS, PARTITIONS, Engine, Machine
from neuronmm_ops.kernels.attention.scores import LOAD_BYTES
from neuronmm_ops.kernels.attention.units import (
    QUERY_BLOCK,
    CacheBlock,
    Shape,
    Unit,
    cache_blocks,
    decode_units,
    prefill_groups,
)
from neuronmm_ops.kernels.planner.instructions import (
    evict_ns,
    load_ns,
    matmul_ns,
    matmul_passes,
    result_ns,
    transpose_ns,
)
from neuronmm_ops.kernels.stages.tiling import BANK_COLUMNS, column_groups, spans, tiles_in

# --- decode


class Decode:
    """One core's time for `attention_decode`."""

    def __init__(self, shape: Shape, machine: Machine, itemsize: int, norm: bool) -> None:
        self.shape, self.machine, self.itemsize, self.norm = shape, machine, itemsize, norm

    def time_ns(self, core: int, cores: int) -> float:
        """From the launch to the last byte stored; 0 where the core has nothing to do."""
        units = decode_units(self.shape, core, cores)
        if not units:
            return 0.0
        chain = self._chain_ns(units[-1])
        loads = [self._loads_ns(u) for u in units]
        # a unit whose loads are short waits for its chain of instructions
        least = UNIT_SHARE * (chain + self._tail_ns(units[-1]))
        before = sum([max(k + v, least) for k, v in loads[:-1]])
        keys, values = loads[-1]
        ready = max(DMA_START_NS + before + keys + DMA_DONE_NS, self._queries_ns())
        come = DMA_START_NS + before + keys + values + DMA_DONE_NS + self._last_ns(units[-1])
        return max(ready + chain, come) + self._tail_ns(units[-1])

    def _blocks(self, unit: Unit) -> list[CacheBlock]:
        queries = unit.keys.size * self.shape.group
        return cache_blocks(self.shape.tokens, column_groups(queries, self.machine.generation))

    def _loads_ns(self, unit: Unit) -> tuple[float, float]:
        """DMA time of a unit's keys and of its values."""
        m, d, n, item = self.machine, self.shape.head_dim, unit.keys.size, self.itemsize
        rows = min(n, self.shape.stacked) * d
        keys = values = 0.0
        for block in self._blocks(unit):
            each = max(1, LOAD_BYTES // (rows * block.size * item))
            for s in spans(0, tiles_in(n * d, rows), each):
                keys += max(m.dma.interval_ns, load_ns(m, rows, block.size * item, s.size))
            most = max(1, BANK_COLUMNS // d)
            each = max(1, min(most, LOAD_BYTES // (block.size * d * item)))
            each = most // tiles_in(most, each)
            whole = block.tiles - 1 if block.last else block.tiles
            if block.last:
                for s in spans(0, n, most):
                    values += max(m.dma.interval_ns, load_ns(m, block.rows, d * item, s.size))
            for s in spans(0, n if whole else 0, each):
                run = whole * d * item
                values += max(m.dma.interval_ns, load_ns(m, block.rows, run, s.size))
        return keys, values

    def _queries_ns(self) -> float:
        """Until the queries are on the diagonal."""
        m, d = self.machine, self.shape.head_dim
        vector, seen = Engine.VECTOR, result_ns(self.machine, Engine.VECTOR)
        rotate = 2 * evict_ns(m, vector, d) + 4 * evict_ns(m, vector, d) + seen
        norm = 4 * (evict_ns(m, vector, d) + seen) if self.norm else 0.0
        place = result_ns(m, Engine.TENSOR) + 3 * evict_ns(m, vector, 64) + 2 * seen
        return DMA_START_NS + 2 * DMA_DONE_NS + rotate + norm + place

    def _chain_ns(self, unit: Unit) -> float:
        """From the last key to the last sum in PSUM, where no value is waited for."""
        m, blocks = self.machine, self._blocks(unit)
        last = blocks[-1]
        matmul, scalar, vector = [
            result_ns(m, e) for e in (Engine.TENSOR, Engine.SCALAR, Engine.VECTOR)
        ]
        columns = last.rows * last.width
        scores = self._turns_ns(last.groups, min(columns, BANK_COLUMNS)) * 2
        most = evict_ns(m, Engine.VECTOR, columns + 64) + evict_ns(m, Engine.VECTOR, 1)
        parts = len([s for b in blocks for s in b.segments()])
        exp = evict_ns(m, Engine.SCALAR, columns + 64) * len(blocks)
        moved = transpose_ns(m, PARTITIONS, PARTITIONS, self.itemsize) * last.width
        moved += evict_ns(m, Engine.VECTOR, PARTITIONS * last.width / 2)
        sums = max(self._sums_ns(unit), self._factors_ns(last.groups))
        latencies = 3 * matmul + 3 * vector + scalar
        return scores + most + exp + moved + sums + latencies + parts * 64

    def _factors_ns(self, groups: int) -> float:
        """The factors that groups join with, and the sum of all probabilities."""
        m = self.machine
        matmul, scalar, vector = [
            result_ns(m, e) for e in (Engine.TENSOR, Engine.SCALAR, Engine.VECTOR)
        ]
        small, total = evict_ns(m, Engine.VECTOR, 1), matmul_ns(m, 64, 1, 4) + matmul
        joined = 3 * small + 2 * vector + total
        if groups == 1:
            return joined
        spread = groups * (small + vector) + groups * small
        return spread + evict_ns(m, Engine.SCALAR, 1) + scalar + joined

    def _turns_ns(self, groups: int, columns: int) -> float:
        """Matmuls of all groups side by side."""
        m, passes = self.machine, matmul_passes(self.itemsize)
        return max(
            matmul_ns(m, PARTITIONS, columns, passes), groups * matmul_ns(m, PARTITIONS, 64, 1)
        )

    def _sums_ns(self, unit: Unit) -> float:
        """Products of a block's probabilities with the values of all heads."""
        last = self._blocks(unit)[-1]
        columns = unit.keys.size * self.shape.head_dim
        turns = tiles_in(columns, BANK_COLUMNS) * last.width
        return turns * self._turns_ns(last.groups, min(columns, BANK_COLUMNS))

    def _last_ns(self, unit: Unit) -> float:
        """What is multiplied when the last values have come."""
        last = self._blocks(unit)[-1]
        whole = max(1, last.tiles - 1)
        columns = max(1, LOAD_BYTES // (last.size * self.itemsize))
        columns = min(columns, BANK_COLUMNS, unit.keys.size * self.shape.head_dim)
        return tiles_in(whole, last.groups) * self._turns_ns(last.groups, columns)

    def _tail_ns(self, unit: Unit) -> float:
        """From the last sum in PSUM to the last byte in HBM."""
        m, d, n = self.machine, self.shape.head_dim, unit.keys.size
        matmul, vector = result_ns(m, Engine.TENSOR), result_ns(m, Engine.VECTOR)
        evicted = evict_ns(m, Engine.VECTOR, min(n * d, BANK_COLUMNS) / 2)
        banks = tiles_in(n * d, BANK_COLUMNS)
        chosen = n * matmul_ns(m, 64, d, matmul_passes(self.itemsize))
        out = evict_ns(m, Engine.VECTOR, d) + 2 * vector + 2 * matmul
        return evicted * banks + chosen + out + result_ns(m, Engine.SCALAR) + DMA_START_NS + 50.0


UNIT_SHARE = 0.8
"""Of a unit's chain and tail, what the next unit's do not hide (fit: the simulated core)."""


# --- prefill


def prefill_ns(shape: Shape, machine: Machine, itemsize: int, core: int, cores: int) -> float:
    """Time of one core for `attention`: of the engine that is busiest in each block of tokens."""
    d, M = shape.head_dim, shape.tokens
    heads = sum([g.heads.size for g in prefill_groups(shape, core, cores)])
    if not heads:
        return 0.0
    joined = d % 32 == 0 and d < PARTITIONS
    passes = matmul_passes(itemsize)
    total = 0.0
    for block in spans(0, M, QUERY_BLOCK):
        tensor = vector = scalar = 0.0
        for tile in spans(block.start, block.size, PARTITIONS):
            for s in spans(0, tile.start + tile.size, BANK_COLUMNS):
                tensor += matmul_ns(machine, PARTITIONS, s.size, passes)
                vector += evict_ns(machine, Engine.VECTOR, s.size)
            tensor += 2 * matmul_ns(machine, PARTITIONS, PARTITIONS, passes)
            vector += 3 * evict_ns(machine, Engine.VECTOR, 1)
            scalar += evict_ns(machine, Engine.SCALAR, d)
        for tile in spans(0, block.start + block.size, PARTITIONS):
            columns = block.size - max(0, tile.start - block.start)
            tensor += (2 - joined) * matmul_ns(machine, PARTITIONS, columns, passes)
            scalar += evict_ns(machine, Engine.SCALAR, columns)
            matmul = matmul_ns(machine, PARTITIONS, d + 1, passes)
            tensor += tiles_in(columns, PARTITIONS) * matmul
        if machine.shared_ports:
            scalar = vector = scalar + vector
        total += max(tensor, vector, scalar)
    return total * heads + 2 * DMA_START_NS + START_NS


START_NS = 4000.0
"""The first block's maxima, which nothing hides, and the last output (fit: the simulated core)."""
