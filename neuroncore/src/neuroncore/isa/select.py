"""Selections: copies by predicate and by range on VectorE, patterns on GpSimdE."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from neuroncore import core as running
from neuroncore.checks import operands as check
from neuroncore.checks.base import refuse
from neuroncore.hardware import MIN_CYCLES, Engine
from neuroncore.isa.enums import reduce_cmd
from neuroncore.isa.instruction import Scalar, instruction
from neuroncore.isa.values import (
    PSUM,
    convert,
    flat,
    free_cycles,
    raw,
    read,
    scalar,
    write,
    write_integers,
    write_reduced,
)
from neuroncore.memory.tensor import NkiTensor
from neuroncore.nl import operators
from neuroncore.nl.elementary import equal, maximum
from neuroncore.timing.trace import InstructionTemplate

SelectPattern = Sequence[Sequence[int]]

_GPSIMD_START = 150
"""Cycles that iota and affine_select take before the first element (SDK 2.26)."""
_FP32_MIN = -3.4028234663852886e38


@instruction("dst")
def tensor_copy_predicated(
    dst: NkiTensor,
    src: Scalar,
    predicate: NkiTensor,
    reverse_pred: bool = False,
    name: str | None = None,
) -> InstructionTemplate:
    """dst = src where predicate is not 0, and stays as it is elsewhere, on VectorE.

    `src` is a number or a tile of dst's dtype; predicate is uint8, uint16 or uint32. At most one
    of the two is in PSUM. dst must have been written before.
    """
    opcode, tiles = "tensor_copy_predicated", {"dst": dst, "predicate": predicate, "src": src}
    check.elementwise(opcode, Engine.VECTOR, **tiles)
    check.dtype_in(opcode, "predicate", predicate, "uint8", "uint16", "uint32")
    if isinstance(src, NkiTensor):
        check.same_dtype(opcode, dst, src)
    check.one_psum_input(opcode, src, predicate)
    check.number(opcode, "src", src)

    def run(dst: NkiTensor, src: Scalar, predicate: NkiTensor) -> None:
        target = raw(dst)
        selected = (raw(predicate) == 0) == reverse_pred
        if isinstance(src, NkiTensor):
            source = raw(src).reshape(target.shape)
        else:
            source = convert(dst, np.full(1, src, np.float32))
        np.copyto(target, source, where=selected.reshape(target.shape))

    n = dst.geometry.elements
    in_psum = any(t.geometry.memory is PSUM for t in filter(check.is_tile, tiles.values()))
    cost = max(MIN_CYCLES, n if in_psum else 2 * n)
    return InstructionTemplate(Engine.VECTOR, cost, run, reads_dst=True)


@instruction("dst")
def iota(
    dst: NkiTensor,
    pattern: SelectPattern,
    offset: int = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> InstructionTemplate:
    """dst[p, w, z, y, x] = offset + p * channel_multiplier + w * step_w + ... + x * step_x.

    `pattern` is one to four pairs [step, count], outermost first, whose counts multiply to dst's
    elements per partition. int32 arithmetic on GpSimdE, converted to dst's dtype; dst in SBUF.
    """
    check.in_sbuf("iota", dst=dst)
    values = _affine("iota", dst, pattern, offset, channel_multiplier)

    def run(dst: NkiTensor) -> None:
        write_integers(dst, values)

    return InstructionTemplate(Engine.GPSIMD, _GPSIMD_START + dst.geometry.elements, run)


@instruction("dst")
def affine_select(
    dst: NkiTensor,
    pattern: SelectPattern,
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Any = equal,
    offset: int = 0,
    name: str | None = None,
) -> InstructionTemplate:
    """dst = on_true_tile where cmp_op(iota, 0), else the number on_false_value, on GpSimdE in SBUF.

    The pattern is `iota`'s. `cmp_op` is nl.equal, nl.not_equal, nl.less, nl.greater_equal, ...
    """
    opcode, compare = "affine_select", operators.alu(cmp_op)
    check.comparison(opcode, "cmp_op", compare, *check.COMPARISONS, "not_equal")
    check.number(opcode, "on_false_value", on_false_value)
    check.in_sbuf(opcode, dst=dst, on_true_tile=on_true_tile)
    check.same_elements(opcode, dst=dst, on_true_tile=on_true_tile)
    values = _affine(opcode, dst, pattern, offset, channel_multiplier)
    selected = compare.apply(values, 0) != 0
    fill = np.float32(on_false_value)

    def run(dst: NkiTensor, on_true_tile: NkiTensor) -> None:
        target, source = raw(dst), raw(on_true_tile)
        mask = selected.reshape(target.shape)
        if dst.dtype == on_true_tile.dtype:
            other = convert(dst, np.full(1, fill, np.float32))
            target[...] = np.where(mask, source.reshape(target.shape), other)
        else:
            write(dst, np.where(mask, read(on_true_tile).reshape(target.shape), fill))

    return InstructionTemplate(Engine.GPSIMD, _GPSIMD_START + dst.geometry.elements, run)


def _affine(
    opcode: str, dst: NkiTensor, pattern: SelectPattern, offset: int, channel: int
) -> np.ndarray:
    """The affine expression [P, elements], int64 that wrapped as int32; empty in trace mode."""
    pairs = [(step, count) for step, count in pattern]
    if not 1 <= len(pairs) <= 4 or any(n < 1 for _, n in pairs):
        refuse(f"{opcode}: pattern is one to four [step, count] pairs; got {pairs}")
    total, elements = prod([n for _, n in pairs]), dst.geometry.elements
    if total != elements:
        refuse(
            f"{opcode}: pattern {pairs} has {total} elements and dst {elements} per "
            "partition; make them equal"
        )
    steps = {f"step {i}": step for i, (step, _) in enumerate(pairs)}
    check.int32(opcode, offset=offset, channel_multiplier=channel, **steps)
    if not running.active().execute:
        return np.zeros(0, np.int64)
    values = offset + channel * np.arange(dst.geometry.partitions, dtype=np.int64)
    for step, count in pairs:
        values = values[..., None] + step * np.arange(count, dtype=np.int64)
    return flat(values).astype(np.int32).astype(np.int64)


@instruction("dst", "reduce_res")
def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Any,
    comp_op1: Any,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Any = maximum,
    range_start: int = 0,
    on_false_value: float = _FP32_MIN,
    name: str | None = None,
) -> InstructionTemplate:
    """dst = on_true_tile where i op0 bound0 and i op1 bound1, else the lowest fp32, on VectorE.

    i is range_start plus the index of the element in its partition; the bounds are fp32 tiles
    [P, 1] and on_true_tile is of a float type. The maximum goes to reduce_res [P, 1].
    NeuronCore-v3 and later.
    """
    opcode, core = "range_select", running.active()
    check.feature(opcode, core.machine, "range_select", "it", "use iota and tensor_copy_predicated")
    first, second = operators.alu(comp_op0), operators.alu(comp_op1)
    check.comparison(opcode, "comp_op0", first, *check.COMPARISONS)
    check.comparison(opcode, "comp_op1", second, *check.COMPARISONS)
    reducer = _maximum(opcode, on_true_tile, reduce_op, reduce_cmd, reduce_res)
    if np.float32(on_false_value) != np.float32(_FP32_MIN):
        seen = f"the lowest float32; got {on_false_value!r}"
        refuse(f"{opcode}: on_false_value must be {_FP32_MIN!r}, {seen}")
    check.elementwise(opcode, Engine.VECTOR, dst=dst, on_true_tile=on_true_tile)
    check.float_dtype(opcode, "on_true_tile", on_true_tile)
    check.scalars(opcode, on_true_tile, (bound0, bound1), "float32")
    elements = on_true_tile.geometry.elements
    # indices are compared in float32, exact below 2**24
    if not isinstance(range_start, int) or abs(range_start) + elements > 2**24:
        refuse(
            f"{opcode}: range_start {range_start!r} plus {elements} elements must be ints within "
            "2**24; compare against shifted bounds"
        )

    def run(
        dst: NkiTensor,
        on_true_tile: NkiTensor,
        bound0: NkiTensor,
        bound1: NkiTensor,
        reduce_res: NkiTensor | None,
    ) -> None:
        value = flat(read(on_true_tile))
        index = np.arange(range_start, range_start + elements, dtype=np.float32)[None, :]
        low = first.apply(index, scalar(bound0, value))
        high = second.apply(index, scalar(bound1, value))
        value = np.where((low != 0) & (high != 0), value, np.float32(on_false_value))
        write_reduced(core, dst, reduce_res, on_true_tile, reduce_cmd.name, reducer, value)

    return InstructionTemplate(Engine.VECTOR, free_cycles(dst), run)


@instruction("dst", "reduce_res")
def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: Scalar,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    reduce_op: Any = maximum,
    reverse_pred: bool = False,
    name: str | None = None,
) -> InstructionTemplate:
    """dst = on_true where predicate is not 0, else on_false: a number or a tile [P, 1]; VectorE.

    The maximum goes to reduce_res [P, 1] as reduce_cmd says. predicate is an 8 or 16-bit integer;
    at most one of predicate and on_true is in PSUM. NeuronCore-v3 and later.
    """
    opcode, core = "select_reduce", running.active()
    check.feature(
        opcode, core.machine, "select_reduce", "it", "use tensor_copy_predicated and tensor_reduce"
    )
    reducer = _maximum(opcode, on_true, reduce_op, reduce_cmd, reduce_res)
    check.elementwise(opcode, Engine.VECTOR, dst=dst, predicate=predicate, on_true=on_true)
    check.one_psum_input(opcode, predicate, on_true)
    check.dtype_in(opcode, "predicate", predicate, "int8", "uint8", "int16", "uint16")
    if on_true.dtype in ("tfloat32", "int32", "uint32"):
        seen = f"{on_true} is {on_true.dtype}"
        refuse(f"{opcode}: on_true must not be tfloat32, int32, uint32; {seen}")
    check.scalars(opcode, on_true, [on_false])
    check.number(opcode, "on_false", on_false)
    check.float_dtype(opcode, "reduce_res", reduce_res)

    def run(
        dst: NkiTensor,
        predicate: NkiTensor,
        on_true: NkiTensor,
        on_false: Scalar,
        reduce_res: NkiTensor | None,
    ) -> None:
        value = flat(read(on_true))
        selected = (flat(raw(predicate)) == 0) == reverse_pred
        value = np.where(selected, value, scalar(on_false, value))
        write_reduced(core, dst, reduce_res, on_true, reduce_cmd.name, reducer, value)

    return InstructionTemplate(Engine.VECTOR, free_cycles(dst), run)


def _maximum(
    opcode: str, data: NkiTensor, op: Any, command: reduce_cmd, result: NkiTensor | None
) -> operators.AluOp:
    """The one operator that selections reduce with."""
    reducer = operators.alu(op)
    check.reducing_operator(opcode, reducer, "maximum")
    check.reduction_command(opcode, command, "idle", "reset_reduce", "reduce")
    check.reduction_result(opcode, data, command, result)
    return reducer
