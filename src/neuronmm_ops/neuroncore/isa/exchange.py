"""Barriers and exchanges between the two cores of a launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuronmm_ops.hardware import MIN_CYCLES, Engine
from neuronmm_ops.neuroncore import checks
from neuronmm_ops.neuroncore import core as running
from neuronmm_ops.neuroncore.core import Core
from neuronmm_ops.neuroncore.isa.common import SBUF, dma_engine, engine, engine_of, raw
from neuronmm_ops.neuroncore.isa.dma import copy_cost
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.neuroncore.timing.trace import Form, NkiInstruction


def core_barrier(
    data: NkiTensor,
    cores: tuple[int, ...],
    engine: engine = engine.gpsimd,
    name: str | None = None,
) -> NkiInstruction:
    """Wait until the other core comes here too; what it wrote to `data` can be read afterwards.

    `data` is in shared_hbm and `cores` is (0, 1). NeuronCore-v3 and later, launches on two cores.
    """
    core = running.active("nki.isa.core_barrier")
    _both(core, "core_barrier")
    checks.barrier_cores(cores)
    checks.shared("core_barrier", data)
    number, _ = _meet(core, ("core_barrier", data.name))
    # ordered like a write of `data`, of which it may have been written a part only
    storage = data.storage
    initialised, storage.initialised = storage.initialised, True
    try:
        done = core.issue(_barrier, (data,), (engine,), name)
    finally:
        storage.initialised = initialised
    core.trace.barriers[done.index] = number
    return done


def _barrier(core: Core, data: NkiTensor, asked: engine) -> Form:
    chosen = engine_of(asked, Engine.GPSIMD)
    checks.engine_runs(
        "core_barrier",
        chosen,
        Engine.GPSIMD,
        Engine.VECTOR,
        Engine.SCALAR,
        Engine.TENSOR,
        Engine.SYNC,
    )

    def run(data: NkiTensor) -> None:
        """Moves nothing."""

    return Form("core_barrier", chosen, MIN_CYCLES, run=run)  # the cost is not documented


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
    core = running.active("nki.isa.sendrecv")
    _both(core, "sendrecv")
    checks.ranks(send_to_rank, recv_from_rank)
    values = raw(src).copy() if core.execute else None
    kind = ("sendrecv", pipe_id, src.shape, src.dtype, dma_engine.name)
    number, posts = _meet(core, kind, send_to_rank, values)
    sent_to, core.state["received"] = posts[recv_from_rank][1:]
    checks.delivered(core.program_id, sent_to)
    done = core.issue(_sendrecv, (dst, src), (dma_engine,), name)
    core.trace.barriers[done.index] = number
    return done


def _sendrecv(core: Core, dst: NkiTensor, src: NkiTensor, path: dma_engine) -> Form:
    checks.memory("sendrecv", "src", src, SBUF)
    checks.memory("sendrecv", "dst", dst, SBUF)
    checks.same_dtype("sendrecv", dst, src)
    checks.same_shape("sendrecv", dst, src)
    if path.name == "gpsimd_dma":
        checks.gpsimd_bytes(src)

    def run(dst: NkiTensor, src: NkiTensor) -> None:
        target = raw(dst)
        target[...] = core.state.pop("received")

    return Form("sendrecv", Engine.DMA, 0, run=run, dma=copy_cost(core, dst, src))


def _both(core: Core, opcode: str) -> None:
    checks.generation(opcode, core.machine, 3, "it", "launch on one core")
    checks.two_cores(opcode, len(core.launch.cores))


def _meet(
    core: Core, kind: tuple[Any, ...], sent_to: int = -1, values: np.ndarray | None = None
) -> tuple[int, list[tuple[Any, ...]]]:
    """Post what this core brings, wait for the other; returns the meeting and all posts.

    A post is (kind, rank it is sent to, values). When a meeting is over, both cores have read the
    posts of the one before.
    """
    posts: dict[int, tuple[Any, ...]] = core.state.setdefault("posts", {})
    order: int = core.state.get("exchanges", 0)
    core.state["exchanges"] = order + 1
    posts[order] = (kind, sent_to, values)
    number = core.launch.meet(core)
    posts.pop(order - 1, None)
    found = [c.state["posts"][order] for c in core.launch.cores]
    checks.counterparts(kind, found[1 - core.program_id][0])
    return number, found
