"""Shared by the tests of the simulated NeuronCore: data, and references on plain numbers."""

import math
import operator
from typing import Any

import ml_dtypes
import numpy as np

from neuroncore import language as nl
from neuroncore.dtypes import dtype_of, from_fp32

TARGETS = ("trn1", "trn2", "trn3")
FLOATS = (nl.float32, nl.bfloat16, nl.float16, nl.float8_e5m2, nl.float8_e4m3)
INTEGERS = (nl.int8, nl.uint8, nl.int16, nl.uint16, nl.int32, nl.uint32)
DTYPES = (*FLOATS, *INTEGERS)
bf16 = ml_dtypes.bfloat16
f32 = np.float32

BINARY: dict[str, Any] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "maximum": max,
    "minimum": min, "equal": operator.eq, "not_equal": operator.ne, "less": operator.lt,
    "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge,
    "logical_and": lambda x, y: bool(x) and bool(y), "logical_or": lambda x, y: bool(x) or bool(y),
    "logical_xor": lambda x, y: bool(x) != bool(y), "bypass": lambda x, y: x,
    "abs_max": lambda x, y: x if abs(x) > abs(y) else y,
    "abs_min": lambda x, y: x if abs(x) < abs(y) else y,
}  # fmt: skip
"""Operators on Python numbers."""
BITVEC: dict[str, Any] = {
    "bitwise_and": operator.and_, "bitwise_or": operator.or_, "bitwise_xor": operator.xor,
    "left_shift": operator.lshift, "right_shift": operator.rshift,
}  # fmt: skip
OPERATORS = ["add", "subtract", "multiply", "maximum", "minimum"]
LOGICAL = ["logical_and", "logical_or", "logical_xor"]
START = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -math.inf, "minimum": math.inf}
ARITHMETIC: dict[str, Any] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum,
    "minimum": np.minimum, "equal": np.equal, "not_equal": np.not_equal, "less": np.less,
    "less_equal": np.less_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
}  # fmt: skip


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def pdf(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def tanh_argument(x: float) -> float:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


FUNCTIONS: dict[str, Any] = {
    "copy": lambda x: x,
    "square": lambda x: x * x,
    "sigmoid": sigmoid,
    "relu": lambda x: max(x, 0.0),
    "prelu": lambda x: max(x, 0.0) + 0.25 * min(x, 0.0),
    "gelu": lambda x: x * cdf(x),
    "gelu_dx": lambda x: cdf(x) + x * pdf(x),
    "gelu_apprx_tanh": lambda x: x * sigmoid(2 * tanh_argument(x)),
    "gelu_apprx_sigmoid": lambda x: x * sigmoid(1.702 * x),
    "gelu_apprx_sigmoid_dx": lambda x: (
        sigmoid(1.702 * x) + 1.702 * x * sigmoid(1.702 * x) * sigmoid(-1.702 * x)
    ),
    "silu": lambda x: x * sigmoid(x),
    "silu_dx": lambda x: sigmoid(x) + x * sigmoid(x) * sigmoid(-x),
    "tanh": math.tanh,
    "softplus": softplus,
    "mish": lambda x: x * math.tanh(softplus(x)),
    "erf": math.erf,
    "erf_dx": lambda x: 2 / math.sqrt(math.pi) * math.exp(-x * x),
    "exp": lambda x: math.exp(x) if x < 700 else math.inf,
    "log": math.log,
    "sin": math.sin,
    "arctan": math.atan,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sign": lambda x: (x > 0) - (x < 0),
    "abs": abs,
}
"""Activations, on Python numbers."""


def data(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0, scale: float = 1) -> Any:
    """Normal values in a dtype; integers over their whole range."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(dtype, "numpy", dtype))
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)
    return (rng.standard_normal(shape) * scale).astype(np.float32).astype(dtype)


def values(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Random eighths from -8 to 8 (bytes from 0 in unsigned types): many ties, exact sums."""
    kind = dtype_of(dtype)
    low = 0 if kind.kind == "uint" else -64
    drawn = np.random.default_rng(seed).integers(low, 64, shape)
    return (drawn / 8 if kind.is_float else drawn).astype(kind.numpy)


def as_stored(expected: Any, dtype: str) -> np.ndarray:
    """A reference in float64 as an engine writes it: through float32."""
    with np.errstate(all="ignore"):
        wide = np.atleast_1d(np.asarray(expected, np.float64)).astype(np.float32)
        return from_fp32(wide, dtype_of(dtype))


def wide(x: Any) -> Any:
    """Values in fp64."""
    return np.asarray(x).astype(np.float64)


def rounded(values: Any, dtype: Any) -> Any:
    """Independent statement of a conversion from fp32: nearest even, saturating to integers."""
    values = np.asarray(values, np.float32)
    target = np.dtype(getattr(dtype, "numpy", dtype))
    if target.kind in "iu":
        bounds = np.iinfo(target)
        whole = np.rint(values.astype(np.float64))
        return np.minimum(np.maximum(whole, bounds.min), bounds.max).astype(target)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(target)


def equal(got: Any, expected: Any) -> None:
    """Bit-equal dtypes and values, NaN equal to NaN."""
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(wide(got), wide(expected).reshape(got.shape))


def rows_of(array: np.ndarray) -> list[list[float]]:
    """The elements of each partition as Python numbers."""
    return array.reshape(len(array), -1).astype(np.float64).tolist()
