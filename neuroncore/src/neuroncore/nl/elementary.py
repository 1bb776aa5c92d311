"""The element-wise functions of `nl`: `nl.exp(tile)` computes, `op=nl.exp` names an operator.

Called, each allocates a tile in SBUF and issues the instructions a kernel would write by hand.
As `op=` only the name counts (see `operators`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from neuroncore import core as running
from neuroncore.checks.base import note
from neuroncore.checks.operands import one_tile
from neuroncore.dtypes import DType, float32, int32
from neuroncore.isa import elementwise as nisa
from neuroncore.isa.activation import activation
from neuroncore.memory.storage import MemoryRegion
from neuroncore.memory.tensor import NkiTensor

Function = Callable[..., NkiTensor]


def tile(
    x: NkiTensor, dtype: DType | None = None, shape: tuple[int, ...] | None = None
) -> NkiTensor:
    """A fresh tile in SBUF, unless said otherwise of the shape and dtype of `x`."""
    return running.active("nki.language").allocate(
        shape or x.shape, dtype or x.dtype, MemoryRegion.sbuf
    )


def named(function: Any, name: str, text: str) -> Any:
    """Give a function of `nl` its name and docstring."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    function.__module__ = __name__
    return function


def _binary(name: str, text: str) -> Function:
    """A function of two inputs, by one tensor_tensor or tensor_scalar."""

    def function(x: Any, y: Any, dtype: DType | None = None) -> NkiTensor:
        reverse = not isinstance(x, NkiTensor) or _is_column(name, x, y)
        data, other = (y, x) if reverse else (x, y)
        one_tile(name, data)
        result = tile(data, dtype)
        if reverse or not isinstance(other, NkiTensor) or _is_column(name, other, data):
            nisa.tensor_scalar(result, data, function, other, reverse0=reverse)
        else:
            nisa.tensor_tensor(result, x, y, function)
        return result

    return named(
        function, name, f"{text}, element by element; one may be a number or a tile [P, 1]."
    )


def _is_column(name: str, x: NkiTensor, y: Any) -> bool:
    """Whether x is a tile [P, 1] for a y of several columns: of each row its number."""
    if not isinstance(y, NkiTensor) or not 1 == x.geometry.elements < y.geometry.elements:
        return False
    if name not in ("abs_max", "abs_min"):
        note(
            f"nl.{name}: {x} is taken for all columns of {y}; NKI's reference shows that for "
            "abs_max and abs_min alone; use nisa.tensor_scalar"
        )
    return True


def _unary(name: str, text: str) -> Function:
    """A function of one input, by one activation on ScalarE."""
    function = _built(name, text, lambda result, x: activation(result, function, x))
    return function


def _built(name: str, text: str, write: Callable[[NkiTensor, NkiTensor], Any]) -> Function:
    """A function of one input by other instructions: write(result, x)."""

    def function(x: NkiTensor, dtype: DType | None = None) -> NkiTensor:
        one_tile(name, x)
        result = tile(x, dtype)
        write(result, x)
        return result

    return named(function, name, f"{text}, element by element.")


def _token(name: str, text: str) -> Function:
    """A name for `op=` only."""

    def function(x: NkiTensor, dtype: DType | None = None) -> NkiTensor:
        raise TypeError(f"nl.{name} is an operator for op= and cannot be called")

    return named(function, name, text)


add = _binary("add", "x + y")
subtract = _binary("subtract", "x - y")
multiply = _binary("multiply", "x * y")
maximum = _binary("maximum", "The larger of x and y")
minimum = _binary("minimum", "The smaller of x and y")
abs_max = _binary("abs_max", "x where |x| > |y|, else y (trn3)")
abs_min = _binary("abs_min", "x where |x| < |y|, else y (trn3)")
power = _binary("power", "x to the power of y")
equal = _binary("equal", "1 where x == y, else 0")
not_equal = _binary("not_equal", "1 where x != y, else 0")
less = _binary("less", "1 where x < y, else 0")
less_equal = _binary("less_equal", "1 where x <= y, else 0")
greater = _binary("greater", "1 where x > y, else 0")
greater_equal = _binary("greater_equal", "1 where x >= y, else 0")
logical_and = _binary("logical_and", "1 where both are not 0, else 0")
logical_or = _binary("logical_or", "1 where one is not 0, else 0")
logical_xor = _binary("logical_xor", "1 where exactly one is not 0, else 0")
bitwise_and = _binary("bitwise_and", "x & y of integers")
bitwise_or = _binary("bitwise_or", "x | y of integers")
bitwise_xor = _binary("bitwise_xor", "x ^ y of integers")
left_shift = _binary("left_shift", "x << y of integers")
right_shift = _binary("right_shift", "x >> y of bit patterns, zeros from the left")

exp = _unary("exp", "e to the power of x")
log = _unary("log", "Natural logarithm, for x in [2^-64, 2^64]")
sqrt = _unary("sqrt", "Square root, for x in [2^-116, 2^118]")
rsqrt = _unary("rsqrt", "1 / sqrt(x), for x in [2^-87, 2^97]")
tanh = _unary("tanh", "Hyperbolic tangent")
arctan = _unary("arctan", "Inverse tangent, for x in [-pi/2, pi/2]")
sigmoid = _unary("sigmoid", "1 / (1 + exp(-x))")
relu = _unary("relu", "max(x, 0)")
gelu = _unary("gelu", "GELU")
gelu_dx = _unary("gelu_dx", "Derivative of GELU")
gelu_apprx_tanh = _unary("gelu_apprx_tanh", "GELU approximated by tanh")
gelu_apprx_sigmoid = _unary("gelu_apprx_sigmoid", "GELU approximated by sigmoid")
gelu_apprx_sigmoid_dx = _unary("gelu_apprx_sigmoid_dx", "Derivative of gelu_apprx_sigmoid")
silu = _unary("silu", "x * sigmoid(x)")
silu_dx = _unary("silu_dx", "Derivative of silu")
softplus = _unary("softplus", "log(1 + exp(x))")
mish = _unary("mish", "x * tanh(softplus(x))")
erf = _unary("erf", "Error function")
erf_dx = _unary("erf_dx", "Derivative of erf")
square = _unary("square", "x * x")
sign = _unary("sign", "-1, 0 or 1")
abs = _unary("abs", "Magnitude")  # noqa: A001 - NKI's name

reciprocal = _built("reciprocal", "1 / x on VectorE", nisa.reciprocal)
copy = _built("copy", "A copy in SBUF", nisa.tensor_copy)
negative = _built("negative", "-x", lambda d, x: nisa.tensor_scalar(d, x, multiply, -1.0))
invert = _built("invert", "~x of integers", lambda d, x: nisa.tensor_scalar(d, x, invert, None))
logical_not = _built(
    "logical_not",
    "1 where x is 0, else 0",
    lambda d, x: nisa.tensor_scalar(d, x, logical_not, None),
)


def _whole(result: NkiTensor, x: NkiTensor, beyond: Function) -> None:
    """Nearest integer, then one step where it lies `beyond` x: conversions round to nearest."""
    nearest, step = tile(x, int32), tile(x, float32)
    nisa.tensor_copy(nearest, x)
    nisa.tensor_tensor(step, nearest, x, beyond)
    nisa.tensor_tensor(result, nearest, step, subtract if beyond is greater else add)


def _trunc(result: NkiTensor, x: NkiTensor) -> None:
    size, whole = tile(x, float32), tile(x, float32)
    activation(size, abs, x)
    _whole(whole, size, greater)
    activation(size, sign, x)
    nisa.tensor_tensor(result, whole, size, multiply)


def _sin(result: NkiTensor, x: NkiTensor, shift: float = 0.0) -> None:
    """sin(x + shift): whole turns are taken off first, ScalarE knows [-pi, pi] only."""
    moved, turns, angle = tile(x, float32), tile(x, int32), tile(x, float32)
    nisa.tensor_scalar(moved, x, add, shift)
    nisa.tensor_scalar(turns, moved, multiply, 1 / (2 * math.pi))
    # 2 pi in two parts, the first with few bits: its product with a count of turns is exact
    high = 6.28125
    nisa.scalar_tensor_tensor(angle, turns, multiply, -high, add, moved)
    nisa.scalar_tensor_tensor(angle, turns, multiply, high - 2 * math.pi, add, angle)
    nisa.tensor_scalar(angle, angle, minimum, math.pi, op1=maximum, operand1=-math.pi)
    activation(result, sin, angle)


def _tan(result: NkiTensor, x: NkiTensor) -> None:
    sine, cosine = tile(x, float32), tile(x, float32)
    _sin(sine, x)
    _sin(cosine, x, math.pi / 2)
    nisa.reciprocal(cosine, cosine)
    nisa.tensor_tensor(result, sine, cosine, multiply)


floor = _built("floor", "Next integer below, |x| < 2^31", lambda d, x: _whole(d, x, greater))
ceil = _built("ceil", "Next integer above, |x| < 2^31", lambda d, x: _whole(d, x, less))
trunc = _built("trunc", "Integer part, |x| < 2^31", _trunc)
sin = _built("sin", "Sine, of any argument", _sin)
cos = _built("cos", "Cosine, of any argument", lambda d, x: _sin(d, x, math.pi / 2))
tan = _built("tan", "Tangent, of any argument", _tan)

prelu = _token("prelu", "Parametric ReLU, for nisa.activation.")
bypass = _token("bypass", "The first operand unchanged, for tensor-scalar instructions.")
average = _token("average", "Mean, for reductions over partitions.")
