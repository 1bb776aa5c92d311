"""What a tensor occupies: storages, and the regions of them that views touch.

A region is a box in (row, byte of the row): rows are partitions on chip, and rows of the last
dimension in HBM. Boxes are interned per layout (one shape, dtype and memory), with their
overlaps, so that a dependency check per instruction is a look-up and no geometry.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from enum import Enum
from math import prod
from types import CodeType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from neuroncore import dtypes, hardware
from neuroncore.dtypes import DType

if TYPE_CHECKING:
    from neuroncore.memory.geometry import Geometry


Interval = tuple[int, int]


class MemoryRegion(Enum):
    """The memories of `nl.ndarray`, which makes a tensor of `hbm` in `private_hbm`."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"
    hbm = "hbm"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash costs a Python call

    def __eq__(self, other: object) -> bool:
        """`hbm` equals all that is HBM.

        An argument is in `nl.hbm` by AWS's simulator guide and its kernels for MX, and in
        `nl.shared_hbm` by nki-library's.
        """
        if self is other or not isinstance(other, MemoryRegion):
            return self is other
        return "hbm" in (self.label, other.label) and not (self.on_chip or other.on_chip)

    def __init__(self, label: str) -> None:
        self.label = label  # `value`, which costs a Python call
        self.on_chip = label in ("sbuf", "psum")
        """SBUF or PSUM: the first dimension is the partition."""

    def __repr__(self) -> str:
        return self.value


class Box(NamedTuple):
    """Rows [row, row_end) and bytes [byte, byte_end) of each.

    `pattern`, unless None, says which bytes of them: place, sizes and strides in bytes. Two views
    with one box and other holes are two regions.
    """

    row: int
    row_end: int
    byte: int
    byte_end: int
    pattern: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def exact(self) -> bool:
        """Whether it has no holes."""
        return self.pattern is None

    def holds(self, other: Box) -> bool:
        """Whether every byte of another is one of it."""
        rows = self.row <= other.row and other.row_end <= self.row_end
        columns = self.byte <= other.byte and other.byte_end <= self.byte_end
        return self.pattern is None and rows and columns

    def places(self) -> np.ndarray:
        """The bytes of the storage that a pattern names, one number each."""
        assert self.pattern is not None
        return _places(*self.pattern)

    def in_each_row(self, row_bytes: int) -> np.ndarray | None:
        """The bytes of each row, as a pattern has them that goes from row to row; else None."""
        if self.pattern is None:
            return np.arange(self.byte, self.byte_end)
        place, sizes, strides = self.pattern
        if (sizes[0], strides[0]) != (self.row_end - self.row, row_bytes):
            return None
        return _places(place - self.row * row_bytes, sizes[1:], strides[1:])


def _places(place: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Numbers from a place on, of all dimensions."""
    places = np.array([place])
    for count, stride in zip(sizes, strides, strict=True):
        places = np.add.outer(places, np.arange(count) * stride).reshape(-1)
    return places


class _Intervals:
    """Intervals of one dimension, and for each those that it overlaps, itself among them.

    They are found by length, in powers of two, and by the multiple of it that they begin after.
    """

    __slots__ = ("_begins", "_touching")

    def __init__(self) -> None:
        self._touching: dict[Interval, list[Interval]] = {}
        self._begins: defaultdict[int, dict[int, list[Interval]]] = defaultdict(dict)

    def touching(self, new: Interval) -> list[Interval]:
        """Those known so far that it overlaps, among which it is from now on."""
        known = self._touching.get(new)
        if known is not None:
            return known
        begin, end = new
        overlapping = [new]
        for length, begins in self._begins.items():
            places = range(begin // length - 1, (end - 1) // length + 1)
            near = begins if len(places) > len(begins) else begins.keys() & places
            overlapping += [
                one for at in near for one in begins[at] if one[0] < end and one[1] > begin
            ]
        for other in overlapping[1:]:
            self._touching[other].append(new)
        length = 1 << (end - begin - 1).bit_length()
        self._begins[length].setdefault(begin // length, []).append(new)
        self._touching[new] = overlapping
        return overlapping


class Layout:
    """Every tensor of one shape, dtype and memory: its interned views and regions.

    `bytes` is per partition on chip and of the whole tensor in HBM; `size` is what capacity is
    counted in: bytes per partition in SBUF, where two tensors of up to 64 partitions or four of up
    to 32 can lie above one another, and banks in PSUM, where tensors start on a bank.
    """

    __slots__ = (
        "_at", "_bytes", "_ids", "_rows", "boxes", "bytes", "containers", "dtype", "forms",
        "memory", "on_chip", "overlaps", "row_elements", "shape", "size", "views", "whole",
    )  # fmt: skip

    def __init__(self, shape: tuple[int, ...], dtype: DType, memory: MemoryRegion) -> None:
        self.shape, self.dtype, self.memory = shape, dtype, memory
        self.on_chip = memory.on_chip
        self.bytes = prod(shape[1:] if self.on_chip else shape) * dtype.itemsize
        self.size = self.bytes
        if memory is MemoryRegion.psum:
            self.size = -(-self.bytes // hardware.PSUM_BANK_BYTES)
        elif memory is MemoryRegion.sbuf:
            self.size = -(-self.bytes // (4 if shape[0] <= 32 else 2 if shape[0] <= 64 else 1))
        # an access pattern addresses on-chip storage as [partition, free elements]
        self.row_elements = prod(shape[1:]) if memory.on_chip else shape[-1]
        self.views: dict[object, Geometry] = {}
        self.whole: Geometry | None = None
        self.forms: dict[object, Geometry] = {}
        self.boxes: list[Box] = []
        self.overlaps: list[list[int]] = []
        self.containers: list[list[int]] = []
        self._ids: dict[Box, int] = {}
        # the regions of each two intervals of rows and bytes
        self._rows, self._bytes = _Intervals(), _Intervals()
        self._at: defaultdict[tuple[Interval, Interval], list[int]] = defaultdict(list)

    def region(self, box: Box) -> int:
        """The number of a region; overlaps with all others are found once, here."""
        number = self._ids.get(box)
        if number is not None:
            return number
        new = len(self.boxes)
        rows, columns = (box.row, box.row_end), (box.byte, box.byte_end)
        at, same_columns = self._at, self._bytes.touching(columns)
        near = [(r, c) for r in self._rows.touching(rows) for c in same_columns if (r, c) in at]
        touching = sorted([other for pair in near for other in at[pair]])
        at[rows, columns].append(new)
        self._ids[box] = new
        self.boxes.append(box)
        self.overlaps.append([*touching, new])
        self.containers.append([o for o in touching if self.boxes[o].holds(box)])
        for other in touching:
            self.overlaps[other].append(new)
            if box.holds(self.boxes[other]):
                self.containers[other].append(new)
        if box.exact:
            self.containers[new].append(new)
        return new

    def mask(self, regions: Iterable[int], within: Box | None = None) -> np.ndarray:
        """One entry per byte of a tensor, or of the rows of a box, true in the regions."""
        row_bytes = self.row_elements * self.dtype.itemsize
        first = within.row if within else 0
        rows = within.row_end - first if within else prod(self.shape) // self.row_elements
        mask = np.zeros(rows * row_bytes, bool)
        grid = mask.reshape(rows, row_bytes)
        for region in regions:
            box = self.boxes[region]
            if box.exact:
                start, end = max(box.row - first, 0), max(box.row_end - first, 0)
                grid[start:end, box.byte : box.byte_end] = True
            else:
                places = box.places() - first * row_bytes
                mask[places[(places >= 0) & (places < len(mask))]] = True
        return mask

    def covers(self, region: int, written: set[int]) -> bool:
        """Whether written regions together have every byte of a region."""
        if not written.isdisjoint(self.containers[region]):
            return True
        touching = written.intersection(self.overlaps[region])
        box, parts = self.boxes[region], [self.boxes[r] for r in touching]
        exact = [p for p in parts if p.exact]
        # what has holes is written where its whole box is
        if _fill(box, exact):
            return True
        if box.exact and len(exact) == len(parts):
            return False
        row_bytes = self.row_elements * self.dtype.itemsize
        known = _fill_rows(box, parts, row_bytes)
        if known is not None:
            return known
        mask = self.mask(touching, box)
        if box.exact:
            return bool(mask.reshape(-1, row_bytes)[:, box.byte : box.byte_end].all())
        return bool(mask[box.places() - box.row * row_bytes].all())


def _fill(box: Box, parts: list[Box]) -> bool:
    """Whether parts without holes fill a box, on the grid of all their edges."""
    rows = sorted({e for p in (box, *parts) for e in (p.row, p.row_end)})
    cols = sorted({e for p in (box, *parts) for e in (p.byte, p.byte_end)})
    row_at = {edge: i for i, edge in enumerate(rows)}
    col_at = {edge: i for i, edge in enumerate(cols)}
    grid = np.zeros((len(rows), len(cols)), bool)
    for p in parts:
        grid[row_at[p.row] : row_at[p.row_end], col_at[p.byte] : col_at[p.byte_end]] = True
    inside = grid[row_at[box.row] : row_at[box.row_end], col_at[box.byte] : col_at[box.byte_end]]
    return bool(inside.all())


def _fill_rows(box: Box, parts: list[Box], row_bytes: int) -> bool | None:
    """Whether parts fill a box, by one row of those between two edges; None where they differ."""
    own = box.in_each_row(row_bytes)
    bytes_of = [p for part in parts if (p := part.in_each_row(row_bytes)) is not None]
    if own is None or len(bytes_of) < len(parts):
        return None
    edges = {edge for part in (box, *parts) for edge in (part.row, part.row_end)}
    for row in edges.intersection(range(box.row, box.row_end)):
        written = np.zeros(row_bytes, bool)
        for part, places in zip(parts, bytes_of, strict=True):
            if part.row <= row < part.row_end:
                written[places] = True
        if not written[own].all():
            return False
    return True


class Held(weakref.ref[np.ndarray]):
    """The values of a storage, while anything holds them; and how many bytes they count as."""

    __slots__ = ("size",)
    size: int


class Storage:
    """The memory behind a tensor and all its views, on one core or shared by both."""

    __slots__ = (
        "_data", "address", "code", "first", "initialised", "last", "layout", "line", "name",
        "store", "summed", "written",
    )  # fmt: skip

    def __init__(self, layout: Layout, name: str) -> None:
        self.layout = layout
        self.name = name
        self._data: Held | None = None
        # the dtype of its values: with NKI_PRECISE_FP=0 floats are kept in fp32
        self.store = layout.dtype.numpy
        self.address: tuple[int, int] | None = None
        self.code: CodeType | None = None
        self.line = 0
        # written and summed: regions that any instruction, or a matmul, wrote
        self.initialised = False
        self.written: set[int] = set()
        self.summed: set[int] = set()
        # numbers of the first and last instruction that use it
        self.first = self.last = -1

    @property
    def memory(self) -> MemoryRegion:
        """Where it lies."""
        return self.layout.memory

    @property
    def bytes(self) -> int:
        """Size in bytes: per partition on chip, of the whole tensor in HBM."""
        return self.layout.bytes

    @property
    def data(self) -> np.ndarray | None:
        """Its bytes, which tensors hold: a trace outlives them, and must not keep them."""
        return self._data and self._data()

    def hold(
        self, values: np.ndarray, size: int = 0, freed: list[Held] | None = None
    ) -> np.ndarray:
        """Make an array's bytes its own; what held them joins `freed` when nothing does any more.

        `size` is what counts as freed then.
        """
        data = values.reshape(-1).view(np.uint8)
        self._data = Held(data, None if freed is None else freed.append)
        self._data.size = size
        return data

    def fresh(self, precise: bool) -> np.ndarray:
        """Its values before the first write: NaN in floats, 4 in integers."""
        dtype = self.layout.dtype if precise or not self.layout.dtype.is_float else dtypes.float32
        self.store = dtype.numpy
        return dtypes.fresh((prod(self.layout.shape),), dtype)

    def covered(self, region: int) -> bool:
        """Whether instructions wrote every element of a region, which is then noted."""
        covered = self.initialised or self.layout.covers(region, self.written)
        if covered:
            self.written.add(region)
        return covered

    def describe(self) -> str:
        """Name, shape, dtype, memory and the line that made it, for messages."""
        where = f" at line {self.line}" if self.line else ""
        layout = self.layout
        return f"{self.name} {list(layout.shape)} {layout.dtype} in {layout.memory.value}{where}"
