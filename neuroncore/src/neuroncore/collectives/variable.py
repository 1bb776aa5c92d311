"""Collectives whose sizes are data: each rank's counts and places come from a uint32 tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from neuroncore.checks import operands as check
from neuroncore.checks.base import refuse
from neuroncore.collectives.exchange import (
    HBM,
    SBUF,
    CollectiveCall,
    finish,
    operands,
    started,
)
from neuroncore.collectives.groups import RankList, ReplicaGroup, rank_list
from neuroncore.collectives.links import RankGroup
from neuroncore.core import SimulatedCore
from neuroncore.isa.values import raw
from neuroncore.memory.tensor import NkiTensor
from neuroncore.turns import Posts

COUNT, PLACE, RECEIVED, TARGET = range(4)
"""Rows of the metadata: send counts and displacements, receive counts and displacements."""


def all_gather_v(
    srcs: Sequence[NkiTensor],
    dsts: Sequence[NkiTensor],
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Each rank's chunk of its src, to all ranks: that of rank i of a list into slot i of dst.

    Buffers are flat; a slot is dst's elements over the number of ranks. The metadata's first
    column holds the chunk's size (row 0) and place (row 1); row 2 gets the sizes received unless
    `recv_counts_known`. Two cores a rank, and 4 ranks of one chip a list (documented limits).
    """
    opcode, core = "all_gather_v", started("all_gather_v", priority)
    ranks = _checked(opcode, core, srcs, dsts, replica_group, metadata_tensor, has_rdispls)
    if has_rdispls:
        refuse(f"{opcode}: has_rdispls=True is not supported; use the slots")
    chips = {rank * core.launch.lnc // core.machine.cores for rank in ranks}
    if core.launch.lnc != 2 or len(ranks) != 4 or len(chips) != 1:
        refuse(
            f"{opcode}: needs kernel[2] and lists of 4 ranks of one chip; got {core.launch.lnc} "
            f"cores and {ranks}"
        )

    call = CollectiveCall(core, opcode, ranks, srcs, dsts, name, (recv_counts_known, False))
    _exchange(call, metadata_tensor, 1, RankGroup.gather_ns)


def all_to_all_v(
    srcs: Sequence[NkiTensor],
    dsts: Sequence[NkiTensor],
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """A chunk of each rank's src for each rank: that of rank i of a list into slot i of dst.

    Column r of the metadata holds size (row 0) and place (row 1) of the chunk for rank r of the
    list; row 2 gets the sizes received unless `recv_counts_known`; with `has_rdispls` row 3 says
    where in dst the chunk of rank r goes, instead of its slot. trn3 with two cores a rank, more
    than one chip, and whole chips of successive ranks (documented limits; on other targets it is
    for ranks of different instances, which are not modelled).
    """
    opcode, core = "all_to_all_v", started("all_to_all_v", priority)
    check.feature(opcode, core.machine, "all_to_all_v", "it, within an instance,", "use all_to_all")
    ranks = _checked(opcode, core, srcs, dsts, replica_group, metadata_tensor, has_rdispls)
    each = core.machine.cores // core.launch.lnc
    successive = ranks == tuple(range(ranks[0], ranks[0] + len(ranks)))
    whole = ranks[0] % each == 0 and len(ranks) % each == 0
    if core.launch.lnc != 2 or not (successive and whole) or len(ranks) == each:
        refuse(
            f"{opcode}: needs kernel[2], and lists of successive ranks that fill two chips or "
            f"more, {each} ranks each; got {core.launch.lnc} cores and {ranks}"
        )

    def ns(group: RankGroup, chunk: float) -> float:
        return group.exchange_ns(chunk * len(ranks) if core.execute else chunk)

    call = CollectiveCall(core, opcode, ranks, srcs, dsts, name, (recv_counts_known, has_rdispls))
    _exchange(call, metadata_tensor, len(ranks), ns)


def _checked(
    opcode: str,
    core: SimulatedCore,
    srcs: Sequence[NkiTensor],
    dsts: Sequence[NkiTensor],
    group: ReplicaGroup,
    metadata: NkiTensor,
    has_rdispls: bool,
) -> RankList:
    """Rules of both: one tensor a side, in HBM; uint32 metadata of 3 or 4 rows."""
    operands(opcode, srcs, dsts, *HBM)
    if len(srcs) != 1 or len(dsts) != 1:
        refuse(f"{opcode}: takes one tensor on each side; got {len(srcs)} and {len(dsts)}")
    if not isinstance(metadata, NkiTensor):
        refuse(f"{opcode}: metadata_tensor must be a tensor; got {metadata!r}")
    ranks = rank_list(opcode, core, group)
    rows = (4 if has_rdispls else 3, len(ranks))
    check.memory(opcode, "metadata_tensor", metadata, *HBM, SBUF)
    check.dtype_in(opcode, "metadata_tensor", metadata, "uint32")
    wanted = (1, *rows) if metadata.geometry.on_chip else rows
    if metadata.shape != wanted or not metadata.is_contiguous():
        refuse(f"{opcode}: metadata_tensor must be contiguous {list(wanted)}; got {metadata}")
    return ranks


def _exchange(
    call: CollectiveCall,
    metadata: NkiTensor,
    columns: int,
    ns: Callable[[RankGroup, float], float],
) -> None:
    """Chunk r of rank s goes to rank r; of one column of sizes and places the one goes to all."""
    core, ranks, srcs, dsts = call.core, call.ranks, call.srcs, call.dsts
    known, placed = call.options
    lnc, count, group = core.launch.lnc, len(ranks), call.group

    def act(posts: Posts) -> float:
        if not core.execute:
            return ns(group, srcs[0].size * srcs[0].dtype.itemsize)
        most = 0
        for part in range(lnc):
            sides = [posts[rank * lnc + part] for rank in ranks]
            tables = [raw(m).reshape(-1, count).astype(np.int64) for *_, m in sides]
            sent = [raw(src).reshape(-1).copy() for src, _, _ in sides]
            for me, (_, dst, own) in enumerate(sides):
                flat = raw(dst).reshape(-1).copy()
                slot = len(flat) // count
                for other in range(count):
                    size, place = tables[other][[COUNT, PLACE], min(me, columns - 1)]
                    at = tables[me][TARGET, other] if placed else slot * other
                    room = len(flat) - at if placed else slot
                    _check_chunk(call.opcode, ranks[other], place, size, len(sent[other]), room)
                    flat[at : at + size] = sent[other][place : place + size]
                    tables[me][RECEIVED, other] = size
                    most = max(most, int(size))
                raw(dst)[...] = flat.reshape(dst.shape)
                if not known:
                    raw(own).reshape(-1, count)[RECEIVED] = tables[me][RECEIVED]
        return ns(group, most * srcs[0].dtype.itemsize)

    inputs = [_rows(metadata, 0, 2, columns), *([_rows(metadata, 3, 4, count)] if placed else [])]
    outs = [*dsts, *([] if known else [_rows(metadata, 2, 3, count)])]
    post = (srcs[0], dsts[0], metadata)
    finish(replace(call, srcs=[*srcs, *inputs], dsts=outs), post, act)


def _rows(metadata: NkiTensor, first: int, end: int, columns: int) -> NkiTensor:
    """Some rows and columns of the metadata, in HBM or on one partition of SBUF."""
    if metadata.geometry.on_chip:
        return metadata[:, first:end, :columns]
    return metadata[first:end, :columns]


def _check_chunk(opcode: str, rank: int, place: int, size: int, available: int, room: int) -> None:
    if place + size > available or size > room:
        refuse(
            f"{opcode}: rank {rank} sends {size} elements from {place} on; its src has {available} "
            f"and the receiver room for {max(room, 0)}; mend the metadata"
        )
