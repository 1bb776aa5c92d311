"""What ranks of tensor parallel exchange: bytes on the wire, and modelled times."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Literal, NamedTuple

from neuroncore.collectives.links import RankGroup
from neuroncore.hardware import resolve_target

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]
PUBLISHED_US = 6.16
"""The quickest collective of 32 ranks among the examples of the SDK's nccom-test (an all-gather of
1 KiB; Neuron SDK 2.32, tools/neuron-sys-tools/nccom-test.rst). A hop of the links' model is 1.5 us.
"""


class Collective(NamedTuple):
    """One collective of [M, N] on all ranks.

    Attributes:
        kind: all_reduce, all_gather or reduce_scatter.
        M: rows.
        N: columns, of all ranks together.
        ms: modelled.
        wire_bytes: that a rank sends in a ring.
    """

    kind: str
    M: int
    N: int
    ms: float
    wire_bytes: float


@dataclass(frozen=True)
class Collectives:
    """Collectives of all ranks of one model; one rank has none.

    In a ring: an all-reduce of n bytes sends `2 (tp - 1) / tp * n`, and either half of it, a gather
    or a scattered sum, half (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).

    Attributes:
        target: trn1, trn2 or trn3.
        lnc: NeuronCores of a rank.
        tp: ranks.
        least_us: time that every collective takes at least.

    Raises:
        ValueError: there are more ranks than NeuronLink connects.
    """

    target: str
    lnc: int
    tp: int
    least_us: float = 0.0

    def __post_init__(self) -> None:
        """Refuse ranks that no link is modelled for."""
        machine = resolve_target(self.target)
        most = machine.cores // self.lnc * machine.links.chips
        if self.tp > most:
            raise ValueError(
                f"tp must be at most {most}, the ranks of lnc {self.lnc} that NeuronLink connects "
                f"on {machine.target}; got {self.tp}"
            )

    def all_reduce(self, M: int, N: int, itemsize: int = 2) -> tuple[Collective, ...]:
        """The sum of [M, N] over the ranks, which all of them get."""
        whole = itemsize * M * N
        sent = 2 * (self.tp - 1) / self.tp * whole
        return self._collective("all_reduce", M, N, sent, whole)

    def all_gather(self, M: int, N: int, itemsize: int = 2) -> tuple[Collective, ...]:
        """[M, N] of the columns that each rank has; columns are padded to equal parts."""
        return self._collective("all_gather", M, N, *self._parts(M, N, itemsize))

    def reduce_scatter(self, M: int, N: int, itemsize: int = 2) -> tuple[Collective, ...]:
        """The sum of [M, N] over the ranks, of which each gets its columns, padded as above."""
        return self._collective("reduce_scatter", M, N, *self._parts(M, N, itemsize))

    def _parts(self, M: int, N: int, itemsize: int) -> tuple[float, float]:
        """Bytes that a rank sends, and those of its part."""
        part = itemsize * M * ceil(N / self.tp)
        return (self.tp - 1) * part, part

    def _collective(
        self, kind: CollectiveKind, M: int, N: int, sent: float, size: float
    ) -> tuple[Collective, ...]:
        if self.tp == 1:
            return ()
        takes = self._group.reduce_ns if kind == "all_reduce" else self._group.gather_ns
        ms = max(takes(size) / 1e6, self.least_us / 1e3)
        return (Collective(kind, M, N, ms, sent),)

    @cached_property
    def _group(self) -> RankGroup:
        return RankGroup("tp", resolve_target(self.target), self.lnc, tuple(range(self.tp)))
