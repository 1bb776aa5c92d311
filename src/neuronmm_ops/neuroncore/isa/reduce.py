"""Reductions, scans and statistics of VectorE; the reduction across partitions of GpSimdE."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuronmm_ops.hardware import MIN_CYCLES, Engine
from neuronmm_ops.neuroncore import checks
from neuronmm_ops.neuroncore import core as running
from neuronmm_ops.neuroncore.core import Core
from neuronmm_ops.neuroncore.isa.common import (
    Scalar,
    free_cycles,
    raw,
    read,
    reduce_cmd,
    scalar,
    write,
)
from neuronmm_ops.neuroncore.isa.elementwise import apply
from neuronmm_ops.neuroncore.isa.operands import (
    accumulate,
    checked,
    flat,
    given,
    in_sbuf,
    marks_of,
    reduction_tile,
    registers,
    scalar_tiles,
    start_accumulators,
    tiles_of,
)
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.neuroncore.nl import operators
from neuronmm_ops.neuroncore.timing.trace import Form, NkiInstruction

_CUMULATIVE = ("add", "subtract", "multiply", "maximum", "minimum")
_FLOAT8 = ("float8_e4m3", "float8_e4m3fn", "float8_e5m2")
_NARROW = (
    "bfloat16", "float16", "float32", *_FLOAT8, "uint8", "uint16", "int8", "int16"
)  # fmt: skip


def tensor_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    axis: int | list[int] | tuple[int, ...],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """dst = data [P, ...] reduced over its last free dimensions, in fp32; bit operators on bits.

    `axis` are the last dimensions, as 2 or (1, 2) of three; dst has the elements of the others,
    whether `keepdims` or not. `negate` changes the sign. Raises NkiValidationError.
    """
    core = running.active("nki.isa.tensor_reduce")
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    return core.issue(_tensor_reduce, (dst, data), (op, axes, negate, keepdims), name)


def _tensor_reduce(
    core: Core,
    dst: NkiTensor,
    data: NkiTensor,
    op: Any,
    axes: tuple[int, ...],
    negate: bool,
    keepdims: bool,
) -> Form:
    alu = operators.alu(op)
    checks.reducing_operator("tensor_reduce", alu)
    axes = tuple([a % data.ndim if -data.ndim <= a < 0 else a for a in axes])
    checks.trailing_axes(data, axes)
    checks.negated(alu, negate)
    checked("tensor_reduce", Engine.VECTOR, dst=dst, data=data)
    left = int(np.prod(data.shape[1 : min(axes)], dtype=int))
    checks.free_size("tensor_reduce", "dst", dst, left)
    bitvec = alu.kind == "bitvec"
    if bitvec:
        checks.bitvec_dtypes("tensor_reduce", alu, dst, data)
        checks.bit_patterns("tensor_reduce", dst, data)

    def run(dst: NkiTensor, data: NkiTensor) -> None:
        result = operators.reduce(alu, raw(data) if bitvec else read(data), axes)
        if bitvec:
            target = raw(dst)
            target[...] = result.astype(target.dtype).reshape(target.shape)
        else:
            write(dst, -result if negate else result)

    n = data.geometry.elements
    half = alu.name in ("add", "maximum") and dst.dtype == data.dtype == "bfloat16"
    return Form("tensor_reduce", Engine.VECTOR, max(MIN_CYCLES, n / 2 if half else n), run=run)


def tensor_partition_reduce(
    dst: NkiTensor, op: Any, data: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """dst [1, ...] = data [P, ...] reduced over its partitions on GpSimdE, both in SBUF.

    `op` is nl.add, nl.maximum, nl.bitwise_and or nl.bitwise_or.
    """
    core = running.active("nki.isa.tensor_partition_reduce")
    return core.issue(_partition_reduce, (dst, data), (op,), name)


def _partition_reduce(core: Core, dst: NkiTensor, data: NkiTensor, op: Any) -> Form:
    opcode = "tensor_partition_reduce"
    alu = operators.alu(op)
    checks.reducing_operator(opcode, alu, "add", "maximum", "bitwise_and", "bitwise_or")
    in_sbuf(opcode, dst=dst)
    in_sbuf(opcode, data=data)
    checks.partition_count(opcode, "dst", dst, 1)
    checks.same_elements(opcode, {"dst": dst, "data": data})
    bitvec = alu.kind == "bitvec"
    if bitvec:
        checks.bitvec_dtypes(opcode, alu, dst, data)
        checks.bit_patterns(opcode, dst, data)

    def run(dst: NkiTensor, data: NkiTensor) -> None:
        result = operators.reduce(alu, raw(data) if bitvec else read(data), (0,))
        if bitvec:
            target = raw(dst)
            target[...] = result.astype(target.dtype).reshape(target.shape)
        else:
            write(dst, result)

    return Form(opcode, Engine.GPSIMD, free_cycles(data), run=run)


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
) -> NkiInstruction:
    """dst = data op0 operand0, and its reduction over the free dimensions into reduce_res [P, 1].

    `operand0` and `reduce_init` are numbers or tiles [P, 1]. `reduce_op` is nl.add, nl.multiply,
    nl.maximum or nl.minimum, of the fp32 results before they are rounded to dst's dtype.
    """
    core = running.active("nki.isa.tensor_scalar_reduce")
    scalars = (operand0, reduce_init)
    options = (op0, reduce_op, reverse0, reduce_cmd, reduce_res_negate, marks_of(*scalars))
    outputs = (dst,) if reduce_res is None else (dst, reduce_res)
    return core.issue(
        _scalar_reduce, (*outputs, data, *tiles_of(*scalars)), (*options, len(outputs)), name
    )


def _scalar_reduce(core: Core, *rest: Any) -> Form:
    opcode = "tensor_scalar_reduce"
    *operands, op0, reduce_op, reverse, command, negate, marks, outputs = rest
    dst, data, tiles = operands[0], operands[outputs], operands[outputs + 1 :]
    result = operands[1] if outputs == 2 else None
    alu, reducer = operators.alu(op0), operators.alu(reduce_op)
    checks.arithmetic(opcode, alu)
    checks.not_reversed(opcode, reverse)
    checks.unary_operand(opcode, alu, marks[0])
    checks.reducing_operator(opcode, reducer, "add", "multiply", "maximum", "minimum")
    checks.reduction_command(opcode, command, "reset_reduce", "reduce", "load_reduce")
    initial_given = marks[1] is None or marks[1][0] is not None
    checks.reduction_start(opcode, "reduce_init", command.name, initial_given)
    checked(opcode, Engine.VECTOR, dst=dst, data=data)
    checks.same_elements(opcode, {"dst": dst, "data": data})
    scalar_tiles(opcode, data, tiles, "float32")
    reduction_tile(opcode, data, command.name, result)

    def run(*operands: NkiTensor) -> None:
        operand, initial = given(marks, operands[outputs + 1 :])
        value = apply(alu, read(operands[outputs]), operand, False)
        kept = accumulate(core, operands[outputs], command.name, reducer, value, initial)
        write(operands[0], value)
        if outputs == 2:
            write(operands[1], -kept if negate else kept)

    # "a small additional performance cost" for the reduction: as activation_reduce's (SDK 2.26)
    return Form(opcode, Engine.VECTOR, free_cycles(dst, data) + MIN_CYCLES, writes=outputs, run=run)


def tensor_scalar_cumulative(
    dst: NkiTensor,
    src: NkiTensor,
    op0: Any,
    op1: Any,
    imm0: Scalar,
    imm1: Scalar | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    name: str | None = None,
) -> NkiInstruction:
    """dst[i] = register = (src[i] op0 imm0) op1 register, along the free dimensions, in fp32.

    `imm0` is a number or a fp32 tile [P, 1]; `imm1`, with reduce_cmd.load_reduce, is where the
    register starts. `op1` is nl.add, subtract, multiply, maximum or minimum. No 32-bit integers.
    """
    core = running.active("nki.isa.tensor_scalar_cumulative")
    options = (op0, op1, marks_of(imm0, imm1), reduce_cmd)
    return core.issue(_cumulative, (dst, src, *tiles_of(imm0, imm1)), options, name)


def _cumulative(core: Core, dst: NkiTensor, src: NkiTensor, *rest: Any) -> Form:
    opcode = "tensor_scalar_cumulative"
    *tiles, op0, op1, marks, command = rest
    first, second = operators.alu(op0), operators.alu(op1)
    checks.arithmetic(opcode, first)
    checks.unary_operand(opcode, first, marks[0])
    checks.reducing_operator(opcode, second, *_CUMULATIVE)
    checks.reduction_command(opcode, command, "reset_reduce", "reduce", "load_reduce")
    initial_given = marks[1] is None or marks[1][0] is not None
    checks.reduction_start(opcode, "imm1", command.name, initial_given)
    checked(opcode, Engine.VECTOR, dst=dst, src=src)
    checks.same_elements(opcode, {"dst": dst, "src": src})
    checks.dtype_in(opcode, "dst", dst, *_NARROW)
    checks.dtype_in(opcode, "src", src, *_NARROW)
    scalar_tiles(opcode, src, tiles, "float32")

    def run(dst: NkiTensor, src: NkiTensor, *tiles: NkiTensor) -> None:
        operand, initial = given(marks, tiles)
        value = flat(apply(first, read(src), operand, False))
        kept = registers(core, src)
        start_accumulators(kept, command.name, second, initial)
        result = np.empty_like(value)
        for i in range(value.shape[1]):
            kept[:] = result[:, i] = second.apply(value[:, i], kept)
        write(dst, result)

    return Form(opcode, Engine.VECTOR, free_cycles(dst), run=run)


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
) -> NkiInstruction:
    """dst[i] = (data0[i] op0 dst[i - 1]) op1 data1[i] along the free dimensions, in fp32.

    dst[-1] is `initial`, a number or a tile [P, 1]. `reverse` swaps the sides of its operator.
    At most one input is in PSUM.
    """
    core = running.active("nki.isa.tensor_tensor_scan")
    options = (op0, op1, reverse0, reverse1, marks_of(initial))
    return core.issue(_scan, (dst, data0, data1, *tiles_of(initial)), options, name)


def _scan(core: Core, dst: NkiTensor, data0: NkiTensor, data1: NkiTensor, *rest: Any) -> Form:
    opcode = "tensor_tensor_scan"
    *tiles, op0, op1, reverse0, reverse1, marks = rest
    first, second = operators.alu(op0), operators.alu(op1)
    checks.binary_arithmetic(opcode, "op0", first)
    checks.binary_arithmetic(opcode, "op1", second)
    checked(opcode, Engine.VECTOR, dst=dst, data0=data0, data1=data1)
    checks.same_elements(opcode, {"dst": dst, "data0": data0, "data1": data1})
    checks.one_psum_input(opcode, data0, data1)
    scalar_tiles(opcode, data0, tiles)

    def run(dst: NkiTensor, data0: NkiTensor, data1: NkiTensor, *tiles: NkiTensor) -> None:
        a, b = flat(read(data0)), flat(read(data1))
        last = np.broadcast_to(scalar(given(marks, tiles)[0], a), (len(a), 1))[:, 0]
        result = np.empty_like(a)
        for i in range(a.shape[1]):
            x = first.apply(last, a[:, i]) if reverse0 else first.apply(a[:, i], last)
            last = second.apply(b[:, i], x) if reverse1 else second.apply(x, b[:, i])
            result[:, i] = last
        write(dst, result)

    return Form(opcode, Engine.VECTOR, max(MIN_CYCLES, 2 * data0.geometry.elements), run=run)


def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst [P, 6] = count, mean, variance * count of the even, then of the odd elements of data.

    data [P, up to 512]; fp32 inside.
    """
    core = running.active("nki.isa.bn_stats")
    return core.issue(_bn_stats, (dst, data), (), name)


def _bn_stats(core: Core, dst: NkiTensor, data: NkiTensor) -> Form:
    checked("bn_stats", Engine.VECTOR, dst=dst, data=data)
    checks.free_size("bn_stats", "dst", dst, 6)
    checks.free_range("bn_stats", "data", data, 1, 512)

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

    return Form("bn_stats", Engine.VECTOR, free_cycles(data), run=run)


def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst [P, 2] = mean and variance from data [P, 3n], triples of `bn_stats`."""
    core = running.active("nki.isa.bn_aggr")
    return core.issue(_bn_aggr, (dst, data), (), name)


def _bn_aggr(core: Core, dst: NkiTensor, data: NkiTensor) -> Form:
    checked("bn_aggr", Engine.VECTOR, dst=dst, data=data)
    checks.free_size("bn_aggr", "dst", dst, 2)
    checks.free_multiple("bn_aggr", "data", data, 3)

    def run(dst: NkiTensor, data: NkiTensor) -> None:
        count, means, spread = np.moveaxis(flat(read(data)).reshape(data.shape[0], -1, 3), 2, 0)
        total = count.sum(1)
        mean = (count * means).sum(1) / total
        between = (count * np.square(means - mean[:, None])).sum(1)
        write(dst, np.stack([mean, (spread.sum(1) + between) / total], 1))

    return Form("bn_aggr", Engine.VECTOR, free_cycles(data), run=run)


def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst [P, 8] = the 8 largest of src [P, 8 to 16384], in descending order."""
    core = running.active("nki.isa.max8")
    return core.issue(_max8, (dst, src), (), name)


def _max8(core: Core, dst: NkiTensor, src: NkiTensor) -> Form:
    checked("max8", Engine.VECTOR, dst=dst, src=src)
    checks.free_size("max8", "dst", dst, 8)
    checks.dimensions("max8", "dst", dst, 2)
    checks.free_range("max8", "src", src, 8, 16384)
    checks.dimensions("max8", "src", src, 3)

    def run(dst: NkiTensor, src: NkiTensor) -> None:
        write(dst, np.sort(flat(read(src)), axis=1)[:, :-9:-1])

    return Form("max8", Engine.VECTOR, free_cycles(src), run=run)


def exponential(
    dst: NkiTensor,
    src: NkiTensor,
    max_value: Scalar = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    reduce_init: Scalar = 0.0,
    name: str | None = None,
) -> NkiInstruction:
    """dst = exp(src - max_value) on VectorE, NeuronCore-v4; the sums go to reduce_res [P, 1].

    `max_value`, and `reduce_init` with reduce_cmd.load_reduce, are numbers or fp32 tiles [P, 1].
    """
    core = running.active("nki.isa.exponential")
    scalars = (max_value, reduce_init)
    outputs = (dst,) if reduce_res is None else (dst, reduce_res)
    options = (reduce_cmd, marks_of(*scalars), len(outputs))
    return core.issue(_exponential, (*outputs, src, *tiles_of(*scalars)), options, name)


def _exponential(core: Core, *rest: Any) -> Form:
    *operands, command, marks, outputs = rest
    dst, src, tiles = operands[0], operands[outputs], operands[outputs + 1 :]
    result = operands[1] if outputs == 2 else None
    checks.generation("exponential", core.machine, 4, "it", "use activation(op=nl.exp, bias=)")
    commands = ("idle", "reset_reduce", "reduce", "load_reduce")
    checks.reduction_command("exponential", command, *commands)
    if command.name != "load_reduce":
        initial_given = marks[1] is None or marks[1][0] != 0
        checks.reduction_start("exponential", "reduce_init", command.name, initial_given)
    checked("exponential", Engine.VECTOR, dst=dst, src=src)
    checks.same_elements("exponential", {"dst": dst, "src": src})
    scalar_tiles("exponential", src, tiles, "float32")
    reduction_tile("exponential", src, command.name, result)
    if result is not None:
        checks.float_dtype("exponential", "reduce_res", result)
    function, add = operators.ACTIVATION["exp"], operators.ALU["add"]

    def run(*operands: NkiTensor) -> None:
        largest, initial = given(marks, operands[outputs + 1 :])
        value = read(operands[outputs])
        value = function.apply(value - scalar(largest, value))
        kept = accumulate(core, operands[outputs], command.name, add, value, initial)
        write(operands[0], value)
        if outputs == 2:
            write(operands[1], kept)

    return Form("exponential", Engine.VECTOR, free_cycles(dst), writes=outputs, run=run)
