"""ScalarE's activation functions, with sums of their results."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.hardware import MIN_CYCLES, Engine
from neuronmm_ops.neuroncore import checks
from neuronmm_ops.neuroncore import core as running
from neuronmm_ops.neuroncore.core import Core
from neuronmm_ops.neuroncore.isa.common import (
    Scalar,
    free_cycles,
    on_chip,
    read,
    reduce_cmd,
    scalar,
    write,
)
from neuronmm_ops.neuroncore.isa.operands import (
    flat,
    given,
    marks_of,
    registers,
    tiles_of,
)
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.neuroncore.nl import operators
from neuronmm_ops.neuroncore.timing.trace import Form, NkiInstruction


def activation(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Scalar | None = None,
    scale: Scalar = 1.0,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    name: str | None = None,
) -> NkiInstruction:
    """dst = op(data * scale + bias) on ScalarE, fp32 inside; scale and bias numbers or [P, 1].

    With `reduce_op=nl.add` the results are also summed over the free dimensions into the
    accumulator, as `reduce_cmd` says, and written to `reduce_res` [P, 1].
    """
    core = running.active("nki.isa.activation")
    outputs = (dst,) if reduce_res is None else (dst, reduce_res)
    return core.issue(
        _activation,
        (*outputs, data, *tiles_of(bias, scale)),
        (op, marks_of(bias, scale), reduce_op, reduce_cmd, len(outputs)),
        name,
    )


def _activation(core: Core, *rest: Any) -> Form:
    *operands, op, marks, reduce_op, command, outputs = rest
    dst, data = operands[0], operands[outputs]
    function = operators.activation(op)
    on_chip("activation", dst=dst, data=data)
    checks.same_partitions("activation", {"dst": dst, "data": data})
    checks.same_elements("activation", {"dst": dst, "data": data})
    checks.activation_bias(core.machine, marks[0], function.name)
    names = [n for n, mark in zip(("bias", "scale"), marks, strict=True) if mark is None]
    for operand, t in zip(names, operands[outputs + 1 :], strict=True):
        checks.scalar_operand("activation", operand, t, data.geometry.partitions)
        checks.activation_operand(operand, t)
    for t in operands[1:outputs]:
        checks.scalar_operand("activation", "reduce_res", t, data.geometry.partitions)
    checks.activation_reduce(reduce_op, command.name)
    sums = command.name != "idle"

    def run(*operands: NkiTensor) -> None:
        dst, data = operands[0], operands[outputs]
        bias, scale = given(marks, operands[outputs + 1 :])
        value = read(data)
        if isinstance(scale, NkiTensor) or scale != 1.0:
            value = value * scalar(scale, value)
        if bias is not None:
            value = value + scalar(bias, value)
        value = function.apply(value)
        kept = registers(core, data, "scalar")
        if command.name in ("reset", "reset_reduce"):
            kept[:] = 0
        if command.name in ("reduce", "reset_reduce"):
            kept += flat(value).sum(1)
        write(dst, value)
        if outputs == 2:
            write(operands[1], kept)

    cycles = free_cycles(dst, data) + (MIN_CYCLES if sums or outputs == 2 else 0)
    return Form("activation", Engine.SCALAR, cycles, writes=outputs, run=run)


def activation_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    reduce_op: Any,
    reduce_res: NkiTensor,
    bias: Scalar | None = None,
    scale: Scalar = 1.0,
    name: str | None = None,
) -> NkiInstruction:
    """`activation` that also sums its results over the free dimensions into reduce_res [P, 1]."""
    return activation(
        dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd.reset_reduce, name
    )
