"""The maths behind operator tokens: what `nl.add` or `nl.silu` does when passed as `op=`.

Two tables: `ALU` for Vector and GpSimd (NKI 0.6 documentation, Supported Math Operators for NKI
ISA) and `ACTIVATION` for Scalar (Supported Activation Functions for NKI ISA). Tokens are functions
of `nl`, known by their names. Floating-point warnings of ALU operators follow the caller's
`np.errstate`; activations raise none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from neuroncore.dtypes import Array, Float32

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AluOp:
    """One operator of the Vector and GpSimd engines.

    `apply` takes `arity` arrays that broadcast. An arithmetic operator takes and returns float32,
    comparisons and logical ones 1.0 or 0.0; a bitvec one takes and returns one integer dtype.
    """

    name: str
    arity: Literal[1, 2]
    kind: Literal["arithmetic", "bitvec"]
    reducible: bool
    """Legal as a reduction operator, by the documented table."""
    apply: Callable[..., Array]


@dataclass(frozen=True, slots=True)
class Activation:
    """One function of the Scalar engine; `apply` maps float32 to float32 of the same shape.

    Computed in float64 and rounded once. The hardware approximates by piecewise polynomials of
    unstated accuracy, and returns garbage outside `valid`: here that is NaN. For `sin` the
    hardware extrapolates a cubic whose coefficients are not documented (at 9.0 it gives 27.65);
    NaN stands for that too.
    """

    name: str
    valid: tuple[float, float] | None
    """Documented input range, both ends included; of the magnitude for `reciprocal`."""
    apply: Callable[[Float32], Float32]


def _to_float(predicate: np.ufunc) -> Callable[..., Array]:
    return lambda x, y: predicate(x, y).astype(np.float32)


def _by_magnitude(compare: np.ufunc) -> Callable[..., Array]:
    # As documented, x where |x| compares to |y|, else y; a NaN on either side stays visible.
    return lambda x, y: np.where(compare(np.abs(x), np.abs(y)) | np.isnan(x), x, y)


def _relu(x: Float32) -> Float32:
    return np.maximum(x, np.float32(0))


def _rsqrt(x: Float32) -> Float32:
    return (1 / np.sqrt(x, dtype=np.float64)).astype(np.float32)


def _shift(shift: np.ufunc) -> Callable[..., Array]:
    """Shift the bit patterns: zeros come in from either side, whatever the sign."""

    def apply(x: Array, y: Array) -> Array:
        pattern = np.dtype(f"u{x.itemsize}")
        return shift(x.view(pattern), y.view(pattern)).view(x.dtype)

    return apply


_REDUCERS: dict[str, np.ufunc] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply,
    "maximum": np.maximum, "minimum": np.minimum,
    "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
    "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor,
}  # fmt: skip

_PREDICATES = ("equal", "not_equal", "greater_equal", "greater", "less_equal", "less")
_LOGICAL = ("logical_and", "logical_or", "logical_xor")
_BINARY: dict[str, Callable[..., Array]] = {
    **{n: _REDUCERS[n] for n in ("add", "subtract", "multiply", "maximum", "minimum")},
    **{n: _to_float(getattr(np, n)) for n in (*_PREDICATES, *_LOGICAL)},
    "power": np.power,
    "abs_max": _by_magnitude(np.greater),
    "abs_min": _by_magnitude(np.less),
    "bypass": lambda x, y: x,
}
_UNARY: dict[str, Callable[..., Array]] = {
    "abs": np.abs,
    "square": np.square,
    "relu": _relu,
    "rsqrt": _rsqrt,
    "reciprocal": np.reciprocal,
    "logical_not": lambda x: np.equal(x, 0).astype(np.float32),
}
_BITVEC: dict[str, Callable[..., Array]] = {
    **{n: _REDUCERS[n] for n in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    "left_shift": _shift(np.left_shift),
    "right_shift": _shift(np.right_shift),
}

ALU: dict[str, AluOp] = {
    **{n: AluOp(n, 2, "arithmetic", n in _REDUCERS, f) for n, f in _BINARY.items()},
    **{n: AluOp(n, 1, "arithmetic", False, f) for n, f in _UNARY.items()},
    **{n: AluOp(n, 2, "bitvec", n in _REDUCERS, f) for n, f in _BITVEC.items()},
    "invert": AluOp("invert", 1, "bitvec", False, np.invert),
}
"""Operators by name. `bypass` returns its first operand. There is no divide and no modulo."""


def reduce(op: AluOp, array: Array, axes: tuple[int, ...]) -> Array:
    """Return `array` reduced over `axes`, in its own dtype: sums of float32 stay float32.

    `subtract` takes the first element, in row-major order of the axes, minus all others.

    Args:
        op: a reducible operator.
        array: float32 for an arithmetic operator, integers for a bitvec one.
        axes: one or more, none twice.
    """
    reducer = _REDUCERS[op.name]
    if reducer is np.subtract:
        ordered = sorted(axis % array.ndim for axis in axes)
        outer = [n for n in range(array.ndim) if n not in ordered]
        flat = array.transpose(*outer, *ordered).reshape(*(array.shape[n] for n in outer), -1)
        return np.subtract.reduce(flat, axis=-1)
    return reducer.reduce(array, axis=axes).astype(array.dtype, copy=False)


# Beyond these arguments every tail has reached its limit in float32; infinities would make NaN.
_FAR = 200.0
_BLOCK = 8192


def _elementwise(function: Callable[[float], float], x: Float64) -> Float64:
    """A function of one number, of each; NumPy has no erf."""
    return np.fromiter(map(function, x.tolist()), np.float64, x.size)


def _clip(x: Float64) -> Float64:
    return np.clip(x, -_FAR, _FAR)


def _floor(x: Float64) -> Float64:
    return np.maximum(x, -_FAR)


def _sigmoid(x: Float64) -> Float64:
    return 1 / (1 + np.exp(-x))


def _times_sigmoid(x: Float64, u: Float64) -> Float64:
    return _floor(x) * _sigmoid(_floor(u))


def _normal_cdf(x: Float64) -> Float64:
    return _elementwise(math.erfc, -math.sqrt(0.5) * x) / 2


def _gelu(x: Float64) -> Float64:
    return _floor(x) * _normal_cdf(x)


def _gelu_dx(x: Float64) -> Float64:
    x = _clip(x)
    return _normal_cdf(x) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: Float64) -> Float64:
    # (1 + tanh(u)) / 2 is sigmoid(2 u), without the cancellation.
    return _times_sigmoid(x, 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def _gelu_sigmoid_dx(x: Float64) -> Float64:
    x = _clip(x)
    u = 1.702 * x
    return _sigmoid(u) * (1 + u * _sigmoid(-u))


def _silu_dx(x: Float64) -> Float64:
    x = _clip(x)
    return _sigmoid(x) * (1 + x * _sigmoid(-x))


def _mish(x: Float64) -> Float64:
    x = _floor(x)
    return x * np.tanh(np.logaddexp(0, x))


def _activation(
    name: str,
    function: Callable[[Float64], Float64],
    valid: tuple[float, float] | None = None,
    magnitude: bool = False,
) -> Activation:
    """Wrap `function`: float64 inside, float32 outside, NaN where the input is not valid."""
    # A kernel clamps to the bounds as float32 knows them.
    low, high = np.array(valid or (0, 0), np.float32)

    def apply(x: Float32) -> Float32:
        result = np.empty(x.shape, np.float32)
        source, target = x.reshape(-1), result.reshape(-1)
        with np.errstate(all="ignore"):
            # In blocks the float64 intermediates stay in cache: two to four times as fast.
            for start in range(0, x.size, _BLOCK):
                block = slice(start, start + _BLOCK)
                target[block] = function(source[block].astype(np.float64))
        if valid is None:
            return result
        size = np.abs(x) if magnitude else x
        return np.where((size >= low) & (size <= high), result, np.float32(np.nan))

    return Activation(name, valid, apply)


ACTIVATION: dict[str, Activation] = {
    entry.name: entry
    for entry in (
        Activation("copy", None, lambda x: x),
        _activation("square", np.square),
        _activation("sigmoid", _sigmoid),
        Activation("relu", None, _relu),
        # No slope is documented for `nisa.activation`; PyTorch's initial one stands in.
        _activation("prelu", lambda x: np.where(x < 0, 0.25 * x, x)),
        _activation("gelu", _gelu),
        _activation("gelu_dx", _gelu_dx),
        _activation("gelu_apprx_tanh", _gelu_tanh),
        _activation("gelu_apprx_sigmoid", lambda x: _times_sigmoid(x, 1.702 * x)),
        _activation("gelu_apprx_sigmoid_dx", _gelu_sigmoid_dx),
        _activation("silu", lambda x: _times_sigmoid(x, x)),
        _activation("silu_dx", _silu_dx),
        _activation("tanh", np.tanh),
        _activation("softplus", lambda x: np.logaddexp(0, x)),
        _activation("mish", _mish),
        _activation("erf", lambda x: _elementwise(math.erf, x)),
        _activation("erf_dx", lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x)),
        _activation("exp", np.exp),
        _activation("log", np.log, (2.0**-64, 2.0**64)),
        _activation("sin", np.sin, (-math.pi, math.pi)),
        _activation("arctan", np.arctan, (-math.pi / 2, math.pi / 2)),
        _activation("sqrt", np.sqrt, (2.0**-116, 2.0**118)),
        _activation("rsqrt", lambda x: 1 / np.sqrt(x), (2.0**-87, 2.0**97)),
        _activation("reciprocal", np.reciprocal, (2.0**-42, 2.0**42), magnitude=True),
        Activation("sign", None, np.sign),
        Activation("abs", None, np.abs),
    )
}
"""Functions of the Scalar engine by name. `copy` returns its argument itself."""


_NO_DIVIDE = "the engines have no divide: use nisa.reciprocal, then nl.multiply"
_NO_MODULO = "the engines have no modulo: for a power of two use nl.bitwise_and on integers"
_MISSING = {
    "divide": _NO_DIVIDE, "floor_divide": _NO_DIVIDE,
    "mod": _NO_MODULO, "fmod": _NO_MODULO,
    "max": "reductions take the elementwise operator: use nl.maximum",
    "min": "reductions take the elementwise operator: use nl.minimum",
    "sum": "reductions take the elementwise operator: use nl.add",
}  # fmt: skip
_FOREIGN = {"numpy", "torch", "math", "operator", "_operator", "builtins", "jax", "scipy"}


def alu(op: object) -> AluOp:
    """Return the ALU operator that the token `op`, a function of `nl`, stands for.

    Raises:
        TypeError: for functions of other libraries, activations, and what the engines lack.
    """
    remedy = "is an activation, not an ALU operator: use nisa.activation"
    return ALU[_known(op, ALU, ACTIVATION, remedy)]


def activation(op: object) -> Activation:
    """Return the Scalar engine's function that the token `op`, a function of `nl`, stands for.

    Raises:
        TypeError: for functions of other libraries, ALU operators, and what the engines lack.
    """
    remedy = "is an ALU operator, not an activation: use nisa.tensor_tensor or nisa.tensor_scalar"
    return ACTIVATION[_known(op, ACTIVATION, ALU, remedy)]


def _known(op: object, table: dict[str, Any], others: dict[str, Any], remedy: str) -> str:
    """The name of a token that the table has."""
    name = getattr(op, "__name__", None)
    module = str(getattr(op, "__module__", None)).partition(".")[0]
    foreign = isinstance(op, (np.ufunc, BuiltinFunctionType, type)) or module in _FOREIGN
    if foreign or not isinstance(name, str) or not callable(op):
        meant = str(name or op).removeprefix("nl.")
        meant = "abs" if meant == "absolute" else meant
        seen = f"operator {' '.join(repr(op).split())} is not a function of nl"
        raise TypeError(f"{seen}: {f'use nl.{meant}' if meant in table else _use(meant, table)}")
    if name in table:
        return name
    if name in others:
        raise TypeError(f"nl.{name} {remedy}")
    raise TypeError(f"operator {name!r} is not supported: {_use(name, table)}")


def _use(name: str, table: dict[str, Any]) -> str:
    return _MISSING.get(name) or f"use {_listing(table)}"


def _listing(names: dict[str, Any]) -> str:
    return "one of " + ", ".join(f"nl.{name}" for name in names)
