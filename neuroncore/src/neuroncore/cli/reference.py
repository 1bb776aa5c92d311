"""A kernel's outputs next to a reference function of the user's, computed in fp64."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from neuroncore.boundary import as_arrays, is_torch
from neuroncore.cli.arguments import check_arguments, parameters_of
from neuroncore.cli.console import KernelError
from neuroncore.cli.files import FunctionPath, function_of, module, reported
from neuroncore.dtypes import from_fp32, from_numpy

ROUNDINGS = 4
"""Units in the last place of the largest value that are always allowed."""


@dataclass(frozen=True)
class Agreement:
    """How far an output is from the reference; None stands for what is not finite."""

    output: int
    max_error: float | None
    """max |output - fp64 reference|."""
    allowed: float | None
    """2 max |fp32 reference, rounded to the output's dtype - fp64 reference| + 4 eps max |fp64|."""
    largest: float | None
    """max |fp64 reference|."""
    agrees: bool

    def within(self, rtol: float) -> "Agreement":
        """The same where this share of the largest value is allowed."""
        allowed = rtol * (self.largest or 0.0)
        agrees = self.max_error is not None and self.max_error <= allowed
        return replace(self, allowed=allowed, agrees=agrees)

    def document(self) -> dict[str, Any]:
        """As plain types."""
        return asdict(self)


@dataclass(frozen=True)
class Expected:
    """What the reference returned: in fp64, and in fp32."""

    of: str
    exact: list[np.ndarray]
    single: list[np.ndarray]


def expect(place: FunctionPath, arguments: dict[str, Any]) -> Expected:
    """`expected_of` the function of a file."""
    with reported(place.path), module(place.path) as loaded:
        return expected_of(function_of(loaded, place), str(place), arguments)


def expected_of(function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> Expected:
    """Call the reference with the kernel's arguments that it names, floats in fp64 and in fp32.

    To be called before the kernel, which may write its inputs.
    """
    known, takes_any = parameters_of(function)
    named = {n: value for n, value in arguments.items() if takes_any or n in known}
    check_arguments(function, f"reference {name.rpartition(':')[2]}", named)
    results = [
        as_arrays(function(**{n: _cast(value, dtype) for n, value in named.items()}))
        for dtype in (np.float64, np.float32)
    ]
    return Expected(name, results[0], results[1])


def inputs_of(place: FunctionPath) -> dict[str, Any]:
    """The arguments of a kernel, by parameter, that a function returns."""
    with reported(place.path), module(place.path) as loaded:
        values = function_of(loaded, place)()
    if not isinstance(values, dict):
        raise KernelError(f"{place} must return a dict of arguments; it returns {values!r:.40}")
    return values


def _cast(value: Any, dtype: Any) -> Any:
    """Floats in another dtype; other arrays copied, other values as they are."""
    if is_torch(value):
        is_float = value.is_floating_point()
        return (value.double() if dtype is np.float64 else value.float()) if is_float else value
    if not isinstance(value, np.ndarray):
        return value
    is_float = value.dtype.kind == "f" or from_numpy(value.dtype).is_float
    return value.astype(dtype) if is_float else value.copy()


def agreements(outputs: Any, expected: Expected) -> list[Agreement]:
    """Compare each output. Raises KernelError where number or shapes differ."""
    arrays = as_arrays(outputs)
    if len(arrays) != len(expected.exact):
        raise KernelError(
            f"the kernel returns {len(arrays)} tensors, {expected.of} {len(expected.exact)}"
        )
    for i, (output, exact) in enumerate(zip(arrays, expected.exact, strict=True)):
        if output.shape != exact.shape:
            raise KernelError(
                f"output {i} is {list(output.shape)}, of {expected.of} {list(exact.shape)}"
            )
    rows = zip(arrays, expected.exact, expected.single, strict=True)
    return [_agreement(i, *row) for i, row in enumerate(rows)]


def _agreement(i: int, output: np.ndarray, exact: np.ndarray, single: np.ndarray) -> Agreement:
    dtype = from_numpy(output.dtype)
    with np.errstate(all="ignore"):
        rounded = from_fp32(np.asarray(single, np.float32).reshape(exact.shape or (1,)), dtype)
        exact = np.asarray(exact, np.float64)
        error = _largest_difference(output.astype(np.float64), exact)
        least = _largest_difference(rounded.reshape(exact.shape).astype(np.float64), exact)
        finite = np.abs(exact[np.isfinite(exact)])
        largest = float(finite.max()) if finite.size else 0.0
    eps = float(ml_dtypes.finfo(output.dtype).eps) if dtype.is_float else 0.0
    allowed = 2 * least + ROUNDINGS * eps * largest
    return Agreement(i, _finite(error), _finite(allowed), largest, bool(error <= allowed))


def _largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """NaN where one alone is NaN; equal infinities do not differ."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    differences = np.abs(np.where(same, 0.0, a - b))
    return float(differences.max()) if differences.size else 0.0


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def check_agreement(agreements: list[Agreement], place: FunctionPath) -> None:
    """Raise KernelError at the first output that is too far from the reference."""
    for entry in agreements:
        if not entry.agrees:
            raise KernelError(f"values: {describe(entry)}, of {place} in fp64")


def describe(entry: Agreement) -> str:
    """In words."""
    error = "not finite" if entry.max_error is None else f"{entry.max_error:.3g}"
    allowed = "any" if entry.allowed is None else f"{entry.allowed:.3g}"
    return (
        f"output {entry.output} is off by {error}, {'within' if entry.agrees else 'beyond'} "
        f"{allowed}, with values up to {entry.largest:.3g}"
    )
