"""Rules of copies and element-wise arithmetic.

Source: NKI 0.6 documentation, `nki.isa`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neuronmm_ops.hardware import Engine, Machine
from neuronmm_ops.neuroncore.checks.base import refuse
from neuronmm_ops.neuroncore.checks.operands import dtype_in, generation

if TYPE_CHECKING:
    from neuronmm_ops.neuroncore.memory.tensor import NkiTensor


def constant_kind(dst: NkiTensor, value: Any) -> None:
    """memset: an int for integer tiles, a number otherwise."""
    if not isinstance(value, int | float):
        refuse(f"memset: value must be a number; got {value!r}")
    if not dst.dtype.is_float and isinstance(value, float) and not value.is_integer():
        refuse(f"memset: {dst} takes an int; got {value!r}")
    if dst.dtype.kind == "packed" and value != 0:
        refuse(f"memset: {dst} packs four values and takes 0 only; got {value!r}")


def operator_arity(opcode: str, alu: Any, arity: int) -> None:
    """The operator takes that many inputs."""
    if alu.arity != arity:
        refuse(
            f"{opcode}: op nl.{alu.name} takes {alu.arity} input; use tensor_scalar or activation"
        )


def operator_generation(opcode: str, machine: Machine, alu: Any) -> None:
    """abs_max and abs_min exist from NeuronCore-v4 on."""
    if alu.name in ("abs_max", "abs_min"):
        generation(opcode, machine, 4, f"nl.{alu.name}", "use nl.abs, then nl.maximum or minimum")


def same_kind(engine: Engine, first: Any, second: Any) -> None:
    """tensor_scalar: both operators arithmetic or both on bits; bits on VectorE, GpSimdE: rsqrt."""
    if second is not None and first.kind != second.kind:
        refuse(
            f"tensor_scalar: nl.{first.name} and nl.{second.name} are of different kinds; both "
            "must be bit operators or both arithmetic"
        )
    if first.kind == "bitvec" and engine is not Engine.VECTOR:
        refuse(f"tensor_scalar: nl.{first.name} is a bit operator and runs on engine.vector only")
    if engine is Engine.GPSIMD and "rsqrt" not in (first.name, getattr(second, "name", "")):
        refuse("tensor_scalar: engine.gpsimd runs nl.rsqrt only; use engine.vector")


def power_engine(opcode: str, op: str, engine: Engine) -> None:
    """power runs on GpSimdE only."""
    if op == "power" and engine is not Engine.GPSIMD:
        refuse(f"{opcode}: nl.power runs on GpSimdE only; leave engine out or use engine.gpsimd")


def arithmetic(opcode: str, alu: Any) -> None:
    """The instruction takes arithmetic operators only."""
    if alu.kind != "arithmetic":
        refuse(f"{opcode}: nl.{alu.name} is a bit operator; only arithmetic ones are taken")


def bitvec_dtypes(opcode: str, alu: Any, *tensors: NkiTensor) -> None:
    """Bit operators work on integers."""
    if alu.kind == "bitvec" and any(t.dtype.is_float for t in tensors):
        seen = ", ".join([t.dtype for t in tensors])
        refuse(f"{opcode}: nl.{alu.name} takes integer tiles; got {seen}; view them as integers")


def scalar_engine_ops(machine: Machine, engine: Engine, op0: str, op1: str | None) -> None:
    """tensor_scalar on ScalarE: multiply then add, multiply, or add; NeuronCore-v3 on."""
    if engine is not Engine.SCALAR:
        return
    generation("tensor_scalar", machine, 3, "engine.scalar", "use engine.vector or activation")
    if (op0, op1) not in {("multiply", "add"), ("multiply", None), ("add", None)}:
        refuse(f"tensor_scalar: ScalarE runs multiply+add, multiply or add; got {op0}, {op1}")


def second_operand(opcode: str, op1: Any, mark: Any) -> None:
    """op1 and operand1 come together; `mark` is (value,) of a number."""
    absent = mark is not None and mark[0] is None
    if (op1 is None) != absent:
        refuse(f"{opcode}: op1 and operand1 come together; set both or neither")


def activation_bias(machine: Machine, mark: Any, op: str) -> None:
    """Before NeuronCore-v3 a bias is a tile, and reciprocal takes none."""
    given = mark is None or mark[0] is not None
    if machine.generation < 3 and given and mark is not None:
        refuse(f"activation: bias must be a tile [P, 1] on {machine.target}; got {mark[0]!r}")
    if machine.generation < 3 and given and op == "reciprocal":
        refuse(f"activation: nl.reciprocal takes no bias on {machine.target}; leave it out")


def activation_operand(operand: str, t: NkiTensor) -> None:
    """scale is float32; bias anything but tfloat32."""
    if operand == "scale":
        dtype_in("activation", operand, t, "float32")
    elif t.dtype == "tfloat32":
        refuse(f"activation: bias must not be tfloat32; got {t}; use float32")


def activation_reduce(op: Any, command: str) -> None:
    """Only sums, and not half asked for."""
    if op is not None and op.__name__ != "add":
        refuse(f"activation: reduce_op must be nl.add; got {op.__name__}")
    if command in ("reduce", "reset_reduce") and op is None:
        refuse(f"activation: reduce_cmd.{command} needs reduce_op=nl.add")
    if command == "load_reduce":
        refuse("activation: reduce_cmd.load_reduce is not one of ScalarE's; use reset_reduce")
