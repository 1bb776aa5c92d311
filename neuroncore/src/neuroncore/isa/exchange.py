"""Barriers and exchanges between the two cores of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neuroncore import core as running
from neuroncore.checks import operands as check
from neuroncore.checks.base import note, refuse, seen
from neuroncore.core import SimulatedCore
from neuroncore.hardware import MIN_CYCLES, Engine
from neuroncore.isa.dma import copy_cost
from neuroncore.isa.enums import dma_engine, engine, engine_of, option
from neuroncore.isa.values import SBUF, raw
from neuroncore.memory.storage import MemoryRegion
from neuroncore.memory.tensor import NkiTensor
from neuroncore.timing.trace import InstructionTemplate, NkiInstruction
from neuroncore.turns import Meeting, Posts

_Path = dma_engine  # sendrecv has a parameter of that name


def core_barrier(
    data: NkiTensor,
    cores: tuple[int, ...],
    engine: engine = engine.gpsimd,
    name: str | None = None,
) -> NkiInstruction:
    """Wait until the other core comes here too; what it wrote to `data` can be read afterwards.

    `data` is in shared_hbm and `cores` is (0, 1). NeuronCore-v3 and later, launches on two cores.
    """
    core = _one_of_two("core_barrier")
    if tuple(cores) != (0, 1):
        refuse(f"core_barrier: cores must be (0, 1); got {cores!r}")
    if not isinstance(data, NkiTensor):
        refuse(f"core_barrier: data must be a tensor in shared_hbm; got {seen(data)}")
    if data.buffer is not MemoryRegion.shared_hbm:
        note(
            f"core_barrier: data must be in shared_hbm (nki.isa.core_barrier); {data} is the "
            "core's own, so the barrier orders its instructions alone"
        )
    meeting = meet(core, core.of_rank, ("core_barrier", data.name), None, lambda posts: 0.0)
    # ordered like a write of `data`, of which it may have been written a part only
    storage = data.storage
    initialised, storage.initialised = storage.initialised, True
    try:
        done = core.record(core.template(_barrier, (data,), (engine,)), (data,))
    finally:
        storage.initialised = initialised
    core.trace.barriers[done.index] = meeting
    return done.named(name)


def _barrier(data: NkiTensor, asked: engine) -> InstructionTemplate:
    engines = Engine.GPSIMD, Engine.VECTOR, Engine.SCALAR, Engine.TENSOR, Engine.SYNC
    chosen = engine_of("core_barrier", asked, *engines)
    # moves nothing; its cost is not documented
    return InstructionTemplate(chosen, MIN_CYCLES, lambda data: None, "core_barrier")


def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: dma_engine = dma_engine.dma,
    name: str | None = None,
) -> NkiInstruction:
    """Send the tile src to core `send_to_rank`; dst = the tile that `recv_from_rank` sends.

    Both in SBUF, of one shape and dtype. Both cores issue their exchanges and barriers in one
    order, with the same `pipe_id`. NeuronCore-v3 and later, launches on two cores.
    """
    core = _one_of_two("sendrecv")
    path = option("sendrecv", "dma_engine", _Path, dma_engine)
    if send_to_rank not in (0, 1) or recv_from_rank not in (0, 1):
        ranks = f"send_to {send_to_rank!r} and recv_from {recv_from_rank!r}"
        refuse(f"sendrecv: ranks must be 0 or 1; got {ranks}")
    template = core.template(_sendrecv, (dst, src), (path,))
    kind = ("sendrecv", pipe_id, src.shape, src.dtype, path.name)
    post = (core.program_id, send_to_rank, recv_from_rank, src, dst)
    meeting = meet(core, core.of_rank, kind, post, _swap if core.execute else _check_ranks)
    done = core.record(template, (dst, src))
    core.trace.barriers[done.index] = meeting
    return done.named(name)


def _sendrecv(dst: NkiTensor, src: NkiTensor, path: dma_engine) -> InstructionTemplate:
    check.memory("sendrecv", "src", src, SBUF)
    check.memory("sendrecv", "dst", dst, SBUF)
    check.same_dtype("sendrecv", dst, src)
    if dst.shape != src.shape:
        refuse(f"sendrecv: src and dst must have one shape; got {src} and {dst}")
    size, limit = src.geometry.elements * src.dtype.itemsize, 256 * src.dtype.itemsize
    if path.name == "gpsimd_dma" and size > limit:
        refuse(
            f"sendrecv: dma_engine.gpsimd_dma moves {limit} bytes per partition of {src.dtype}; "
            f"{src} has {size}; use dma_engine.dma"
        )
    # the values are swapped where the cores meet
    return InstructionTemplate(Engine.DMA, 0, _nothing, "sendrecv", dma=copy_cost(dst, src))


def _nothing(*operands: NkiTensor) -> None:
    """No values: they were moved where cores met."""


def _swap(posts: Posts) -> float:
    _check_ranks(posts)
    sent = {rank: raw(src).copy() for rank, _, _, src, _ in posts.values()}
    for _, _, recv_from, _, dst in posts.values():
        raw(dst)[...] = sent[recv_from]
    return 0.0


def _check_ranks(posts: Posts) -> float:
    sends_to = {rank: sent_to for rank, sent_to, *_ in posts.values()}
    for rank, _, recv_from, *_ in posts.values():
        if sends_to[recv_from] != rank:
            seen = f"core {rank} receives from a core that sends to {sends_to[recv_from]}"
            refuse(f"sendrecv: {seen}; ranks must match")
    return 0.0


def _one_of_two(opcode: str) -> SimulatedCore:
    core = running.active(f"nki.isa.{opcode}")
    check.feature(opcode, core.machine, "paired_cores", "it", "launch on one core")
    if core.launch.lnc != 2:
        refuse(f"{opcode}: needs two cores and the launch has 1; call kernel[2](...)")
    return core


def meet(
    core: SimulatedCore,
    members: tuple[int, ...],
    kind: tuple[Any, ...],
    post: Any,
    act: Callable[[Posts], float],
) -> Meeting:
    """Meet other cores for an exchange of one kind; see `Turns.meet`."""

    def checked(posts: Posts) -> float:
        for number in members:
            if posts[number][1] != kind:
                refuse(
                    f"{kind[0]}: {kind} of core {core.number} meets {posts[number][1]} of core "
                    f"{number}; all cores must issue the same exchanges in one order"
                )
        return act({number: p for number, (_, _, p) in posts.items()})

    return core.launch.turns.meet(core.number, members, (kind[0], kind, post), checked)
