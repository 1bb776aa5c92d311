"""Modelled times of single instructions, in ns, from the facts of `hardware`."""

from __future__ import annotations

from neuronmm_ops.hardware import (
    DMA_ENGINES,
    MIN_CYCLES,
    PARTITIONS,
    Engine,
    Machine,
)


def matmul_passes(itemsize: int) -> int:
    """TensorE passes of a matmul: fp32 takes four."""
    return 4 if itemsize == 4 else 1


def matmul_ns(machine: Machine, stationary: int, moving: int, passes: int = 1) -> float:
    """A matmul: max(min(64, stationary), moving) cycles a pass, and its issue overhead.

    `stationary` and `moving` are free sizes. Source: SDK 2.26 `nki.isa`, and the fitted overhead.
    """
    cycles = max(min(MIN_CYCLES, stationary), moving) * passes
    return machine.ns(Engine.TENSOR, cycles) + machine.matmul_overhead_ns


def transpose_ns(machine: Machine, rows: int, columns: int, itemsize: int) -> float:
    """A transpose of [rows, columns] on TensorE; fp32 takes four passes, from trn2 on two."""
    passes = 1 if itemsize == 2 else 4 if machine.generation < 3 else 2
    cycles = max(rows, min(MIN_CYCLES, columns)) * passes
    return machine.ns(Engine.TENSOR, cycles) + machine.matmul_overhead_ns


def evict_ns(machine: Machine, engine: Engine, columns: float) -> float:
    """fp32 [partitions, columns] from PSUM to SBUF on ScalarE or VectorE."""
    return machine.ns(engine, max(MIN_CYCLES, columns))


def cast_ns(machine: Machine, shares: list[int]) -> list[float]:
    """Casts of [partitions, columns] one-byte weights: columns of ScalarE, GpSimdE and VectorE."""
    engines = (Engine.SCALAR, Engine.GPSIMD, Engine.VECTOR)
    return [evict_ns(machine, e, size) for e, size in zip(engines, shares, strict=False)]


def result_ns(machine: Machine, engine: Engine) -> float:
    """From the end of an instruction until another may use its result."""
    return machine.result_ns[engine]


def load_ns(machine: Machine, partitions: int, run_bytes: int, runs: int = 1) -> float:
    """A DMA of [partitions, runs x run_bytes]: each of the 16 engines serves 8 partitions."""
    return min(PARTITIONS // DMA_ENGINES, partitions) * runs * machine.dma_run_ns(run_bytes)


def load_transposed_ns(machine: Machine, elements: int, itemsize: int) -> float:
    """A DMA from HBM that transposes."""
    return elements * itemsize / machine.dma_transpose_gbps("hbm")
