"""Rules of shapes in reductions and scans.

Source: NKI 0.6 documentation, `nki.isa`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neuronmm_ops.neuroncore.checks.base import refuse

if TYPE_CHECKING:
    from neuronmm_ops.neuroncore.memory.tensor import NkiTensor
    from neuronmm_ops.neuroncore.nl.operators import AluOp


COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")


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


def free_multiple(opcode: str, operand: str, t: NkiTensor, of: int) -> None:
    """The number of elements per partition is a multiple."""
    if t.geometry.elements % of:
        refuse(f"{opcode}: {operand} must have a multiple of {of} elements per partition; got {t}")


def dimensions(opcode: str, operand: str, t: NkiTensor, most: int) -> None:
    """No more dimensions than the instruction encodes."""
    if t.ndim > most:
        refuse(f"{opcode}: {operand} has at most {most} dimensions; got {t}; merge with reshape")


def partition_count(opcode: str, operand: str, t: NkiTensor, wanted: int) -> None:
    """A fixed number of partitions."""
    if t.geometry.partitions != wanted:
        refuse(f"{opcode}: {operand} must have {wanted} partitions; got {t}")


def sixteen_partitions(opcode: str, operand: str, t: NkiTensor) -> None:
    """Whole GpSimd cores: 16 partitions each."""
    if t.geometry.partitions % 16:
        refuse(f"{opcode}: {operand} must have a multiple of 16 partitions; got {t}")


def reducing_operator(opcode: str, alu: AluOp, *allowed: str) -> None:
    """The operator is one that the instruction reduces with."""
    if (allowed and alu.name not in allowed) or not alu.reducible:
        names = ", ".join([f"nl.{n}" for n in allowed]) or "a reducible one, as nl.add"
        refuse(f"{opcode}: nl.{alu.name} does not reduce; use {names}")


def binary_arithmetic(opcode: str, operand: str, alu: AluOp) -> None:
    """An arithmetic operator with two inputs."""
    if alu.kind != "arithmetic" or alu.arity != 2:
        refuse(f"{opcode}: {operand} must be a binary arithmetic operator; got nl.{alu.name}")


def trailing_axes(data: NkiTensor, axes: tuple[int, ...]) -> None:
    """The last free dimensions, without gaps and without the partition."""
    legal = [tuple(range(first, data.ndim)) for first in range(1, data.ndim)]
    if tuple(sorted(axes)) not in legal:
        refuse(
            f"tensor_reduce: axis {axes} of {data} must be the last free dimensions, one of "
            f"{', '.join(map(str, legal))}; permute the view, or transpose to reduce partitions"
        )


def negated(alu: AluOp, negate: bool) -> None:
    """Bit patterns have no sign to change."""
    if negate and alu.kind == "bitvec":
        refuse(f"tensor_reduce: negate is for arithmetic operators; got nl.{alu.name}")


def bit_patterns(opcode: str, dst: NkiTensor, src: NkiTensor) -> None:
    """Bit operators neither widen nor narrow."""
    if dst.dtype.itemsize != src.dtype.itemsize:
        refuse(
            f"{opcode}: a bit operator keeps the element size; dst is {dst.dtype} and data "
            f"{src.dtype}; use one size"
        )


def reduction_command(opcode: str, command: Any, *allowed: str) -> None:
    """The instruction knows the command."""
    if getattr(command, "name", None) not in allowed:
        names = ", ".join([f"reduce_cmd.{n}" for n in allowed])
        refuse(f"{opcode}: reduce_cmd must be one of {names}; got {command!r}")


def reduction_start(opcode: str, operand: str, command: str, given: bool) -> None:
    """An initial value comes with load_reduce, and only with it."""
    if given != (command == "load_reduce"):
        refuse(f"{opcode}: {operand} and reduce_cmd.load_reduce come together; set both or neither")


def reduction_result(opcode: str, command: str, result: NkiTensor | None) -> None:
    """An idle accumulator holds nothing to write."""
    if command == "idle" and result is not None:
        refuse(
            f"{opcode}: reduce_res with reduce_cmd.idle is undefined; use reduce_cmd.reset_reduce"
        )


def not_reversed(opcode: str, reverse: bool) -> None:
    """Documented as not supported yet."""
    if reverse:
        refuse(f"{opcode}: reverse0 is not supported; swap the operands or use tensor_scalar")


def unary_operand(opcode: str, alu: AluOp, mark: Any) -> None:
    """A unary operator takes no operand: None or 0. `mark` is (value,) of a number."""
    if alu.arity == 1 and (mark is None or mark[0] not in (None, 0)):
        refuse(f"{opcode}: nl.{alu.name} is unary; operand0 must be None or 0")
    if alu.arity == 2 and mark is not None and mark[0] is None:
        refuse(f"{opcode}: nl.{alu.name} needs operand0, a number or a tile [P, 1]")
