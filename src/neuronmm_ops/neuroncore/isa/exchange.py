"""Barriers and exchanges between the two cores of a launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuronmm_ops.hardware import MIN_CYCLES, Engine
from neuronmm_ops.neuroncore import core as running
from neuronmm_ops.neuroncore.checks import operands as check
from neuronmm_ops.neuroncore.checks.base import note, refuse, seen
from neuronmm_ops.neuroncore.core import SimulatedCore
from neuronmm_ops.neuroncore.isa.dma import copy_cost
from neuronmm_ops.neuroncore.isa.enums import dma_engine, engine, engine_of, option
from neuronmm_ops.neuroncore.isa.values import SBUF, raw
from neuronmm_ops.neuroncore.memory.storage import MemoryRegion
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.neuroncore.timing.trace import InstructionTemplate, NkiInstruction

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
    number, _ = _exchanged(core, ("core_barrier", data.name))
    # ordered like a write of `data`, of which it may have been written a part only
    storage = data.storage
    initialised, storage.initialised = storage.initialised, True
    try:
        done = core.record(core.template(_barrier, (data,), (engine,)), (data,))
    finally:
        storage.initialised = initialised
    core.trace.barriers[done.index] = number
    return done


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
        seen = f"send_to {send_to_rank!r} and recv_from {recv_from_rank!r}"
        refuse(f"sendrecv: ranks must be 0 or 1; got {seen}")
    values = raw(src).copy() if core.execute else None
    kind = ("sendrecv", pipe_id, src.shape, src.dtype, path.name)
    number, posts = _exchanged(core, kind, send_to_rank, values)
    sent_to, core.state["received"] = posts[recv_from_rank][1:]
    rank = core.program_id
    if sent_to != rank:
        seen = f"core {rank} receives from a core that sends to {sent_to}"
        refuse(f"sendrecv: {seen}; ranks must match")
    done = core.record(core.template(_sendrecv, (dst, src), (path,)), (dst, src))
    core.trace.barriers[done.index] = number
    return done


def _sendrecv(dst: NkiTensor, src: NkiTensor, path: dma_engine) -> InstructionTemplate:
    core = running.active()
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

    def run(dst: NkiTensor, src: NkiTensor) -> None:
        raw(dst)[...] = core.state.pop("received")

    return InstructionTemplate(Engine.DMA, 0, run, "sendrecv", dma=copy_cost(dst, src))


def _one_of_two(opcode: str) -> SimulatedCore:
    core = running.active(f"nki.isa.{opcode}")
    check.generation(opcode, core.machine, 3, "it", "launch on one core")
    cores = len(core.launch.cores)
    if cores != 2:
        refuse(f"{opcode}: needs two cores and the launch has {cores}; call kernel[2](...)")
    return core


def _exchanged(
    core: SimulatedCore, kind: tuple[Any, ...], sent_to: int = -1, values: np.ndarray | None = None
) -> tuple[int, list[tuple[Any, ...]]]:
    """Post what this core brings, wait for the other; returns the barrier's number and all posts.

    A post is (kind, rank it is sent to, values). When a barrier is over, both cores have read the
    posts of the one before.
    """
    posts: dict[int, tuple[Any, ...]] = core.state.setdefault("posts", {})
    order: int = core.state.get("exchanges", 0)
    core.state["exchanges"] = order + 1
    posts[order] = (kind, sent_to, values)
    number = core.launch.barrier(core)
    posts.pop(order - 1, None)
    found = [c.state["posts"][order] for c in core.launch.cores]
    other = found[1 - core.program_id][0]
    if kind != other:
        refuse(
            f"core_barrier/sendrecv: {kind} meets the other core's {other}; both "
            "cores must issue the same exchanges in one order"
        )
    return number, found
