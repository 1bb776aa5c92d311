"""Quotients and remainders of `nl`: the engines have neither, so each is several instructions.

They work in simulation; the compiler of NKI 0.6 refuses them (release notes, known issues), which
an `NkiWarning` says.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from neuroncore.checks.base import note
from neuroncore.checks.operands import one_tile
from neuroncore.dtypes import DType, float32
from neuroncore.isa import elementwise as nisa
from neuroncore.memory.tensor import NkiTensor
from neuroncore.nl import elementary as nl
from neuroncore.nl.elementary import tile


def divide(x: Any, y: Any, dtype: DType | None = None) -> NkiTensor:
    """x / y, element by element, as x times the reciprocal of y; one of the two may be a number."""
    like = x if isinstance(x, NkiTensor) else y
    one_tile("divide", like)
    _note("divide")
    result = tile(like, dtype)
    _quotient(result, x, y)
    return result


def mod(x: Any, y: Any, dtype: DType | None = None) -> NkiTensor:
    """x - y * floor(x / y) of fp32, with the sign of y; one of the two may be a number.

    Exact where y times the quotient is exact in fp32, else to within the rounding of x. y is
    finite, and the quotient below 2^31.
    """
    like = x if isinstance(x, NkiTensor) else y
    one_tile("mod", like)
    _note("mod")
    result, sign = tile(like, dtype), _sign(y)
    rest = _remainder(_times(like, x, sign), _magnitude(y))
    _multiply(result, rest, sign)
    return result


def fmod(x: Any, y: Any, dtype: DType | None = None) -> NkiTensor:
    """x - y * trunc(x / y) of fp32, with the sign of x; as exact as `mod`."""
    like = x if isinstance(x, NkiTensor) else y
    one_tile("fmod", like)
    _note("fmod")
    result = tile(like, dtype)
    rest = _remainder(_times(like, _magnitude(x), 1.0), _magnitude(y))
    _multiply(result, rest, _sign(x))
    return result


def _note(name: str) -> None:
    note(
        f"nl.{name}: works in simulation and does not compile (NKI release notes, known issues); "
        "use nl.reciprocal and nl.multiply"
    )


def _remainder(x: NkiTensor, y: Any) -> NkiTensor:
    """x - y * floor(x / y) for y > 0, from 0 to below y although the quotient is rounded."""
    rest, step = tile(x), tile(x)
    _quotient(rest, x, y)
    whole = nl.floor(rest)
    _multiply(step, whole, y)
    nisa.tensor_tensor(rest, x, step, nl.subtract)
    for compare, bound, fix in ((nl.less, 0.0, nl.add), (nl.greater_equal, y, nl.subtract)):
        if isinstance(bound, NkiTensor):
            nisa.tensor_tensor(step, rest, bound, compare)
        else:
            nisa.tensor_scalar(step, rest, compare, bound)
        _multiply(step, step, y)
        nisa.tensor_tensor(rest, rest, step, fix)
    return rest


def _quotient(result: NkiTensor, x: Any, y: Any) -> None:
    if not isinstance(y, NkiTensor):
        with np.errstate(all="ignore"):
            _multiply(result, x, float(np.float32(1) / np.float32(y)))
        return
    inverse = tile(y, float32)
    nisa.reciprocal(inverse, y)
    _multiply(result, inverse, x)


def _multiply(result: NkiTensor, x: NkiTensor, y: Any) -> None:
    if isinstance(y, NkiTensor):
        nisa.tensor_tensor(result, x, y, nl.multiply)
    else:
        nisa.tensor_scalar(result, x, nl.multiply, y)


def _times(like: NkiTensor, x: Any, y: Any) -> NkiTensor:
    """x * y in fp32, of the shape of `like`; either may be a number."""
    result = tile(like, float32)
    if isinstance(x, NkiTensor):
        _multiply(result, x, y)
    elif isinstance(y, NkiTensor):
        _multiply(result, y, x)
    else:
        nisa.memset(result, float(x) * y)
    return result


def _sign(x: Any) -> Any:
    """1 or -1, for 0 too: a remainder of 0 keeps its value and no quotient becomes 0."""
    if not isinstance(x, NkiTensor):
        return -1.0 if x < 0 else 1.0
    result = tile(x, float32)
    nisa.tensor_scalar(result, x, nl.less, 0.0, op1=nl.multiply, operand1=-2.0)
    nisa.tensor_scalar(result, result, nl.add, 1.0)
    return result


def _magnitude(x: Any) -> Any:
    return nl.abs(x, float32) if isinstance(x, NkiTensor) else float(np.abs(x))
