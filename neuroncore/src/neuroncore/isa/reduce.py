"""Reductions, scans and statistics of VectorE; the reduction across partitions of GpSimdE."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuroncore import core as running
from neuroncore.checks import operands as check
from neuroncore.checks.base import refuse
from neuroncore.hardware import MIN_CYCLES, Engine
from neuroncore.isa.elementwise import apply
from neuroncore.isa.enums import reduce_cmd
from neuroncore.isa.instruction import Scalar, instruction
from neuroncore.isa.values import (
    flat,
    free_cycles,
    raw,
    read,
    scalar,
    started,
    write,
    write_bits,
    write_reduced,
)
from neuroncore.memory.tensor import NkiTensor
from neuroncore.nl import operators
from neuroncore.timing.trace import InstructionTemplate

_STARTED = ("reset_reduce", "reduce", "load_reduce")
_NARROW = (
    *("bfloat16", "float16", "float32", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"),
    *("uint8", "uint16", "int8", "int16"),
)


@instruction("dst")
def tensor_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    axis: int | list[int] | tuple[int, ...],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> InstructionTemplate:
    """dst = data [P, ...] reduced over its last free dimensions, in fp32; bit operators on bits.

    `axis` are the last dimensions, as 2 or (1, 2) of three; dst has the elements of the others,
    whether `keepdims` or not. `negate` changes the sign. Raises NkiValidationError.
    """
    opcode, alu = "tensor_reduce", operators.alu(op)
    check.reducing_operator(opcode, alu)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple([a % data.ndim if -data.ndim <= a < 0 else a for a in axes])
    check.trailing_axes(data, axes)
    if negate and alu.kind == "bitvec":
        refuse(f"{opcode}: negate is for arithmetic operators; got nl.{alu.name}")
    check.vector(opcode, Engine.VECTOR, dst=dst, data=data)
    left = int(np.prod(data.shape[1 : min(axes)], dtype=int))
    check.free_size(opcode, "dst", dst, left)
    bits = check.bit_reduction(opcode, alu, dst, data)

    def run(dst: NkiTensor, data: NkiTensor) -> None:
        result = operators.reduce(alu, raw(data) if bits else read(data), axes)
        (write_bits if bits else write)(dst, -result if negate else result)

    n = data.geometry.elements
    half = alu.name in ("add", "maximum") and dst.dtype == data.dtype == "bfloat16"
    return InstructionTemplate(Engine.VECTOR, max(MIN_CYCLES, n / 2 if half else n), run)


@instruction("dst")
def tensor_partition_reduce(
    dst: NkiTensor, op: Any, data: NkiTensor, name: str | None = None
) -> InstructionTemplate:
    """dst [1, ...] = data [P, ...] reduced over its partitions on GpSimdE, both in SBUF.

    `op` is nl.add, nl.maximum, nl.bitwise_and or nl.bitwise_or.
    """
    opcode, alu = "tensor_partition_reduce", operators.alu(op)
    check.reducing_operator(opcode, alu, "add", "maximum", "bitwise_and", "bitwise_or")
    check.in_sbuf(opcode, dst=dst)
    check.in_sbuf(opcode, data=data)
    check.partition_count(opcode, "dst", dst, 1)
    check.same_elements(opcode, dst=dst, data=data)
    bits = check.bit_reduction(opcode, alu, dst, data)

    def run(dst: NkiTensor, data: NkiTensor) -> None:
        result = operators.reduce(alu, raw(data) if bits else read(data), (0,))
        (write_bits if bits else write)(dst, result)

    return InstructionTemplate(Engine.GPSIMD, free_cycles(data), run)


@instruction("dst", "reduce_res")
def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Scalar | None,
    reduce_op: Any,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_init: Scalar | None = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> InstructionTemplate:
    """dst = data op0 operand0, and its reduction over the free dimensions into reduce_res [P, 1].

    `operand0` and `reduce_init` are numbers or tiles [P, 1]. `reduce_op` is nl.add, nl.multiply,
    nl.maximum or nl.minimum, of the fp32 results before they are rounded to dst's dtype.
    """
    opcode, core = "tensor_scalar_reduce", running.active()
    alu, reducer = operators.alu(op0), operators.alu(reduce_op)
    check.arithmetic(opcode, alu)
    if reverse0:  # documented as not supported yet
        refuse(f"{opcode}: reverse0 is not supported; swap the operands or use tensor_scalar")
    check.unary_operand(opcode, alu, operand0)
    check.reducing_operator(opcode, reducer, "add", "multiply", "maximum", "minimum")
    check.reduction_command(opcode, reduce_cmd, *_STARTED)
    check.reduction_start(opcode, "reduce_init", reduce_cmd, reduce_init is not None)
    check.elementwise(opcode, Engine.VECTOR, dst=dst, data=data)
    check.scalars(opcode, data, (operand0, reduce_init), "float32")
    check.reduction_result(opcode, data, reduce_cmd, reduce_res)

    def run(
        dst: NkiTensor,
        data: NkiTensor,
        operand0: Scalar | None,
        reduce_res: NkiTensor | None,
        reduce_init: Scalar | None,
    ) -> None:
        value = apply(alu, read(data), operand0, False)
        command, sign = reduce_cmd.name, reduce_res_negate
        write_reduced(core, dst, reduce_res, data, command, reducer, value, reduce_init, sign)

    # "a small additional performance cost" for the reduction: as activation_reduce's (SDK 2.26)
    return InstructionTemplate(Engine.VECTOR, free_cycles(dst, data) + MIN_CYCLES, run)


@instruction("dst")
def tensor_scalar_cumulative(
    dst: NkiTensor,
    src: NkiTensor,
    op0: Any,
    op1: Any,
    imm0: Scalar,
    imm1: Scalar | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    name: str | None = None,
) -> InstructionTemplate:
    """dst[i] = register = (src[i] op0 imm0) op1 register, along the free dimensions, in fp32.

    `imm0` is a number or a fp32 tile [P, 1]; `imm1`, with reduce_cmd.load_reduce, is where the
    register starts. `op1` is nl.add, subtract, multiply, maximum or minimum. No 32-bit integers.
    """
    opcode, core = "tensor_scalar_cumulative", running.active()
    first, second = operators.alu(op0), operators.alu(op1)
    check.arithmetic(opcode, first)
    check.unary_operand(opcode, first, imm0)
    allowed = "add", "subtract", "multiply", "maximum", "minimum"
    check.reducing_operator(opcode, second, *allowed)
    check.reduction_command(opcode, reduce_cmd, *_STARTED)
    check.reduction_start(opcode, "imm1", reduce_cmd, imm1 is not None)
    check.elementwise(opcode, Engine.VECTOR, dst=dst, src=src)
    check.dtype_in(opcode, "dst", dst, *_NARROW)
    check.dtype_in(opcode, "src", src, *_NARROW)
    check.scalars(opcode, src, (imm0, imm1), "float32")

    def run(dst: NkiTensor, src: NkiTensor, imm0: Scalar, imm1: Scalar | None) -> None:
        value = flat(apply(first, read(src), imm0, False))
        register = started(core, src, reduce_cmd.name, second, imm1)
        result = np.empty_like(value)
        for i in range(value.shape[1]):
            register[:] = result[:, i] = second.apply(value[:, i], register)
        write(dst, result)

    return InstructionTemplate(Engine.VECTOR, free_cycles(dst), run)


@instruction("dst")
def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: Scalar,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> InstructionTemplate:
    """dst[i] = (data0[i] op0 dst[i - 1]) op1 data1[i] along the free dimensions, in fp32.

    dst[-1] is `initial`, a number or a tile [P, 1]. `reverse` swaps the sides of its operator.
    At most one input is in PSUM.
    """
    opcode = "tensor_tensor_scan"
    first, second = operators.alu(op0), operators.alu(op1)
    check.binary_arithmetic(opcode, "op0", first)
    check.binary_arithmetic(opcode, "op1", second)
    check.elementwise(opcode, Engine.VECTOR, dst=dst, data0=data0, data1=data1)
    check.one_psum_input(opcode, data0, data1)
    check.scalars(opcode, data0, [initial])

    def run(dst: NkiTensor, data0: NkiTensor, data1: NkiTensor, initial: Scalar) -> None:
        a, b = flat(read(data0)), flat(read(data1))
        last = np.broadcast_to(scalar(initial, a), (len(a), 1))[:, 0]
        result = np.empty_like(a)
        for i in range(a.shape[1]):
            x = first.apply(last, a[:, i]) if reverse0 else first.apply(a[:, i], last)
            last = second.apply(b[:, i], x) if reverse1 else second.apply(x, b[:, i])
            result[:, i] = last
        write(dst, result)

    cycles = max(MIN_CYCLES, 2 * data0.geometry.elements)
    return InstructionTemplate(Engine.VECTOR, cycles, run)


@instruction("dst")
def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> InstructionTemplate:
    """dst [P, 6] = count, mean, variance * count of the even, then of the odd elements of data.

    data [P, up to 512]; fp32 inside.
    """
    check.vector("bn_stats", Engine.VECTOR, dst=dst, data=data)
    check.free_size("bn_stats", "dst", dst, 6)
    check.free_range("bn_stats", "data", data, 1, 512)

    def run(dst: NkiTensor, data: NkiTensor) -> None:
        values = flat(read(data))
        stats = np.zeros((len(values), 6), np.float32)
        for at, half in ((0, values[:, ::2]), (3, values[:, 1::2])):
            if half.shape[1]:
                mean = half.mean(1, keepdims=True)
                stats[:, at] = half.shape[1]
                stats[:, at + 1] = mean[:, 0]
                stats[:, at + 2] = np.square(half - mean).sum(1)
        write(dst, stats)

    return InstructionTemplate(Engine.VECTOR, free_cycles(data), run)


@instruction("dst")
def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> InstructionTemplate:
    """dst [P, 2] = mean and variance from data [P, 3n], triples of `bn_stats`."""
    check.vector("bn_aggr", Engine.VECTOR, dst=dst, data=data)
    check.free_size("bn_aggr", "dst", dst, 2)
    if data.geometry.elements % 3:
        refuse(f"bn_aggr: data must have a multiple of 3 elements per partition; got {data}")

    def run(dst: NkiTensor, data: NkiTensor) -> None:
        count, means, spread = np.moveaxis(flat(read(data)).reshape(data.shape[0], -1, 3), 2, 0)
        total = count.sum(1)
        mean = (count * means).sum(1) / total
        between = (count * np.square(means - mean[:, None])).sum(1)
        write(dst, np.stack([mean, (spread.sum(1) + between) / total], 1))

    return InstructionTemplate(Engine.VECTOR, free_cycles(data), run)


@instruction("dst")
def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> InstructionTemplate:
    """dst [P, 8] = the 8 largest of src [P, 8 to 16384], in descending order."""
    check.vector("max8", Engine.VECTOR, dst=dst, src=src)
    check.free_size("max8", "dst", dst, 8)
    check.dimensions("max8", "dst", dst, 2)
    check.free_range("max8", "src", src, 8, 16384)
    check.dimensions("max8", "src", src, 3)

    def run(dst: NkiTensor, src: NkiTensor) -> None:
        write(dst, np.sort(flat(read(src)), axis=1)[:, :-9:-1])

    return InstructionTemplate(Engine.VECTOR, free_cycles(src), run)


@instruction("dst", "reduce_res")
def exponential(
    dst: NkiTensor,
    src: NkiTensor,
    max_value: Scalar = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    reduce_init: Scalar = 0.0,
    name: str | None = None,
) -> InstructionTemplate:
    """dst = exp(src - max_value) on VectorE, NeuronCore-v4; the sums go to reduce_res [P, 1].

    `max_value`, and `reduce_init` with reduce_cmd.load_reduce, are numbers or fp32 tiles [P, 1].
    """
    opcode, core = "exponential", running.active()
    check.feature(opcode, core.machine, "exponential", "it", "use activation(op=nl.exp, bias=)")
    check.reduction_command(opcode, reduce_cmd, "idle", *_STARTED)
    if reduce_cmd.name != "load_reduce":
        started_at = isinstance(reduce_init, NkiTensor) or reduce_init != 0
        check.reduction_start(opcode, "reduce_init", reduce_cmd, started_at)
    check.elementwise(opcode, Engine.VECTOR, dst=dst, src=src)
    check.scalars(opcode, src, (max_value, reduce_init), "float32")
    check.reduction_result(opcode, src, reduce_cmd, reduce_res)
    check.float_dtype(opcode, "reduce_res", reduce_res)
    function, add = operators.ACTIVATION["exp"], operators.ALU["add"]

    def run(
        dst: NkiTensor,
        src: NkiTensor,
        max_value: Scalar,
        reduce_res: NkiTensor | None,
        reduce_init: Scalar,
    ) -> None:
        value = read(src)
        value = function.apply(value - scalar(max_value, value))
        write_reduced(core, dst, reduce_res, src, reduce_cmd.name, add, value, reduce_init)

    return InstructionTemplate(Engine.VECTOR, free_cycles(dst), run)
