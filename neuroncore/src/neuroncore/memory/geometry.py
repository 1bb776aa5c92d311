"""Where a view's elements lie: shape, strides and offset, interned per layout.

A view made again in a loop is one look-up, and the checks made for it hold for all tensors of its
layout.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import mul

import numpy as np

from neuroncore.checks.base import refuse
from neuroncore.dtypes import DType
from neuroncore.memory.storage import Box, Layout, Storage


class Geometry:
    """Shape, strides and offset of a view, in elements of its dtype, and the region it touches."""

    __slots__ = (
        "_extent", "children", "dtype", "elements", "form", "indirect", "inside", "layout",
        "memory", "offset", "on_chip", "partitions", "region", "shape", "start", "strides",
    )  # fmt: skip

    def __init__(
        self,
        layout: Layout,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        dtype: DType,
        indirect: tuple[str, int, int] | None,
    ) -> None:
        self.layout, self.memory, self.on_chip = layout, layout.memory, layout.memory.on_chip
        self.shape, self.strides, self.offset, self.dtype = shape, strides, offset, dtype
        self.indirect = indirect
        self.children: dict[object, Geometry] = {}
        row = layout.row_elements * layout.dtype.itemsize // dtype.itemsize
        self.start = offset // row if self.on_chip else 0
        self.partitions = shape[0] if self.on_chip else 0
        self.elements = prod(shape[1:]) if self.on_chip else prod(shape)
        # the first geometry that differs by its place in HBM only
        self.form = self
        if not self.on_chip:
            self.form = layout.forms.setdefault((shape, strides, dtype, indirect), self)
        if self.form is self:
            self._extent = self._spread(row)
        if indirect:
            rows = max(1, prod(layout.shape) // layout.row_elements)
            self.region = layout.region(Box(0, rows, 0, row * dtype.itemsize))
        else:
            self.region = layout.region(self._box(row))
        self.inside = False  # until an instruction has seen that it is

    def _spread(self, row: int) -> tuple[int, int, int, bool]:
        """Where it begins, from its offset; its rows and columns; whether it has all of them."""
        steps = [(s, c) for s, c in zip(self.strides, self.shape, strict=True) if c > 1 and s]
        rows = columns = 1
        exact = True
        for stride, count in sorted([(abs(s), c) for s, c in steps]):
            if stride % row == 0:
                exact &= stride // row == rows
                rows += (stride // row) * (count - 1)
            else:
                exact &= stride == columns
                columns += stride * (count - 1)
        return sum([s * (c - 1) for s, c in steps if s < 0]), rows, columns, exact

    def _box(self, row: int) -> Box:
        """The rows and bytes that the view touches, and whether it touches all of them."""
        size = self.dtype.itemsize
        lowest, rows, columns, exact = self.form._extent
        first_row, first = divmod(self.offset + lowest, row)
        pattern = None
        if first + columns > row:  # runs over the end of a row: take whole rows
            rows += (first + columns - 1) // row
            first, columns, exact = 0, row, False
        if not exact:
            byte_strides = tuple([s * size for s in self.strides])
            pattern = (self.offset * size, (*self.shape, size), (*byte_strides, 1))
        return Box(first_row, first_row + rows, first * size, (first + columns) * size, pattern)

    @property
    def run_bytes(self) -> int:
        """Bytes of one contiguous run in memory, over the free dimensions on chip."""
        first = 1 if self.on_chip else 0
        runs = merged(self.shape[first:], self.strides[first:])
        return (max(1, runs[-1][0]) if runs and runs[-1][1] == 1 else 1) * self.dtype.itemsize

    @property
    def unit_stride(self) -> bool:
        """Whether the innermost elements lie side by side."""
        return self.shape[-1] == 1 or self.strides[-1] == 1

    def array(self, storage: Storage, extra: int = 0) -> np.ndarray:
        """The view as a NumPy array on the storage's memory, `extra` elements further on."""
        data = storage.data
        if data is None:
            refuse(f"{storage.describe()} has lost its values; keep its tensor, or a view of it")
        dtype = storage.store if self.dtype is self.layout.dtype else self.dtype.numpy
        size = dtype.itemsize
        strides = tuple([s * size for s in self.strides])
        return np.ndarray(self.shape, dtype, data, (self.offset + extra) * size, strides)

    def bytes_of(self, mask: np.ndarray) -> np.ndarray:
        """The view's bytes in a mask that has one entry per byte of the storage."""
        size = self.dtype.itemsize
        strides = (*[s * size for s in self.strides], 1)
        return np.ndarray((*self.shape, size), bool, mask, self.offset * size, strides)

    def each_row(self, step: int) -> Geometry:
        """The geometry of the partitions whose number is a multiple of `step`."""
        skipped = -self.start % step
        if step == 1 or skipped >= self.partitions:
            return self
        shape = (-(-(self.partitions - skipped) // step), *self.shape[1:])
        strides = (self.strides[0] * step, *self.strides[1:])
        return self.derive(shape, strides, self.offset + skipped * self.strides[0])

    def derive(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        dtype: DType | None = None,
        indirect: tuple[str, int, int] | None = None,
    ) -> Geometry:
        """The interned geometry of another view of the same layout."""
        key = (shape, strides, offset, dtype or self.dtype, indirect or self.indirect)
        geometry = self.layout.views.get(key)
        if geometry is None:
            geometry = self.layout.views[key] = Geometry(self.layout, *key)
        return geometry

    def holds(self, elements: int) -> bool:
        """Whether the view, so many elements further on, is still in its storage."""
        total = prod(self.layout.shape) * self.layout.dtype.itemsize // self.dtype.itemsize
        reach = [s * (c - 1) for s, c in zip(self.strides, self.shape, strict=True)]
        first = self.offset + elements + sum([r for r in reach if r < 0])
        last = self.offset + elements + sum([r for r in reach if r > 0])
        return elements >= 0 and first >= 0 and last < total

    def moved(self, elements: int) -> Geometry:
        """The same view so many elements further on, its place known."""
        key = (self.shape, self.strides, self.offset + elements, self.dtype, None)
        geometry = self.layout.views.get(key)
        if geometry is None:
            geometry = self.layout.views[key] = Geometry(self.layout, *key)
        return geometry


def whole(layout: Layout) -> Geometry:
    """The interned geometry of a tensor, from which those of its views derive."""
    geometry = layout.whole
    if geometry is None:
        key = (layout.shape, contiguous_strides(layout.shape), 0, layout.dtype, None)
        geometry = layout.whole = layout.views[key] = Geometry(layout, *key)
    return geometry


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    sizes = tuple(accumulate(reversed(shape), mul, initial=1))
    return sizes[-2::-1]


def merged(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """(count, stride) of the longest runs of dimensions that one stride walks; sizes 1 left out."""
    runs: list[tuple[int, int]] = []
    for count, stride in zip(shape, strides, strict=True):
        if count == 1:
            continue
        if runs and runs[-1][1] == count * stride:
            count *= runs.pop()[0]
        runs.append((count, stride))
    return runs


def reshaped_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Strides of a reshape, or None where it needs a copy: each size divides a merged run."""
    runs = merged(shape, strides)
    result: list[int] = []
    step = 1
    for size in reversed(sizes):
        if size != 1:
            count, step = runs.pop()
            if count % size:
                return None
            if count > size:
                runs.append((count // size, step * size))
        result.append(step)
        step *= size
    return tuple(reversed(result))
