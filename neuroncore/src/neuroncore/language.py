"""`nki.language`: dtypes, memories, tensors, loops and programs; element-wise functions by name.

The functions of `elementary` (`nl.add`, `nl.exp`, ...) are also the operator tokens of `nki.isa`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from neuroncore import core as running
from neuroncore import dtypes, hardware
from neuroncore.checks.base import note, refuse
from neuroncore.isa.elementwise import memset
from neuroncore.isa.register import VirtualRegister
from neuroncore.loops import dynamic_range, fori_loop, while_loop
from neuroncore.memory.indexing import DynamicSlice
from neuroncore.memory.storage import MemoryRegion, Storage
from neuroncore.memory.tensor import NkiTensor
from neuroncore.nl.division import divide, fmod, mod
from neuroncore.nl.objects import NKIObject

from neuroncore.dtypes import (  # isort: skip
    DType, bfloat16, bool_, float16, float32, float4_e2m1fn_x4, float8_e4m3, float8_e4m3fn,
    float8_e4m3fn_x4, float8_e5m2, float8_e5m2_x4, float8_e8m0fnu, int16, int32, int8,
    tfloat32, uint16, uint32, uint8,
)  # fmt: skip
from neuroncore.nl.composite import (  # isort: skip
    broadcast_to, dropout, expand_dims, gather_flattened, load, load_transpose2d, matmul, mean,
    prod, rand, random_seed, rms_norm, softmax, store, transpose, var, where,
    all, max, min, sum,  # noqa: A004
)  # fmt: skip
from neuroncore.nl.elementary import (  # isort: skip
    abs_max, abs_min, add, arctan, average, bitwise_and, bitwise_or, bitwise_xor, bypass,
    ceil, copy, cos, equal, erf, erf_dx, exp, floor, gelu, gelu_apprx_sigmoid,
    gelu_apprx_sigmoid_dx, gelu_apprx_tanh, gelu_dx, greater, greater_equal, invert,
    left_shift, less, less_equal, log, logical_and, logical_not, logical_or, logical_xor,
    maximum, minimum, mish, multiply, negative, not_equal, power, prelu, reciprocal, relu,
    right_shift, rsqrt, sigmoid, sign, silu, silu_dx, sin, softplus, sqrt, square, subtract,
    tan, tanh, trunc,
    abs,  # noqa: A004
)  # fmt: skip

sbuf = MemoryRegion.sbuf
psum = MemoryRegion.psum
hbm, private_hbm = MemoryRegion.hbm, MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm


class _TileSize:
    """Sizes of the target's tiles: partitions, PSUM banks and matmul operands."""

    pmax = hardware.PARTITIONS
    psum_bank_fmax = psum_fmax = hardware.PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = hardware.PSUM_BANK_BYTES
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512
    psum_num_banks = hardware.PSUM_BANKS
    psum_min_align = hardware.PSUM_ALIGN_BYTES
    sbuf_min_align = 1

    @property
    def sbuf_size_bytes(self) -> int:
        """SBUF of all partitions, bytes."""
        return self.sbuf_fmax_bytes * hardware.PARTITIONS

    @property
    def sbuf_fmax(self) -> int:
        """Usable SBUF per partition, in fp32 elements."""
        return self.sbuf_fmax_bytes // 4

    @property
    def sbuf_fmax_bytes(self) -> int:
        """Usable SBUF per partition, bytes."""
        core = running.running()
        return (core.machine if core else hardware.resolve_target(None)).usable_sbuf_bytes

    total_available_sbuf_size = sbuf_fmax_bytes


tile_size = _TileSize()


def is_hbm(buffer: MemoryRegion) -> bool:
    """Whether the memory is HBM."""
    return not buffer.on_chip


def is_on_chip(buffer: MemoryRegion) -> bool:
    """Whether the memory is SBUF or PSUM."""
    return buffer.on_chip


def is_psum(buffer: MemoryRegion) -> bool:
    """Whether the memory is PSUM."""
    return buffer is psum


def is_sbuf(buffer: MemoryRegion) -> bool:
    """Whether the memory is SBUF."""
    return buffer is sbuf


# tensors


def ndarray(
    shape: tuple[int, ...],
    dtype: DType,
    buffer: MemoryRegion = sbuf,
    name: str = "",
    address: tuple[int, int] | None = None,
) -> NkiTensor:
    """An uninitialised tensor; on chip [partition, free, ...] with at most 128 partitions.

    `address` is (partition, byte in the partition). Raises NkiValidationError.
    """
    if not isinstance(buffer, MemoryRegion):
        refuse(
            f"nl.ndarray: buffer must be nl.sbuf, nl.psum, nl.hbm or nl.shared_hbm; got {buffer!r}"
        )
    memory = private_hbm if buffer is hbm else buffer
    return running.active("nl.ndarray").allocate(shape, dtype, memory, name, address)


def full(
    shape: tuple[int, ...],
    fill_value: float,
    dtype: DType,
    buffer: MemoryRegion = sbuf,
    name: str = "",
) -> NkiTensor:
    """A tensor on chip filled with a constant."""
    tensor = ndarray(shape, dtype, buffer, name)
    memset(tensor, fill_value)
    return tensor


def zeros(
    shape: tuple[int, ...], dtype: DType, buffer: MemoryRegion = sbuf, name: str = ""
) -> NkiTensor:
    """A tensor on chip filled with 0."""
    return full(shape, 0, dtype, buffer, name)


def ones(
    shape: tuple[int, ...], dtype: DType, buffer: MemoryRegion = sbuf, name: str = ""
) -> NkiTensor:
    """A tensor on chip filled with 1."""
    return full(shape, 1, dtype, buffer, name)


def zeros_like(
    x: NkiTensor, dtype: DType | None = None, buffer: MemoryRegion | None = None, name: str = ""
) -> NkiTensor:
    """Zeros of the shape, and unless given the dtype, of `x`; in SBUF unless given a memory."""
    return zeros(x.shape, dtype or x.dtype, buffer or sbuf, name)


def empty_like(
    x: NkiTensor, dtype: DType | None = None, buffer: MemoryRegion | None = None, name: str = ""
) -> NkiTensor:
    """An uninitialised tensor of the shape, and unless given the dtype and memory, of `x`."""
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def shared_constant(constant: np.ndarray | str | Path) -> NkiTensor:
    """A tensor in shared HBM that holds a NumPy array, or the array of an `.npy` file."""
    core = running.active("nl.shared_constant")
    array = constant
    if not isinstance(array, np.ndarray):
        array = np.load(array, allow_pickle=False)
    layout = core.launch.layout(array.shape, dtypes.from_numpy(array.dtype), shared_hbm)
    storage = Storage(layout, "constant")
    tensor = core.adopt(storage)
    if core.execute:
        tensor.data = storage.hold(np.ascontiguousarray(array))
    return tensor


def shared_identity_matrix(n: int, dtype: DType = uint8, dst: NkiTensor | None = None) -> NkiTensor:
    """An n x n identity in SBUF, loaded once per dtype and size, or written to `dst`."""
    from neuroncore.isa.dma import dma_copy

    core = running.active("nl.shared_identity_matrix")
    key = (n, dtype)
    if dst is None and key in core.constants:
        return core.constants[key]
    values = dtypes.from_fp32(np.eye(n, dtype=np.float32), dtypes.dtype_of(dtype))
    if core.launch.precise or not dtypes.dtype_of(dtype).is_float:
        constant = shared_constant(values)
    else:
        constant = shared_constant(np.eye(n, dtype=np.float32))
    target = dst if dst is not None else ndarray((n, n), dtype, sbuf, name=f"identity{n}")
    dma_copy(dst=target, src=constant)
    if dst is None:
        core.constants[key] = target
    return target


# indices, loops and programs


def ds(start: int | VirtualRegister, size: int) -> slice | DynamicSlice:
    """`size` elements from `start`, which may be a register."""
    if isinstance(start, VirtualRegister):
        return DynamicSlice(start, size)
    return slice(start, start + size)


def affine_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """Deprecated alias of `range`."""
    return range(start) if stop is None else range(start, stop, step)


sequential_range = static_range = affine_range


@contextmanager
def no_reorder() -> Generator[None]:
    """Keep program order inside the block; the simulated engines always do."""
    state = running.active("nl.no_reorder").state
    outer = state.get("no_reorder", False)
    state["no_reorder"] = True
    try:
        yield
    finally:
        state["no_reorder"] = outer


def program_id(axis: int = 0) -> int:
    """Which of the launch's cores this is: 0, or 1 with `kernel[2]`."""
    _check_axis(axis)
    return running.active("nl.program_id").program_id


def num_programs(axes: int = 0) -> int:
    """How many cores the kernel was launched on."""
    _check_axis(axes)
    return running.active("nl.num_programs").launch.lnc


def _check_axis(axis: int) -> None:
    if axis != 0:
        refuse(f"nl.program_id/num_programs: the only axis is 0; got {axis}")


def program_ndim() -> int:
    """Dimensions of the launch grid: 1 with `kernel[2]`, else 0."""
    return 1 if running.active("nl.program_ndim").launch.lnc > 1 else 0


_FORMER = {"range": ("range", affine_range), "bool": ("nl.bool_", bool_)}


def __getattr__(name: str) -> Any:
    """Names of public kernels that the documentation lacks, where their meaning is plain."""
    if name not in _FORMER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    known, value = _FORMER[name]
    note(f"nl.{name} is taken as {known}; the documentation of NKI 0.6 has no such name")
    return value


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Print a tensor's values when the kernel runs in execute mode."""
    from neuroncore.isa.values import raw

    core = running.active("nl.device_print")
    if core.execute:
        print(f"{print_prefix} {tensor}\n{raw(tensor)}")


__all__ = [
    "DType", "MemoryRegion", "NKIObject", "NkiTensor", "abs", "abs_max", "abs_min", "add",
    "affine_range", "all", "arctan", "average", "bfloat16", "bitwise_and", "bitwise_or",
    "bitwise_xor", "bool_", "broadcast_to", "bypass", "ceil", "copy", "cos", "device_print",
    "divide", "dropout", "ds", "dynamic_range", "empty_like", "equal", "erf", "erf_dx", "exp",
    "expand_dims", "float4_e2m1fn_x4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3fn_x4",
    "float8_e5m2", "float8_e5m2_x4", "float8_e8m0fnu", "float16", "float32", "floor", "fmod",
    "fori_loop", "full", "gather_flattened", "gelu", "gelu_apprx_sigmoid",
    "gelu_apprx_sigmoid_dx", "gelu_apprx_tanh", "gelu_dx", "greater", "greater_equal", "hbm",
    "int8", "int16", "int32", "invert", "is_hbm", "is_on_chip", "is_psum", "is_sbuf",
    "left_shift", "less", "less_equal", "load", "load_transpose2d", "log", "logical_and",
    "logical_not", "logical_or", "logical_xor", "matmul", "max", "maximum", "mean", "min",
    "minimum", "mish", "mod", "multiply", "ndarray", "negative", "no_reorder", "not_equal",
    "num_programs", "ones", "power", "prelu", "private_hbm", "prod", "program_id", "program_ndim",
    "psum", "rand", "random_seed", "reciprocal", "relu", "right_shift", "rms_norm", "rsqrt",
    "sbuf", "sequential_range", "shared_constant", "shared_hbm", "shared_identity_matrix",
    "sigmoid", "sign", "silu", "silu_dx", "sin", "softmax", "softplus", "sqrt", "square",
    "static_range", "store", "subtract", "sum", "tan", "tanh", "tfloat32", "tile_size",
    "transpose", "trunc", "uint8", "uint16", "uint32", "var", "where", "while_loop", "zeros",
    "zeros_like",
]  # fmt: skip
