"""Values of `simulate --arg NAME=VALUE`: tensors, random or from files, and compile-time values."""

import ast
import copy
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from neuroncore import TensorSpec
from neuroncore.cli.files import UsageError, listed
from neuroncore.cli.tensors import TensorFile
from neuroncore.dtypes import DTYPES, DType, from_fp32

_SHORT = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32",
    "fp8": "float8_e4m3", "fp8_e4m3": "float8_e4m3", "fp8_e4m3fn": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2", "i8": "int8", "i16": "int16", "i32": "int32", "u8": "uint8",
    "u16": "uint16", "u32": "uint32", "bool": "bool_",
}  # fmt: skip
_TENSOR = re.compile(r"(\w+)\[([^\[\]]*)\]")
_FILE = re.compile(r"(.+\.npy)|(.+\.(?:safetensors|npz))(?::(.+))?")
_COMMA = re.compile(r""",(?=(?:[^"']|"[^"]*"|'[^']*')*$)(?![^\[]*\])(?![^(]*\))""")
"""Between values: outside quotes, brackets and parentheses."""
_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Tensor:
    """A tensor argument: its values are made for runs that compute."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    def spec(self) -> TensorSpec:
        """The same without values."""
        return TensorSpec(self.shape, self.dtype)

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


def read_arguments(text: str) -> list[tuple[str, Any]]:
    """Return name and value of `name=value`, or all of an .npz file. Raises ValueError if wrong."""
    name, equals, value = text.partition("=")
    if not equals and text.endswith(".npz"):
        file = TensorFile("", Path(text), "", None)
        return [(name, replace(file, name=name, key=name)) for name in file.names()]
    if not equals or not name.isidentifier():
        raise ValueError(f"--arg must be NAME=VALUE, such as x=bf16[128,512]; got {text!r}")
    return [(name, _value(name, value.strip()))]


def read_sweep(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return name and values, each with its text, of `name=value,value,...`."""
    name, equals, values = text.partition("=")
    if not equals or not name.isidentifier() or not values:
        raise ValueError(f"--sweep must be NAME=VALUE,VALUE, such as BLOCK=128,256; got {text!r}")
    texts = [value.strip() for value in _COMMA.split(values)]
    try:
        return name, [(value, _value(name, value)) for value in texts]
    except ValueError as error:
        raise ValueError(str(error).replace("--arg", "--sweep", 1)) from error


def _value(name: str, value: str) -> Any:
    tensor = _TENSOR.fullmatch(value)
    file = _FILE.fullmatch(tensor[2] if tensor else value)
    if file is not None and value[:1] not in ("'", '"', "("):
        path = Path(file[1] or file[2])
        if not path.is_file():
            raise ValueError(f"--arg {name}: {path} is no file; a text is quoted")
        return TensorFile(name, path, file[3] or "", tensor and _dtype(name, tensor[1]))
    if tensor is not None:
        return Tensor(name, _dtype(name, tensor[1]), _shape(name, value, tensor[2]))
    return _plain(name, value)


def _dtype(name: str, text: str) -> DType:
    dtype = DTYPES.get(_SHORT.get(text, text))
    if dtype is None:
        short = ", ".join(key for key in _SHORT if not key.startswith("fp8_"))
        raise ValueError(f"--arg {name}: dtype {text!r} is unknown; use {short} or a name of NKI")
    return dtype


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


def parameters_of(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names that a function takes, and whether it takes any other."""
    parameters = inspect.signature(function).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return [p.name for p in parameters if p.kind in named], takes_any


def check_arguments(function: Callable[..., Any], what: str, values: Mapping[str, Any]) -> None:
    """Raise UsageError where a function lacks a parameter, or a parameter its value."""
    known, takes_any = parameters_of(function)
    unknown = [n for n in values if n not in known]
    if unknown and not takes_any:
        raise UsageError(
            f"{what} has no parameter {listed(unknown)}; it has {listed(known) or 'none'}"
        )
    parameters = inspect.signature(function).parameters
    required = [n for n in known if parameters[n].default is inspect.Parameter.empty]
    missing = [n for n in required if n not in values]
    if missing:
        raise UsageError(f"{what} needs --arg {listed(missing)}")


def make_arguments(values: Mapping[str, Any], seed: int, trace_only: bool) -> dict[str, Any]:
    """What a kernel is called with: arrays, or specs where no value is computed."""
    random = np.random.default_rng(seed)
    made: dict[str, Any] = {}
    copies: dict[int, Any] = {}  # what is one array stays one
    for name, value in values.items():
        if not isinstance(value, Tensor | TensorFile):
            made[name] = copy.deepcopy(value, copies)  # a kernel may write its inputs
        else:
            made[name] = value.spec() if trace_only else value.values(random)
    return made
