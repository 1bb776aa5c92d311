"""Searches, gathers and shuffles: VectorE by value, GpSimdE by index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from neuroncore import core as running
from neuroncore.checks import operands as check
from neuroncore.checks.base import refuse
from neuroncore.hardware import Engine
from neuroncore.isa.instruction import instruction
from neuroncore.isa.values import (
    PSUM,
    SBUF,
    flat,
    free_cycles,
    raw,
    read,
    write,
    write_bits,
    write_integers,
)
from neuroncore.memory.tensor import NkiTensor
from neuroncore.timing.trace import InstructionTemplate

_UNCHANGED = 255
_CORE_PARTITIONS = 16


@instruction("dst")
def nc_find_index8(
    dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None
) -> InstructionTemplate:
    """dst [P, 8] = index in data [P, 8 to 16384] of each of vals [P, 8], on VectorE.

    uint16 or uint32, all ones where a value is not found. The first of equal vals takes the first
    place, the second the second, and so on.
    """
    _check_search("nc_find_index8", data, vals, dst=dst)
    _check_indices("nc_find_index8", "dst", dst)

    def run(dst: NkiTensor, data: NkiTensor, vals: NkiTensor) -> None:
        write_bits(dst, _places(data, vals, range(8)))  # -1 becomes all ones

    return InstructionTemplate(Engine.VECTOR, free_cycles(data), run)


@instruction("dst", "dst_idx")
def nc_match_replace8(
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> InstructionTemplate:
    """dst = data [P, N] with one occurrence of each of vals [P, 8] replaced by imm, on VectorE.

    dst_idx [P, 8], uint16 or uint32, gets the places, all ones where a value is not found. Of
    equal vals the last takes the first place: the opposite of `nc_find_index8`.
    """
    opcode = "nc_match_replace8"
    _check_search(opcode, data, vals, dst=dst, dst_idx=dst_idx)
    check.same_elements(opcode, dst=dst, data=data)
    check.number(opcode, "imm", imm)
    if dst_idx is not None:
        _check_indices(opcode, "dst_idx", dst_idx)

    def run(dst: NkiTensor, data: NkiTensor, vals: NkiTensor, dst_idx: NkiTensor | None) -> None:
        places = _places(data, vals, range(7, -1, -1))
        value = flat(read(data)).copy()
        rows, columns = np.nonzero(places >= 0)
        value[rows, places[rows, columns]] = imm
        write(dst, value)
        if dst_idx is not None:
            write_bits(dst_idx, places)

    return InstructionTemplate(Engine.VECTOR, free_cycles(data), run)


def _check_search(
    opcode: str, data: NkiTensor, vals: NkiTensor, **results: NkiTensor | None
) -> None:
    check.vector(opcode, Engine.VECTOR, data=data, vals=vals, **results)
    check.free_range(opcode, "data", data, 8, 16384)
    check.free_size(opcode, "vals", vals, 8)
    check.dimensions(opcode, "data", data, 3)
    check.dimensions(opcode, "vals", vals, 3)


def _check_indices(opcode: str, operand: str, t: NkiTensor) -> None:
    check.free_size(opcode, operand, t, 8)
    check.dtype_in(opcode, operand, t, "uint16", "uint32")


def _places(data: NkiTensor, vals: NkiTensor, order: Iterable[int]) -> np.ndarray:
    """Index of each value [P, 8], -1 where none is left; earlier ones take the earlier places."""
    values, wanted = flat(read(data)), flat(read(vals))
    free = np.ones(values.shape, bool)
    places = np.full(wanted.shape, -1, np.int64)
    rows = np.arange(len(values))
    for column in order:
        match = free & (values == wanted[:, column, None])
        place = match.argmax(1)
        hit = match[rows, place]
        places[hit, column] = place[hit]
        free[rows[hit], place[hit]] = False
    return places


@instruction("dst")
def nc_stream_shuffle(
    dst: NkiTensor, src: NkiTensor, shuffle_mask: Sequence[int], name: str | None = None
) -> InstructionTemplate:
    """Partition p of each 32 of dst = partition shuffle_mask[p] of the same 32 of src, on VectorE.

    255 leaves a partition as it is. dst and src have one dtype and number of elements per
    partition, not of partitions, and may be one tile.
    """
    opcode, mask = "nc_stream_shuffle", tuple(shuffle_mask)
    if len(mask) != 32 or not all(isinstance(m, int) and (0 <= m < 32 or m == 255) for m in mask):
        refuse(f"{opcode}: shuffle_mask is 32 numbers, 0 to 31 or 255; got {list(mask)}")
    count = dst.geometry.partitions
    active = -(-max(src.geometry.partitions, count) // 32) * 32
    for operand, t in (("dst", dst), ("src", src)):
        check.memory(opcode, operand, t, SBUF, PSUM)
        check.start_partition(opcode, operand, t, active)
    check.same_dtype(opcode, dst, src)
    check.same_elements(opcode, dst=dst, src=src)
    moved = [p for p in range(count) if mask[p % 32] != _UNCHANGED]
    sources = [p // 32 * 32 + mask[p % 32] for p in moved]
    for p, source in zip(moved, sources, strict=True):
        if source >= src.geometry.partitions:
            refuse(
                f"{opcode}: partition {p} of dst copies partition {source}, which "
                f"{src} lacks; a shuffle stays within each 32 partitions"
            )

    def run(dst: NkiTensor, src: NkiTensor) -> None:
        target = raw(dst)
        target[moved] = raw(src)[sources].reshape(-1, *target.shape[1:])

    return InstructionTemplate(Engine.VECTOR, free_cycles(dst), run, reads_dst=len(moved) < count)


@instruction("dst")
def local_gather(
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> InstructionTemplate:
    """Each 16 partitions gather from their own src_buffer by their own uint16 index, on GpSimdE.

    The indices of 16 partitions are put in one row, partition by partition within each column;
    all 16 partitions of dst then hold, for each of the first `num_valid_indices`, the
    `num_elem_per_idx` elements of src_buffer from that element on. dst has src_buffer's dtype.
    """
    opcode = "local_gather"
    check.in_sbuf(opcode, dst=dst, src_buffer=src_buffer, index=index)
    if src_buffer.geometry.partitions % _CORE_PARTITIONS:
        refuse(f"{opcode}: src_buffer must have a multiple of 16 partitions; got {src_buffer}")
    check.same_dtype(opcode, dst, src_buffer)
    check.dtype_in(opcode, "index", index, "uint16")
    run_of = num_elem_per_idx
    if run_of not in (1, 2, 4, 8, 16, 32):
        refuse(f"{opcode}: num_elem_per_idx must be 1, 2, 4, 8, 16 or 32; got {run_of!r}")
    available = index.geometry.elements * _CORE_PARTITIONS
    count = available if num_valid_indices is None else num_valid_indices
    if not isinstance(count, int) or not 1 <= count <= min(available, 4096):
        refuse(
            f"{opcode}: {count!r} valid indices per core; each 16 partitions of index hold "
            f"{available}, and a core takes 4096 at most; set num_valid_indices"
        )
    check.free_size(opcode, "dst", dst, count * run_of)

    def run(dst: NkiTensor, src_buffer: NkiTensor, index: NkiTensor) -> None:
        source, places = flat(raw(src_buffer)), flat(raw(index)).astype(np.int64)
        cores = len(places) // _CORE_PARTITIONS
        # [core, column, partition]: the partition runs fastest
        rows = places.reshape(cores, _CORE_PARTITIONS, -1).transpose(0, 2, 1).reshape(cores, -1)
        starts = rows[:, :count].repeat(_CORE_PARTITIONS, 0)
        check.in_bounds(opcode, starts, source.shape[1] - run_of + 1)
        wanted = flat(starts[:, :, None] + np.arange(run_of))
        write_bits(dst, np.take_along_axis(source, wanted, 1))

    return InstructionTemplate(Engine.GPSIMD, free_cycles(dst), run)


@instruction("dst")
def nc_n_gather(
    dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None
) -> InstructionTemplate:
    """dst = data[indices] within each partition, by uint32 places in its flattened free dimensions.

    All in SBUF, on GpSimdE; dst has data's dtype and the elements of indices.
    """
    opcode = "nc_n_gather"
    check.in_sbuf(opcode, dst=dst, data=data, indices=indices)
    check.same_dtype(opcode, dst, data)
    check.dtype_in(opcode, "indices", indices, "uint32")
    check.same_elements(opcode, dst=dst, indices=indices)

    def run(dst: NkiTensor, data: NkiTensor, indices: NkiTensor) -> None:
        source, places = flat(raw(data)), flat(raw(indices)).astype(np.int64)
        check.in_bounds(opcode, places, source.shape[1])
        write_bits(dst, np.take_along_axis(source, places, 1))

    return InstructionTemplate(Engine.GPSIMD, free_cycles(dst), run)


@instruction("dst")
def nonzero_with_count(
    dst: NkiTensor,
    src: NkiTensor,
    index_offset: int = 0,
    padding_val: int = -1,
    name: str | None = None,
) -> InstructionTemplate:
    """dst [P, T + 1] = places of what is not 0 in src [P, T], then padding, then their number.

    On GpSimdE in SBUF, NeuronCore-v3 and later. Only partitions 0, 16, ..., 112 are read and
    written. src is float32 or int32, dst int32; `index_offset` is added to each place.
    """
    opcode, machine = "nonzero_with_count", running.active().machine
    check.feature(opcode, machine, "nonzero_with_count", "it", "use max8 and nc_find_index8")
    check.in_sbuf(opcode, dst=dst, src=src)
    check.dtype_in(opcode, "src", src, "float32", "int32")
    check.dtype_in(opcode, "dst", dst, "int32")
    check.free_size(opcode, "dst", dst, src.geometry.elements + 1)
    check.int32(opcode, index_offset=index_offset, padding_val=padding_val)
    first = -src.geometry.start % _CORE_PARTITIONS

    def run(dst: NkiTensor, src: NkiTensor) -> None:
        target, source = raw(dst), flat(raw(src))
        for p in range(first, len(source), _CORE_PARTITIONS):
            places = np.flatnonzero(source[p])
            row = np.full(source.shape[1] + 1, padding_val, np.int32)
            row[: len(places)] = places + index_offset
            row[-1] = len(places)
            target[p] = row.reshape(target.shape[1:])

    # documented kernels read all partitions of a fresh dst: the others count as written too
    return InstructionTemplate(Engine.GPSIMD, free_cycles(dst), run, row_step=_CORE_PARTITIONS)


@instruction("dst")
def sequence_bounds(
    dst: NkiTensor, segment_ids: NkiTensor, name: str | None = None
) -> InstructionTemplate:
    """dst [1, 2, N] = start and end of the segment, in segment_ids [1, N], of each element.

    Segments are runs of one id; the end is exclusive. Elements with id 0 get (N, -1). float32 or
    int32, on GpSimdE.
    """
    opcode = "sequence_bounds"
    check.in_sbuf(opcode, dst=dst, segment_ids=segment_ids)
    check.partition_count(opcode, "segment_ids", segment_ids, 1)
    check.free_size(opcode, "dst", dst, 2 * segment_ids.geometry.elements)
    for operand, t in (("dst", dst), ("segment_ids", segment_ids)):
        check.dtype_in(opcode, operand, t, "float32", "int32")

    def run(dst: NkiTensor, segment_ids: NkiTensor) -> None:
        row = raw(segment_ids).reshape(-1)
        n = len(row)
        edges = np.flatnonzero(np.append(True, row[1:] != row[:-1]))
        segment = np.searchsorted(edges, np.arange(n), side="right") - 1
        ends = np.append(edges[1:], n)
        padding = row == 0
        bounds = [np.where(padding, n, edges[segment]), np.where(padding, -1, ends[segment])]
        write_integers(dst, np.stack(bounds).astype(np.int64))

    return InstructionTemplate(Engine.GPSIMD, free_cycles(dst), run)
