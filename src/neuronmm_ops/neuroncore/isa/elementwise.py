"""Copies and element-wise arithmetic of VectorE, ScalarE and GpSimdE."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuronmm_ops.hardware import MIN_CYCLES, Engine
from neuronmm_ops.neuroncore import checks, dtypes
from neuronmm_ops.neuroncore import core as running
from neuronmm_ops.neuroncore.core import Core
from neuronmm_ops.neuroncore.isa.common import (
    PSUM,
    SBUF,
    SIXTEEN_BIT,
    Scalar,
    copy_cycles,
    engine,
    engine_of,
    on_chip,
    raw,
    read,
    scalar,
    write,
)
from neuronmm_ops.neuroncore.isa.operands import given, marks_of, tiles_of
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.neuroncore.nl import operators
from neuronmm_ops.neuroncore.timing.trace import Form, NkiInstruction


def tensor_copy(
    dst: NkiTensor, src: NkiTensor, engine: engine = engine.unknown, name: str | None = None
) -> NkiInstruction:
    """dst = src within SBUF and PSUM; bit exact where the dtypes agree, else through fp32."""
    core = running.active("nki.isa.tensor_copy")
    return core.issue(_copy, (dst, src), (engine,), name)


def _copy(core: Core, dst: NkiTensor, src: NkiTensor, asked: engine) -> Form:
    chosen = engine_of(asked, Engine.VECTOR)
    checks.engine_runs("tensor_copy", chosen, Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD)
    if chosen is Engine.SCALAR:
        checks.generation(
            "tensor_copy", core.machine, 3, "engine.scalar", "use activation(op=nl.copy)"
        )
    _checked("tensor_copy", chosen, dst=dst, src=src)

    def run(dst: NkiTensor, src: NkiTensor) -> None:
        target, source = raw(dst), raw(src)
        if target.dtype == source.dtype:
            target[...] = source.reshape(target.shape)
        else:
            write(dst, read(src))

    return Form(
        "tensor_copy", chosen, copy_cycles(core.machine.fast_modes, dst, src, chosen), run=run
    )


def memset(
    dst: NkiTensor, value: Any, engine: engine = engine.unknown, name: str | None = None
) -> NkiInstruction:
    """Fill `dst` with a compile-time constant of its kind (int for integers), Vector or GpSimd."""
    core = running.active("nki.isa.memset")
    return core.issue(_memset, (dst,), (value, str(value), engine), name)


def _memset(core: Core, dst: NkiTensor, value: Any, _: str, asked: engine) -> Form:
    # the text tells -0.0 from 0.0, which are one key
    chosen = engine_of(asked, Engine.VECTOR)
    checks.engine_runs("memset", chosen, Engine.VECTOR, Engine.GPSIMD)
    _checked("memset", chosen, dst=dst)
    checks.constant_kind(dst, value)
    n = dst.geometry.elements
    half = value == 0 and dst.dtype in SIXTEEN_BIT
    fill = _constant(dst, value)

    def run(dst: NkiTensor) -> None:
        target = raw(dst)
        target[...] = fill if target.dtype == fill.dtype else value

    return Form("memset", chosen, max(MIN_CYCLES, n / 2 if half else n), run=run)


def _constant(dst: NkiTensor, value: Any) -> np.ndarray:
    """One element of the destination's dtype: integers exact and saturated, floats rounded."""
    if dst.dtype.is_float or dst.dtype.kind == "bool":
        return dtypes.from_fp32(np.full(1, value, np.float32), dst.dtype)
    bounds = np.iinfo(dst.dtype.numpy)
    return np.full(1, min(max(int(value), int(bounds.min)), int(bounds.max)), dst.dtype.numpy)


def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Any,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """dst = data1 op data2, element by element; at most one input in PSUM; no broadcasting."""
    core = running.active("nki.isa.tensor_tensor")
    return core.issue(_tensor_tensor, (dst, data1, data2), (op, engine), name)


def _tensor_tensor(
    core: Core, dst: NkiTensor, data1: NkiTensor, data2: NkiTensor, op: Any, asked: engine
) -> Form:
    alu = operators.alu(op)
    checks.operator_arity("tensor_tensor", alu, 2)
    checks.operator_generation("tensor_tensor", core.machine, alu)
    integers = data1.dtype in ("int32", "uint32") and data1.dtype == data2.dtype == dst.dtype
    default = (
        Engine.GPSIMD
        if alu.name == "power" or (integers and _in_sbuf(dst, data1, data2))
        else Engine.VECTOR
    )
    chosen = engine_of(asked, default)
    checks.engine_runs("tensor_tensor", chosen, Engine.VECTOR, Engine.GPSIMD)
    checks.power_engine("tensor_tensor", alu.name, chosen)
    _checked("tensor_tensor", chosen, dst=dst, data1=data1, data2=data2)
    checks.one_psum_input("tensor_tensor", data1, data2)
    checks.bitvec_dtypes("tensor_tensor", alu, dst, data1, data2)

    def run(dst: NkiTensor, data1: NkiTensor, data2: NkiTensor) -> None:
        if alu.kind == "bitvec" or (integers and chosen is Engine.GPSIMD):
            exact(dst, alu, raw(data1), raw(data2))
            return
        a, b = read(data1), read(data2)
        write(dst, alu.apply(a, b if b.shape == a.shape else b.reshape(a.shape)))

    return Form(
        "tensor_tensor", chosen, _two_input_cycles(core, alu.name, dst, data1, data2), run=run
    )


def _two_input_cycles(
    core: Core, op: str, dst: NkiTensor, data1: NkiTensor, data2: NkiTensor
) -> float:
    """N with an input in PSUM or all-bf16 add/multiply/subtract, else 2N (SDK 2.26).

    From trn2 on, 2x more where both inputs are in SBUF and all three are 16-bit.
    """
    n = dst.geometry.elements
    three = (dst, data1, data2)
    in_psum = PSUM in (data1.geometry.memory, data2.geometry.memory)
    if in_psum:
        return max(MIN_CYCLES, n)
    if core.machine.fast_modes and all(t.dtype in SIXTEEN_BIT for t in three):
        return max(MIN_CYCLES, n)
    plain = op in ("add", "multiply", "subtract") and all(t.dtype == "bfloat16" for t in three)
    if plain and all(t.geometry.unit_stride for t in three):
        return max(MIN_CYCLES, n)
    return max(MIN_CYCLES, 2 * n)


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
) -> NkiInstruction:
    """dst = (data op0 operand0) op1 operand1; operands are numbers or tiles [P, 1].

    `reverse` swaps the two sides of its operator. Two operators cost the same as one.
    """
    core = running.active("nki.isa.tensor_scalar")
    return core.issue(
        _tensor_scalar,
        (dst, data, *tiles_of(operand0, operand1)),
        (op0, reverse0, op1, reverse1, marks_of(operand0, operand1), engine),
        name,
    )


def _tensor_scalar(core: Core, dst: NkiTensor, data: NkiTensor, *rest: Any) -> Form:
    *tiles, op0, reverse0, op1, reverse1, marks, asked = rest
    first = operators.alu(op0)
    second = operators.alu(op1) if op1 is not None else None
    default = (
        Engine.GPSIMD if "rsqrt" in (first.name, getattr(second, "name", "")) else Engine.VECTOR
    )
    chosen = engine_of(asked, default)
    checks.engine_runs("tensor_scalar", chosen, Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD)
    checks.scalar_engine_ops(core.machine, chosen, first.name, second.name if second else None)
    checks.same_kind(chosen, first, second)
    for alu in (first, *([second] if second else [])):
        checks.operator_generation("tensor_scalar", core.machine, alu)
    _checked("tensor_scalar", chosen, dst=dst, data=data)
    for t in tiles:
        checks.scalar_operand("tensor_scalar", "operand", t, data.geometry.partitions)
        if first.kind == "arithmetic":
            checks.dtype_in("tensor_scalar", "operand", t, "float32")
    checks.second_operand("tensor_scalar", op1, marks[1])
    steps = [(first, reverse0)] + ([(second, reverse1)] if second else [])
    bitvec = first.kind == "bitvec" or (second is not None and second.kind == "bitvec")
    if bitvec:
        checks.bitvec_dtypes("tensor_scalar", first, dst, data)

    def run(dst: NkiTensor, data: NkiTensor, *tiles: NkiTensor) -> None:
        value = raw(data) if bitvec else read(data)
        for (alu, reverse), operand in zip(steps, given(marks, tiles), strict=False):
            value = apply(alu, value, operand, reverse)
        if bitvec:
            raw(dst)[...] = value.astype(raw(dst).dtype).reshape(raw(dst).shape)
        else:
            write(dst, value)

    return Form(
        "tensor_scalar", chosen, copy_cycles(core.machine.fast_modes, dst, data, chosen), run=run
    )


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


def exact(dst: NkiTensor, alu: operators.AluOp, a: np.ndarray, b: np.ndarray) -> None:
    """Integer arithmetic on the stored values, wrapping as 32-bit hardware does."""
    target = raw(dst)
    target[...] = (
        np.asarray(alu.apply(a, b.reshape(a.shape))).astype(target.dtype).reshape(target.shape)
    )


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
) -> NkiInstruction:
    """dst = (data op0 operand0) op1 operand1 on VectorE: a number or tile [P, 1], then a tensor."""
    core = running.active("nki.isa.scalar_tensor_tensor")
    return core.issue(
        _scalar_tensor_tensor,
        (dst, data, operand1, *tiles_of(operand0)),
        (op0, op1, reverse0, reverse1, marks_of(operand0)),
        name,
    )


def _scalar_tensor_tensor(
    core: Core, dst: NkiTensor, data: NkiTensor, other: NkiTensor, *rest: Any
) -> Form:
    *tiles, op0, op1, reverse0, reverse1, marks = rest
    first, second = operators.alu(op0), operators.alu(op1)
    for alu in (first, second):
        checks.arithmetic("scalar_tensor_tensor", alu)
    _checked("scalar_tensor_tensor", Engine.VECTOR, dst=dst, data=data, operand1=other)
    for t in tiles:
        checks.scalar_operand("scalar_tensor_tensor", "operand0", t, data.geometry.partitions)
    checks.one_psum_input("scalar_tensor_tensor", data, other)
    n = dst.geometry.elements
    bf16 = all(t.dtype == "bfloat16" for t in (dst, data, other))
    quick = bf16 and n % 2 == 0 and (first.name, second.name) == ("subtract", "multiply")

    def run(dst: NkiTensor, data: NkiTensor, other: NkiTensor, *tiles: NkiTensor) -> None:
        (operand,) = given(marks, tiles)
        value = apply(first, read(data), operand, reverse0)
        b = read(other).reshape(value.shape)
        write(dst, second.apply(b, value) if reverse1 else second.apply(value, b))

    return Form(
        "scalar_tensor_tensor", Engine.VECTOR, max(MIN_CYCLES, n if quick else 2 * n), run=run
    )


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst = 1 / data on VectorE: more precise and 8x slower than ScalarE's."""
    core = running.active("nki.isa.reciprocal")
    return core.issue(_reciprocal, (dst, data), (), name)


def _reciprocal(core: Core, dst: NkiTensor, data: NkiTensor) -> Form:
    _checked("reciprocal", Engine.VECTOR, dst=dst, data=data)

    def run(dst: NkiTensor, data: NkiTensor) -> None:
        with np.errstate(divide="ignore"):
            write(dst, np.float32(1) / read(data))

    return Form("reciprocal", Engine.VECTOR, max(MIN_CYCLES, 8 * data.geometry.elements), run=run)


def _checked(opcode: str, chosen: Engine, **operands: NkiTensor) -> None:
    """What every element-wise instruction asks of its tensors."""
    on_chip(opcode, **operands)
    checks.engine_reaches(opcode, chosen, operands)
    checks.same_partitions(opcode, operands)
    checks.same_elements(opcode, operands)


def _in_sbuf(*operands: NkiTensor) -> bool:
    return all(t.geometry.memory is SBUF for t in operands)
