"""Operands that are numbers or tiles, reductions, and the accumulator registers of engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from neuronmm_ops.hardware import PARTITIONS, Engine
from neuronmm_ops.neuroncore import checks
from neuronmm_ops.neuroncore.core import Core
from neuronmm_ops.neuroncore.isa.common import SBUF, on_chip, raw, scalar, write
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.neuroncore.nl import operators

_IDENTITY = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}


def checked(opcode: str, chosen: Engine, **operands: NkiTensor) -> None:
    """Operands on chip, where the engine reaches, with equal numbers of partitions."""
    on_chip(opcode, **operands)
    checks.engine_reaches(opcode, chosen, operands)
    checks.same_partitions(opcode, operands)


def in_sbuf(opcode: str, **operands: NkiTensor) -> None:
    """Operands in SBUF, with equal numbers of partitions."""
    for name, t in operands.items():
        checks.memory(opcode, name, t, SBUF)
        checks.start_partition(opcode, name, t)
    checks.same_partitions(opcode, operands)


def tiles_of(*values: Any) -> tuple[NkiTensor, ...]:
    """Those of the scalar operands that are tiles."""
    return tuple([v for v in values if isinstance(v, NkiTensor)])


def marks_of(*values: Any) -> tuple[tuple[Any] | None, ...]:
    """Scalar operands as options: (value,) of a number, None of a tile."""
    return tuple([None if isinstance(v, NkiTensor) else (v,) for v in values])


def given(marks: Iterable[tuple[Any] | None], tiles: Iterable[NkiTensor]) -> list[Any]:
    """The scalar operands again, from their marks and tiles."""
    left = iter(tiles)
    return [next(left) if mark is None else mark[0] for mark in marks]


def scalar_tiles(opcode: str, data: NkiTensor, tiles: Iterable[NkiTensor], *dtypes: str) -> None:
    """Tiles that stand for numbers are [P, 1], of the given dtypes if any."""
    for t in tiles:
        checks.scalar_operand(opcode, "a scalar operand", t, data.geometry.partitions)
        if dtypes:
            checks.dtype_in(opcode, "a scalar operand", t, *dtypes)


def flat(values: np.ndarray) -> np.ndarray:
    """[P, elements per partition]."""
    return values.reshape(len(values), -1)


def write_integers(dst: NkiTensor, values: np.ndarray) -> None:
    """Convert int64 values to the destination's dtype: exact or saturated, floats through fp32."""
    target = raw(dst)
    values = values.reshape(target.shape)
    if dst.dtype.is_integer:
        bounds = np.iinfo(dst.dtype.numpy)
        target[...] = values.clip(bounds.min, bounds.max)
    else:
        write(dst, values.astype(np.float32))


def reduction_tile(opcode: str, data: NkiTensor, command: str, result: NkiTensor | None) -> None:
    """reduce_res is a tile [P, 1] that something defined is written to."""
    checks.reduction_result(opcode, command, result)
    if result is not None:
        checks.scalar_operand(opcode, "reduce_res", result, data.geometry.partitions)


def registers(core: Core, data: NkiTensor, engine: str = "vector") -> np.ndarray:
    """An engine's fp32 accumulators of the partitions of `data`, NaN where undefined; a view."""
    kept = core.state.setdefault(engine, np.full(PARTITIONS, np.nan, np.float32))
    start = data.geometry.start
    return kept[start : start + data.geometry.partitions]


def start_accumulators(
    kept: np.ndarray, command: str, alu: operators.AluOp, initial: Any = None
) -> None:
    """What a reduce command does before the first result: reset, load or keep."""
    if command == "reset_reduce":
        kept[:] = _IDENTITY[alu.name]
    elif command == "load_reduce":
        kept[:] = np.reshape(scalar(initial, kept[:, None]), -1)
    elif command == "idle":
        kept[:] = np.nan


def accumulate(
    core: Core,
    data: NkiTensor,
    command: str,
    alu: operators.AluOp,
    values: np.ndarray,
    initial: Any = None,
) -> np.ndarray:
    """Reduce fp32 values over the free dimensions into the accumulators, and return them [P]."""
    kept = registers(core, data)
    start_accumulators(kept, command, alu, initial)
    if command != "idle":
        kept[:] = alu.apply(kept, operators.reduce(alu, flat(values), (1,)))
    return kept
