"""Registers of the engines' sequencers: dynamic offsets and loop bounds."""

from __future__ import annotations

from neuroncore import core as running
from neuroncore.checks import operands as check
from neuroncore.checks.base import refuse
from neuroncore.hardware import MIN_CYCLES, Engine
from neuroncore.isa.values import SBUF, raw
from neuroncore.memory.indexing import VirtualRegister
from neuroncore.memory.storage import MemoryRegion
from neuroncore.memory.tensor import NkiTensor
from neuroncore.timing.trace import InstructionTemplate


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A new register, holding `x`."""
    return VirtualRegister(x)


def register_move(dst: VirtualRegister, src: VirtualRegister | int) -> None:
    """dst = src."""
    _check_writable(dst)
    if isinstance(src, VirtualRegister):
        dst.value, dst.loop = src.value, src.loop
    else:
        dst.value, dst.loop = int(src), None


def register_load(dst: VirtualRegister, src: NkiTensor) -> None:
    """dst = the one element of a tensor of integers in SBUF or HBM; needs execute mode."""
    core = running.active("nki.isa.register_load")
    _check_writable(dst)
    if not core.execute:
        problem = 'the value is data, which mode="trace" does not compute'
        refuse(f'register_load: {problem}; use "execute"')
    core.record(core.template(_transfer, (src,), ("register_load", 0)), (src,))
    dst.value, dst.loop = int(raw(src).reshape(-1)[0]), None


def _check_writable(register: VirtualRegister) -> None:
    if register.frozen:
        refuse("register_move/load: the loop variable is read-only; use another register")


def register_store(dst: NkiTensor, src: VirtualRegister | int) -> None:
    """The one element of a tensor in SBUF or HBM = src."""
    core = running.active("nki.isa.register_store")
    value = src.value if isinstance(src, VirtualRegister) else int(src)
    core.record(core.template(_transfer, (dst,), ("register_store", 1)), (dst,))
    if core.execute:
        raw(dst)[...] = value


def _transfer(tile: NkiTensor, opcode: str, writes: int) -> InstructionTemplate:
    check.memory(opcode, "tile", tile, SBUF, MemoryRegion.private_hbm, MemoryRegion.shared_hbm)
    check.one_element(opcode, tile)
    # the value moves in register_load and register_store
    return InstructionTemplate(Engine.GPSIMD, MIN_CYCLES, lambda tile: None, opcode, writes)
