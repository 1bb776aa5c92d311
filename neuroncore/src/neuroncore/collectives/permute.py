"""Permutes: from each rank to one other, as pairs or around a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuroncore import core as running
from neuroncore.checks.base import refuse
from neuroncore.collectives.exchange import (
    HBM,
    SBUF,
    CollectiveCall,
    ValueExchange,
    Values,
    issue,
    message_bytes,
    operands,
    reducer,
    started,
)
from neuroncore.collectives.groups import (
    RankList,
    ReplicaGroup,
    check_ranks,
    rank_list,
)
from neuroncore.core import SimulatedCore
from neuroncore.memory.indexing import VirtualRegister
from neuroncore.memory.tensor import NkiTensor

Channels = Sequence[Sequence[NkiTensor]]


def collective_permute(
    srcs: Sequence[NkiTensor],
    dsts: Sequence[NkiTensor],
    source_target_pairs: Sequence[tuple[int, int]],
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """dst of each target = src of its source, in HBM. Ranks in no pair do not take part.

    The pairs form rings: each of their ranks is once a source and once a target.
    """
    opcode, core = "collective_permute", started("collective_permute", priority)
    operands(opcode, srcs, dsts, *HBM)
    _one(opcode, srcs, dsts)
    asked: Any = source_target_pairs
    if not isinstance(asked, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in asked
    ):
        refuse(f"{opcode}: source_target_pairs must be pairs of ranks; got {asked!r}")
    pairs = tuple([tuple(pair) for pair in source_target_pairs])
    sources, targets = (sorted([pair[side] for pair in pairs]) for side in (0, 1))
    check_ranks(opcode, core, [*sources, *targets])
    if sources != targets or len(set(sources)) != len(sources):
        refuse(
            f"{opcode}: pairs must form rings, each rank once a source and once a target; got "
            f"{list(pairs)}"
        )
    if core.rank not in sources:
        return
    _same(opcode, srcs[0], dsts[0])
    source_of = {target: source for source, target in pairs}
    ranks = tuple(sources)

    def exchange(sent: list[Values]) -> list[Values]:
        return [sent[ranks.index(source_of[rank])] for rank in ranks]

    size = message_bytes(core, srcs)
    call = CollectiveCall(core, opcode, ranks, srcs, dsts, name, (pairs,))
    issue(call, exchange, lambda group: group.shift_ns(size))


def collective_permute_implicit(
    srcs_by_channel: Channels,
    dsts_by_channel: Channels,
    replica_group: ReplicaGroup,
    channel_ids: Sequence[int] = [0],
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """dst of each rank = src of the rank before it in the ring, a tensor for each channel."""
    opcode = "collective_permute_implicit"
    core, ranks = _ring(opcode, priority, replica_group, channel_ids)
    (srcs, dsts) = _by_channel(opcode, channel_ids, srcs_by_channel, dsts_by_channel)

    def exchange(sent: list[Values]) -> list[Values]:
        return [sent[-1], *sent[:-1]]

    _shift(CollectiveCall(core, opcode, ranks, srcs, dsts, name), exchange, len(srcs))


def collective_permute_implicit_reduce(
    srcs0_by_channel: Channels,
    srcs1_by_channel: Channels,
    dsts_by_channel: Channels,
    replica_group: ReplicaGroup,
    op: Any,
    channel_ids: Sequence[int] = [0],
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """dst of each rank = op(src0, src1) of the rank before it in the ring, for each channel."""
    opcode = "collective_permute_implicit_reduce"
    core, ranks = _ring(opcode, priority, replica_group, channel_ids)
    ufunc = reducer(opcode, op)
    srcs0, srcs1, dsts = _by_channel(
        opcode, channel_ids, srcs0_by_channel, srcs1_by_channel, dsts_by_channel
    )
    channels = len(dsts)

    def exchange(sent: list[Values]) -> list[Values]:
        reduced = [
            [ufunc(a, b) for a, b in zip(values[:channels], values[channels:], strict=True)]
            for values in sent
        ]
        return [reduced[-1], *reduced[:-1]]

    srcs = (*srcs0, *srcs1)
    call = CollectiveCall(core, opcode, ranks, srcs, dsts, name, (ufunc.__name__,))
    _shift(call, exchange, channels, reduces=True)


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: int, replica_group: ReplicaGroup, channel_id: int = 0, name: str | None = None
) -> VirtualRegister:
    """A register with the rank whose data has arrived after `iteration_id` implicit permutes.

    Its own at 0. The simulated ring of every channel is the order of the rank's list.
    """
    opcode = "collective_permute_implicit_current_processing_rank_id"
    core = running.active(f"nki.collectives.{opcode}")
    ranks = rank_list(opcode, core, replica_group)
    _check_channels(opcode, core, ranks, range(channel_id + 1))
    if not isinstance(iteration_id, int) or iteration_id < 0:
        refuse(f"{opcode}: iteration_id must be 0 or more; got {iteration_id!r}")
    rank = ranks[(ranks.index(core.rank) - iteration_id) % len(ranks)]
    return VirtualRegister(rank, frozen=True)


def _ring(
    opcode: str, priority: int | None, group: ReplicaGroup, channel_ids: Sequence[int]
) -> tuple[SimulatedCore, RankList]:
    core = started(opcode, priority)
    ranks = rank_list(opcode, core, group)
    _check_channels(opcode, core, ranks, channel_ids)
    return core, ranks


def _check_channels(
    opcode: str, core: SimulatedCore, ranks: RankList, channel_ids: Sequence[int]
) -> None:
    """Consecutive from 0; 4 where the group has all devices of a node, else 2."""
    machine = core.machine
    chips = {rank * core.launch.lnc // machine.cores for rank in ranks}
    most = 4 if len(chips) >= machine.links.chips else 2
    ids = list(channel_ids) if isinstance(channel_ids, list | tuple | range) else []
    if ids != list(range(len(ids))) or not 1 <= len(ids) <= most:
        refuse(
            f"{opcode}: channel_ids must be consecutive from 0, {most} at most for this group; got "
            f"{channel_ids!r}"
        )


def _by_channel(
    opcode: str, channel_ids: Sequence[int], *sides: Channels
) -> tuple[tuple[NkiTensor, ...], ...]:
    """The one tensor of each channel, for each side."""
    for side in sides:
        lists = isinstance(side, list | tuple) and all(isinstance(t, list | tuple) for t in side)
        if not lists or [len(tensors) for tensors in side] != [1] * len(channel_ids):
            refuse(
                f"{opcode}: takes a list of one tensor for each of {len(channel_ids)} channels; "
                f"got {side!r}"
            )
    return tuple([tuple([tensors[0] for tensors in side]) for side in sides])


def _shift(
    call: CollectiveCall, exchange: ValueExchange, channels: int, reduces: bool = False
) -> None:
    for i, src in enumerate(call.srcs):
        dst = call.dsts[i % channels]
        operands(call.opcode, [src], [dst], *HBM, SBUF)
        _same(call.opcode, src, dst)
    size = message_bytes(call.core, call.dsts)
    issue(call, exchange, lambda group: group.shift_ns(size, channels), reduces)


def _one(opcode: str, srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor]) -> None:
    if len(srcs) != 1 or len(dsts) != 1:
        refuse(f"{opcode}: takes one tensor on each side; got {len(srcs)} and {len(dsts)}")


def _same(opcode: str, src: NkiTensor, dst: NkiTensor) -> None:
    if src.shape != dst.shape:
        refuse(f"{opcode}: src and dst must have one shape; got {src} and {dst}")
