"""Values of `simulate --arg NAME=VALUE`: random tensors and compile-time values."""

import ast
import re
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from neuronmm_ops.neuroncore.dtypes import DTYPES, DType, from_fp32

_SHORT = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32",
    "fp8": "float8_e4m3", "fp8_e4m3": "float8_e4m3", "fp8_e4m3fn": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2", "i8": "int8", "i16": "int16", "i32": "int32", "u8": "uint8",
    "u16": "uint16", "u32": "uint32", "bool": "bool_",
}  # fmt: skip
_TENSOR = re.compile(r"(\w+)\[([^\[\]]*)\]")
_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Tensor:
    """A tensor argument: its values are made for runs that compute."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    def values(self, random: np.random.Generator) -> np.ndarray:
        """Standard-normal floats, integers from -8 to 7 (unsigned: 0 to 15), any bool."""
        dtype, shape = self.dtype, self.shape
        if dtype.kind == "packed" or dtype == "tfloat32":
            raise ValueError(f"--arg {self.name}: {dtype} has no NumPy dtype; use --trace-only")
        if dtype.kind == "bool":
            return random.integers(0, 2, shape).astype(bool)
        if not dtype.is_float:
            low = -8 if dtype.kind == "int" else 0
            return random.integers(low, low + 16, shape).astype(dtype.numpy)
        if dtype == "float8_e8m0fnu":  # powers of two alone
            return from_fp32(np.exp2(random.integers(-3, 4, shape)).astype(np.float32), dtype)
        return from_fp32(random.standard_normal(shape, np.float32), dtype)


def read_argument(text: str) -> tuple[str, Any]:
    """Return name and value of `name=value`. Raises ValueError that says what is wrong with it."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"--arg must be NAME=VALUE, such as x=bf16[128,512]; got {text!r}")
    value = value.strip()
    tensor = _TENSOR.fullmatch(value)
    if tensor is not None:
        return name, Tensor(name, _dtype(name, tensor[1]), _shape(name, value, tensor[2]))
    return name, _plain(name, value)


def _dtype(name: str, text: str) -> DType:
    found = DTYPES.get(_SHORT.get(text, text))
    if found is None:
        short = ", ".join(key for key in _SHORT if not key.startswith("fp8_"))
        raise ValueError(f"--arg {name}: dtype {text!r} is unknown; use {short} or a name of NKI")
    return found


def _shape(name: str, value: str, text: str) -> tuple[int, ...]:
    sizes = [size.strip() for size in text.split(",")]
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(
            f"--arg {name}: a tensor is DTYPE[SIZE,...] with sizes from 1, as bf16[128,512]; "
            f"got {value!r}"
        )
    shape = tuple(int(size) for size in sizes)
    if prod(shape) >= 2**40:
        raise ValueError(f"--arg {name}: {value} has {prod(shape):,} elements; the limit is 2^40")
    return shape


def _plain(name: str, text: str) -> Any:
    """A compile-time value."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if text[:1] in ("'", '"', "("):
        try:
            return _checked(ast.literal_eval(text))
        except (ValueError, SyntaxError) as error:
            raise ValueError(
                f"--arg {name}: {text!r} is neither a quoted text nor a tuple of plain values"
            ) from error
    if not text or "[" in text or "]" in text:
        raise ValueError(
            f"--arg {name}: {text!r} is neither a tensor, DTYPE[SIZE,...], nor a plain value"
        )
    return text


def _checked(value: Any) -> Any:
    if isinstance(value, tuple):
        for entry in value:
            _checked(entry)
    elif not isinstance(value, bool | int | float | str | None):
        raise ValueError(f"{value!r} is no plain value")
    return value
