"""What DMAs read and write through views whose places are known when the instruction runs."""

from __future__ import annotations

import numpy as np

from neuroncore import dtypes
from neuroncore.checks import operands as check
from neuroncore.checks.base import note, refuse
from neuroncore.isa.values import SBUF, raw, read
from neuroncore.memory.indexing import VirtualRegister
from neuroncore.memory.tensor import NkiTensor


def index_tiles(*tensors: NkiTensor) -> tuple[NkiTensor, ...]:
    """The index tiles of indirect views, which an instruction reads too."""
    return tuple([t.index for t in tensors if isinstance(t.index, NkiTensor)])


def check_index(opcode: str, t: NkiTensor, index: NkiTensor) -> None:
    """An index tile: integers in SBUF, one per row of a vector-indexed view."""
    check.memory(opcode, "index", index, SBUF)
    if not index.dtype.is_integer:
        refuse(f"{opcode}: index must be integers; got {index}")
    indirect = t.geometry.indirect
    if indirect is not None and indirect[0] == "vector" and index.size != t.shape[0]:
        refuse(f"{opcode}: {t} needs {t.shape[0]} indices, one a row; got {index}")


def _legal(opcode: str, t: NkiTensor, offsets: np.ndarray, skip: bool, first: int) -> np.ndarray:
    """Which offsets keep the dimensions from `first` on inside the storage; all, unless `skip`."""
    layout = t.geometry.layout
    total = int(np.prod(layout.shape)) * layout.dtype.itemsize // t.dtype.itemsize
    reach = sum(s * (c - 1) for s, c in list(zip(t.strides, t.shape, strict=True))[first:])
    legal = (offsets >= 0) & (t.offset + offsets + reach < total)
    if not legal.all() and not skip:
        refuse(f"{opcode}: a dynamic index runs out of {t}; check it or use oob_mode.skip")
    return legal


def places(opcode: str, t: NkiTensor, skip: bool) -> tuple[str, np.ndarray, np.ndarray]:
    """An indirect view's kind, the element offset of each index, and which are within bounds."""
    assert t.geometry.indirect is not None
    how, _, scale = t.geometry.indirect
    if isinstance(t.index, VirtualRegister):
        values = np.array([t.index.value], np.int64)
    else:
        values = raw(t.index).reshape(-1).astype(np.int64)
    offsets = values * scale
    return how, offsets, _legal(opcode, t, offsets, skip, 1 if how == "vector" else 0)


def gathered(opcode: str, t: NkiTensor, skip: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """What an indirect view reads, and with `skip` the rows that were within bounds."""
    how, offsets, legal = places(opcode, t, skip)
    if how == "scalar":
        if not legal[0]:
            return np.zeros(t.shape, t.storage.store), np.zeros(t.shape[0], bool)
        return t.geometry.array(t.storage, int(offsets[0])), None
    rows = np.zeros(t.shape, t.storage.store)
    for i in np.flatnonzero(legal[: t.shape[0]]):
        rows[i] = _row(t, int(offsets[i]))
    return rows, None if legal.all() else legal[: t.shape[0]]


def scatter(opcode: str, t: NkiTensor, values: np.ndarray, skip: bool) -> None:
    """Write through an indirect view, in the order of the indices."""
    how, offsets, legal = places(opcode, t, skip)
    if how == "scalar":
        if legal[0]:
            target = t.geometry.array(t.storage, int(offsets[0]))
            target[...] = values.reshape(target.shape)
        return
    rows = values.reshape(t.shape)
    count = len(rows)
    _, first, same = np.unique(offsets[:count], return_index=True, return_inverse=True)
    if len(first) < count and (rows != rows[first[same]])[legal[:count]].any():
        note(
            f"{opcode}: an index of {t} occurs twice with other rows, and a DMA moves rows in no "
            "order; make indices unique"
        )
    for i in np.flatnonzero(legal[: t.shape[0]]):
        _row(t, int(offsets[i]))[...] = rows[i]


def _row(t: NkiTensor, offset: int) -> np.ndarray:
    """Row 0 of a vector-indexed view, `offset` elements further on."""
    row = t.geometry.derive((1, *t.shape[1:]), t.strides, t.offset)
    return row.array(t.storage, offset)[0]


def gathered_columns(opcode: str, src: NkiTensor, index: NkiTensor, skip: bool) -> np.ndarray:
    """Rows of `src` in the column-major order of a [P, n] index tile."""
    flat = raw(index).T.reshape(-1)[: src.shape[0]].astype(np.int64)
    kind = src.geometry.indirect
    assert kind is not None
    rows = np.zeros(src.shape, src.storage.store)
    offsets = flat * kind[2]
    for i in np.flatnonzero(_legal(opcode, src, offsets, skip, 1)):
        rows[i] = _row(src, int(offsets[i]))
    return rows


def values_of(opcode: str, t: NkiTensor, skip: bool) -> np.ndarray:
    """What an operand of dma_compute reads, in fp32; 0 where an index is out of bounds."""
    return read(t) if t.index is None else dtypes.to_fp32(gathered(opcode, t, skip)[0], t.dtype)
