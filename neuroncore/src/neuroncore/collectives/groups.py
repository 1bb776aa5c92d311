"""Which ranks take part in a collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neuroncore import core as running
from neuroncore.checks.base import refuse
from neuroncore.core import SimulatedCore
from neuroncore.memory.indexing import VirtualRegister
from neuroncore.nl.objects import NKIObject

RankList = tuple[int, ...]


@dataclass
class ReplicaGroup(NKIObject):
    """Lists of ranks that do not overlap; the ranks of a list take part in a collective together.

    Results are ordered as the ranks of a list are; rings go around it.
    """

    groups: Sequence[Sequence[int]]


def rank_id(name: str | None = None) -> VirtualRegister:
    """A register with the number of the current rank in the launch."""
    return VirtualRegister(running.active("nki.collectives.rank_id").rank, frozen=True)


def rank_list(opcode: str, core: SimulatedCore, group: ReplicaGroup) -> RankList:
    """The list of a group that the core's rank is in.

    Raises NkiValidationError for lists that overlap, ranks that the launch lacks, and a rank that
    is in none.
    """
    if not isinstance(group, ReplicaGroup):
        refuse(f"{opcode}: replica_group must be a ReplicaGroup; got {group!r}")
    whole: Any = group.groups
    if not isinstance(whole, list | tuple) or not all(
        isinstance(ranks, list | tuple | range) for ranks in whole
    ):
        refuse(f"{opcode}: a ReplicaGroup is made of lists of ranks; got {group.groups!r}")
    lists = [tuple(ranks) for ranks in group.groups]
    every = [rank for ranks in lists for rank in ranks]
    if len(set(every)) != len(every):
        refuse(f"{opcode}: the lists of a replica group must not overlap; got {lists}")
    check_ranks(opcode, core, every)
    own_list = next((ranks for ranks in lists if core.rank in ranks), None)
    if own_list is None:
        refuse(f"{opcode}: rank {core.rank} is in no list of the replica group {lists}; add it")
    return own_list


def check_ranks(opcode: str, core: SimulatedCore, ranks: Sequence[int]) -> None:
    """Ranks are numbers of ranks that the launch has."""
    for rank in ranks:
        if not isinstance(rank, int) or not 0 <= rank < core.launch.ranks:
            refuse(
                f"{opcode}: rank {rank!r} does not exist, the launch has {core.launch.ranks}; "
                "simulate(kernel, ..., ranks=) sets how many"
            )
