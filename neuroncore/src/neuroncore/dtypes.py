"""The dtypes of NKI kernels, and what conversions do to values.

Engines compute in float32: operands are widened exactly, results are rounded to nearest even on
the way out and, for integers, then saturated (NKI 0.6 documentation, Supported Data Types and
Supported Math Operators). A `DType` is a string, so that `nl.float32 == "float32"`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

Kind = Literal["float", "int", "uint", "bool", "packed"]
Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]


class DType(str):
    """A dtype of `nl`: its name, with the NumPy dtype that stores it.

    Args:
        name: as in `nl`, such as `bfloat16`.
        numpy: the storage; `bool_` is kept as uint8, packed types as one unsigned integer.
        kind: `float`, `int`, `uint`, `bool`, or `packed` for four values in one element.
    """

    numpy: np.dtype[Any]
    kind: Kind
    itemsize: int
    is_float: bool
    is_integer: bool

    def __new__(cls, name: str, numpy: npt.DTypeLike, kind: Kind) -> DType:
        """Make the string and hang the facts on it."""
        self = super().__new__(cls, name)
        self.numpy = np.dtype(numpy)
        self.kind = kind
        self.itemsize = self.numpy.itemsize
        self.is_float = kind == "float"
        self.is_integer = kind in ("int", "uint")
        return self

    def __repr__(self) -> str:
        """The name without quotes, for messages."""
        return str(self)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Copies and pickles are the instance itself."""
        return dtype_of, (str(self),)


bool_ = DType("bool_", np.uint8, "bool")
int8 = DType("int8", np.int8, "int")
int16 = DType("int16", np.int16, "int")
int32 = DType("int32", np.int32, "int")
uint8 = DType("uint8", np.uint8, "uint")
uint16 = DType("uint16", np.uint16, "uint")
uint32 = DType("uint32", np.uint32, "uint")
float16 = DType("float16", np.float16, "float")
bfloat16 = DType("bfloat16", ml_dtypes.bfloat16, "float")
float32 = DType("float32", np.float32, "float")
tfloat32 = DType("tfloat32", np.float32, "float")
"""float32 storage whose values carry 10 mantissa bits."""
float8_e4m3 = DType("float8_e4m3", ml_dtypes.float8_e4m3, "float")
"""IEEE-like: infinities, largest value 240."""
float8_e4m3fn = DType("float8_e4m3fn", ml_dtypes.float8_e4m3fn, "float")
"""No infinities, largest value 448."""
float8_e5m2 = DType("float8_e5m2", ml_dtypes.float8_e5m2, "float")
float8_e8m0fnu = DType("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu, "float")
"""Powers of two without sign or zero: the scales of MX formats."""
float8_e5m2_x4 = DType("float8_e5m2_x4", np.uint32, "packed")
float8_e4m3fn_x4 = DType("float8_e4m3fn_x4", np.uint32, "packed")
float4_e2m1fn_x4 = DType("float4_e2m1fn_x4", np.uint16, "packed")

DTYPES: dict[str, DType] = {
    str(dtype): dtype
    for dtype in (
        bool_, int8, int16, int32, uint8, uint16, uint32,
        float16, bfloat16, float32, tfloat32,
        float8_e4m3, float8_e4m3fn, float8_e5m2, float8_e8m0fnu,
        float8_e5m2_x4, float8_e4m3fn_x4, float4_e2m1fn_x4,
    )
}  # fmt: skip
"""Every dtype of NKI 0.6 by name."""


def array_dtype(dtype: DType) -> np.dtype[Any]:
    """The NumPy dtype of arrays that enter a kernel as `dtype`; a packed type is a named field."""
    return np.dtype([(str(dtype), dtype.numpy)]) if dtype.kind == "packed" else dtype.numpy


_OF_NUMPY: dict[np.dtype[Any], DType] = {
    np.dtype(np.bool_): bool_,
    **{
        array_dtype(dtype): dtype
        for dtype in DTYPES.values()
        if dtype.kind != "bool" and dtype is not tfloat32
    },
}

_NARROWER = {
    "float64": "float32", "longdouble": "float32", "double": "float32", "float": "float32",
    "int64": "int32", "long": "int32", "int": "int32", "uint64": "uint32", "bool": "bool_",
    "half": "float16",
}  # fmt: skip


def dtype_of(value: object) -> DType:
    """Return the dtype that `value`, a `DType` or its name, stands for.

    Raises:
        TypeError: for anything else. Kernels name dtypes as `nl.float32`, not by the dtypes of
            NumPy or PyTorch (NKI 0.6 documentation, Supported Data Types).
    """
    if isinstance(value, DType):
        return value
    if isinstance(value, str):
        if value in DTYPES:
            return DTYPES[value]
        raise TypeError(f"dtype {value!r} is unknown: use {_remedy(value)}")
    if isinstance(value, type):
        name = value.__name__
    else:
        name = value.name if isinstance(value, np.dtype) else str(value).rpartition(".")[2]
    raise TypeError(
        f"dtype {' '.join(repr(value).split())} is not one of nki.language, "
        f"and kernels take only those: use {_remedy(name)}"
    )


def _remedy(name: str) -> str:
    name = name.rpartition(".")[2]
    name = _NARROWER.get(name, name)
    return f"nl.{name}" if name in DTYPES else "nl.float32, nl.bfloat16 or another dtype of nl"


def from_numpy(dtype: npt.DTypeLike) -> DType:
    """Return the NKI dtype of an array that enters a kernel; NumPy's bool becomes `bool_`.

    Args:
        dtype: a dtype of NumPy or ml_dtypes, in native byte order.

    Raises:
        TypeError: if the NeuronCore has no such type (float64, int64, complex, ...).
    """
    numpy_dtype = np.dtype(dtype)
    if numpy_dtype in _OF_NUMPY:
        return _OF_NUMPY[numpy_dtype]
    wanted = _NARROWER.get(numpy_dtype.name, numpy_dtype.name)
    wanted = wanted if wanted in DTYPES else "float32"
    name = numpy_dtype.str if numpy_dtype.name == wanted else numpy_dtype.name
    raise TypeError(f"the NeuronCore has no dtype {name}: cast the input with .astype(np.{wanted})")


@cache
def _values_of_bytes(dtype: DType) -> Float32:
    """The float32 value of each of the 256 patterns of an 8-bit float."""
    return np.arange(256, dtype=np.uint8).view(dtype.numpy).astype(np.float32)


def to_fp32(array: Array, dtype: DType) -> Float32:
    """Return the values of `array`, stored as `dtype`, in float32, as an engine reads them.

    Exact, but for 32-bit integers, which round to nearest even. An array already in float32 is
    returned itself, without a copy; so are floats that `NKI_PRECISE_FP=0` keeps wide.

    Args:
        array: any shape and strides, of dtype `dtype.numpy`.
        dtype: what the array holds.

    Raises:
        TypeError: if `dtype` is packed.
    """
    if dtype.kind == "packed":
        raise _no_value(dtype)
    if array.dtype == np.float32:
        return array
    if dtype.is_float and dtype.itemsize == 1:
        # ml_dtypes converts 8-bit floats one by one; a table is seven times as fast.
        return _values_of_bytes(dtype).take(array.view(np.uint8))
    return array.astype(np.float32)


def from_fp32(values: Float32, dtype: DType) -> Array:
    """Return `values` as an engine writes them to `dtype`, in an array of dtype `dtype.numpy`.

    Floats round to nearest even. What is too large becomes infinite, and NaN in the types without
    infinities (float8_e4m3fn, float8_e8m0fnu); NaN stays NaN. float8_e8m0fnu has no zero and no
    sign: zero and negative values become NaN. Integers round to nearest even, then saturate; NaN
    becomes 0. `bool_` is 1 for whatever is not 0. float32 is returned itself, without a copy.

    Args:
        values: float32, of one or more dimensions and any strides.
        dtype: the type to write.

    Raises:
        TypeError: if `dtype` is packed.
    """
    if dtype.is_float:
        if dtype is float32:
            return values
        if dtype is tfloat32:
            return _round_to_tfloat32(values)
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(dtype.numpy)
    if dtype.is_integer:
        # float32 does not hold the bounds of 32-bit integers.
        wide = np.rint(values, dtype=np.float64 if dtype.itemsize == 4 else np.float32)
        bounds = np.iinfo(dtype.numpy)
        np.clip(wide, bounds.min, bounds.max, out=wide)
        wide[np.isnan(wide)] = 0
        return wide.astype(dtype.numpy)
    if dtype.kind == "bool":
        return np.not_equal(values, 0).astype(np.uint8)
    raise _no_value(dtype)


def _round_to_tfloat32(values: Float32) -> Float32:
    bits = values.view(np.uint32)
    rounded = (bits >> 13) & 1
    rounded += bits
    rounded += 0xFFF
    rounded &= 0xFFFFE000
    # The carry could turn a NaN into an infinity or a zero.
    return np.where(np.isnan(values), np.float32(np.nan), rounded.view(np.float32))


def _no_value(dtype: DType) -> TypeError:
    return TypeError(
        f"{dtype} packs four values and has no conversion: "
        "only nisa.quantize_mx writes it and only nisa.nc_matmul_mx reads it"
    )


def fresh(shape: int | tuple[int, ...], dtype: DType) -> Array:
    """Return an array of dtype `dtype.numpy` that stands for memory nobody has written.

    Floats are NaN, so that they show in whatever is computed from them; all other types are 4.
    """
    # as bits, which NumPy fills five times as fast as narrow floats
    bits = np.array(np.nan if dtype.is_float else 4, dtype.numpy).view(f"u{dtype.itemsize}")
    return np.full(shape, bits).view(dtype.numpy)
