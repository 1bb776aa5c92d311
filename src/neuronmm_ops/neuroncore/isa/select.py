"""Selections: copies by predicate and by range on VectorE, patterns on GpSimdE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuronmm_ops.hardware import MIN_CYCLES, Engine
from neuronmm_ops.neuroncore import checks
from neuronmm_ops.neuroncore import core as running
from neuronmm_ops.neuroncore.core import Core
from neuronmm_ops.neuroncore.isa.common import (
    PSUM,
    Scalar,
    convert,
    free_cycles,
    raw,
    read,
    reduce_cmd,
    scalar,
    write,
)
from neuronmm_ops.neuroncore.isa.operands import (
    accumulate,
    checked,
    flat,
    given,
    in_sbuf,
    marks_of,
    reduction_tile,
    scalar_tiles,
    tiles_of,
    write_integers,
)
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.neuroncore.nl import operators
from neuronmm_ops.neuroncore.nl.elementary import equal, maximum
from neuronmm_ops.neuroncore.timing.trace import Form, NkiInstruction

Pattern = Sequence[Sequence[int]]

_GPSIMD_START = 150
"""Cycles that iota and affine_select take before the first element (SDK 2.26)."""


def tensor_copy_predicated(
    dst: NkiTensor,
    src: Scalar,
    predicate: NkiTensor,
    reverse_pred: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """dst = src where predicate is not 0, and stays as it is elsewhere, on VectorE.

    `src` is a number or a tile of dst's dtype; predicate is uint8, uint16 or uint32. At most one
    of the two is in PSUM. dst must have been written before.
    """
    core = running.active("nki.isa.tensor_copy_predicated")
    operands = (dst, predicate, *tiles_of(src))
    return core.issue(_predicated, operands, (marks_of(src)[0], reverse_pred), name)


def _predicated(core: Core, dst: NkiTensor, predicate: NkiTensor, *rest: Any) -> Form:
    opcode = "tensor_copy_predicated"
    *tiles, mark, reverse = rest
    operands = {"dst": dst, "predicate": predicate, **dict(zip(("src",), tiles, strict=False))}
    checked(opcode, Engine.VECTOR, **operands)
    checks.same_elements(opcode, operands)
    checks.dtype_in(opcode, "predicate", predicate, "uint8", "uint16", "uint32")
    for src in tiles:
        checks.same_dtype(opcode, dst, src)
        checks.one_psum_input(opcode, src, predicate)
    if mark is not None:
        checks.number(opcode, "src", mark[0])

    def run(dst: NkiTensor, predicate: NkiTensor, *tiles: NkiTensor) -> None:
        target = raw(dst)
        chosen = raw(predicate) == 0 if reverse else raw(predicate) != 0
        if mark is None:
            source = raw(tiles[0]).reshape(target.shape)
        else:
            source = convert(dst, np.full(1, mark[0], np.float32))
        np.copyto(target, source, where=chosen.reshape(target.shape))

    n = dst.geometry.elements
    in_psum = any(t.geometry.memory is PSUM for t in operands.values())
    cost = max(MIN_CYCLES, n if in_psum else 2 * n)
    return Form(opcode, Engine.VECTOR, cost, keeps=True, run=run)


def iota(
    dst: NkiTensor,
    pattern: Pattern,
    offset: int = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> NkiInstruction:
    """dst[p, w, z, y, x] = offset + p * channel_multiplier + w * step_w + ... + x * step_x.

    `pattern` is one to four pairs [step, count], outermost first, whose counts multiply to dst's
    elements per partition. int32 arithmetic on GpSimdE, converted to dst's dtype; dst in SBUF.
    """
    core = running.active("nki.isa.iota")
    return core.issue(_iota, (dst,), (_pairs(pattern), offset, channel_multiplier), name)


def _iota(
    core: Core, dst: NkiTensor, pattern: tuple[tuple[int, int], ...], offset: int, channel: int
) -> Form:
    in_sbuf("iota", dst=dst)
    values = _affine(core, "iota", dst, pattern, offset, channel)

    def run(dst: NkiTensor) -> None:
        write_integers(dst, values)

    return Form("iota", Engine.GPSIMD, _GPSIMD_START + dst.geometry.elements, run=run)


def affine_select(
    dst: NkiTensor,
    pattern: Pattern,
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Any = equal,
    offset: int = 0,
    name: str | None = None,
) -> NkiInstruction:
    """dst = on_true_tile where cmp_op(iota, 0), else the number on_false_value, on GpSimdE in SBUF.

    The pattern is `iota`'s. `cmp_op` is nl.equal, nl.not_equal, nl.less, nl.greater_equal, ...
    """
    core = running.active("nki.isa.affine_select")
    options = (_pairs(pattern), channel_multiplier, on_false_value, cmp_op, offset)
    return core.issue(_affine_select, (dst, on_true_tile), options, name)


def _affine_select(
    core: Core,
    dst: NkiTensor,
    data: NkiTensor,
    pattern: tuple[tuple[int, int], ...],
    channel: int,
    fill: float,
    cmp_op: Any,
    offset: int,
) -> Form:
    compare = operators.alu(cmp_op)
    allowed = (*checks.COMPARISONS, "not_equal")
    checks.comparison("affine_select", "cmp_op", compare, *allowed)
    checks.number("affine_select", "on_false_value", fill)
    in_sbuf("affine_select", dst=dst, on_true_tile=data)
    checks.same_elements("affine_select", {"dst": dst, "on_true_tile": data})
    values = _affine(core, "affine_select", dst, pattern, offset, channel)
    chosen = compare.apply(values, 0) != 0

    def run(dst: NkiTensor, data: NkiTensor) -> None:
        target, source = raw(dst), raw(data)
        mask = chosen.reshape(target.shape)
        if dst.dtype == data.dtype:
            other = convert(dst, np.full(1, fill, np.float32))
            target[...] = np.where(mask, source.reshape(target.shape), other)
        else:
            write(dst, np.where(mask, read(data).reshape(target.shape), np.float32(fill)))

    return Form("affine_select", Engine.GPSIMD, _GPSIMD_START + dst.geometry.elements, run=run)


def _pairs(pattern: Pattern) -> tuple[tuple[int, int], ...]:
    return tuple([(step, count) for step, count in pattern])


def _affine(
    core: Core,
    opcode: str,
    dst: NkiTensor,
    pattern: tuple[tuple[int, int], ...],
    offset: int,
    channel: int,
) -> np.ndarray:
    """The affine expression [P, elements], int64 that wrapped as int32; empty in trace mode."""
    checks.affine_pattern(opcode, pattern, dst.geometry.elements)
    steps = {f"step {i}": step for i, (step, _) in enumerate(pattern)}
    checks.int32(opcode, offset=offset, channel_multiplier=channel, **steps)
    if not core.execute:
        return np.zeros(0, np.int64)
    values = offset + channel * np.arange(dst.geometry.partitions, dtype=np.int64)
    for step, count in pattern:
        values = values[..., None] + step * np.arange(count, dtype=np.int64)
    return flat(values).astype(np.int32).astype(np.int64)


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
    on_false_value: float = checks.FP32_MIN,
    name: str | None = None,
) -> NkiInstruction:
    """dst = on_true_tile where i op0 bound0 and i op1 bound1, else the lowest fp32, on VectorE.

    i is range_start plus the index of the element in its partition; the bounds are fp32 tiles
    [P, 1] and on_true_tile is of a float type. The maximum goes to reduce_res [P, 1].
    NeuronCore-v3 and later.
    """
    core = running.active("nki.isa.range_select")
    outputs = (dst,) if reduce_res is None else (dst, reduce_res)
    options = (comp_op0, comp_op1, reduce_cmd, reduce_op, range_start, on_false_value, len(outputs))
    return core.issue(_range_select, (*outputs, on_true_tile, bound0, bound1), options, name)


def _range_select(core: Core, *rest: Any) -> Form:
    opcode = "range_select"
    *operands, op0, op1, command, reduce_op, start, fill, outputs = rest
    dst, (data, *bounds) = operands[0], operands[outputs:]
    checks.generation(opcode, core.machine, 3, "it", "use iota and tensor_copy_predicated")
    tests = [operators.alu(op) for op in (op0, op1)]
    for operand, test in zip(("comp_op0", "comp_op1"), tests, strict=True):
        checks.comparison(opcode, operand, test, *checks.COMPARISONS)
    reducer = operators.alu(reduce_op)
    checks.reducing_operator(opcode, reducer, "maximum")
    checks.reduction_command(opcode, command, "idle", "reset_reduce", "reduce")
    checks.range_fill(fill)
    checked(opcode, Engine.VECTOR, dst=dst, on_true_tile=data)
    checks.same_elements(opcode, {"dst": dst, "on_true_tile": data})
    checks.float_dtype(opcode, "on_true_tile", data)
    scalar_tiles(opcode, data, bounds, "float32")
    reduction_tile(opcode, data, command.name, operands[1] if outputs == 2 else None)
    checks.range_indices(start, data.geometry.elements)

    def run(*operands: NkiTensor) -> None:
        data, *bounds = operands[outputs:]
        value = flat(read(data))
        index = np.arange(start, start + value.shape[1], dtype=np.float32)[None, :]
        low, high = [
            test.apply(index, scalar(b, value)) for test, b in zip(tests, bounds, strict=True)
        ]
        value = np.where((low != 0) & (high != 0), value, np.float32(fill))
        kept = accumulate(core, data, command.name, reducer, value)
        write(operands[0], value)
        if outputs == 2:
            write(operands[1], kept)

    return Form(opcode, Engine.VECTOR, free_cycles(dst), writes=outputs, run=run)


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
) -> NkiInstruction:
    """dst = on_true where predicate is not 0, else on_false: a number or a tile [P, 1]; VectorE.

    The maximum goes to reduce_res [P, 1] as reduce_cmd says. predicate is an 8 or 16-bit integer;
    at most one of predicate and on_true is in PSUM. NeuronCore-v3 and later.
    """
    core = running.active("nki.isa.select_reduce")
    outputs = (dst,) if reduce_res is None else (dst, reduce_res)
    options = (marks_of(on_false), reduce_cmd, reduce_op, reverse_pred, len(outputs))
    operands = (*outputs, predicate, on_true, *tiles_of(on_false))
    return core.issue(_select_reduce, operands, options, name)


def _select_reduce(core: Core, *rest: Any) -> Form:
    opcode = "select_reduce"
    *operands, marks, command, reduce_op, reverse, outputs = rest
    dst, (predicate, data, *tiles) = operands[0], operands[outputs:]
    checks.generation(opcode, core.machine, 3, "it", "use tensor_copy_predicated and tensor_reduce")
    reducer = operators.alu(reduce_op)
    checks.reducing_operator(opcode, reducer, "maximum")
    checks.reduction_command(opcode, command, "idle", "reset_reduce", "reduce")
    checked(opcode, Engine.VECTOR, dst=dst, predicate=predicate, on_true=data)
    checks.same_elements(opcode, {"dst": dst, "predicate": predicate, "on_true": data})
    checks.one_psum_input(opcode, predicate, data)
    checks.dtype_in(opcode, "predicate", predicate, "int8", "uint8", "int16", "uint16")
    checks.dtype_not_in(opcode, "on_true", data, "tfloat32", "int32", "uint32")
    scalar_tiles(opcode, data, tiles)
    if marks[0] is not None:
        checks.number(opcode, "on_false", marks[0][0])
    result = operands[1] if outputs == 2 else None
    reduction_tile(opcode, data, command.name, result)
    if result is not None:
        checks.float_dtype(opcode, "reduce_res", result)

    def run(*operands: NkiTensor) -> None:
        predicate, data, *tiles = operands[outputs:]
        value = flat(read(data))
        chosen = flat(raw(predicate)) == 0 if reverse else flat(raw(predicate)) != 0
        value = np.where(chosen, value, scalar(given(marks, tiles)[0], value))
        kept = accumulate(core, data, command.name, reducer, value)
        write(operands[0], value)
        if outputs == 2:
            write(operands[1], kept)

    return Form(opcode, Engine.VECTOR, free_cycles(dst), writes=outputs, run=run)
