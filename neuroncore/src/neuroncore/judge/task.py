"""What a task is: inputs of several shapes, and what a kernel is to make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from neuroncore.dtypes import DType, dtype_of, from_fp32

TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""By a case's dtype: of an element, relative to its size plus the root mean square of all."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
Values = Callable[[np.random.Generator, tuple[int, ...], Mapping[str, int]], Any]
KINDS: dict[str, Values] = {
    "normal": lambda random, shape, dims: random.standard_normal(shape),
    "small": lambda random, shape, dims: random.standard_normal(shape) / shape[-2] ** 0.5,
    "uniform": lambda random, shape, dims: random.random(shape),
    "wide": lambda random, shape, dims: (
        8 * random.standard_normal(shape) + random.choice([-90, 90], (*shape[:-1], 1))
    ),
    "bytes": lambda random, shape, dims: random.integers(-127, 128, shape),
    "rows": lambda random, shape, dims: random.integers(0, dims["V"], shape),
    "distinct": lambda random, shape, dims: (
        random.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1) - shape[-1] // 2
    ),
}
"""Values of inputs, of (random, shape, dims): "small" weights make a product of normal values
normal, "rows" are numbers of rows below V, "distinct" rows have no two equal values."""


@dataclass(frozen=True)
class TaskCase:
    """Sizes and dtype of one set of inputs: "M=128 N=512 bf16"."""

    text: str

    @cached_property
    def dims(self) -> dict[str, int]:
        """Sizes by name."""
        return {n: int(v) for n, _, v in (w.partition("=") for w in self.text.split()) if v}

    @cached_property
    def dtype(self) -> DType:
        """The dtype that an input or output has unless the task says another."""
        return dtype_of(_DTYPES[self.text.split()[-1]])


@dataclass(frozen=True)
class KernelTask:
    """One task. A kernel takes the inputs, in order, and returns what the reference does.

    Attributes:
        name: of the task.
        level: 1, the easiest, to 5.
        text: what to compute, with the shapes.
        reference: takes the inputs, floats in fp64, and returns an array or a tuple of them; with
            ranks, lists of an array for each rank instead of arrays.
        inputs: by name "M K", dimensions of the case; "int8: M K bytes" has another dtype, and
            values of another of `KINDS` than normal.
        cases: as `TaskCase` reads them.
        outputs: dtypes, "" for that of the case.
        lnc: cores. ranks: how many run it, each with its own values, or None.
    """

    name: str
    level: int
    text: str
    reference: Callable[..., Any]
    inputs: Mapping[str, str]
    cases: tuple[str, ...]
    outputs: tuple[str, ...] = ("",)
    lnc: int = 1
    ranks: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a case without a dtype, or without a dimension of an input."""
        for case in map(TaskCase, self.cases):
            try:
                self.shapes(case)
            except (KeyError, ValueError) as error:
                problem = f"case {case.text!r} lacks {error}, or its last word is no dtype"
                raise ValueError(f"task {self.name}: {problem}") from error

    def form(self, name: str, case: TaskCase) -> tuple[DType, tuple[int, ...], Values]:
        """Dtype, shape and values of an input."""
        dtype, _, words = self.inputs[name].rpartition(":")
        names = words.split()
        kind = names.pop() if names[-1] in KINDS else "normal"
        shape = tuple([case.dims[n] for n in names])
        return dtype_of(dtype) if dtype else case.dtype, shape, KINDS[kind]

    def shapes(self, case: TaskCase) -> dict[str, tuple[str, list[tuple[int, ...]]]]:
        """Dtype and shape on each rank, by input."""
        forms = {name: self.form(name, case) for name in self.inputs}
        count = self.ranks or 1
        return {name: (str(dtype), [shape] * count) for name, (dtype, shape, _) in forms.items()}

    def values(self, case: TaskCase, random: np.random.Generator) -> dict[str, list[Any]]:
        """Arrays, one a rank, by input."""
        values: dict[str, list[Any]] = {name: [] for name in self.inputs}
        for name in [name for _ in range(self.ranks or 1) for name in self.inputs]:
            dtype, shape, make = self.form(name, case)
            made = make(random, shape, case.dims)
            array = from_fp32(made.astype(np.float32), dtype) if dtype.is_float else made
            values[name].append(array.astype(dtype.numpy))
        return values

    def expected(self, case: TaskCase, values: Mapping[str, list[Any]]) -> list[list[Any]]:
        """For each rank what a kernel must return, in fp64 or integers."""
        exact = [
            [a.astype(np.float64) if self.form(name, case)[0].is_float else a for a in arrays]
            for name, arrays in values.items()
        ]
        results = self.reference(*(exact if self.ranks else [a for (a,) in exact]))
        each = results if self.ranks else [results]
        return [list(outputs) if isinstance(outputs, tuple) else [outputs] for outputs in each]
