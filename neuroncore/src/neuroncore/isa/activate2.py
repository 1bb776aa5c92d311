"""ScalarE of NeuronCore-v4: two operators, a function and a reduction in one instruction."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuroncore import core as running
from neuroncore.checks import operands as check
from neuroncore.checks.base import refuse
from neuroncore.hardware import MIN_CYCLES, Engine
from neuroncore.isa.activation import function_of, note_idle_sum
from neuroncore.isa.enums import reduce_cmd
from neuroncore.isa.instruction import Scalar, instruction
from neuroncore.isa.values import flat, free_cycles, read, registers, scalar, write
from neuroncore.memory.tensor import NkiTensor
from neuroncore.nl import operators
from neuroncore.timing.trace import InstructionTemplate

_PAIRS = {
    ("multiply", "add"), ("multiply", "subtract"), ("multiply", "bypass"),
    ("add", "bypass"), ("subtract", "bypass"), ("bypass", "bypass"),
}  # fmt: skip
_FIRST = {"add": 0.0, "maximum": -np.inf, "minimum": np.inf, "abs_max": 0.0, "abs_min": np.inf}
"""What a reset leaves in the accumulators, by reduce_op."""


@instruction("dst", "reduce_res")
def activate2(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    imm0: Scalar,
    imm1: Scalar,
    op0: Any,
    op1: Any,
    relu_param: Scalar = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    name: str | None = None,
) -> InstructionTemplate:
    """dst = op((data op0 imm0) op1 imm1) on ScalarE, fp32 inside; NeuronCore-v4.

    `reverse0` and `reverse1` swap the sides of op0 and op1. imm0, imm1 and relu_param, the slope
    of nl.prelu below 0, are numbers or tiles [P, 1]. With `reduce_op` the results are also reduced
    over the free dimensions into the accumulators of ScalarE, as `reduce_cmd` says, and the
    accumulators are written to reduce_res [P, 1].
    """
    opcode, core = "activate2", running.active()
    check.feature(opcode, core.machine, "activate2", "it", "use tensor_scalar, then activation")
    check.elementwise(opcode, Engine.SCALAR, dst=dst, data=data)
    check.scalars(opcode, data, (imm0, imm1, relu_param))
    first, second = (operators.alu(o) if o is not None else operators.ALU["bypass"]
                     for o in (op0, op1))  # fmt: skip
    _check_operators(first.name, second.name, reverse0, reverse1)
    if check.is_tile(imm0) and check.is_tile(imm1):
        check.same_dtype(opcode, imm0, imm1)
    function, command = function_of(opcode, op), reduce_cmd.name
    sloped = function.name == "prelu"
    if not sloped and (check.is_tile(relu_param) or relu_param != 0):
        refuse(f"{opcode}: relu_param is nl.prelu's; nl.{function.name} takes none, leave it out")
    reducer = _reducer(reduce_op, command)
    note_idle_sum(opcode, reduce_op, command, reduce_res)
    if reduce_res is not None:
        check.scalar_operand(opcode, "reduce_res", reduce_res, data.geometry.partitions)

    def run(
        dst: NkiTensor,
        data: NkiTensor,
        imm0: Scalar,
        imm1: Scalar,
        relu_param: Scalar,
        reduce_res: NkiTensor | None,
    ) -> None:
        value = read(data)
        for alu, operand, reverse in ((first, imm0, reverse0), (second, imm1, reverse1)):
            if alu.name != "bypass":
                other = scalar(operand, value)
                value = alu.apply(other, value) if reverse else alu.apply(value, other)
        if sloped:
            value = np.where(value < 0, value * scalar(relu_param, value), value)
        else:
            value = function.apply(value)
        sums = registers(core, data, "scalar")
        if command in ("reset", "reset_reduce"):
            sums[:] = _FIRST[reducer] if reducer else 0
        if command in ("reduce", "reset_reduce"):
            assert reducer is not None
            sums[:] = operators.ALU[reducer].apply(sums, _reduced(reducer, flat(value)))
        write(dst, value)
        if reduce_res is not None:
            write(reduce_res, sums)

    reduces = command != "idle" or reduce_res is not None
    cycles = free_cycles(dst, data) + (MIN_CYCLES if reduces else 0)
    return InstructionTemplate(Engine.SCALAR, cycles, run)


def _check_operators(op0: str, op1: str, reverse0: bool, reverse1: bool) -> None:
    if (op0, op1) not in _PAIRS:
        legal = ", ".join([f"({a}, {b})" for a, b in sorted(_PAIRS)])
        refuse(f"activate2: (op0, op1) must be one of {legal}; got ({op0}, {op1})")
    for operand, op, reverse in (("0", op0, reverse0), ("1", op1, reverse1)):
        if reverse and op == "bypass":
            refuse(f"activate2: reverse{operand} needs op{operand}, which is nl.bypass; drop it")


def _reducer(op: Any, command: str) -> str | None:
    if command == "load_reduce":
        refuse(f"activate2: reduce_cmd.{command} is not one of ScalarE's; use reset_reduce")
    if op is None:
        if command in ("reduce", "reset_reduce"):
            refuse(f"activate2: reduce_cmd.{command} needs a reduce_op, as nl.add")
        return None
    name = operators.alu(op).name
    if name not in _FIRST:
        legal = ", ".join([f"nl.{n}" for n in _FIRST])
        refuse(f"activate2: reduce_op must be one of {legal}; got nl.{name}")
    return name


def _reduced(op: str, values: np.ndarray) -> np.ndarray:
    """[P, n] reduced to [P]; abs_max and abs_min keep the sign of what they find."""
    if op in ("abs_max", "abs_min"):
        sizes = np.abs(values)
        at = sizes.argmax(1) if op == "abs_max" else sizes.argmin(1)
        return values[np.arange(len(values)), at]
    return operators.reduce(operators.ALU[op], values, (1,))
