"""Tensor indirection of trn3: views whose columns are chosen by an index tile."""

from __future__ import annotations

from math import prod

from neuroncore.checks import operands as check
from neuroncore.checks.base import refuse
from neuroncore.core import active
from neuroncore.memory.storage import MemoryRegion
from neuroncore.memory.tensor import NkiTensor

COLUMNS = "columns"
"""Kind of `Geometry.indirect` of these views."""


class IndirectTile(NkiTensor):
    """Column i of the view [P, num_elem] is the column of `base` that offset i of `index` names."""

    __slots__ = ("base",)

    base: NkiTensor


def indirect(base: NkiTensor, index: NkiTensor, num_elem: int | None) -> IndirectTile:
    """A view of `base` through `index`. Raises NkiValidationError where there is none."""
    machine = active("NkiTensor.indirect").machine
    remedy = "use nisa.nc_n_gather or .ap(vector_offset=)"
    check.feature(str(base), machine, "tensor_indirection", "tensor indirection", remedy)
    if not base.geometry.on_chip or base.is_indirect() or not base.is_contiguous():
        refuse(
            f"{base}: indirect takes a tile in SBUF or PSUM, contiguous in each partition and not "
            "yet indirect; copy it first"
        )
    if not isinstance(index, NkiTensor):
        refuse(f"{base}: the index of an indirect view is a tile of integers; got {index!r}")
    if index.buffer is not MemoryRegion.sbuf or index.is_indirect() or not index.dtype.is_integer:
        refuse(f"{base}: the index of an indirect view is a tile of integers in SBUF; got {index}")
    if index.ndim != 2 or index.shape[0] != base.shape[0]:
        refuse(f"{base}: the index must be [{base.shape[0]}, K], a row a partition; got {index}")
    count = index.size if num_elem is None else num_elem
    if not isinstance(count, int) or not 1 <= count <= index.size:
        refuse(f"{base}: num_elem must be 1 to {index.size}, the index's size; got {num_elem!r}")
    how = (COLUMNS, 1, prod(base.shape[1:]))
    shape, strides = (base.shape[0], count), (base.strides[0], 0)
    view: IndirectTile = object.__new__(IndirectTile)
    view.storage, view.index, view.base, view.data = base.storage, index, base, base.data
    view.geometry = base.geometry.derive(shape, strides, base.offset, None, how)
    return view
