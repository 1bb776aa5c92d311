"""Rules of operands: memories, partitions, sizes and dtypes.

Source: NKI 0.6 documentation, `nki.isa`; architecture guides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuronmm_ops.hardware import Engine, Machine
from neuronmm_ops.neuroncore.checks.base import refuse
from neuronmm_ops.neuroncore.memory.storage import MemoryRegion

if TYPE_CHECKING:
    from neuronmm_ops.neuroncore.memory.tensor import NkiTensor


def memory(opcode: str, operand: str, t: NkiTensor, *allowed: MemoryRegion) -> None:
    """The memory of an operand is one that the engine reaches."""
    if t.geometry.memory not in allowed:
        names = " or ".join([m.value for m in allowed])
        refuse(f"{opcode}: {operand} must be in {names}; {t} is not. {_memory_remedy(opcode)}")


def _memory_remedy(opcode: str) -> str:
    if opcode.startswith("dma"):
        return "DMA does not reach PSUM: copy to SBUF with tensor_copy or activation first"
    if opcode in ("nc_matmul", "nc_matmul_mx"):
        return "TensorE reads SBUF and writes PSUM"
    return "Load from HBM with dma_copy first"


def engine_reaches(opcode: str, engine: Engine, operands: dict[str, NkiTensor]) -> None:
    """GpSimdE does not reach PSUM."""
    if engine is not Engine.GPSIMD:
        return
    for name, t in operands.items():
        if t.geometry.memory is MemoryRegion.psum:
            refuse(f"{opcode}: GpSimdE does not reach PSUM, {name} is {t}; use engine.vector")


def engine_runs(opcode: str, engine: Engine, *allowed: Engine) -> None:
    """The instruction exists on that engine."""
    if engine not in allowed:
        names = " or ".join([f"engine.{e.name.lower()}" for e in allowed])
        refuse(f"{opcode}: engine.{engine.name.lower()} does not run it; use {names}")


def start_partition(opcode: str, operand: str, t: NkiTensor) -> None:
    """Engines address partitions in quadrants.

    65 to 128 partitions start at 0, 33 to 64 at 0 or 64, up to 32 at 0, 32, 64 or 96
    (architecture guide).
    """
    g = t.geometry
    legal = (0,) if g.partitions > 64 else (0, 64) if g.partitions > 32 else (0, 32, 64, 96)
    if g.start not in legal:
        refuse(
            f"{opcode}: {operand} {t} starts at partition {g.start}; {g.partitions} partitions "
            f"start at {' or '.join(map(str, legal))}; move it by DMA or lay it out so"
        )


def same_partitions(opcode: str, operands: dict[str, NkiTensor]) -> None:
    """Operands of an element-wise instruction have the same number of partitions."""
    counts = {name: t.geometry.partitions for name, t in operands.items()}
    if len(set(counts.values())) > 1:
        refuse(f"{opcode}: partition counts differ: {_listed(counts)}; slice them alike")


def same_elements(opcode: str, operands: dict[str, NkiTensor]) -> None:
    """They have the same number of elements per partition: nothing is broadcast."""
    counts = {name: t.geometry.elements for name, t in operands.items()}
    if len(set(counts.values())) > 1:
        refuse(
            f"{opcode}: elements per partition differ: {_listed(counts)}; nothing is broadcast, "
            "use view.broadcast(dim, size)"
        )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join([f"{name} has {count}" for name, count in counts.items()])


def scalar_operand(opcode: str, operand: str, t: NkiTensor, partitions: int) -> None:
    """A scalar per partition is a tile [P, 1]."""
    if t.geometry.elements != 1 or t.geometry.partitions != partitions:
        refuse(f"{opcode}: {operand} must be a number or a tile [{partitions}, 1]; got {t}")
    memory(opcode, operand, t, MemoryRegion.sbuf, MemoryRegion.psum)


def one_psum_input(opcode: str, first: NkiTensor, second: NkiTensor) -> None:
    """VectorE reads at most one of two tensors from PSUM."""
    if first.geometry.memory is second.geometry.memory is MemoryRegion.psum:
        refuse(
            f"{opcode}: both inputs are in PSUM, {first} and {second}; copy one to SBUF first "
            "(an activation on the way costs the same)"
        )


def dtype_in(opcode: str, operand: str, t: NkiTensor, *allowed: str) -> None:
    """The dtype is one that the instruction takes."""
    if t.dtype not in allowed:
        refuse(f"{opcode}: {operand} must be {', '.join(allowed)}; {t} is {t.dtype}")


def same_dtype(opcode: str, dst: NkiTensor, src: NkiTensor) -> None:
    """Source and destination have one dtype."""
    if dst.dtype != src.dtype:
        refuse(f"{opcode}: dst and source must have one dtype; got {dst.dtype} and {src.dtype}")


def generation(opcode: str, machine: Machine, least: int, what: str, remedy: str) -> None:
    """A feature exists from some generation on."""
    if machine.generation < least:
        refuse(
            f"{opcode}: {what} needs NeuronCore-v{least}; {machine.target} is "
            f"v{machine.generation}; {remedy}"
        )
