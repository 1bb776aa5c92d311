"""`NkiTensor`: a storage seen through a geometry, with the views of NKI 0.6."""

from __future__ import annotations

from math import prod
from operator import index as as_int
from typing import Any

import numpy as np

from neuroncore.checks import views as check
from neuroncore.checks.base import note, refuse, seen
from neuroncore.dtypes import DType, dtype_of
from neuroncore.memory.geometry import (
    Geometry,
    contiguous_strides,
    merged,
    reshaped_strides,
    whole,
)
from neuroncore.memory.indexing import (
    DynamicSlice,
    VirtualRegister,
    dynamic_index,
    hashable,
    static_index,
)
from neuroncore.memory.storage import MemoryRegion, Storage

Pattern = list[list[int]]


class NkiTensor:
    """A tensor in HBM, SBUF or PSUM, or a view of one; views share storage, nothing is copied.

    On chip, dimension 0 is the partition: it cannot be permuted, merged, split or broadcast, and
    indexing it with an integer keeps it, with size 1.
    """

    __slots__ = ("data", "geometry", "index", "storage")

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        storage: Storage,
        buffer: MemoryRegion = MemoryRegion.sbuf,
        name: str = "",
    ) -> None:
        layout = storage.layout
        if (
            layout.memory is not buffer
            or prod(shape) * dtype_of(dtype).itemsize != prod(layout.shape) * layout.dtype.itemsize
        ):
            raise ValueError(
                f"NkiTensor {list(shape)} {dtype} in {buffer.value} does not cover its storage "
                f"{storage.describe()}; use nl.ndarray for fresh storage"
            )
        self.storage = storage
        self.geometry = whole(layout).derive(shape, contiguous_strides(shape), 0, dtype_of(dtype))
        self.index: Any = None
        self.data = storage.data
        storage.name = name or storage.name

    # what it is

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return self.geometry.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance of neighbours in each dimension, in elements."""
        return self.geometry.strides

    @property
    def offset(self) -> int:
        """First element's place in the storage, in elements."""
        return self.geometry.offset

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.geometry.dtype

    @property
    def buffer(self) -> MemoryRegion:
        """The memory it lies in."""
        return self.geometry.memory

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.geometry.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.geometry.shape)

    @property
    def name(self) -> str:
        """Its storage's name."""
        return self.storage.name

    def __repr__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype} in {self.buffer.value}"

    def is_contiguous(self) -> bool:
        """Whether the view is row-major without gaps (on chip: within each partition)."""
        return self.geometry.run_bytes == self.geometry.elements * self.dtype.itemsize

    def is_indirect(self) -> bool:
        """Whether its place depends on an index that is known when the instruction runs."""
        return self.geometry.indirect is not None

    def get_pattern(self) -> Pattern:
        """The access pattern [[stride, count], ...] in elements."""
        return [[s, c] for s, c in zip(self.strides, self.shape, strict=True)]

    # views

    def __getitem__(self, key: Any) -> NkiTensor:
        geometry = self.geometry
        if key.__class__ is tuple and len(key) == 2:
            a, b = key
            if a.__class__ is slice and b.__class__ is slice:
                cached = (a.start, a.stop, a.step, b.start, b.stop, b.step, slice)
            else:
                cached = hashable(key)
        else:
            cached = hashable(key)
        try:
            view = geometry.children.get(cached)
        except TypeError:  # a register or a tensor in the key
            return dynamic_index(self, key)
        if view is None:
            for k in cached:
                if isinstance(k, DynamicSlice | NkiTensor | VirtualRegister):
                    return dynamic_index(self, key)
            view = geometry.children[cached] = static_index(self, key)
        return view_of(self.storage, view, self.index, self.data)

    def __iter__(self) -> Any:
        refuse(f"{self}: tensors are not iterated over; use range(t.shape[0]) and t[i]")

    def __setitem__(self, key: Any, value: Any) -> None:
        """Copy a tile, as NKI 0.3 did: the reference of 0.6 has this method and no text for it."""
        from neuroncore import isa

        if not isinstance(value, NkiTensor):
            refuse(f"{self}: assigning {seen(value)} into a tile is not NKI; use nisa.memset")
        on_chip = self.geometry.on_chip and value.geometry.on_chip
        copy = isa.tensor_copy if on_chip else isa.dma_copy
        note(
            f"{self}: assigning into a tile is taken as nisa.{copy.__name__}, as NKI 0.3 did; NKI "
            f"0.6 does not say what it does; write nisa.{copy.__name__}(dst=tile[...], src=...)"
        )
        copy(self[key], value)

    __array_ufunc__ = None  # a number of NumPy's leaves the operator to the tile

    def _no_operator(self, other: Any = None) -> Any:
        refuse(f"{self}: Python operators on tiles are not NKI; use nisa.tensor_tensor or nl.add")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _no_operator
    __rtruediv__ = __pow__ = __matmul__ = __mod__ = __neg__ = __abs__ = _no_operator
    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __xor__ = __invert__ = _no_operator

    def _view(self, shape: tuple[int, ...], strides: tuple[int, ...], start: int = 0) -> NkiTensor:
        geometry = self.geometry.derive(shape, strides, self.offset + start)
        return self.with_geometry(geometry, self.index)

    def _recut(
        self, dim: int, sizes: tuple[int, ...], steps: tuple[int, ...], start: int = 0, cut: int = 1
    ) -> NkiTensor:
        """`cut` dimensions from `dim` on replaced by others, `start` elements further on."""
        after = dim + cut
        shape = (*self.shape[:dim], *sizes, *self.shape[after:])
        strides = (*self.strides[:dim], *steps, *self.strides[after:])
        return self._view(shape, strides, start)

    def with_geometry(self, geometry: Geometry, index: Any) -> NkiTensor:
        """Another view of the same storage."""
        return view_of(self.storage, geometry, index, self.data)

    def moved(
        self, index: Any, how: tuple[str, int, int], shape: tuple[int, ...] | None = None
    ) -> NkiTensor:
        """The view that `index` moves when the instruction runs; `how`: kind, dimension, scale."""
        geometry = self.geometry.derive(shape or self.shape, self.strides, self.offset, None, how)
        return self.with_geometry(geometry, index)

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Elements start, start+step, ... below end of one dimension."""
        dim = check.dimension(self, dim)
        check.slice_bounds(self, dim, start, end, step)
        check.not_the_indirect(self, dim)
        count, stride = -(-(end - start) // step), self.strides[dim]
        return self._recut(dim, (count,), (stride * step,), start * stride if count else 0)

    def select(self, dim: int, index: Any) -> NkiTensor:
        """One element of a dimension, which disappears; the index may be a tensor or register."""
        dim = check.dimension(self, dim)
        check.not_the_indirect(self, dim)
        # a tile keeps one free dimension, a tensor in HBM one dimension
        kept = (1,) if self.ndim == (2 if self.geometry.on_chip else 1) else ()
        if not isinstance(index, int | np.integer):
            check.scalar_index(self, dim, index, isinstance(index, NkiTensor | VirtualRegister))
            check.one_dynamic_index(self, dim)
            return self._recut(dim, kept, kept).moved(index, ("scalar", dim, self.strides[dim]))
        check.partition_view(self, dim, "selected away")
        if not 0 <= as_int(index) < self.shape[dim]:
            seen = f"select({dim}, {as_int(index)}) is out of bounds"
            refuse(f"{self}: {seen}; the size is {self.shape[dim]}")
        return self._recut(dim, kept, kept, as_int(index) * self.strides[dim])

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        """HBM rows chosen by one index per partition, `vector_offset` [P, 1] in SBUF."""
        if dim != 0 or self.geometry.on_chip or vector_offset.shape[1:] != (1,):
            rule = "vector_select takes dim 0 of an HBM tensor and an index [P, 1]"
            refuse(f"{self}: {rule}; got {vector_offset}")
        check.one_dynamic_index(self, dim)
        shape = (vector_offset.shape[0], *self.shape[1:])
        return self.moved(vector_offset, ("vector", dim, self.strides[dim]), shape)

    def permute(self, dims: tuple[int, ...]) -> NkiTensor:
        """Dimensions in another order; the partition stays first."""
        if sorted(dims) != list(range(self.ndim)):
            refuse(f"{self}: permute{tuple(dims)} is no permutation of {self.ndim} dimensions")
        if check.first_fixed(self) and dims[0] != 0:
            refuse(f"{self}: permute{tuple(dims)} moves the partition; dims[0] must be 0")
        return self._view(
            tuple([self.shape[d] for d in dims]), tuple([self.strides[d] for d in dims])
        )

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """Repeat a dimension of size 1."""
        dim = check.dimension(self, dim)
        check.partition_view(self, dim, "broadcast")
        check.size_one(self, dim, "broadcast")
        return self._recut(dim, (size,), (0,))

    def expand_dim(self, dim: int) -> NkiTensor:
        """Insert a dimension of size 1."""
        dim = check.dimension(self, dim, extra=1)
        check.partition_view(self, dim, "moved by a new dimension")
        return self._recut(dim, (1,), (0,), cut=0)

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Remove a dimension of size 1."""
        dim = check.dimension(self, dim)
        check.partition_view(self, dim, "removed")
        check.size_one(self, dim, "removed")
        return self._recut(dim, (), ())

    def reshape_dim(self, dim: int, shape: tuple[int, ...]) -> NkiTensor:
        """Split a dimension; one size may be -1."""
        dim = check.dimension(self, dim)
        shape = tuple(shape)
        sizes = check.filled(self, shape, self.shape[dim], f"reshape_dim({dim}, {shape})")
        if len(sizes) > 1:
            check.partition_view(self, dim, "split")
        steps = tuple([s * self.strides[dim] for s in contiguous_strides(sizes)])
        return self._recut(dim, sizes, steps)

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Merge neighbouring dimensions that are contiguous in memory, both ends included."""
        start_dim, end_dim = check.dimension(self, start_dim), check.dimension(self, end_dim)
        if start_dim != end_dim:
            check.partition_view(self, start_dim, "merged")
        sizes, steps = self.shape[start_dim : end_dim + 1], self.strides[start_dim : end_dim + 1]
        runs = merged(sizes, steps)
        if len(runs) > 1:
            refuse(
                f"{self}: dimensions {start_dim} to {end_dim} with strides {list(steps)} are "
                "not contiguous; flatten before permute or slice"
            )
        return self._recut(start_dim, (prod(sizes),), (runs[0][1] if runs else 1,), cut=len(sizes))

    def reshape(self, shape: tuple[int, ...]) -> NkiTensor:
        """The same elements in another shape, where memory allows it without a copy."""
        shape = tuple(shape)
        sizes = check.filled(self, shape, self.size, f"reshape({shape})")
        if check.first_fixed(self) and sizes[0] != self.shape[0]:
            problem = f"reshape({shape}) changes the partition size"
            refuse(f"{self}: {problem}; it must stay {self.shape[0]}")
        strides = reshaped_strides(self.shape, self.strides, sizes)
        if strides is None:
            refuse(
                f"{self}: reshape({sizes}) needs a copy, strides are {list(self.strides)}; copy it "
                "into a fresh tile first"
            )
        return self._view(sizes, strides)

    def rearrange(
        self,
        src_pattern: tuple[Any, ...],
        dst_pattern: tuple[Any, ...],
        fixed_sizes: dict[str, int] | None = None,
    ) -> NkiTensor:
        """Split, reorder and merge dimensions by name, as einops does."""
        view = self
        source = [(g,) if isinstance(g, str) else tuple(g) for g in src_pattern]
        names = [m for g in source for m in g]
        flat = [m for g in dst_pattern for m in ((g,) if isinstance(g, str) else g)]
        if len(source) != self.ndim:
            seen = f"rearrange's source pattern has {len(source)} groups"
            refuse(f"{self}: {seen}; it has {self.ndim} dimensions")
        if len(set(names)) != len(names) or sorted(names) != sorted(flat):
            refuse(f"{self}: rearrange needs the same names on both sides; got {names} and {flat}")
        sizes = fixed_sizes or {}
        dim = 0
        for members in source:
            if len(members) > 1:
                view = view.reshape_dim(dim, tuple([sizes.get(m, -1) for m in members]))
            dim += len(members)
        view = view.permute(tuple([names.index(m) for m in flat]))
        for dim, group in enumerate(dst_pattern):
            if not isinstance(group, str) and len(group) > 1:
                view = view.flatten_dims(dim, dim + len(group) - 1)
        return view

    def view(self, dtype: DType) -> NkiTensor:
        """The same bytes as another dtype; the last dimension's size changes with the itemsize."""
        new, old = dtype_of(dtype), self.dtype
        check.reinterpretable(self, new)
        shape, strides, offset = list(self.shape), list(self.strides), self.offset
        if new.itemsize != old.itemsize:
            shape[-1] = shape[-1] * old.itemsize // new.itemsize
            scaled = [s * old.itemsize for s in strides]
            strides = [s // new.itemsize for s in scaled[:-1]] + [1]
            offset = offset * old.itemsize // new.itemsize
        geometry = self.geometry.derive(tuple(shape), tuple(strides), offset, new)
        return self.with_geometry(geometry, self.index)

    reinterpret_cast = view

    def ap(
        self,
        pattern: Pattern,
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: DType | None = None,
    ) -> NkiTensor:
        """An explicit access pattern [[stride, count], ...] on the storage, in elements.

        On chip the first pair is the partition's: its stride is the storage's number of elements
        per partition. `offset` is added to the view's own. The stride of `indirect_dim` of this
        view scales `scalar_offset` (a register or a [1, 1] tensor) or `vector_offset` [P, 1].
        """
        new = self.dtype if dtype is None else dtype_of(dtype)
        strides = tuple([as_int(s) for s, _ in pattern])
        shape = tuple([as_int(c) for _, c in pattern])
        place = self.offset * self.dtype.itemsize // new.itemsize + (offset or 0)
        index = vector_offset if vector_offset is not None else scalar_offset
        if index is not None:
            check.one_index(self, scalar_offset, vector_offset, indirect_dim)
        strides = check.access_pattern(self, new, shape, strides)
        check.stored_as_itself(self, new)
        how = None
        if index is not None:
            scale = self.strides[indirect_dim] * self.dtype.itemsize // new.itemsize
            how = ("vector" if vector_offset is not None else "scalar", indirect_dim, scale)
        geometry = whole(self.geometry.layout).derive(shape, strides, place, new, how)
        return self.with_geometry(geometry, index)

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        """Columns of a tile on chip by an index tile [P, K]: [P, num_elem], on trn3.

        Offset i is index[i % G, i // G], G 32 on TensorE and 16 on the other engines; the same in
        every G partitions. Instructions gather what they read and scatter what they write.
        """
        from neuroncore.memory.indirection import indirect

        return indirect(self, index, num_elem)


_new = object.__new__


def view_of(
    storage: Storage, geometry: Geometry, index: Any = None, data: np.ndarray | None = None
) -> NkiTensor:
    """A tensor from its parts; in execute mode it holds its storage's values."""
    view = _new(NkiTensor)
    view.storage, view.geometry, view.index, view.data = storage, geometry, index, data
    return view


def tensor_of(storage: Storage) -> NkiTensor:
    """A storage as a whole."""
    return view_of(storage, whole(storage.layout), None, storage.data)
