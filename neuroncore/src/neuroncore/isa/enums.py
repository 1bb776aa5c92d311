"""Enumerations of `nki.isa`."""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any, TypeVar

from neuroncore.checks import operands as check
from neuroncore.checks.base import note, refuse, seen
from neuroncore.hardware import MACHINES, Engine


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


@functools.total_ordering
class Version(_Option):
    """NeuronCore generations, in order."""

    def __lt__(self, other: object) -> bool:
        """Whether it is older than another; kernels compare `get_nc_version() >= gen3`."""
        return self.value < other.value if isinstance(other, Version) else NotImplemented


nc_version: Any = Version(
    "nc_version", {f"gen{m.generation}": m.generation for m in MACHINES.values()}, module=__name__
)
"""gen2, gen3, gen4: the generations of `hardware`."""


class dma_engine(_Option):  # noqa: N801 - NKI's name
    """DMA engine of `sendrecv`."""

    dma = 1
    gpsimd_dma = 2


Option = TypeVar("Option", bound=_Option)
OPTIONS = {
    kind.__name__: kind
    for kind in (engine, reduce_cmd, dge_mode, oob_mode, matmul_perf_mode, dma_engine)
}
"""The enumerations that parameters of instructions are annotated with, by name."""


def option(opcode: str, parameter: str, kind: type[Option], value: object) -> Option:
    """The member of an enumeration that an argument is, or stands for by name or value.

    NKI 0.3 and later refuse names and values (migration guide, "Integer enum constants no longer
    supported"); kernels written before pass them, so they are converted, with a warning.
    """
    if isinstance(value, kind):
        return value
    meant = [m for m in kind if value in (m.name, m.value) and not isinstance(value, bool)]
    if not meant:
        members = ", ".join([m.name for m in kind])
        refuse(
            f"{opcode}: {parameter} must be a member of nki.isa.{kind.__name__}, one of {members}; "
            f"got {seen(value)}"
        )
    note(
        f"{opcode}: {parameter}={value!r} is taken as {kind.__name__}.{meant[0].name}; NKI 0.3 and "
        "later take members of the enumeration only (migration guide)"
    )
    return meant[0]


def engine_of(opcode: str, asked: engine, *allowed: Engine) -> Engine:
    """The engine asked for, one of `allowed` if any; the first where the choice is left open."""
    asked = option(opcode, "engine", engine, asked)
    if asked is engine.unknown:
        return allowed[0]
    chosen = Engine[asked.name.upper()]
    check.engine_runs(opcode, chosen, *allowed)
    return chosen
