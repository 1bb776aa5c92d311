"""Affine indices and masks of the Beta dialect: `nl.arange`, `nl.mgrid`, `mask=`."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from neuroncore.checks.base import refuse

Box = dict[int, tuple[int, int]]
"""Begin and end of axes, which are counted from the last, -1."""


class Index:
    """An affine index: offset + the sum of coefficient * place on an axis of the tile.

    `terms` has (coefficient, size) of each axis; axes are counted from the last, -1.
    """

    def __init__(self, offset: int, terms: dict[int, tuple[int, int]]) -> None:
        self.offset, self.terms = offset, terms

    def __getitem__(self, key: Any) -> Index:
        """`nl.arange(n)[:, None]`: the axis at the place of the colon."""
        places = list(key) if isinstance(key, tuple) else [key]
        colons = [i for i, k in enumerate(places) if k == slice(None)]
        if len(colons) != 1 or [*self.terms] != [-1] or len(places) - places.count(None) != 1:
            refuse(f"nl.arange takes one colon and None for the other axes; got {key!r}")
        return Index(self.offset, {colons[0] - len(places): self.terms[-1]})

    def _sum(self, other: Any, sign: int = 1) -> Any:
        if isinstance(other, Index):
            terms = dict(self.terms)
            for axis, (step, size) in other.terms.items():
                before, own = terms.get(axis, (0, size))
                if own != size:
                    refuse(f"indices of {own} and {size} places meet on one axis")
                terms[axis] = (before + sign * step, size)
            return Index(self.offset + sign * other.offset, terms)
        return Index(self.offset + sign * operator.index(other), self.terms)

    def __mul__(self, factor: Any) -> Index:
        factor = operator.index(factor)
        terms = {axis: (factor * step, size) for axis, (step, size) in self.terms.items()}
        return Index(factor * self.offset, terms)

    __rmul__ = __mul__
    __add__ = __radd__ = _sum

    def __sub__(self, other: Any) -> Index:
        return self._sum(other, -1)

    def __rsub__(self, other: Any) -> Index:
        return (self * -1)._sum(other)

    # a mask is a list of indices that must not be negative

    def __ge__(self, other: Any) -> Mask:
        return Mask([self - other])

    def __gt__(self, other: Any) -> Mask:
        return Mask([self - other - 1])

    def __le__(self, other: Any) -> Mask:
        return Mask([other - self])

    def __lt__(self, other: Any) -> Mask:
        return Mask([other - self - 1])

    def ends(self, box: Box) -> tuple[int, int]:
        """The smallest and the largest place, where axes in the box are cut to it."""
        reach = []
        for axis, (step, size) in self.terms.items():
            low, high = box.get(axis, (0, size))
            reach.append((step * low, step * (high - 1)))
        lows, highs = [min(r) for r in reach], [max(r) for r in reach]
        return self.offset + sum(lows), self.offset + sum(highs)


class Mask:
    """A conjunction of comparisons of indices."""

    def __init__(self, parts: list[Index]) -> None:
        self.parts = parts

    def __and__(self, other: Mask) -> Mask:
        return Mask(self.parts + other.parts)

    def box(self) -> Box:
        """The box of axes where it holds. Refused where that is no box."""
        box: Box = {}
        for part in self.parts:
            moving = [axis for axis, (step, _) in part.terms.items() if step]
            if len(moving) > 1:
                if part.ends({})[0] < 0:
                    refuse("this mask is no box of indices; only affine_select takes it")
                continue
            if not moving:
                if part.offset < 0:
                    return dict.fromkeys(part.terms, (0, 0))
                continue
            (axis,) = moving
            step, size = part.terms[axis]
            low, high = box.get(axis, (0, size))
            if step > 0:
                low = max(low, -(part.offset // step))
            else:
                high = min(high, part.offset // -step + 1)
            box[axis] = (low, max(low, high))
        return box


class IndexGrid:
    """`nl.mgrid[a:b, c:d]`: an index for each axis, also by the names p, x, y, z."""

    def __init__(self, slices: Any) -> None:
        slices = slices if isinstance(slices, tuple) else (slices,)
        self.axes = tuple(
            Index(s.start or 0, {i - len(slices): (1, s.stop - (s.start or 0))})
            for i, s in enumerate(slices)
        )

    def __iter__(self) -> Iterator[Index]:
        return iter(self.axes)

    def __getattr__(self, name: str) -> Index:
        if len(name) != 1 or name not in "pxyzw":
            raise AttributeError(name)
        return self.axes["pxyzw".index(name)]
