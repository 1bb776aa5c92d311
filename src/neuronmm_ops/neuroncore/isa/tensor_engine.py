"""TensorE: matmul and transpose."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuronmm_ops.hardware import MIN_CYCLES, Engine
from neuronmm_ops.neuroncore import core as running
from neuronmm_ops.neuroncore.checks import operands as check
from neuronmm_ops.neuroncore.checks import tensor_engine as pe_check
from neuronmm_ops.neuroncore.checks.base import refuse
from neuronmm_ops.neuroncore.isa.enums import engine, engine_of, matmul_perf_mode
from neuronmm_ops.neuroncore.isa.instruction import instruction
from neuronmm_ops.neuroncore.isa.values import PSUM, SBUF, convert, raw, read
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.neuroncore.timing.trace import InstructionTemplate, NkiInstruction


def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, int] | tuple[()] = (),
    tile_size: tuple[int, int] | tuple[()] = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
    name: str | None = None,
) -> NkiInstruction:
    """dst[M, N] = or += stationary[K, M].T @ moving[K, N], fp32 inside; SBUF to PSUM.

    `accumulate`: False overwrites, True adds to what a matmul wrote, None overwrites what no
    matmul wrote yet and adds elsewhere. Raises NkiValidationError.
    """
    core = running.active("nki.isa.nc_matmul")
    storage, region = dst.storage, dst.geometry.region
    adds = partly = False
    if accumulate:
        check.memory("nc_matmul", "dst", dst, PSUM)
        pe_check.accumulates(dst)
        adds = True
    elif accumulate is None and storage.summed:
        adds = region in storage.summed
        if not adds and storage.summed.intersection(dst.geometry.layout.overlaps[region]):
            adds = partly = True
            if core.execute:
                _clear_unsummed(dst)
    operands = (dst, stationary, moving)
    onezero = is_stationary_onezero or is_moving_onezero
    options = (adds, partly, onezero, is_transpose, tile_position, tile_size, perf_mode)
    done = core.record(core.template(_matmul, operands, options), operands)
    storage.summed.add(region)
    return done


def _clear_unsummed(dst: NkiTensor) -> None:
    """Zero the part of an overlapping destination that no matmul wrote: adding overwrites it."""
    layout, region = dst.geometry.layout, dst.geometry.region
    summed = layout.mask(dst.storage.summed.intersection(layout.overlaps[region]))
    fresh = ~dst.geometry.bytes_of(summed)[..., 0]
    raw(dst)[fresh] = 0


def _matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    adds: bool,
    partly: bool,
    onezero: bool,
    is_transpose: bool,
    position: tuple[int, int],
    size: tuple[int, int],
    perf_mode: matmul_perf_mode,
) -> InstructionTemplate:
    opcode, machine = "nc_matmul", running.active().machine
    check.memory(opcode, "dst", dst, PSUM)
    check.memory(opcode, "stationary", stationary, SBUF)
    check.memory(opcode, "moving", moving, SBUF)
    double = perf_mode is matmul_perf_mode.double_row
    if double:
        pe_check.double_row(machine, stationary, moving, bool(size))
    rows = 2 if double else 1
    pe_check.matmul_shapes(machine, dst, stationary, moving, rows)
    native_transpose = is_transpose and machine.generation >= 3
    if native_transpose:
        check.same_dtype("nc_matmul(is_transpose=True)", dst, stationary)
        check.same_dtype("nc_matmul(is_transpose=True)", dst, moving)
    else:
        pe_check.matmul_dtypes(machine, dst, stationary, moving)
    pe_check.psum_bank(opcode, machine, dst)
    k = stationary.geometry.partitions
    m, n = dst.geometry.partitions, dst.geometry.elements
    pe_check.pe_tiling(machine, position, size, k, m)
    pe_check.pe_partitions(opcode, machine, stationary=stationary, moving=moving, dst=dst)
    passes = _passes(stationary, moving, onezero, native_transpose)
    return InstructionTemplate(
        Engine.TENSOR,
        max(min(MIN_CYCLES, m), n) * passes,
        _matmul_values(rows, adds, native_transpose),
        opcode,
        reads_dst=adds and not partly,
        flops=0 if is_transpose else 2 * rows * k * m * n,
        pe_tile=(position[0], size[0], position[1], size[1]) if size else None,
    )


def _passes(a: NkiTensor, b: NkiTensor, onezero: bool, transpose: bool) -> int:
    """fp32 takes 4 passes; "up to 2x faster" with a 0/1 operand or as a native transpose."""
    if "float32" not in (a.dtype, b.dtype):
        return 1
    return 2 if onezero or transpose else 4


def _matmul_values(rows: int, adds: bool, transpose: bool) -> Any:
    def run(dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor) -> None:
        out = raw(dst)
        if transpose:  # bit-exact: the identity only routes
            source, identity = raw(stationary), read(moving)
            order = identity.reshape(len(identity), -1).argmax(0)
            out[...] = source.reshape(len(source), -1)[order].T.reshape(out.shape)
            return
        a, b = read(stationary), read(moving)
        k = a.shape[0] * rows
        left, right = a.reshape(k, -1).T, b.reshape(k, -1)
        if out.ndim == 2 and out.dtype == np.float32:
            if adds:
                out += left @ right
            else:
                np.matmul(left, right, out=out)
            return
        product = (left @ right).reshape(out.shape)
        out[...] = convert(dst, read(dst) + product if adds else product)

    return run


@instruction("dst")
def nc_transpose(
    dst: NkiTensor, data: NkiTensor, engine: engine = engine.unknown, name: str | None = None
) -> InstructionTemplate:
    """dst[F, P] = data[P, F].T: TensorE SBUF to PSUM up to 128 x 128, VectorE up to 32 x 32.

    Both have one dtype; before NeuronCore-v3 TensorE writes float32.
    """
    opcode, machine = "nc_transpose", running.active().machine
    p, f = data.geometry.partitions, data.geometry.elements
    moves = dst.geometry.memory is PSUM and data.geometry.memory is SBUF
    engines = (Engine.TENSOR, Engine.VECTOR) if moves else (Engine.VECTOR, Engine.TENSOR)
    chosen = engine_of(opcode, engine, *engines)
    pe_check.transpose_tile(opcode, chosen, data, dst)
    for operand, t in (("dst", dst), ("data", data)):
        check.memory(opcode, operand, t, SBUF, PSUM)
        check.start_partition(opcode, operand, t)
    if machine.generation >= 3 or chosen is Engine.VECTOR:
        check.same_dtype(opcode, dst, data)
    elif dst.dtype != "float32":
        refuse(
            f"{opcode}: dst must be float32 on {machine.target}; {dst} is {dst.dtype}, and TensorE "
            "transposes into 16 bits from NeuronCore-v3 on; copy it to 16 bits afterwards"
        )
    cycles: float = max(MIN_CYCLES, f)
    if chosen is Engine.TENSOR:
        check.memory(opcode, "data", data, SBUF)
        check.memory(opcode, "dst", dst, PSUM)
        pe_check.pe_partitions(opcode, machine, data=data, dst=dst)
        pe_check.psum_bank(opcode, machine, dst)
        passes = _passes(data, data, False, machine.generation >= 3)
        cycles = max(p, min(MIN_CYCLES, f)) * passes

    def run(dst: NkiTensor, data: NkiTensor) -> None:
        out, source = raw(dst), raw(data)
        values = source if out.dtype == source.dtype else convert(dst, read(data))
        out[...] = values.reshape(p, f).T.reshape(out.shape)

    return InstructionTemplate(chosen, cycles, run)
