"""Microscaling formats of NeuronCore-v4: quantisation on VectorE, matmul on TensorE.

A packed element holds four 4- or 8-bit floats, the first in its lowest bits. Packed elements of 8
partitions, 32 values, share a scale, a power of two stored as its biased exponent (OCP
Microscaling Formats 1.0, E8M0). Scales of 32 partitions of data, a quadrant, lie in 4 partitions
of the same quadrant, which begin at its partition 0, 4, 8 or 12 (NKI 0.6 `nki.isa.quantize_mx`,
MXFP guide).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from neuroncore import core as running
from neuroncore.checks import operands as check
from neuroncore.checks import views
from neuroncore.checks.base import refuse
from neuroncore.dtypes import DType
from neuroncore.hardware import MIN_CYCLES, PARTITIONS, Engine
from neuroncore.isa import indirection
from neuroncore.isa.tensor_engine import adding, check_result, check_tiling
from neuroncore.isa.values import PSUM, SBUF, convert, flat, raw, read
from neuroncore.memory.tensor import NkiTensor
from neuroncore.timing.trace import InstructionTemplate, NkiInstruction

PACKED = 4
"""Values in an element."""
_GROUP_PARTITIONS = 8
_QUADRANT = 32
_SCALES = _QUADRANT // _GROUP_PARTITIONS
_SCALE_DTYPES = ("float8_e8m0fnu", "uint8")
_BIAS, _NAN = 127, 255  # of E8M0
_FLOATS = {
    "float8_e5m2_x4": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e4m3fn_x4": np.dtype(ml_dtypes.float8_e4m3fn),
    "float4_e2m1fn_x4": np.dtype(ml_dtypes.float4_e2m1fn),
}
_LARGEST_EXPONENT = {"float8_e5m2_x4": 15, "float8_e4m3fn_x4": 8}


def quantize_mx(
    dst: NkiTensor, src: NkiTensor, dst_scale: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """dst [P, F / 4] = src [P, F] over its scale; dst_scale has a scale per 8 partitions and 4 F.

    On VectorE in SBUF, NeuronCore-v4. src is bfloat16 or float16, P a multiple of 32; dst is
    float8_e5m2_x4 or float8_e4m3fn_x4, dst_scale float8_e8m0fnu or uint8. The scale of a group is
    2^(floor(log2 of its largest magnitude) - (E - 1)), E the largest exponent of dst's format, 15
    or 8, and 2^-127 where all are 0. With `simulate(follow="kernels")` it is half of that, the
    sample conversion of the OCP specification, which saturates. A group with an infinity or NaN
    gets the scale NaN.
    """
    core = running.active("nki.isa.quantize_mx")
    check.feature("quantize_mx", core.machine, "mx", "it", "quantise before the kernel")
    _check_tiles("quantize_mx", dst=dst, src=src, dst_scale=dst_scale)
    operands = (dst, scale_rows("quantize_mx", "dst_scale", dst_scale, dst), src)
    done = core.record(core.template(_quantize, operands), operands).named(name)
    # published kernels send whole scale tiles: the rest of these quadrants counts as written
    quadrants = dst_scale[: min(dst_scale.shape[0], dst.shape[0])]
    quadrants.storage.written.add(quadrants.geometry.region)
    return done


def _quantize(dst: NkiTensor, scales: NkiTensor, src: NkiTensor) -> InstructionTemplate:
    opcode, follow = "quantize_mx", running.active().launch.follow
    for operand, t in (("dst", dst), ("src", src)):
        check.memory(opcode, operand, t, SBUF)
        check.start_partition(opcode, operand, t)
    check.dtype_in(opcode, "src", src, "bfloat16", "float16")
    check.dtype_in(opcode, "dst", dst, *_LARGEST_EXPONENT)
    check.same_partitions(opcode, {"dst": dst, "src": src})
    if src.geometry.elements != PACKED * dst.geometry.elements:
        refuse(
            f"{opcode}: dst must have a quarter of src's elements per partition, {src} has "
            f"{src.geometry.elements}; got {dst}"
        )
    top = _LARGEST_EXPONENT[dst.dtype] - (1 if follow == "documentation" else 0)

    def run(dst: NkiTensor, scales: NkiTensor, src: NkiTensor) -> None:
        values = flat(read(src))
        p, f = values.shape
        groups = values.reshape(p // _GROUP_PARTITIONS, _GROUP_PARTITIONS, f // PACKED, PACKED)
        largest = np.abs(groups).max((1, 3), keepdims=True)
        exponent = np.frexp(largest)[1] - 1 - top
        exponent = np.where(largest == 0, -_BIAS, exponent.clip(-_BIAS, _BIAS))
        known = np.isfinite(largest)
        with np.errstate(all="ignore"):
            scaled = np.where(known, np.ldexp(groups, -exponent), np.float32(np.nan))
        pack(dst, scaled.reshape(p, f))
        bits = np.where(known, exponent + _BIAS, _NAN).astype(np.uint8)
        _write_scales(scales, bits.reshape(p // _QUADRANT, _SCALES, f // PACKED))

    # four values per partition and cycle (Trainium3 guide)
    cycles = max(MIN_CYCLES, src.geometry.elements / PACKED)
    return InstructionTemplate(Engine.VECTOR, cycles, run, opcode, writes=2, scales=(1,))


def nc_matmul_mx(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    stationary_scale: NkiTensor,
    moving_scale: NkiTensor,
    tile_position: tuple[int, int] | None = None,
    tile_size: tuple[int, int] | None = None,
    accumulate: bool | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """dst[M, N] = or += stationary[K, M].T @ moving[K, N], over partitions and packed values.

    Packed operands in SBUF with their scales, dst float32 or bfloat16 in PSUM, fp32 inside;
    NeuronCore-v4. K is a multiple of 32 up to 128, 4 K values; M is even. `accumulate` as in
    `nc_matmul`. `tile_size` (rows, 128) and `tile_position` (row, 0) choose a row tile.
    """
    arguments: dict[str, Any] = {**locals()}
    if any(isinstance(v, NkiTensor) and v.index is not None for v in arguments.values()):
        return indirection.issue(nc_matmul_mx, "nc_matmul_mx", arguments)
    opcode, core = "nc_matmul_mx", running.active("nki.isa.nc_matmul_mx")
    check.feature(opcode, core.machine, "mx", "it", "use nc_matmul with float8 operands")
    scales = {"stationary_scale": stationary_scale, "moving_scale": moving_scale}
    _check_tiles(opcode, dst=dst, stationary=stationary, moving=moving, **scales)
    adds, partly = adding(core, opcode, dst, accumulate)
    rows = (
        scale_rows(opcode, "stationary_scale", stationary_scale, stationary),
        scale_rows(opcode, "moving_scale", moving_scale, moving),
    )
    operands = (dst, stationary, moving, *rows)
    options = (adds, partly, tuple(tile_position or ()), tuple(tile_size or ()))
    done = core.record(core.template(_matmul, operands, options), operands)
    dst.storage.summed.add(dst.geometry.region)
    return done.named(name)


def _matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    stationary_scale: NkiTensor,
    moving_scale: NkiTensor,
    adds: bool,
    partly: bool,
    position: tuple[int, ...],
    size: tuple[int, ...],
) -> InstructionTemplate:
    opcode, machine = "nc_matmul_mx", running.active().machine
    check.memory(opcode, "dst", dst, PSUM)
    check.dtype_in(opcode, "dst", dst, "float32", "bfloat16")
    for operand, t in (("stationary", stationary), ("moving", moving)):
        check.memory(opcode, operand, t, SBUF)
        check.dtype_in(opcode, operand, t, *_FLOATS)
        check.start_partition(opcode, operand, t)
    check.start_partition(opcode, "dst", dst)
    check.same_partitions(opcode, {"stationary": stationary, "moving": moving})
    k, m, n = stationary.geometry.partitions, stationary.geometry.elements, moving.geometry.elements
    if m % 2 or m > 128:
        refuse(f"{opcode}: stationary free size must be even, 128 at most; got {stationary}")
    limit = machine.moving_max * (2 if dst.dtype == "bfloat16" else 1)
    if n > limit:
        refuse(f"{opcode}: moving free size {n} exceeds {limit}; tile it by {limit}")
    if (dst.geometry.partitions, dst.geometry.elements) != (m, n):
        refuse(f"{opcode}: dst must be [{m}, {n}], the operands' free sizes; got {dst}")
    check_result(opcode, machine, dst)
    check_tiling(opcode, machine, position, size, dst, stationary, moving)
    if size and (size[1] != PARTITIONS or position[1]):
        refuse(f"{opcode}: row tiles only, tile_size (rows, 128) at (row, 0); got {size}")

    def run(
        dst: NkiTensor,
        stationary: NkiTensor,
        moving: NkiTensor,
        stationary_scale: NkiTensor,
        moving_scale: NkiTensor,
    ) -> None:
        left, right = _scaled(stationary, stationary_scale), _scaled(moving, moving_scale)
        product = (left.T @ right).reshape(dst.shape)
        raw(dst)[...] = convert(dst, read(dst) + product if adds else product)

    return InstructionTemplate(
        Engine.TENSOR,
        max(min(MIN_CYCLES, m), n),  # four values at a time in each processing element
        run,
        opcode,
        reads_dst=adds and not partly,
        scales=(3, 4),
        flops=2 * PACKED * k * m * n,
        pe_tile=(position[0], size[0], 0, 128) if size else None,
    )


def _check_tiles(opcode: str, **operands: NkiTensor) -> None:
    for operand, t in operands.items():
        if not isinstance(t, NkiTensor):
            refuse(f"{opcode}: {operand} must be a tile; got {t!r}")


# values


def pack(dst: NkiTensor, values: np.ndarray) -> None:
    """Write fp32 values [P, 4 F] to a packed tile [P, F], saturating."""
    kind = _FLOATS[dst.dtype]
    most = np.float32(ml_dtypes.finfo(kind).max)
    target = raw(dst)
    bits = np.clip(values, -most, most).astype(kind).view(np.uint8)
    target[...] = bits.view(target.dtype).reshape(target.shape)


def unpacked(packed: np.ndarray, dtype: DType) -> np.ndarray:
    """The fp32 values [P, F, 4] of packed elements [P, F]."""
    bits = packed.dtype.itemsize * 8 // PACKED
    shifts = np.arange(PACKED, dtype=packed.dtype) * bits
    codes = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.astype(np.uint8).view(_FLOATS[dtype]).astype(np.float32)


def _scaled(t: NkiTensor, scales: NkiTensor) -> np.ndarray:
    """The values [4 K, F] of a packed operand times their scales."""
    values = unpacked(flat(raw(t)), t.dtype)
    k, f, _ = values.shape
    factors = _factors(scales).reshape(k // _GROUP_PARTITIONS, f)
    with np.errstate(all="ignore"):
        values *= factors.repeat(_GROUP_PARTITIONS, 0)[:, :, None]
    return values.transpose(0, 2, 1).reshape(PACKED * k, f)


def _factors(scales: NkiTensor) -> np.ndarray:
    if scales.dtype != "uint8":
        return read(scales)
    bits = raw(scales).astype(np.int32)
    factors = np.ldexp(np.float32(1), bits - _BIAS)
    return np.where(bits == _NAN, np.float32(np.nan), factors)


def _write_scales(scales: NkiTensor, bits: np.ndarray) -> None:
    target = raw(scales)
    values = bits if scales.dtype == "uint8" else bits.view(ml_dtypes.float8_e8m0fnu)
    target[...] = values.reshape(target.shape).astype(target.dtype)


def scale_rows(opcode: str, operand: str, scales: NkiTensor, data: NkiTensor) -> NkiTensor:
    """The view [quadrants, 4, ...] of a scale tile that belongs to packed data [P, F].

    Raises NkiValidationError where the tile does not lie as scales must.
    """
    views.engine_pattern(opcode, scales)
    check.memory(opcode, operand, scales, SBUF)
    check.memory(opcode, "the packed operand", data, SBUF)
    check.dtype_in(opcode, operand, scales, *_SCALE_DTYPES)
    p = data.geometry.partitions
    if p % _QUADRANT or p > 128:
        refuse(f"{opcode}: packed operands have 32, 64, 96 or 128 partitions; got {data}")
    if scales.geometry.elements != data.geometry.elements:
        refuse(
            f"{opcode}: {operand} must have one scale per packed element of a partition, "
            f"{data.geometry.elements}; got {scales}"
        )
    quadrants = p // _QUADRANT
    start, first = scales.geometry.start, data.geometry.start
    if start // _QUADRANT != first // _QUADRANT or start % _QUADRANT not in (0, 4, 8, 12):
        refuse(
            f"{opcode}: {operand} must start 0, 4, 8 or 12 partitions into the quadrant of its "
            f"data, which starts at partition {first}; {scales} starts at {start}"
        )
    needed = _QUADRANT * (quadrants - 1) + _SCALES
    if scales.geometry.partitions < needed:
        refuse(
            f"{opcode}: {operand} holds 4 scales in each quadrant of 32 partitions, {needed} "
            f"partitions or more for {p} of data; got {scales}"
        )
    step, *steps = scales.strides
    geometry = scales.geometry.derive(
        (quadrants, _SCALES, *scales.shape[1:]), (_QUADRANT * step, step, *steps), scales.offset
    )
    return scales.with_geometry(geometry, None)
