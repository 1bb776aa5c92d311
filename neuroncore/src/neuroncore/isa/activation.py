"""ScalarE's activation functions, with sums of their results."""

from __future__ import annotations

from typing import Any

from neuroncore import core as running
from neuroncore.checks import operands as check
from neuroncore.checks.base import note, refuse
from neuroncore.hardware import MIN_CYCLES, Engine
from neuroncore.isa.enums import reduce_cmd
from neuroncore.isa.instruction import Scalar, instruction
from neuroncore.isa.values import flat, free_cycles, read, registers, scalar, write
from neuroncore.memory.tensor import NkiTensor
from neuroncore.nl import operators
from neuroncore.timing.trace import InstructionTemplate, NkiInstruction


@instruction("dst", "reduce_res")
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
) -> InstructionTemplate:
    """dst = op(data * scale + bias) on ScalarE, fp32 inside; scale and bias numbers or [P, 1].

    With `reduce_op=nl.add` the results are also summed over the free dimensions into the
    accumulator, as `reduce_cmd` says, and written to `reduce_res` [P, 1].
    """
    core = running.active()
    function, command = function_of("activation", op), reduce_cmd.name
    check.elementwise("activation", Engine.SCALAR, dst=dst, data=data)
    _check_bias(core, bias, function.name)
    for operand, t in (("bias", bias), ("scale", scale), ("reduce_res", reduce_res)):
        if check.is_tile(t):
            check.scalar_operand("activation", operand, t, data.geometry.partitions)
    if isinstance(scale, NkiTensor):
        check.dtype_in("activation", "scale", scale, "float32")
    _check_reduction(reduce_op, command)
    note_idle_sum("activation", reduce_op, command, reduce_res)

    def run(
        dst: NkiTensor,
        data: NkiTensor,
        bias: Scalar | None,
        scale: Scalar,
        reduce_res: NkiTensor | None,
    ) -> None:
        value = read(data)
        if isinstance(scale, NkiTensor) or scale != 1.0:
            value = value * scalar(scale, value)
        if bias is not None:
            value = value + scalar(bias, value)
        value = function.apply(value)
        sums = registers(core, data, "scalar")
        if command in ("reset", "reset_reduce"):
            sums[:] = 0
        if command in ("reduce", "reset_reduce"):
            sums += flat(value).sum(1)
        write(dst, value)
        if reduce_res is not None:
            write(reduce_res, sums)

    reduces = command != "idle" or reduce_res is not None
    cycles = free_cycles(dst, data) + (MIN_CYCLES if reduces else 0)
    table = "" if function.name in _WITHOUT_TABLE else function.name
    return InstructionTemplate(Engine.SCALAR, cycles, run, table=table)


_WITHOUT_TABLE = ("copy", "identity", "relu")
"""Functions taken to be in every table: nki-library's kernels alternate copies with others."""


def function_of(opcode: str, op: Any) -> operators.Activation:
    """The activation function that a function of `nki.language` names."""
    try:
        return operators.activation(op)
    except TypeError as error:
        refuse(f"{opcode}: op: {error}")


def note_idle_sum(opcode: str, op: Any, command: str, result: NkiTensor | None) -> None:
    """ScalarE's reduce_res is then what earlier instructions left (nki.isa.activation)."""
    if op is not None and command == "idle" and result is not None:
        note(
            f"{opcode}: reduce_cmd.idle sums nothing, {result} gets what the accumulators held; "
            "use reduce_cmd.reset_reduce, or leave reduce_op out to read them"
        )


def _check_bias(core: running.SimulatedCore, bias: Scalar | None, op: str) -> None:
    """Before NeuronCore-v3 a bias is a tile, and reciprocal takes none."""
    target, old = core.machine.target, not core.machine.has("bias_numbers")
    if old and bias is not None and not isinstance(bias, NkiTensor):
        refuse(f"activation: bias must be a tile [P, 1] on {target}; got {bias!r}")
    if old and bias is not None and op == "reciprocal":
        refuse(f"activation: nl.reciprocal takes no bias on {target}; leave it out")
    if isinstance(bias, NkiTensor) and bias.dtype == "tfloat32":
        refuse(f"activation: bias must not be tfloat32; got {bias}; use float32")


def _check_reduction(op: Any, command: str) -> None:
    """Only sums, and not half asked for."""
    if op is not None and op.__name__ != "add":
        refuse(f"activation: reduce_op must be nl.add; got {op.__name__}")
    if command in ("reduce", "reset_reduce") and op is None:
        refuse(f"activation: reduce_cmd.{command} needs reduce_op=nl.add")
    if command == "load_reduce":
        refuse("activation: reduce_cmd.load_reduce is not one of ScalarE's; use reset_reduce")


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
        dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd.reset_reduce, name=name
    )
