"""TensorE: matmul and transpose, with their rules (NKI 0.6 documentation, `nki.isa`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuroncore import core as running
from neuroncore.checks import operands as check
from neuroncore.checks.base import note, refuse
from neuroncore.hardware import (
    MIN_CYCLES,
    PSUM_ALIGN_BYTES,
    PSUM_BANK_BYTES,
    Engine,
    Machine,
)
from neuroncore.isa import indirection
from neuroncore.isa.enums import engine, engine_of, matmul_perf_mode, option
from neuroncore.isa.instruction import instruction
from neuroncore.isa.values import PSUM, SBUF, convert, raw, read
from neuroncore.memory.tensor import NkiTensor
from neuroncore.timing.trace import InstructionTemplate, NkiInstruction

_FLOAT8 = ("float8_e4m3", "float8_e5m2", "float8_e4m3fn")
_DTYPES = (*_FLOAT8, "bfloat16", "float16", "tfloat32", "float32")


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
    if not (dst.index is stationary.index is moving.index is None):
        return indirection.issue(nc_matmul, "nc_matmul", {**locals()})
    core = running.active("nki.isa.nc_matmul")
    addition = adding(core, "nc_matmul", dst, accumulate)
    if accumulate is False and dst.geometry.region in dst.storage.summed:
        _note_unread(core, dst)
    operands = (dst, stationary, moving)
    onezero = is_stationary_onezero or is_moving_onezero
    options = (addition, onezero, is_transpose, (tile_position, tile_size), perf_mode)
    done = core.record(core.template(_matmul, operands, options), operands)
    dst.storage.summed.add(dst.geometry.region)
    return done if name is None else done.named(name)


def adding(
    core: running.SimulatedCore, opcode: str, dst: NkiTensor, accumulate: bool | None
) -> tuple[bool, bool]:
    """Whether a matmul adds to dst, and whether only to a part of it, which is then cleared."""
    if accumulate:
        if dst.geometry.region in dst.storage.summed:  # which is what the checks ask for
            return True, False
        check.memory(opcode, "dst", dst, PSUM)
        _check_accumulates(core.machine, opcode, dst)
        return True, False
    storage, region = dst.storage, dst.geometry.region
    if accumulate is not None:
        return False, False
    if region in storage.summed:
        _note_read(core, dst)
        return True, False
    if not storage.summed.intersection(dst.geometry.layout.overlaps[region]):
        _note_filled(core, opcode, dst)
        return False, False
    if core.execute:
        _clear_unsummed(dst)
    return True, True


def _note_unread(core: running.SimulatedCore, dst: NkiTensor) -> None:
    """Say that a sum is overwritten which nothing has used since a matmul wrote it."""
    template, (storage, *_), _, line = core.trace.records[dst.storage.last]
    wrote = storage is dst.storage and template.engine is Engine.TENSOR
    if wrote and template.regions[0] == dst.geometry.region:
        note(
            f"nc_matmul: accumulate=False overwrites {dst}, which the matmul at line {line} wrote "
            "and nothing has read; accumulate=(k > 0) adds the parts of a contraction"
        )


def _note_read(core: running.SimulatedCore, dst: NkiTensor) -> None:
    """Say that accumulate=None goes on with a sum that another engine has read already."""
    template, storages, _, line = core.trace.records[dst.storage.last]
    used = zip(storages, template.regions, strict=False)
    if template.engine is not Engine.TENSOR and (dst.storage, dst.geometry.region) in used:
        note(
            f"nc_matmul: accumulate=None adds to {dst}, whose sum line {line} has read; give "
            "accumulate=False to begin another, or True to go on"
        )


def _note_filled(core: running.SimulatedCore, opcode: str, dst: NkiTensor) -> None:
    """Say that accumulate=None begins a sum where another engine has just written."""
    if dst.storage.last < 0:
        return
    template, (storage, *_), _, line = core.trace.records[dst.storage.last]
    if template.engine is Engine.TENSOR or storage is not dst.storage:
        return
    if template.regions[0] in dst.geometry.layout.overlaps[dst.geometry.region]:
        note(
            f"{opcode}: accumulate=None overwrites {dst}, which {template.opcode} wrote at line "
            f"{line}; the device may add to it, which is undefined before NeuronCore-v4; give "
            "accumulate=False"
        )


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
    addition: tuple[bool, bool],
    onezero: bool,
    is_transpose: bool,
    tile: tuple[tuple[int, int], tuple[int, int]],
    perf_mode: matmul_perf_mode,
) -> InstructionTemplate:
    opcode, machine = "nc_matmul", running.active().machine
    (adds, partly), (position, size) = addition, tile
    perf_mode = option(opcode, "perf_mode", matmul_perf_mode, perf_mode)
    check.memory(opcode, "dst", dst, PSUM)
    check.memory(opcode, "stationary", stationary, SBUF)
    check.memory(opcode, "moving", moving, SBUF)
    double = perf_mode is matmul_perf_mode.double_row
    if double:
        _check_double_row(machine, stationary, moving, bool(size), is_transpose)
    rows = 2 if double else 1
    _check_shapes(machine, dst, stationary, moving, rows)
    native_transpose = is_transpose and machine.has("native_transposes")
    if native_transpose:
        check.same_dtype("nc_matmul(is_transpose=True)", dst, stationary)
        check.same_dtype("nc_matmul(is_transpose=True)", dst, moving)
    else:
        _check_dtypes(machine, dst, stationary, moving)
    check_result(opcode, machine, dst)
    k = stationary.geometry.partitions
    m, n = dst.geometry.partitions, dst.geometry.elements
    check_tiling(opcode, machine, position, size, dst, stationary, moving)
    _check_partitions(opcode, machine, stationary=stationary, moving=moving, dst=dst)
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
    _check_transpose(opcode, chosen, data, dst)
    for operand, t in (("dst", dst), ("data", data)):
        check.memory(opcode, operand, t, SBUF, PSUM)
        check.start_partition(opcode, operand, t)
    native = machine.has("native_transposes")
    if native or chosen is Engine.VECTOR:
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
        _check_partitions(opcode, machine, data=data, dst=dst)
        check_result(opcode, machine, dst)
        passes = _passes(data, data, False, native)
        cycles = max(p, min(MIN_CYCLES, f)) * passes

    def run(dst: NkiTensor, data: NkiTensor) -> None:
        out, source = raw(dst), raw(data)
        values = source if out.dtype == source.dtype else convert(dst, read(data))
        out[...] = values.reshape(p, f).T.reshape(out.shape)

    return InstructionTemplate(chosen, cycles, run)


# rules


def _check_shapes(machine: Machine, dst: NkiTensor, a: NkiTensor, b: NkiTensor, rows: int) -> None:
    """K <= 128 on partitions of both, M <= 128, N within the machine's limit, dst [M, N].

    `rows` is how many contraction rows a partition holds: 2 with double_row, else 1.
    """
    k, k2 = a.geometry.partitions, b.geometry.partitions
    m, n = a.geometry.elements // rows, b.geometry.elements // rows
    if k != k2:
        refuse(
            f"nc_matmul: contraction is on partitions; stationary has {k} and moving {k2}; "
            "slice both to the same"
        )
    if m > 128:
        refuse(f"nc_matmul: stationary free size {m} exceeds 128; tile it by 128")
    limit = machine.moving_max * (2 if dst.dtype == "bfloat16" and machine.has("bf16_psum") else 1)
    if n > limit:
        refuse(
            f"nc_matmul: moving free size {n} exceeds {limit} on {machine.target}; tile it by "
            f"{limit}"
        )
    if (dst.geometry.partitions, dst.geometry.elements) != (m, n):
        refuse(
            f"nc_matmul: dst must be [{m}, {n}], the free sizes of stationary and moving; got {dst}"
        )


def _check_dtypes(machine: Machine, dst: NkiTensor, a: NkiTensor, b: NkiTensor) -> None:
    """Legal operand dtypes and pairs, and the dtype of the result."""
    for name, t in (("stationary", a), ("moving", b)):
        check.dtype_in("nc_matmul", name, t, *_DTYPES)
    wide = [t.dtype in ("float32", "tfloat32") for t in (a, b)]
    if wide[0] != wide[1]:
        refuse(
            f"nc_matmul: float32 pairs only with float32 or tfloat32; got {a.dtype} and {b.dtype}; "
            "cast one"
        )
    if {a.dtype, b.dtype} >= {"float8_e4m3", "float8_e4m3fn"}:
        refuse("nc_matmul: float8_e4m3 and float8_e4m3fn cannot be mixed; cast one")
    if machine.has("bf16_psum"):
        check.dtype_in("nc_matmul", "dst", dst, "float32", "bfloat16")
    elif dst.dtype != "float32":
        refuse(f"nc_matmul: dst must be float32 on {machine.target}; {dst} is {dst.dtype}")


def check_result(opcode: str, machine: Machine, dst: NkiTensor) -> None:
    """A TensorE result is aligned, and stays within one 2 KiB bank before NeuronCore-v4."""
    box = dst.geometry.layout.boxes[dst.geometry.region]
    if box.byte % PSUM_ALIGN_BYTES:
        refuse(
            f"{opcode}: dst {dst} starts at byte {box.byte} of its partitions; PSUM is written "
            f"from multiples of {PSUM_ALIGN_BYTES} (tile_size.psum_min_align), pad what is before"
        )
    if machine.has("cross_bank_psum"):
        return
    first, last = box.byte // PSUM_BANK_BYTES, (box.byte_end - 1) // PSUM_BANK_BYTES
    if first != last:
        refuse(
            f"{opcode}: dst {dst} covers bytes {box.byte} to {box.byte_end} per partition and "
            "crosses a 2048-byte PSUM bank; start tiles on multiples of 512 fp32"
        )


def _check_partitions(opcode: str, machine: Machine, **operands: NkiTensor) -> None:
    """Operands start on partitions of a PE tile: of 64 x 64 before NeuronCore-v3, then 32 x 32."""
    for operand, t in operands.items():
        check.start_partition(opcode, operand, t)
        if t.geometry.start % machine.pe_tile:
            refuse(
                f"{opcode}: {operand} {t} starts at partition {t.geometry.start}; TensorE of "
                f"{machine.target} addresses partitions from 0 or 64, tiles of 32 rows need "
                "NeuronCore-v3; lay it out so"
            )


def _check_accumulates(machine: Machine, opcode: str, dst: NkiTensor) -> None:
    """accumulate=True needs a result to add to: a matmul's, before NeuronCore-v4."""
    layout, region, storage = dst.geometry.layout, dst.geometry.region, dst.storage
    if layout.covers(region, storage.summed):
        return
    remedy = "start with accumulate=False, for example accumulate=(k > 0)"
    if not storage.covered(region):
        refuse(f"{opcode}: accumulate=True on {dst}, which no matmul wrote; {remedy}")
    if not machine.has("filled_psum"):
        note(
            f"{opcode}: accumulate=True adds to {dst}, which no matmul wrote: another engine's "
            f"values (memset, nl.zeros) are undefined there before NeuronCore-v4; {remedy}"
        )


def check_tiling(
    opcode: str,
    machine: Machine,
    position: tuple[int, ...],
    size: tuple[int, ...],
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
) -> None:
    """Row and column tiles of 32, 64 or 128 that the stationary tile fits; positions in line.

    A PE row reads its partition of SBUF, a PE column writes its partition of PSUM: nki-library's
    column tiles write partitions from start_column on.
    """
    if len(position) != len(size) or len(size) not in (0, 2):
        refuse(f"{opcode}: set tile_position and tile_size both; got {position} and {size}")
    if not size:
        return
    sizes = [s for s in (32, 64, 128) if s >= machine.pe_tile]
    if any(s not in sizes for s in size):
        refuse(f"{opcode}: tile_size {size} must be of {sizes} on {machine.target}")
    if any(p % s or p + s > 128 for p, s in zip(position, size, strict=True)):
        refuse(
            f"{opcode}: tile_position {position} must be multiples of tile_size {size}, below 128"
        )
    k, m = stationary.geometry.partitions, dst.geometry.partitions
    if k > size[0] or m > size[1]:
        refuse(f"{opcode}: stationary [{k}, {m}] exceeds tile_size {size}")
    for axis, operand, t in ((0, "stationary", stationary), (0, "moving", moving), (1, "dst", dst)):
        first, start = position[axis], t.geometry.start
        if not first <= start <= first + size[axis] - t.geometry.partitions:
            refuse(
                f"{opcode}: {operand} {t} starts at partition {start}; the tile's "
                f"{('rows', 'columns')[axis]} {first} to {first + size[axis] - 1} reach the "
                "partitions of these numbers; lay it there, or choose another tile_position"
            )


def _check_double_row(
    machine: Machine, a: NkiTensor, b: NkiTensor, tiled: bool, is_transpose: bool
) -> None:
    """fp8 only, [K, 2, free] on both sides, NeuronCore-v3 on, no column tiling, no transposes.

    It takes as long as 16 bits of half the contraction (Trainium2 guide, double FP8 matmul).
    """
    check.feature("nc_matmul", machine, "double_row", "perf_mode.double_row", "leave it out")
    for name, t in (("stationary", a), ("moving", b)):
        check.dtype_in("nc_matmul", f"double_row {name}", t, *_FLOAT8)
        if t.ndim < 3 or t.shape[1] != 2:
            refuse(f"nc_matmul: double_row {name} must be [K, 2, free]; got {t}")
    if is_transpose:
        refuse("nc_matmul: double_row cannot be combined with is_transpose; drop one")
    if tiled:
        refuse("nc_matmul: double_row cannot be combined with tile_position/tile_size; drop one")


def _check_transpose(opcode: str, engine: Engine, data: NkiTensor, dst: NkiTensor) -> None:
    """TensorE transposes up to 128 x 128, VectorE up to 32 x 32; dst is [free, partitions]."""
    p, f = data.geometry.partitions, data.geometry.elements
    limit = 128 if engine is Engine.TENSOR else 32
    if max(p, f) > limit:
        refuse(f"{opcode}: {engine.name} transposes up to {limit} x {limit}; data is [{p}, {f}]")
    if (dst.geometry.partitions, dst.geometry.elements) != (f, p):
        refuse(f"{opcode}: dst must be [{f}, {p}]; got {dst}")
