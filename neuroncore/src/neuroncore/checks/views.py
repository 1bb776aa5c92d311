"""Rules of views and indices.

Source: NKI 0.6 documentation, `nki.language.NkiTensor`, and the access pattern deep dive.
"""

from __future__ import annotations

from math import prod
from operator import index as as_int
from typing import TYPE_CHECKING, Any

from neuroncore.checks.base import note, refuse
from neuroncore.dtypes import DType
from neuroncore.memory.geometry import merged

if TYPE_CHECKING:
    from neuroncore.memory.geometry import Geometry
    from neuroncore.memory.tensor import NkiTensor


def dimension(t: NkiTensor, dim: int, extra: int = 0) -> int:
    """A dimension number within range, negative ones counted from the end."""
    count = t.ndim + extra
    if not -count <= dim < count:
        refuse(f"{t}: dimension {dim} is out of range; it has {t.ndim} dimensions")
    return dim % count


def index_of(t: NkiTensor, dim: int, k: Any) -> int:
    """An integer index within bounds, negative ones counted from the end."""
    try:
        value = as_int(k)
    except TypeError:
        refuse(
            f"{t}: index {k!r} of dimension {dim} is a {type(k).__name__}; "
            "use int, slice, nl.ds(start, size), a register or `...`"
        )
    count = t.shape[dim]
    if not -count <= value < count:
        refuse(f"{t}: index {value} is out of bounds of dimension {dim} of size {count}")
    return value % count


def slice_of(t: NkiTensor, dim: int, k: slice) -> tuple[int, int, int]:
    """Start, stop and step of a slice; unlike Python's, it may not run over the end."""
    count = t.shape[dim]
    step = 1 if k.step is None else as_int(k.step)
    start = 0 if k.start is None else as_int(k.start)
    stop = count if k.stop is None else as_int(k.stop)
    if start < 0:
        start += count
    if stop < 0:
        stop += count
    slice_bounds(t, dim, start, stop, step)
    return start, stop, step


def slice_bounds(t: NkiTensor, dim: int, start: int, end: int, step: int) -> None:
    """0 <= start <= end <= size and step >= 1: slices are not clamped as in Python."""
    if not (0 <= start <= end <= t.shape[dim] and step >= 1):
        refuse(
            f"{t}: slice {start}:{end}:{step} is out of bounds of dimension {dim} of size "
            f"{t.shape[dim]}; cut edge tiles with min(), slices are not clamped"
        )


def not_the_indirect(t: NkiTensor, dim: int) -> None:
    """The dimension of a dynamic index cannot be cut again."""
    indirect = t.geometry.indirect
    if indirect is not None and indirect[0] == "vector" and dim == indirect[1]:
        refuse(f"{t}: dimension {dim} is addressed by an index; slice before vector_select or ap")


def scalar_index(t: NkiTensor, dim: int, index: Any, dynamic: bool) -> None:
    """A dynamic index is a register or a tile [1, 1] of integers."""
    if not dynamic:
        index_of(t, dim, index)
    if hasattr(index, "geometry") and (index.size != 1 or not index.dtype.is_integer):
        refuse(f"{t}: a dynamic index is one integer, a register or a tile [1, 1]; got {index}")


def one_dynamic_index(t: NkiTensor, dim: int) -> None:
    """One dynamic index a view, and none on partitions."""
    if t.geometry.indirect is not None:
        refuse(f"{t}: a view takes one dynamic index; it already has one")
    if t.geometry.on_chip and dim == 0:
        refuse(f"{t}: the partition dimension cannot be indexed by a register")


def partition_view(t: NkiTensor, dim: int, verb: str) -> None:
    """The partition dimension, or the one that vector_select indexes, stays as it is."""
    if first_fixed(t) and dim == 0:
        refuse(f"{t}: dimension 0 is the partition and cannot be {verb}; use a free dimension")


def first_fixed(t: NkiTensor) -> bool:
    """Whether dimension 0 stays as it is: the partition, or the one that vector_select indexes."""
    indirect = t.geometry.indirect
    return t.geometry.on_chip or (indirect is not None and indirect[0] == "vector")


def size_one(t: NkiTensor, dim: int, verb: str) -> None:
    """Only a dimension of size 1."""
    if t.shape[dim] != 1:
        refuse(f"{t}: dimension {dim} has size {t.shape[dim]}; only size 1 can be {verb}")


def filled(t: NkiTensor, shape: tuple[int, ...], total: int, call: str) -> tuple[int, ...]:
    """Sizes whose product is `total`, one -1 filled in."""
    known = prod([s for s in shape if s != -1])
    sizes = tuple([total // known if s == -1 and known else s for s in shape])
    if shape.count(-1) > 1 or prod(sizes) != total:
        refuse(f"{t}: {call} must keep {total} elements")
    return sizes


def reinterpretable(t: NkiTensor, new: DType) -> None:
    """`view(dtype)` keeps bytes: contiguous last dimension, whole elements."""
    old = t.dtype
    whole = t.shape[-1] * old.itemsize % new.itemsize == 0
    aligned = all(s * old.itemsize % new.itemsize == 0 for s in (*t.strides[:-1], t.offset))
    if (t.strides[-1] != 1 and new.itemsize != old.itemsize) or not (whole and aligned):
        refuse(
            f"{t}: view({new}) needs a contiguous last dimension of whole {new.itemsize}-byte "
            f"elements; strides are {list(t.strides)}"
        )
    if t.geometry.indirect is not None:
        refuse(f"{t}: view({new}) after a dynamic index is not possible; take the view first")
    stored_as_itself(t, new)


def stored_as_itself(t: NkiTensor, new: DType) -> None:
    """With NKI_PRECISE_FP=0 narrow floats are kept in fp32 and have no bytes of their own."""
    own = t.geometry.layout.dtype
    if t.storage.store != own.numpy and new is not own:
        refuse(f"{t}: NKI_PRECISE_FP=0 keeps it in fp32, it cannot be seen as {new}; unset it")


def one_index(t: NkiTensor, scalar: Any, vector: Any, dim: int) -> None:
    """`scalar_offset` or `vector_offset`, not both, on a dimension of the view."""
    if t.geometry.indirect is not None:
        refuse(f"{t}: a view takes one dynamic index; it already has one")
    if scalar is not None and vector is not None:
        refuse(f"{t}: ap takes scalar_offset or vector_offset, not both")
    if vector is not None and t.geometry.on_chip:
        refuse(f"{t}: vector_offset indexes HBM tensors; this one is in {t.buffer.value}")
    place = dimension(t, dim)
    if scalar is not None and not hasattr(scalar, "frozen") and not hasattr(scalar, "geometry"):
        refuse(f"{t}: scalar_offset is a register or a tile [1, 1]; got {scalar!r}; use offset")
    if scalar is not None:
        scalar_index(t, place, scalar, True)


def access_pattern(
    t: NkiTensor, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, ...]:
    """Counts of at least 1 and, on chip, partitions walked by whole rows; returns the strides.

    Whether the pattern stays in its storage is checked where an instruction uses it: it may be
    sliced before.
    """
    if min(shape) < 1:
        refuse(f"{t}: ap counts must be at least 1; got {list(shape)}")
    row = row_elements(t.geometry, dtype)
    if not t.geometry.on_chip or shape[0] == 1 or strides[0] == row:
        return strides
    elements = prod(t.shape[1:]) * t.dtype.itemsize // dtype.itemsize
    if strides[0] != elements:
        refuse(
            f"{t}: ap pattern's first pair is the partition's and its stride must be {row}, the "
            f"storage's elements per partition; got {strides[0]}"
        )
    note(
        f"{t}: ap takes its partition stride {elements}, that of the view, as {row}, the storage's "
        "elements per partition, which the documentation asks for (NKI access patterns)"
    )
    return (row, *strides[1:])


def row_elements(geometry: Geometry, dtype: DType) -> int:
    """Elements of a dtype per partition of a view's storage (per row in HBM)."""
    layout = geometry.layout
    return layout.row_elements * layout.dtype.itemsize // dtype.itemsize


def inside_storage(opcode: str, t: NkiTensor, partition_dims: int = 1) -> None:
    """A view is not empty, and what it reaches lies in its storage, on chip in each partition.

    Its first `partition_dims` dimensions walk partitions.
    """
    geometry = t.geometry
    if 0 in geometry.shape:
        refuse(f"{opcode}: {t} is empty; leave the instruction out where there is nothing to do")
    layout, row = geometry.layout, row_elements(geometry, geometry.dtype)
    if not geometry.on_chip and geometry.indirect is None:
        box, row_bytes = layout.boxes[geometry.region], row * geometry.dtype.itemsize
        if box.row >= 0 and box.row_end * row_bytes <= layout.bytes:
            return
    total = prod(layout.shape) * layout.dtype.itemsize // geometry.dtype.itemsize
    # rows of a vector index come by the index
    first = 1 if geometry.indirect is not None and geometry.indirect[0] == "vector" else 0
    pairs = list(zip(geometry.strides, geometry.shape, strict=True))[first:]
    reach = [s * (c - 1) for s, c in pairs]
    low = geometry.offset + sum(r for r in reach if r < 0)
    high = geometry.offset + sum(r for r in reach if r > 0)
    if low < 0 or high >= total:
        refuse(
            f"{opcode}: {t} reaches elements {low} to {high} of a storage of {total}; "
            "check strides, counts and offset"
        )
    if geometry.on_chip:
        walked = sum(r for r in reach[partition_dims:] if r > 0)
        if geometry.offset % row + walked >= row:
            refuse(f"{opcode}: {t} runs over the end of a partition of {row} elements")


def engine_pattern(opcode: str, t: NkiTensor) -> None:
    """A compute engine walks neighbouring partitions, and up to four free dimensions."""
    geometry = t.geometry
    if not geometry.on_chip:
        return
    row = row_elements(geometry, geometry.dtype)
    if geometry.shape[0] > 1 and geometry.strides[0] != row:
        refuse(
            f"{opcode}: {t} takes every {geometry.strides[0] / row:g}-th partition; engines "
            "address neighbouring ones (NKI access patterns); move them together by DMA"
        )
    free = len(merged(geometry.shape[1:], geometry.strides[1:]))
    if free > 4:
        refuse(
            f"{opcode}: {t} walks {free} free dimensions that do not merge; engines address up to "
            "four (NKI access patterns); copy it in parts"
        )
