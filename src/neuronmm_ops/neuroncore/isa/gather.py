"""Searches, gathers and shuffles: VectorE by value, GpSimdE by index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from neuronmm_ops.hardware import Engine
from neuronmm_ops.neuroncore import checks
from neuronmm_ops.neuroncore import core as running
from neuronmm_ops.neuroncore.core import Core
from neuronmm_ops.neuroncore.isa.common import PSUM, SBUF, free_cycles, raw, read, write
from neuronmm_ops.neuroncore.isa.operands import (
    checked,
    flat,
    in_sbuf,
    write_integers,
)
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.neuroncore.timing.trace import Form, NkiInstruction

_KEEP = 255
_CORE_PARTITIONS = 16


def nc_find_index8(
    dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """dst [P, 8] = index in data [P, 8 to 16384] of each of vals [P, 8], on VectorE.

    uint16 or uint32, all ones where a value is not found. The first of equal vals takes the first
    place, the second the second, and so on.
    """
    core = running.active("nki.isa.nc_find_index8")
    return core.issue(_find_index8, (dst, data, vals), (), name)


def _find_index8(core: Core, dst: NkiTensor, data: NkiTensor, vals: NkiTensor) -> Form:
    checked("nc_find_index8", Engine.VECTOR, dst=dst, data=data, vals=vals)
    _search_operands("nc_find_index8", data, vals)
    _index_operand("nc_find_index8", "dst", dst)

    def run(dst: NkiTensor, data: NkiTensor, vals: NkiTensor) -> None:
        _write_indices(dst, _places(data, vals, range(8)))

    return Form("nc_find_index8", Engine.VECTOR, free_cycles(data), run=run)


def nc_match_replace8(
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """dst = data [P, N] with one occurrence of each of vals [P, 8] replaced by imm, on VectorE.

    dst_idx [P, 8], uint16 or uint32, gets the places, all ones where a value is not found. Of
    equal vals the last takes the first place: the opposite of `nc_find_index8`.
    """
    core = running.active("nki.isa.nc_match_replace8")
    outputs = (dst,) if dst_idx is None else (dst, dst_idx)
    return core.issue(_match_replace8, (*outputs, data, vals), (imm,), name)


def _match_replace8(core: Core, *rest: NkiTensor | float) -> Form:
    opcode = "nc_match_replace8"
    *operands, imm = rest
    tensors = [t for t in operands if isinstance(t, NkiTensor)]
    dst, (data, vals) = tensors[0], tensors[-2:]
    indices = tensors[1:-2]
    checked(
        opcode,
        Engine.VECTOR,
        dst=dst,
        data=data,
        vals=vals,
        **dict(zip(("dst_idx",), indices, strict=False)),
    )
    checks.same_elements(opcode, {"dst": dst, "data": data})
    _search_operands(opcode, data, vals)
    checks.number(opcode, "imm", imm)
    for t in indices:
        _index_operand(opcode, "dst_idx", t)

    def run(dst: NkiTensor, *operands: NkiTensor) -> None:
        *indices, data, vals = operands
        places = _places(data, vals, range(7, -1, -1))
        value = flat(read(data)).copy()
        rows, columns = np.nonzero(places >= 0)
        value[rows, places[rows, columns]] = imm
        write(dst, value)
        for t in indices:
            _write_indices(t, places)

    return Form(opcode, Engine.VECTOR, free_cycles(data), writes=1 + len(indices), run=run)


def _search_operands(opcode: str, data: NkiTensor, vals: NkiTensor) -> None:
    checks.free_range(opcode, "data", data, 8, 16384)
    checks.free_size(opcode, "vals", vals, 8)
    checks.dimensions(opcode, "data", data, 3)
    checks.dimensions(opcode, "vals", vals, 3)


def _index_operand(opcode: str, operand: str, t: NkiTensor) -> None:
    checks.free_size(opcode, operand, t, 8)
    checks.dtype_in(opcode, operand, t, "uint16", "uint32")


def _places(data: NkiTensor, vals: NkiTensor, order: Iterable[int]) -> np.ndarray:
    """Index of each value [P, 8], -1 where none is left; earlier ones take the earlier places."""
    values, wanted = flat(read(data)), flat(read(vals))
    free = np.ones(values.shape, bool)
    found = np.full(wanted.shape, -1, np.int64)
    rows = np.arange(len(values))
    for column in order:
        match = free & (values == wanted[:, column, None])
        place = match.argmax(1)
        hit = match[rows, place]
        found[hit, column] = place[hit]
        free[rows[hit], place[hit]] = False
    return found


def _write_indices(dst: NkiTensor, places: np.ndarray) -> None:
    target = raw(dst)
    target[...] = places.astype(target.dtype).reshape(target.shape)  # -1 becomes all ones


def nc_stream_shuffle(
    dst: NkiTensor, src: NkiTensor, shuffle_mask: Sequence[int], name: str | None = None
) -> NkiInstruction:
    """Partition p of each 32 of dst = partition shuffle_mask[p] of the same 32 of src, on VectorE.

    255 leaves a partition as it is. dst and src have one dtype and number of elements per
    partition, not of partitions, and may be one tile.
    """
    core = running.active("nki.isa.nc_stream_shuffle")
    return core.issue(_shuffle, (dst, src), (tuple(shuffle_mask),), name)


def _shuffle(core: Core, dst: NkiTensor, src: NkiTensor, mask: tuple[int, ...]) -> Form:
    opcode = "nc_stream_shuffle"
    checks.shuffle_mask(mask)
    count = dst.geometry.partitions
    active = -(-max(src.geometry.partitions, count) // 32) * 32
    for operand, t in (("dst", dst), ("src", src)):
        checks.memory(opcode, operand, t, SBUF, PSUM)
        checks.shuffle_start(operand, t, active)
    checks.same_dtype(opcode, dst, src)
    checks.same_elements(opcode, {"dst": dst, "src": src})
    for p in range(count):
        checks.shuffle_source(mask, p, src)
    moved = [p for p in range(count) if mask[p % 32] != _KEEP]
    sources = [p // 32 * 32 + mask[p % 32] for p in moved]

    def run(dst: NkiTensor, src: NkiTensor) -> None:
        target = raw(dst)
        target[moved] = raw(src)[sources].reshape(-1, *target.shape[1:])

    return Form(opcode, Engine.VECTOR, free_cycles(dst), keeps=len(moved) < count, run=run)


def local_gather(
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Each 16 partitions gather from their own src_buffer by their own uint16 index, on GpSimdE.

    The indices of 16 partitions are put in one row, partition by partition within each column;
    all 16 partitions of dst then hold, for each of the first `num_valid_indices`, the
    `num_elem_per_idx` elements of src_buffer from that element on. dst has src_buffer's dtype.
    """
    core = running.active("nki.isa.local_gather")
    options = (num_elem_per_idx, num_valid_indices)
    return core.issue(_local_gather, (dst, src_buffer, index), options, name)


def _local_gather(
    core: Core, dst: NkiTensor, src: NkiTensor, index: NkiTensor, run_of: int, valid: int | None
) -> Form:
    opcode = "local_gather"
    in_sbuf(opcode, dst=dst, src_buffer=src, index=index)
    checks.sixteen_partitions(opcode, "src_buffer", src)
    checks.same_dtype(opcode, dst, src)
    checks.dtype_in(opcode, "index", index, "uint16")
    checks.gather_run(run_of)
    available = index.geometry.elements * _CORE_PARTITIONS
    count = available if valid is None else valid
    checks.gather_indices(count, available)
    checks.free_size(opcode, "dst", dst, count * run_of)

    def run(dst: NkiTensor, src: NkiTensor, index: NkiTensor) -> None:
        source, places = flat(raw(src)), flat(raw(index)).astype(np.int64)
        cores = len(places) // _CORE_PARTITIONS
        # [core, column, partition]: the partition runs fastest
        rows = places.reshape(cores, _CORE_PARTITIONS, -1).transpose(0, 2, 1).reshape(cores, -1)
        starts = rows[:, :count].repeat(_CORE_PARTITIONS, 0)
        checks.in_bounds(opcode, starts, 0, source.shape[1] - run_of + 1)
        wanted = flat(starts[:, :, None] + np.arange(run_of))
        target = raw(dst)
        target[...] = np.take_along_axis(source, wanted, 1).reshape(target.shape)

    return Form(opcode, Engine.GPSIMD, free_cycles(dst), run=run)


def nc_n_gather(
    dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """dst = data[indices] within each partition, by uint32 places in its flattened free dimensions.

    All in SBUF, on GpSimdE; dst has data's dtype and the elements of indices.
    """
    core = running.active("nki.isa.nc_n_gather")
    return core.issue(_n_gather, (dst, data, indices), (), name)


def _n_gather(core: Core, dst: NkiTensor, data: NkiTensor, indices: NkiTensor) -> Form:
    in_sbuf("nc_n_gather", dst=dst, data=data, indices=indices)
    checks.same_dtype("nc_n_gather", dst, data)
    checks.dtype_in("nc_n_gather", "indices", indices, "uint32")
    checks.same_elements("nc_n_gather", {"dst": dst, "indices": indices})

    def run(dst: NkiTensor, data: NkiTensor, indices: NkiTensor) -> None:
        source, places = flat(raw(data)), flat(raw(indices)).astype(np.int64)
        checks.in_bounds("nc_n_gather", places, 0, source.shape[1])
        target = raw(dst)
        target[...] = np.take_along_axis(source, places, 1).reshape(target.shape)

    return Form("nc_n_gather", Engine.GPSIMD, free_cycles(dst), run=run)


def nonzero_with_count(
    dst: NkiTensor,
    src: NkiTensor,
    index_offset: int = 0,
    padding_val: int = -1,
    name: str | None = None,
) -> NkiInstruction:
    """dst [P, T + 1] = places of what is not 0 in src [P, T], then padding, then their number.

    On GpSimdE in SBUF, NeuronCore-v3 and later. Only partitions 0, 16, ..., 112 are read and
    written. src is float32 or int32, dst int32; `index_offset` is added to each place.
    """
    core = running.active("nki.isa.nonzero_with_count")
    return core.issue(_nonzero, (dst, src), (index_offset, padding_val), name)


def _nonzero(core: Core, dst: NkiTensor, src: NkiTensor, offset: int, padding: int) -> Form:
    opcode = "nonzero_with_count"
    checks.generation(opcode, core.machine, 3, "it", "use max8 and nc_find_index8")
    in_sbuf(opcode, dst=dst, src=src)
    checks.dtype_in(opcode, "src", src, "float32", "int32")
    checks.dtype_in(opcode, "dst", dst, "int32")
    checks.free_size(opcode, "dst", dst, src.geometry.elements + 1)
    checks.int32(opcode, index_offset=offset, padding_val=padding)
    first = -src.geometry.start % _CORE_PARTITIONS

    def run(dst: NkiTensor, src: NkiTensor) -> None:
        target, source = raw(dst), flat(raw(src))
        for p in range(first, len(source), _CORE_PARTITIONS):
            places = np.flatnonzero(source[p])
            row = np.full(source.shape[1] + 1, padding, np.int32)
            row[: len(places)] = places + offset
            row[-1] = len(places)
            target[p] = row.reshape(target.shape[1:])

    # documented kernels read all partitions of a fresh dst: the others count as written too
    return Form(opcode, Engine.GPSIMD, free_cycles(dst), run=run)


def sequence_bounds(
    dst: NkiTensor, segment_ids: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """dst [1, 2, N] = start and end of the segment, in segment_ids [1, N], of each element.

    Segments are runs of one id; the end is exclusive. Elements with id 0 get (N, -1). float32 or
    int32, on GpSimdE.
    """
    core = running.active("nki.isa.sequence_bounds")
    return core.issue(_sequence_bounds, (dst, segment_ids), (), name)


def _sequence_bounds(core: Core, dst: NkiTensor, ids: NkiTensor) -> Form:
    opcode = "sequence_bounds"
    in_sbuf(opcode, dst=dst, segment_ids=ids)
    checks.partition_count(opcode, "segment_ids", ids, 1)
    checks.free_size(opcode, "dst", dst, 2 * ids.geometry.elements)
    for operand, t in (("dst", dst), ("segment_ids", ids)):
        checks.dtype_in(opcode, operand, t, "float32", "int32")

    def run(dst: NkiTensor, ids: NkiTensor) -> None:
        row = raw(ids).reshape(-1)
        n = len(row)
        edges = np.flatnonzero(np.append(True, row[1:] != row[:-1]))
        segment = np.searchsorted(edges, np.arange(n), side="right") - 1
        ends = np.append(edges[1:], n)
        padding = row == 0
        bounds = [np.where(padding, n, edges[segment]), np.where(padding, -1, ends[segment])]
        write_integers(dst, np.stack(bounds).astype(np.int64))

    return Form(opcode, Engine.GPSIMD, free_cycles(dst), run=run)
