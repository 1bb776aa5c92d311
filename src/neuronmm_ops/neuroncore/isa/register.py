"""Registers of the engines' sequencers: dynamic offsets and loop bounds."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.hardware import MIN_CYCLES, Engine
from neuronmm_ops.neuroncore import checks
from neuronmm_ops.neuroncore import core as running
from neuronmm_ops.neuroncore.core import Core
from neuronmm_ops.neuroncore.isa.common import SBUF, raw
from neuronmm_ops.neuroncore.memory.storage import MemoryRegion
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor, VirtualRegister
from neuronmm_ops.neuroncore.timing.trace import Form


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A new register, holding `x`."""
    return VirtualRegister(x)


def register_move(dst: VirtualRegister, src: VirtualRegister | int) -> None:
    """dst = src."""
    checks.writable_register(dst)
    dst.value = src.value if isinstance(src, VirtualRegister) else int(src)


def register_load(dst: VirtualRegister, src: NkiTensor) -> None:
    """dst = the one element of a tensor of integers in SBUF or HBM; needs execute mode."""
    core = running.active("nki.isa.register_load")
    checks.writable_register(dst)
    checks.executes(core.execute, "register_load")
    core.issue(_transfer, (src,), ("register_load", 0))
    dst.value = int(raw(src).reshape(-1)[0])


def register_store(dst: NkiTensor, src: VirtualRegister | int) -> None:
    """The one element of a tensor in SBUF or HBM = src."""
    core = running.active("nki.isa.register_store")
    value = src.value if isinstance(src, VirtualRegister) else int(src)
    core.issue(_transfer, (dst,), ("register_store", 1))
    if core.execute:
        raw(dst)[...] = value


def _transfer(core: Core, tile: NkiTensor, opcode: str, writes: int) -> Form:
    checks.memory(opcode, "tile", tile, SBUF, MemoryRegion.private_hbm, MemoryRegion.shared_hbm)
    checks.one_element(opcode, tile)

    def run(*tiles: NkiTensor) -> Any:
        """The value moves in register_load and register_store."""

    return Form(opcode, Engine.GPSIMD, MIN_CYCLES, writes=writes, run=run)
