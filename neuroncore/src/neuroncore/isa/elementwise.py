"""Copies and element-wise arithmetic of VectorE, ScalarE and GpSimdE."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuroncore import core as running
from neuroncore import dtypes
from neuroncore.checks import operands as check
from neuroncore.checks.base import note, refuse
from neuroncore.hardware import MIN_CYCLES, Engine
from neuroncore.isa.enums import engine, engine_of
from neuroncore.isa.instruction import Scalar, instruction
from neuroncore.isa.values import (
    PSUM,
    SBUF,
    SIXTEEN_BIT,
    copy,
    copy_cycles,
    raw,
    read,
    scalar,
    write,
    write_bits,
)
from neuroncore.memory.tensor import NkiTensor
from neuroncore.nl import operators
from neuroncore.timing.trace import InstructionTemplate

_ALL = (Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD)


@instruction("dst")
def tensor_copy(
    dst: NkiTensor, src: NkiTensor, engine: engine = engine.unknown, name: str | None = None
) -> InstructionTemplate:
    """dst = src within SBUF and PSUM; bit exact where the dtypes agree, else through fp32."""
    machine = running.active().machine
    chosen = engine_of("tensor_copy", engine, *_ALL)
    if chosen is Engine.SCALAR:
        remedy = "use activation(op=nl.copy)"
        check.feature("tensor_copy", machine, "scalar_copies", "engine.scalar", remedy)
    check.elementwise("tensor_copy", chosen, dst=dst, src=src)
    return InstructionTemplate(chosen, copy_cycles(machine.fast_modes, dst, src, chosen), copy)


@instruction("dst")
def memset(
    dst: NkiTensor, value: Scalar, engine: engine = engine.unknown, name: str | None = None
) -> InstructionTemplate:
    """Fill `dst` with a compile-time constant of its kind (int for integers), Vector or GpSimd."""
    chosen = engine_of("memset", engine, Engine.VECTOR, Engine.GPSIMD)
    check.vector("memset", chosen, dst=dst)
    if not isinstance(value, int | float):
        refuse(f"memset: value must be a number; got {value!r}")
    if not dst.dtype.is_float and isinstance(value, float):
        if not value.is_integer():
            refuse(f"memset: {dst} takes an int; got {value!r}")
        note(f"memset: {dst} takes an int since NKI 0.3; got {value!r}, which is taken as one")
    if dst.dtype.kind == "packed" and value != 0:
        refuse(f"memset: {dst} packs four values and takes 0 only; got {value!r}")
    n = dst.geometry.elements
    half = value == 0 and dst.dtype in SIXTEEN_BIT

    def run(dst: NkiTensor, value: Any) -> None:
        target, fill = raw(dst), _constant(dst, value)
        target[...] = fill if target.dtype == fill.dtype else value

    return InstructionTemplate(chosen, max(MIN_CYCLES, n / 2 if half else n), run)


def _constant(dst: NkiTensor, value: Any) -> np.ndarray:
    """One element of the destination's dtype: integers exact and saturated, floats rounded."""
    if dst.dtype.is_float or dst.dtype.kind == "bool":
        return dtypes.from_fp32(np.full(1, value, np.float32), dst.dtype)
    bounds = np.iinfo(dst.dtype.numpy)
    return np.full(1, min(max(int(value), int(bounds.min)), int(bounds.max)), dst.dtype.numpy)


@instruction("dst")
def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Any,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> InstructionTemplate:
    """dst = data1 op data2, element by element; at most one input in PSUM; no broadcasting."""
    machine = running.active().machine
    opcode, alu, tiles = "tensor_tensor", operators.alu(op), (dst, data1, data2)
    if alu.arity != 2:
        remedy = "use tensor_scalar or activation"
        refuse(f"{opcode}: op nl.{alu.name} takes {alu.arity} input; {remedy}")
    check.operator_exists(opcode, machine, alu)
    integers = data1.dtype in ("int32", "uint32") and data1.dtype == data2.dtype == dst.dtype
    in_sbuf = all(t.geometry.memory is SBUF for t in tiles)
    engines = Engine.VECTOR, Engine.GPSIMD
    gpsimd = alu.name == "power" or (integers and in_sbuf)
    chosen = engine_of(opcode, engine, *(reversed(engines) if gpsimd else engines))
    if alu.name == "power" and chosen is not Engine.GPSIMD:
        remedy = "leave engine out or use engine.gpsimd"
        refuse(f"{opcode}: nl.power runs on GpSimdE only; {remedy}")
    check.elementwise(opcode, chosen, dst=dst, data1=data1, data2=data2)
    check.one_psum_input(opcode, data1, data2)
    bits = check.bit_operator(opcode, alu, *tiles)

    def run(dst: NkiTensor, data1: NkiTensor, data2: NkiTensor) -> None:
        if bits or (integers and chosen is Engine.GPSIMD):  # on stored values, wrapping
            a, b = raw(data1), raw(data2)
            write_bits(dst, alu.apply(a, b.reshape(a.shape)))
            return
        a, b = read(data1), read(data2)
        write(dst, alu.apply(a, b if b.shape == a.shape else b.reshape(a.shape)))

    three = (dst, data1, data2)
    in_psum = PSUM in (data1.geometry.memory, data2.geometry.memory)
    quick = alu.name in ("add", "multiply", "subtract") and all(
        t.dtype == "bfloat16" and t.geometry.unit_stride for t in three
    )
    return InstructionTemplate(chosen, _two_input_cycles(chosen, dst, in_psum or quick), run)


def _two_input_cycles(chosen: Engine, dst: NkiTensor, once: bool) -> float:
    """2N (SDK 2.26), or N: `once` by the same source, and on VectorE from trn2 on.

    There it reads 256 fp32 elements a cycle (Trainium2 guide), two a lane, and was active for 1.04
    to 1.17 N in six tensor_tensor of fp32 tiles [64, 4096] to [64, 512], for 1.06 to 1.22 N in four
    scalar_tensor_tensor (KDA for Trainium).
    """
    once = once or (chosen is Engine.VECTOR and running.active().machine.fast_modes)
    return max(MIN_CYCLES, dst.geometry.elements * (1 if once else 2))


@instruction("dst")
def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Scalar | None,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Scalar | None = None,
    reverse1: bool = False,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> InstructionTemplate:
    """dst = (data op0 operand0) op1 operand1; operands are numbers or tiles [P, 1].

    `reverse` swaps the two sides of its operator. Two operators cost the same as one.
    """
    opcode, machine = "tensor_scalar", running.active().machine
    first = operators.alu(op0)
    second = operators.alu(op1) if op1 is not None else None
    names = first.name, second.name if second else None
    engines = (Engine.GPSIMD, *_ALL) if "rsqrt" in names else _ALL
    chosen = engine_of(opcode, engine, *engines)
    if chosen is Engine.SCALAR:
        remedy = "use engine.vector or activation"
        check.feature(opcode, machine, "scalar_copies", "engine.scalar", remedy)
        if names not in {("multiply", "add"), ("multiply", None), ("add", None)}:
            seen = f"{names[0]}, {names[1]}"
            refuse(f"{opcode}: ScalarE runs multiply+add, multiply or add; got {seen}")
    _check_kinds(chosen, first, second)
    for alu in filter(None, (first, second)):
        check.operator_exists(opcode, machine, alu)
    check.elementwise(opcode, chosen, dst=dst, data=data)
    for t in filter(check.is_tile, (operand0, operand1)):
        check.scalar_operand(opcode, "operand", t, data.geometry.partitions)
        if first.kind == "arithmetic":
            check.dtype_in(opcode, "operand", t, "float32")
    if (op1 is None) != (operand1 is None):
        refuse(f"{opcode}: op1 and operand1 come together; set both or neither")
    bits = check.bit_operator(opcode, first, dst, data)

    def run(
        dst: NkiTensor, data: NkiTensor, operand0: Scalar | None, operand1: Scalar | None
    ) -> None:
        value = apply(first, raw(data) if bits else read(data), operand0, reverse0)
        if second is not None:
            value = apply(second, value, operand1, reverse1)
        (write_bits if bits else write)(dst, value)

    return InstructionTemplate(chosen, copy_cycles(machine.fast_modes, dst, data, chosen), run)


def _check_kinds(chosen: Engine, first: operators.AluOp, second: operators.AluOp | None) -> None:
    """Both operators arithmetic or both on bits; bits on VectorE; GpSimdE runs rsqrt only."""
    if second is not None and first.kind != second.kind:
        refuse(
            f"tensor_scalar: nl.{first.name} and nl.{second.name} are of different kinds; both "
            "must be bit operators or both arithmetic"
        )
    if first.kind == "bitvec" and chosen is not Engine.VECTOR:
        refuse(f"tensor_scalar: nl.{first.name} is a bit operator and runs on engine.vector only")
    if chosen is Engine.GPSIMD and "rsqrt" not in (first.name, second and second.name):
        refuse("tensor_scalar: engine.gpsimd runs nl.rsqrt only; use engine.vector")


def apply(alu: operators.AluOp, value: np.ndarray, operand: Any, reverse: bool) -> np.ndarray:
    """value op operand, or operand op value; the operand is a number or a tile [P, 1]."""
    if alu.arity == 1:
        return alu.apply(value)
    other = _bits(operand, value) if alu.kind == "bitvec" else scalar(operand, value)
    return alu.apply(other, value) if reverse else alu.apply(value, other)


def _bits(operand: Any, like: np.ndarray) -> np.ndarray:
    """An integer, or a tile [P, 1], as bit patterns of the data's width."""
    if isinstance(operand, NkiTensor):
        return raw(operand).astype(like.dtype).reshape(-1, *([1] * (like.ndim - 1)))
    pattern = int(operand) & ((1 << 8 * like.itemsize) - 1)
    return np.array(pattern, f"u{like.itemsize}").view(like.dtype)


@instruction("dst")
def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Scalar,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> InstructionTemplate:
    """dst = (data op0 operand0) op1 operand1 on VectorE: a number or tile [P, 1], then a tensor."""
    opcode = "scalar_tensor_tensor"
    first, second = operators.alu(op0), operators.alu(op1)
    for alu in (first, second):
        check.arithmetic(opcode, alu)
    check.elementwise(opcode, Engine.VECTOR, dst=dst, data=data, operand1=operand1)
    if isinstance(operand0, NkiTensor):
        check.scalar_operand(opcode, "operand0", operand0, data.geometry.partitions)
    check.one_psum_input(opcode, data, operand1)
    bf16 = all(t.dtype == "bfloat16" for t in (dst, data, operand1))
    even = dst.geometry.elements % 2 == 0
    quick = bf16 and even and (first.name, second.name) == ("subtract", "multiply")

    def run(dst: NkiTensor, data: NkiTensor, operand0: Scalar, operand1: NkiTensor) -> None:
        value = apply(first, read(data), operand0, reverse0)
        b = read(operand1).reshape(value.shape)
        write(dst, second.apply(b, value) if reverse1 else second.apply(value, b))

    return InstructionTemplate(Engine.VECTOR, _two_input_cycles(Engine.VECTOR, dst, quick), run)


@instruction("dst")
def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> InstructionTemplate:
    """dst = 1 / data on VectorE: more precise and 8x slower than ScalarE's."""
    check.elementwise("reciprocal", Engine.VECTOR, dst=dst, data=data)

    def run(dst: NkiTensor, data: NkiTensor) -> None:
        with np.errstate(divide="ignore"):
            write(dst, np.float32(1) / read(data))

    return InstructionTemplate(Engine.VECTOR, max(MIN_CYCLES, 8 * data.geometry.elements), run)
