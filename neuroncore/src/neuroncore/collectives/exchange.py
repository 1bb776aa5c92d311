"""How a collective is issued: rules of its operands, the meeting of ranks, its instruction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from neuroncore import core as running
from neuroncore.checks import operands as check
from neuroncore.checks.base import refuse
from neuroncore.collectives.groups import RankList
from neuroncore.collectives.links import RankGroup
from neuroncore.core import SimulatedCore
from neuroncore.hardware import Engine
from neuroncore.isa.exchange import meet
from neuroncore.isa.values import raw, read, write
from neuroncore.memory.storage import MemoryRegion
from neuroncore.memory.tensor import NkiTensor
from neuroncore.nl import operators
from neuroncore.timing.trace import InstructionTemplate
from neuroncore.turns import Posts

HBM = (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)
SBUF = MemoryRegion.sbuf

Values = list[np.ndarray]
ValueExchange = Callable[[list[Values]], list[Values]]
"""From what each rank sends, one array per tensor, to what each rank receives."""


def started(opcode: str, priority: int | None) -> SimulatedCore:
    """The core that issues a collective."""
    core = running.active(f"nki.collectives.{opcode}")
    if priority is not None:
        check.feature(opcode, core.machine, "priority", "priority", "leave it out")
        if priority not in (0, 1, 2, 3):
            refuse(f"{opcode}: priority must be 0 to 3; got {priority!r}")
    return core


def operands(
    opcode: str, srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], *memories: MemoryRegion
) -> bool:
    """Rules of all collectives; returns whether the tensors are in SBUF.

    As many sources as destinations, pairwise of one dtype, in HBM or all in SBUF; several only in
    HBM.
    """
    for operand, tensors in (("srcs", srcs), ("dsts", dsts)):
        if not isinstance(tensors, list | tuple):
            refuse(f"{opcode}: {operand} must be a list of tensors; got {tensors!r}")
    if not srcs or len(srcs) != len(dsts):
        refuse(f"{opcode}: takes as many dsts as srcs; got {len(srcs)} srcs and {len(dsts)} dsts")
    for operand, tensors in (("srcs", srcs), ("dsts", dsts)):
        for t in tensors:
            if not isinstance(t, NkiTensor):
                refuse(f"{opcode}: {operand} must be tensors; got {t!r}")
            if t.buffer not in (memories or (*HBM, SBUF)) or t.is_indirect():
                names = " or ".join([m.value for m in memories or (*HBM, SBUF)])
                refuse(f"{opcode}: {operand} must be in {names}; {t} is not, copy it there first")
    for src, dst in zip(srcs, dsts, strict=True):
        check.same_dtype(opcode, dst, src)
    on_chip = {t.geometry.on_chip for t in (*srcs, *dsts)}
    if len(on_chip) > 1:
        refuse(f"{opcode}: all tensors must be in HBM, or all in SBUF; got {[*srcs, *dsts]}")
    if on_chip == {True} and len(srcs) > 1:
        refuse(f"{opcode}: in SBUF it takes one tensor, coalescing needs HBM; got {len(srcs)}")
    return on_chip == {True}


def reducer(opcode: str, op: Any) -> np.ufunc:
    """The sum, minimum or maximum that a collective reduces with."""
    names = {"add": np.add, "minimum": np.minimum, "maximum": np.maximum}
    name = operators.alu(op).name
    if name not in names:
        refuse(f"{opcode}: op must be nl.add, nl.minimum or nl.maximum; got nl.{name}")
    return names[name]


def message_bytes(core: SimulatedCore, tensors: Sequence[NkiTensor]) -> int:
    """Bytes of the tensors of one rank; what is not shared, each of its cores has."""
    total = 0
    for t in tensors:
        copies = 1 if t.buffer is MemoryRegion.shared_hbm else core.launch.lnc
        total += prod(t.shape) * t.dtype.itemsize * copies
    return total


@dataclass(frozen=True)
class CollectiveCall:
    """A collective as one core calls it.

    Attributes:
        ranks: that meet, cores of one number with each other.
        options: that all ranks must call it with.
        name: of the instruction.
    """

    core: SimulatedCore
    opcode: str
    ranks: RankList
    srcs: Sequence[NkiTensor]
    dsts: Sequence[NkiTensor]
    name: str | None
    options: tuple[Any, ...] = ()

    @property
    def group(self) -> RankGroup:
        """The ranks on their chips."""
        return RankGroup(self.opcode, self.core.machine, self.core.launch.lnc, self.ranks)


def issue(
    call: CollectiveCall,
    exchange: ValueExchange,
    ns: Callable[[RankGroup], float],
    reduces: bool = False,
) -> None:
    """Exchange values among the ranks of a list, and record the instruction.

    All ranks must come with tensors of the same shapes. Reductions get floats in fp32, and round
    once.
    """
    core, group = call.core, call.group
    lnc = core.launch.lnc

    def act(posts: Posts) -> float:
        if core.execute:
            done: list[tuple[NkiTensor, np.ndarray]] = []
            for part in range(lnc):
                mine = [posts[rank * lnc + part] for rank in call.ranks]
                received = exchange([[_taken(t, reduces) for t in sent] for sent, _ in mine])
                for (_, targets), values in zip(mine, received, strict=True):
                    done += zip(targets, values, strict=True)
            for target, value in done:
                _put(target, value)
        return ns(group)

    finish(call, (call.srcs, call.dsts), act)


def finish(call: CollectiveCall, post: Any, act: Callable[[Posts], float]) -> None:
    """Meet the cores of the ranks, with a post each, and record the instruction."""
    core, opcode, tensors = call.core, call.opcode, (*call.dsts, *call.srcs)
    shapes = tuple([(t.shape, t.dtype, t.geometry.on_chip) for t in tensors])
    lnc, cores = core.launch.lnc, len(core.launch.cores)
    every = [rank * lnc + part for rank in call.ranks for part in range(lnc)]
    members = tuple(sorted([number for number in every if number < cores]))
    meeting = meet(core, members, (opcode, call.ranks, call.options, shapes), post, act)
    template = core.template(_template, tensors, (opcode, len(call.dsts)))
    done = core.record(template, tensors).named(call.name)
    core.trace.barriers[done.index] = meeting


def _template(*rest: Any) -> InstructionTemplate:
    *_, opcode, writes = rest
    # its time is that of the meeting; SyncE stands for the CC-cores, which run them in order
    return InstructionTemplate(Engine.SYNC, 0, lambda *tensors: None, opcode, writes=writes)


def _taken(t: NkiTensor, reduces: bool) -> np.ndarray:
    return (read(t) if reduces and t.dtype.is_float else raw(t)).copy()


def _put(t: NkiTensor, value: np.ndarray) -> None:
    if value.dtype == raw(t).dtype:
        raw(t)[...] = value.reshape(t.shape)
    else:
        write(t, value)
