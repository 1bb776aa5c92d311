"""Tiles of the Beta dialect: block dimensions, Python operators, results that wait for a place."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable
from math import prod
from types import EllipsisType
from typing import Any, ClassVar

from neuroncore import isa
from neuroncore import language as nl
from neuroncore.checks.base import refuse
from neuroncore.legacy.indices import Box, Index, IndexGrid
from neuroncore.legacy.names import OPERATORS
from neuroncore.memory.storage import MemoryRegion, Storage
from neuroncore.memory.tensor import NkiTensor

PSUM = MemoryRegion.psum


class ParDim(int):
    """`nl.par_dim(n)`: the size of the dimension that is the partition."""


class Tile:
    """A tensor or tile, or a view of one that an affine index names."""

    __array_ufunc__ = None

    def __init__(self, base: NkiTensor, places: list[Any] | None = None) -> None:
        self.base, self.places = base, places

    def view(self, box: Box | None = None) -> NkiTensor:
        """The view, with axes in the box cut to it."""
        Pending.flush()
        base, box = self.base, box or {}
        if self.places is None:
            for axis, (low, high) in box.items():
                if -axis <= base.ndim and base.shape[axis] != 1:
                    base = base.slice(base.ndim + axis, low, min(high, base.shape[axis]))
            return base
        ends = [p.ends(box) for p in self.places]
        for dim, (low, high) in enumerate(ends):
            if low < 0 or high >= base.shape[dim]:
                refuse(f"{base}: index {low}:{high + 1} is out of bounds of dimension {dim}")
        sizes = {axis: size for p in self.places for axis, (_, size) in p.terms.items()}
        axes = range(min(sizes, default=-1), 0)
        shape, strides, offset = [], [], base.offset
        for axis in axes:
            low, high = box.get(axis, (0, sizes.get(axis, 1)))
            steps = [p.terms.get(axis, (0, 1))[0] for p in self.places]
            stride = sum(map(operator.mul, steps, base.strides))
            shape.append(high - low)
            strides.append(stride)
            offset += low * stride
        offset += sum(map(operator.mul, [p.offset for p in self.places], base.strides))
        if base.geometry.on_chip and (len(shape) == 1 or any(self._steps(a)[0] for a in axes[1:])):
            refuse(f"{base}: the first axis of an index on chip is the partition's")
        return base.with_geometry(base.geometry.derive(tuple(shape), tuple(strides), offset), None)

    def _steps(self, axis: int) -> list[int]:
        return [p.terms.get(axis, (0, 1))[0] for p in self.places or []]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions, before any mask cuts them."""
        if self.places is None:
            return self.base.shape
        sizes = {axis: size for p in self.places for axis, (_, size) in p.terms.items()}
        return tuple(sizes.get(axis, 1) for axis in range(min(sizes), 0))

    @property
    def dtype(self) -> Any:
        """Element type."""
        return self.base.dtype

    @property
    def buffer(self) -> Any:
        """The memory it lies in."""
        return self.base.buffer

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __getitem__(self, key: Any) -> Tile:
        keys = list(key) if isinstance(key, tuple) else [key]
        keys = [k.axes[i] if isinstance(k, IndexGrid) else k for i, k in enumerate(keys)]
        base = self.view()
        if any(isinstance(k, Tile) for k in keys):
            refuse(f"{base}: an index that is a tile is not interpreted; migrate it by hand")
        if not any(isinstance(k, Index) for k in keys):
            return Tile(base[tuple(keys)])
        dots = [i for i, k in enumerate(keys) if isinstance(k, EllipsisType)]
        if dots or len(keys) != base.ndim or any(isinstance(k, slice) for k in keys):
            refuse(f"{base}: an affine index has a place for each dimension, no slices; got {key}")
        return Tile(base, [k if isinstance(k, Index) else Index(int(k), {}) for k in keys])

    def __setitem__(self, key: Any, value: Any) -> None:
        from neuroncore.legacy import calls

        waits = Pending.taken(value)
        target = self[key]
        if waits is not None and waits.writes(target):
            return
        if value.__class__ is Tile and value.view() is not None:
            a, b = target.view(), value.view()
            if a.storage is b.storage and a.geometry is b.geometry:
                return  # after an operator in place
        calls.assign(target, value)

    def __iadd__(self, other: Any) -> Tile:
        from neuroncore.legacy import calls

        if (waits := Pending.taken(other)) is not None and waits.adds_to(self):
            return self
        storage = self.base.storage
        if storage.initialised or storage.written:
            other = calls.binary(nl.add, self, other)
        calls.assign(self, other)  # the first matmul of a sum overwrites what PSUM held
        return self

    def reshape(self, shape: Any) -> Tile:
        """The same elements in another shape."""
        return Tile(self.view().reshape(tuple(map(int, shape))))

    def broadcast_to(self, shape: Any) -> Tile:
        """Dimensions of size 1 repeated."""
        return Tile(nl.broadcast_to(self.view(), tuple(map(int, shape))))

    def __repr__(self) -> str:
        return repr(self.view())


class Pending(Tile):
    """An instruction, which waits for where its result goes: `tile[...] = nisa.f(...)` is one.

    Anything else that is used before issues it, so that its operands are what they were. A result
    that a name still has is made again before what it can be made of is overwritten.
    """

    waiting: Pending | None = None
    used: ClassVar[list[weakref.ref[Pending]]] = []
    """Issued where they were used, and not into tiles of their own."""

    def __init__(
        self, issue: Callable[..., Any], result: Tile, operands: list[Any], is_sum: bool = False
    ) -> None:
        Pending.flush()
        self.issue, self.result, self.operands, self.is_sum = issue, result, operands, is_sum
        self.places, self.issued = None, False
        self.target: Tile | None = None
        self.needs: set[Storage] = set()
        Pending.waiting = self

    @staticmethod
    def forget() -> None:
        """Begin a launch."""
        Pending.waiting, Pending.used = None, []

    @staticmethod
    def flush() -> None:
        """Issue the instruction that waits, if one does."""
        if Pending.waiting is not None:
            Pending.waiting.base  # noqa: B018 - which issues it

    @staticmethod
    def taken(value: Any) -> Pending | None:
        """The value, if it still waits; now whoever has it issues it."""
        if Pending.waiting is None or Pending.waiting is not value:
            return None
        waits, Pending.waiting = Pending.waiting, None
        return waits

    @staticmethod
    def before_write(storage: Storage) -> None:
        """Give tiles of their own to used results that this write would take away."""
        named = [one for ref in Pending.used if (one := ref()) is not None and not one.issued]
        Pending.used = [weakref.ref(one) for one in named]
        for one in named:
            if storage in one.needs:
                one.base  # noqa: B018 - which makes it

    def _used(self, needs: set[Storage]) -> None:
        self.needs = needs
        Pending.used.append(weakref.ref(self))

    @property
    def base(self) -> NkiTensor:  # type: ignore[override]
        """The result, in a tile of its own."""
        if not self.issued:
            self.issued = True
            if Pending.waiting is self:
                Pending.waiting = None
            if self.target is None:
                self.issue(self.result)
            else:
                isa.tensor_copy(self.result.view(), self.target.view())
        return self.result.base

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        return self.result.shape

    @property
    def dtype(self) -> Any:
        """Of the result."""
        return self.result.dtype

    @property
    def buffer(self) -> Any:
        """Where an own tile of the result lies."""
        return self.result.buffer

    def writes(self, target: Tile) -> bool:
        """Issue it to the target, if its engine reaches that and the result is the same there."""
        result, storage = self.result, target.base.storage
        reaches = target.buffer.on_chip and (result.buffer is not PSUM or target.buffer is PSUM)
        alike = target.shape[0] == result.shape[0] and prod(target.shape) == prod(result.shape)
        same = [o.view() for o in self.operands if isinstance(o, Tile)]
        place = target.view().geometry
        own = any(v.storage is storage and v.geometry is not place for v in same)
        if not (reaches and alike and result.dtype == target.dtype) or own:
            return False
        self.issue(target, accumulate=False) if self.is_sum else self.issue(target)
        self.target = target
        self._used({storage})
        return True

    def adds_to(self, target: Tile) -> bool:
        """Issue a matmul as `target += matmul`: its compiler knows how a sum begins."""
        if not self.is_sum or target.buffer is not PSUM:
            return False
        view = target.view()
        storage, region = view.storage, view.geometry.region
        written = storage.covered(region)
        if written:
            storage.summed.add(region)
        self.issue(target, accumulate=written or None)
        self._used({o.base.storage for o in self.operands if isinstance(o, Tile)})
        return True


class TileBlocks:
    """Tiles under block dimensions, those before `nl.par_dim`."""

    def __init__(self, shape: tuple[int, ...], tiles: list[Tile]) -> None:
        self.block_shape, self.tiles = shape, tiles
        self.shape = (*shape, *tiles[0].shape)
        self.dtype = tiles[0].dtype

    def _found(self, key: Any) -> tuple[Tile | TileBlocks, tuple[Any, ...]]:
        keys = key if isinstance(key, tuple) else (key,)
        most = len(self.block_shape)
        named = list(itertools.takewhile(lambda k: hasattr(k, "__index__"), keys[:most]))
        if not named:
            refuse(f"block dimensions {list(self.block_shape)} are indexed by numbers; got {key}")
        rest = self.block_shape[len(named) :]
        at = 0
        for k, size in zip(named, self.block_shape, strict=False):
            if not 0 <= operator.index(k) < size:
                refuse(f"block {k} is out of bounds of {list(self.block_shape)}")
            at = at * size + operator.index(k)
        if not rest:
            return self.tiles[at], keys[len(named) :]
        count = prod(rest)
        return TileBlocks(rest, self.tiles[at * count : (at + 1) * count]), keys[len(named) :]

    def __getitem__(self, key: Any) -> Any:
        tile, rest = self._found(key)
        return tile[rest] if rest else tile

    def __setitem__(self, key: Any, value: Any) -> None:
        tile, rest = self._found(key)
        tile[rest or ...] = value


def _operator(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(self: Tile, other: Any) -> Any:
        from neuroncore.legacy import calls

        return calls.binary(getattr(nl, name), self, other)

    def backward(self: Tile, other: Any) -> Any:
        from neuroncore.legacy import calls

        return calls.binary(getattr(nl, name), other, self)

    return forward, backward


for _python, _name in OPERATORS.items():
    _special = {"mult": "mul", "div": "truediv", "lte": "le", "gte": "ge"}.get(
        _python.lower(), _python.lower()
    )
    _forward, _backward = _operator(_name)
    setattr(Tile, f"__{_special}__", _forward)
    setattr(Tile, f"__r{_special}__", _backward)
Tile.__neg__ = lambda self: self * -1.0  # type: ignore[attr-defined]
