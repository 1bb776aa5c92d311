"""Rules of operands: memories, partitions, sizes, dtypes, operators and compile-time values.

Source: NKI 0.6 documentation, `nki.isa`; architecture guides. Operands that are None, or numbers
where a tile [P, 1] may stand, pass the rules of tiles.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

from neuroncore import hardware as facts
from neuroncore.checks.base import note, refuse
from neuroncore.hardware import MACHINES, Engine, Feature, Machine
from neuroncore.memory.storage import MemoryRegion

if TYPE_CHECKING:
    from neuroncore.memory.tensor import NkiTensor
    from neuroncore.nl.operators import AluOp

SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum
COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")


def is_tile(value: Any) -> TypeGuard[NkiTensor]:
    """Whether an operand is a tensor, and not a number or None."""
    return hasattr(value, "geometry")


def one_tile(name: str, x: Any) -> None:
    """An element-wise function of `nl` gets at least one tile."""
    if not is_tile(x):
        refuse(f"nl.{name}: one input must be a tile; got {x!r}")


# where tiles are


def vector(opcode: str, engine: Engine, **operands: Any) -> None:
    """Tiles of an instruction of VectorE, ScalarE or GpSimdE: on chip, on equally many partitions.

    They start on legal partitions; GpSimdE does not reach PSUM.
    """
    tiles = _tiles(operands)
    _placed(opcode, tiles, SBUF, PSUM)
    for name, t in tiles.items():
        if engine is Engine.GPSIMD and t.geometry.memory is PSUM:
            refuse(f"{opcode}: GpSimdE does not reach PSUM, {name} is {t}; use engine.vector")
    same_partitions(opcode, tiles)


def elementwise(opcode: str, engine: Engine, **operands: Any) -> None:
    """`vector`, and equally many elements per partition: nothing is broadcast."""
    vector(opcode, engine, **operands)
    same_elements(opcode, **operands)


def in_sbuf(opcode: str, **operands: NkiTensor) -> None:
    """Tiles of a GpSimdE instruction: in SBUF, on equally many partitions."""
    _placed(opcode, operands, SBUF)
    same_partitions(opcode, operands)


def _placed(opcode: str, tiles: dict[str, NkiTensor], *memories: MemoryRegion) -> None:
    for name, t in tiles.items():
        memory(opcode, name, t, *memories)
        start_partition(opcode, name, t)


def _tiles(operands: dict[str, Any]) -> dict[str, NkiTensor]:
    return {name: t for name, t in operands.items() if is_tile(t)}


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


def start_partition(opcode: str, operand: str, t: NkiTensor, active: int = 0) -> None:
    """Engines address partitions in quadrants.

    65 to 128 partitions start at 0, 33 to 64 at 0 or 64, up to 32 at 0, 32, 64 or 96
    (architecture guide). A shuffle counts its `active` partitions.
    """
    start, count = t.geometry.start, active or t.geometry.partitions
    legal = (0,) if count > 64 else (0, 64) if count > 32 else (0, 32, 64, 96)
    if start not in legal:
        refuse(
            f"{opcode}: {operand} {t} starts at partition {start}; {count} "
            f"{'active ' if active else ''}partitions start at {' or '.join(map(str, legal))}"
            f"{'' if active else '; move it by DMA or lay it out so'}"
        )


def same_partitions(opcode: str, tiles: dict[str, NkiTensor]) -> None:
    """Operands of an element-wise instruction have the same number of partitions."""
    counts = {name: t.geometry.partitions for name, t in tiles.items()}
    _equal(f"{opcode}: partition counts differ", counts, "slice them alike")


def same_elements(opcode: str, **operands: Any) -> None:
    """They have the same number of elements per partition: nothing is broadcast."""
    counts = {name: t.geometry.elements for name, t in _tiles(operands).items()}
    remedy = "nothing is broadcast, use view.broadcast(dim, size)"
    _equal(f"{opcode}: elements per partition differ", counts, remedy)


def _equal(problem: str, counts: dict[str, int], remedy: str) -> None:
    if len(set(counts.values())) > 1:
        seen = ", ".join([f"{name} has {count}" for name, count in counts.items()])
        refuse(f"{problem}: {seen}; {remedy}")


def one_psum_input(opcode: str, first: Any, second: Any) -> None:
    """VectorE reads at most one of two tensors from PSUM."""
    if all(is_tile(t) and t.geometry.memory is PSUM for t in (first, second)):
        refuse(
            f"{opcode}: both inputs are in PSUM, {first} and {second}; copy one to SBUF first "
            "(an activation on the way costs the same)"
        )


def engine_runs(opcode: str, engine: Engine, *allowed: Engine) -> None:
    """The instruction exists on that engine."""
    if allowed and engine not in allowed:
        names = " or ".join([f"engine.{e.name.lower()}" for e in allowed])
        refuse(f"{opcode}: engine.{engine.name.lower()} does not run it; use {names}")


def feature(opcode: str, machine: Machine, needed: Feature, what: str, remedy: str) -> None:
    """The machine has a feature."""
    if not machine.has(needed):
        least = min([m.generation for m in MACHINES.values() if m.has(needed)])
        refuse(
            f"{opcode}: {what} needs NeuronCore-v{least}; {machine.target} is "
            f"v{machine.generation}; {remedy}"
        )


# sizes


def free_size(opcode: str, operand: str, t: NkiTensor, wanted: int) -> None:
    """A fixed number of elements per partition."""
    if t.geometry.elements != wanted:
        refuse(f"{opcode}: {operand} must have {wanted} elements per partition; got {t}")


def free_range(opcode: str, operand: str, t: NkiTensor, least: int, most: int) -> None:
    """Limits of the number of elements per partition."""
    if not least <= t.geometry.elements <= most:
        refuse(
            f"{opcode}: {operand} must have {least} to {most} elements per partition; got {t}; "
            "tile the free dimension"
        )


def dimensions(opcode: str, operand: str, t: NkiTensor, most: int) -> None:
    """No more dimensions than the instruction encodes."""
    if t.ndim > most:
        refuse(f"{opcode}: {operand} has at most {most} dimensions; got {t}; merge with reshape")


def partition_count(opcode: str, operand: str, t: NkiTensor, wanted: int) -> None:
    """A fixed number of partitions."""
    if t.geometry.partitions != wanted:
        refuse(f"{opcode}: {operand} must have {wanted} partitions; got {t}")


def one_element(opcode: str, t: NkiTensor) -> None:
    """A tile [1, 1]."""
    if t.size != 1:
        refuse(f"{opcode}: the tile must be [1, 1]; got {t}")


def scalar_operand(opcode: str, operand: str, t: NkiTensor, partitions: int) -> None:
    """A scalar per partition is a tile [P, 1]."""
    if t.geometry.elements != 1 or t.geometry.partitions != partitions:
        refuse(f"{opcode}: {operand} must be a number or a tile [{partitions}, 1]; got {t}")
    memory(opcode, operand, t, SBUF, PSUM)


def scalars(opcode: str, data: NkiTensor, values: Iterable[Any], *dtypes: str) -> None:
    """Tiles that stand for numbers are [P, 1], of the given dtypes if any."""
    for t in filter(is_tile, values):
        scalar_operand(opcode, "a scalar operand", t, data.geometry.partitions)
        if dtypes:
            dtype_in(opcode, "a scalar operand", t, *dtypes)


# dtypes


def dtype_in(opcode: str, operand: str, t: NkiTensor, *allowed: str) -> None:
    """The dtype is one that the instruction takes."""
    if t.dtype not in allowed:
        refuse(f"{opcode}: {operand} must be {', '.join(allowed)}; {t} is {t.dtype}")


def engine_operand(opcode: str, machine: Machine, t: NkiTensor) -> None:
    """What no engine takes: float8_e4m3fn before NeuronCore-v4 (NCC_EVRF051), and long rows."""
    if t.geometry.elements > facts.FREE_ELEMENTS:
        note(
            f"{opcode}: {t} has more than {facts.FREE_ELEMENTS:,} elements per partition; AWS's "
            "agent skills take no more, the architecture guide 64K; tile the free dimension"
        )
    if t.dtype == "float8_e4m3fn":
        remedy = f"{t}: use float8_e4m3, whose bits are the same up to 240, as by .view()"
        feature(opcode, machine, "float8_e4m3fn", "float8_e4m3fn", remedy)


def float_dtype(opcode: str, operand: str, t: NkiTensor | None) -> None:
    """Floats only."""
    if t is not None and not t.dtype.is_float:
        refuse(f"{opcode}: {operand} must be of a float type; {t} is {t.dtype}")


def same_dtype(opcode: str, dst: NkiTensor, src: NkiTensor) -> None:
    """Source and destination have one dtype."""
    if dst.dtype != src.dtype:
        refuse(f"{opcode}: dst and source must have one dtype; got {dst.dtype} and {src.dtype}")


# operators and reductions


def operator_exists(opcode: str, machine: Machine, alu: AluOp) -> None:
    """abs_max and abs_min exist from NeuronCore-v4 on."""
    if alu.name in ("abs_max", "abs_min"):
        remedy = "use nl.abs, then nl.maximum or minimum"
        feature(opcode, machine, "abs_extremes", f"nl.{alu.name}", remedy)


def arithmetic(opcode: str, alu: AluOp) -> None:
    """The instruction takes arithmetic operators only."""
    if alu.kind != "arithmetic":
        refuse(f"{opcode}: nl.{alu.name} is a bit operator; only arithmetic ones are taken")


def binary_arithmetic(opcode: str, operand: str, alu: AluOp) -> None:
    """An arithmetic operator with two inputs."""
    if alu.kind != "arithmetic" or alu.arity != 2:
        refuse(f"{opcode}: {operand} must be a binary arithmetic operator; got nl.{alu.name}")


def unary_operand(opcode: str, alu: AluOp, operand: Any) -> None:
    """A unary operator takes no operand: None or 0."""
    if alu.arity == 1 and (is_tile(operand) or operand not in (None, 0)):
        refuse(f"{opcode}: nl.{alu.name} is unary; operand0 must be None or 0")
    if alu.arity == 2 and operand is None:
        refuse(f"{opcode}: nl.{alu.name} needs operand0, a number or a tile [P, 1]")


def bit_operator(opcode: str, alu: AluOp, *tensors: NkiTensor) -> bool:
    """Whether it is one: then it works on integers."""
    if alu.kind == "bitvec" and any(t.dtype.is_float for t in tensors):
        seen = ", ".join([t.dtype for t in tensors])
        refuse(f"{opcode}: nl.{alu.name} takes integer tiles; got {seen}; view them as integers")
    return alu.kind == "bitvec"


def bit_reduction(opcode: str, alu: AluOp, dst: NkiTensor, data: NkiTensor) -> bool:
    """`bit_operator` of a reduction, which neither widens nor narrows."""
    bits = bit_operator(opcode, alu, dst, data)
    if bits and dst.dtype.itemsize != data.dtype.itemsize:
        refuse(
            f"{opcode}: a bit operator keeps the element size; dst is {dst.dtype} and data "
            f"{data.dtype}; use one size"
        )
    return bits


def comparison(opcode: str, operand: str, alu: AluOp, *allowed: str) -> None:
    """The operator compares."""
    if alu.name not in allowed:
        names = ", ".join([f"nl.{n}" for n in allowed])
        refuse(f"{opcode}: {operand} must be one of {names}; got nl.{alu.name}")


def reducing_operator(opcode: str, alu: AluOp, *allowed: str) -> None:
    """The operator is one that the instruction reduces with."""
    if (allowed and alu.name not in allowed) or not alu.reducible:
        names = ", ".join([f"nl.{n}" for n in allowed]) or "a reducible one, as nl.add"
        refuse(f"{opcode}: nl.{alu.name} does not reduce; use {names}")


def trailing_axes(data: NkiTensor, axes: tuple[int, ...]) -> None:
    """The last free dimensions, without gaps and without the partition."""
    legal = [tuple(range(first, data.ndim)) for first in range(1, data.ndim)]
    if tuple(sorted(axes)) not in legal:
        refuse(
            f"tensor_reduce: axis {axes} of {data} must be the last free dimensions, one of "
            f"{', '.join(map(str, legal))}; permute the view, or transpose to reduce partitions"
        )


def reduction_command(opcode: str, command: Any, *allowed: str) -> None:
    """The instruction knows the command."""
    if getattr(command, "name", None) not in allowed:
        names = ", ".join([f"reduce_cmd.{n}" for n in allowed])
        refuse(f"{opcode}: reduce_cmd must be one of {names}; got {command!r}")


def reduction_start(opcode: str, operand: str, command: Any, given: bool) -> None:
    """An initial value comes with load_reduce, and only with it."""
    if given != (command.name == "load_reduce"):
        refuse(f"{opcode}: {operand} and reduce_cmd.load_reduce come together; set both or neither")


def reduction_result(opcode: str, data: NkiTensor, command: Any, result: NkiTensor | None) -> None:
    """reduce_res is a tile [P, 1] that something defined is written to."""
    if result is None:
        return
    if command.name == "idle":
        refuse(
            f"{opcode}: reduce_res with reduce_cmd.idle is undefined; use reduce_cmd.reset_reduce"
        )
    scalar_operand(opcode, "reduce_res", result, data.geometry.partitions)


# compile-time values


def int32(opcode: str, **values: Any) -> None:
    """Compile-time integers of 32 bits."""
    for name, value in values.items():
        if not isinstance(value, int) or not -(2**31) <= value < 2**31:
            refuse(f"{opcode}: {name} must be an int32; got {value!r}")


def number(opcode: str, operand: str, value: Any) -> None:
    """A compile-time number, where the operand is no tile."""
    if not is_tile(value) and not isinstance(value, int | float):
        refuse(f"{opcode}: {operand} must be a number; got {value!r}")


# values: what execute mode alone can see


def in_bounds(opcode: str, indices: Any, end: int) -> None:
    """Indices stay in the source; `indices` is an array."""
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= end):
        refuse(
            f"{opcode}: indices run from {int(indices.min())} to {int(indices.max())} and must be "
            f"0 to {end - 1}"
        )
