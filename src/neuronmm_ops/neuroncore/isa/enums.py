"""Enumerations of `nki.isa`."""

from __future__ import annotations

from enum import Enum

from neuronmm_ops.hardware import Engine
from neuronmm_ops.neuroncore.checks import operands as check
from neuronmm_ops.neuroncore.checks.base import refuse


class _Option(Enum):
    """Members are singletons, and keys of the cache of templates: Enum's own hash is slower."""

    __hash__ = object.__hash__


class engine(_Option):  # noqa: N801 - NKI's name
    """Engine of an instruction; `unknown` leaves the choice to the compiler."""

    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    dma = 4
    sync = 6
    unknown = 0


class reduce_cmd(_Option):  # noqa: N801 - NKI's name
    """What happens to the accumulator registers of a reduction."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(_Option):  # noqa: N801 - NKI's name
    """Who generates DMA descriptors."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(_Option):  # noqa: N801 - NKI's name
    """What an out-of-bounds dynamic index does."""

    error = 0
    skip = 1


class matmul_perf_mode(_Option):  # noqa: N801 - NKI's name
    """Performance mode of TensorE."""

    none = "none"
    double_row = "double_row"


class nc_version(_Option):  # noqa: N801 - NKI's name
    """NeuronCore generations."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(_Option):  # noqa: N801 - NKI's name
    """DMA engine of `sendrecv`."""

    dma = 1
    gpsimd_dma = 2


def engine_of(opcode: str, asked: engine, *allowed: Engine) -> Engine:
    """The engine asked for, one of `allowed` if any; the first where the choice is left open."""
    if asked is engine.unknown:
        return allowed[0]
    if not isinstance(asked, engine):
        refuse(f"engine must be a member of nki.isa.engine; got {asked!r}")
    chosen = Engine[asked.name.upper()]
    check.engine_runs(opcode, chosen, *allowed)
    return chosen
