"""Collectives of equal parts: all-reduce, all-gather, reduce-scatter, all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuroncore.checks.base import refuse
from neuroncore.collectives.exchange import (
    HBM,
    CollectiveCall,
    Values,
    issue,
    message_bytes,
    operands,
    reducer,
    started,
)
from neuroncore.collectives.groups import ReplicaGroup, rank_list
from neuroncore.memory.tensor import NkiTensor


def all_reduce(
    srcs: Sequence[NkiTensor],
    dsts: Sequence[NkiTensor],
    replica_group: ReplicaGroup,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """dsts of each rank = op over the srcs of all ranks: nl.add, nl.minimum or nl.maximum."""
    opcode, core = "all_reduce", started("all_reduce", priority)
    operands(opcode, srcs, dsts)
    _shapes(opcode, srcs, dsts, 0, 1)
    ufunc, ranks = reducer(opcode, op), rank_list(opcode, core, replica_group)

    def exchange(sent: list[Values]) -> list[Values]:
        return [_reduced(ufunc, sent)] * len(sent)

    size = message_bytes(core, srcs)
    call = CollectiveCall(core, opcode, ranks, srcs, dsts, name, (ufunc.__name__,))
    issue(call, exchange, lambda group: group.reduce_ns(size), reduces=True)


def all_gather(
    srcs: Sequence[NkiTensor],
    dsts: Sequence[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """dsts of each rank = the srcs of all ranks, side by side along `collective_dim`.

    0 in HBM; 0 or 1 of two-dimensional tiles in SBUF.
    """
    opcode, core = "all_gather", started("all_gather", priority)
    tiles = operands(opcode, srcs, dsts)
    if tiles and any(t.ndim != 2 for t in (*srcs, *dsts)):
        refuse(f"{opcode}: tiles in SBUF must have two dimensions; got {[*srcs, *dsts]}")
    _dimension(opcode, collective_dim, (0, 1) if tiles else (0,))
    ranks = rank_list(opcode, core, replica_group)
    _shapes(opcode, srcs, dsts, collective_dim, len(ranks))

    def exchange(sent: list[Values]) -> list[Values]:
        together = [np.concatenate(parts, collective_dim) for parts in zip(*sent, strict=True)]
        return [together] * len(sent)

    chunk = message_bytes(core, srcs)
    call = CollectiveCall(core, opcode, ranks, srcs, dsts, name, (collective_dim,))
    issue(call, exchange, lambda group: group.gather_ns(chunk))


def reduce_scatter(
    srcs: Sequence[NkiTensor],
    dsts: Sequence[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """dsts of rank i of a list = part i, along dimension 0, of op over the srcs of all ranks."""
    opcode, core = "reduce_scatter", started("reduce_scatter", priority)
    operands(opcode, srcs, dsts)
    _dimension(opcode, collective_dim, (0,))
    ufunc, ranks = reducer(opcode, op), rank_list(opcode, core, replica_group)
    _shapes(opcode, dsts, srcs, 0, len(ranks))

    def exchange(sent: list[Values]) -> list[Values]:
        parts = [np.split(total, len(sent)) for total in _reduced(ufunc, sent)]
        return [list(values) for values in zip(*parts, strict=True)]

    chunk = message_bytes(core, dsts)
    call = CollectiveCall(core, opcode, ranks, srcs, dsts, name, (ufunc.__name__,))
    issue(call, exchange, lambda group: group.gather_ns(chunk), reduces=True)


def all_to_all(
    srcs: Sequence[NkiTensor],
    dsts: Sequence[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Part j, along dimension 0, of dsts of rank i of a list = part i of the srcs of rank j."""
    opcode, core = "all_to_all", started("all_to_all", priority)
    operands(opcode, srcs, dsts, *HBM)
    _dimension(opcode, collective_dim, (0,))
    ranks = rank_list(opcode, core, replica_group)
    _shapes(opcode, srcs, dsts, 0, 1)
    for t in srcs:
        if t.shape[0] % len(ranks):
            refuse(f"{opcode}: dimension 0 must divide into {len(ranks)} parts; got {t}")

    def exchange(sent: list[Values]) -> list[Values]:
        parts = [[np.split(value, len(sent)) for value in values] for values in sent]
        return [
            [np.concatenate([p[t][i] for p in parts]) for t in range(len(parts[0]))]
            for i in range(len(sent))
        ]

    size = message_bytes(core, srcs)
    call = CollectiveCall(core, opcode, ranks, srcs, dsts, name)
    issue(call, exchange, lambda group: group.exchange_ns(size))


def _reduced(ufunc: np.ufunc, sent: list[Values]) -> Values:
    """Over the ranks, in the order of their list."""
    totals = [value.copy() for value in sent[0]]
    for values in sent[1:]:
        for total, value in zip(totals, values, strict=True):
            ufunc(total, value, out=total)
    return totals


def _dimension(opcode: str, dim: int, legal: tuple[int, ...]) -> None:
    if dim not in legal:
        names = " or ".join(map(str, legal))
        refuse(f"{opcode}: collective_dim must be {names} of these tensors; got {dim!r}")


def _shapes(
    opcode: str, parts: Sequence[NkiTensor], wholes: Sequence[NkiTensor], dim: int, times: int
) -> None:
    """Each whole has a part's shape, with `times` its size along one dimension."""
    for part, whole in zip(parts, wholes, strict=True):
        shape = list(part.shape)
        shape[dim] *= times
        if list(whole.shape) != shape:
            refuse(
                f"{opcode}: {part} of {times} rank{'s' * (times > 1)} makes {shape}, the other "
                f"side is {whole}; give them matching shapes"
            )
