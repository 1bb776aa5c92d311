"""TensorE: matmul and transpose."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuronmm_ops.hardware import MIN_CYCLES, Engine
from neuronmm_ops.neuroncore import checks
from neuronmm_ops.neuroncore import core as running
from neuronmm_ops.neuroncore.core import Core
from neuronmm_ops.neuroncore.isa.common import (
    PSUM,
    SBUF,
    convert,
    engine,
    engine_of,
    matmul_perf_mode,
    on_chip,
    raw,
    read,
)
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.neuroncore.timing.trace import Form, NkiInstruction


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
        checks.memory("nc_matmul", "dst", dst, PSUM)
        checks.accumulates(dst)
        adds = True
    elif accumulate is None and storage.summed:
        adds = region in storage.summed
        if not adds and storage.summed.intersection(dst.geometry.layout.overlaps[region]):
            adds = partly = True
            if core.execute:
                _clear_unsummed(dst)
    done = core.issue(
        _matmul,
        (dst, stationary, moving),
        (
            adds,
            partly,
            is_stationary_onezero,
            is_moving_onezero,
            is_transpose,
            tile_position,
            tile_size,
            perf_mode,
        ),
        name,
    )
    storage.summed.add(region)
    return done


def _clear_unsummed(dst: NkiTensor) -> None:
    """Zero the part of an overlapping destination that no matmul wrote: adding overwrites it."""
    layout, region = dst.geometry.layout, dst.geometry.region
    summed = layout.mask(dst.storage.summed.intersection(layout.overlaps[region]))
    fresh = ~dst.geometry.bytes_of(summed)[..., 0]
    raw(dst)[fresh] = 0


def _matmul(
    core: Core,
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    adds: bool,
    partly: bool,
    stationary_onezero: bool,
    moving_onezero: bool,
    is_transpose: bool,
    position: tuple[int, int],
    size: tuple[int, int],
    perf_mode: matmul_perf_mode,
) -> Form:
    machine = core.machine
    checks.memory("nc_matmul", "dst", dst, PSUM)
    checks.memory("nc_matmul", "stationary", stationary, SBUF)
    checks.memory("nc_matmul", "moving", moving, SBUF)
    double = perf_mode is matmul_perf_mode.double_row
    if double:
        checks.double_row(machine, stationary, moving, bool(size))
    rows = 2 if double else 1
    checks.matmul_shapes(machine, dst, stationary, moving, rows)
    native_transpose = is_transpose and machine.generation >= 3
    if native_transpose:
        checks.same_dtype("nc_matmul(is_transpose=True)", dst, stationary)
        checks.same_dtype("nc_matmul(is_transpose=True)", dst, moving)
    else:
        checks.matmul_dtypes(machine, dst, stationary, moving)
    checks.psum_bank("nc_matmul", machine, dst)
    k = stationary.geometry.partitions
    m, n = dst.geometry.partitions, dst.geometry.elements
    checks.pe_pair(position, size)
    if size:
        checks.pe_tiling(machine, position, size, k, m)
    for operand, t in (("stationary", stationary), ("moving", moving), ("dst", dst)):
        checks.start_partition("nc_matmul", operand, t)
    passes = _passes(stationary, moving, stationary_onezero or moving_onezero, native_transpose)
    return Form(
        "nc_matmul",
        Engine.TENSOR,
        max(min(MIN_CYCLES, m), n) * passes,
        keeps=adds and not partly,
        flops=0 if is_transpose else 2 * rows * k * m * n,
        run=_matmul_values(rows, adds, native_transpose),
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


def nc_transpose(
    dst: NkiTensor, data: NkiTensor, engine: engine = engine.unknown, name: str | None = None
) -> NkiInstruction:
    """dst[F, P] = data[P, F].T: TensorE SBUF to PSUM up to 128 x 128, VectorE up to 32 x 32."""
    core = running.active("nki.isa.nc_transpose")
    return core.issue(_transpose, (dst, data), (engine,), name)


def _transpose(core: Core, dst: NkiTensor, data: NkiTensor, asked: engine) -> Form:
    p, f = data.geometry.partitions, data.geometry.elements
    moves = dst.geometry.memory is PSUM and data.geometry.memory is SBUF
    default = Engine.TENSOR if moves else Engine.VECTOR
    chosen = engine_of(asked, default)
    checks.engine_runs("nc_transpose", chosen, Engine.TENSOR, Engine.VECTOR)
    checks.transpose_tile("nc_transpose", chosen, data, dst)
    on_chip("nc_transpose", dst=dst, data=data)
    if core.machine.generation >= 3 or chosen is Engine.VECTOR:
        checks.same_dtype("nc_transpose", dst, data)
    cycles: float = max(MIN_CYCLES, f)
    if chosen is Engine.TENSOR:
        checks.memory("nc_transpose", "data", data, SBUF)
        checks.memory("nc_transpose", "dst", dst, PSUM)
        checks.psum_bank("nc_transpose", core.machine, dst)
        cycles = max(p, min(MIN_CYCLES, f)) * _passes(
            data, data, False, core.machine.generation >= 3
        )

    def run(dst: NkiTensor, data: NkiTensor) -> None:
        out, source = raw(dst), raw(data)
        values = source if out.dtype == source.dtype else convert(dst, read(data))
        out[...] = values.reshape(p, f).T.reshape(out.shape)

    return Form("nc_transpose", chosen, cycles, run=run)
