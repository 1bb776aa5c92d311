"""What connects ranks, and the modelled time of collectives over it.

Sources (Neuron SDK 2.32): "hw" = hardware pages of Trn1, Trn2 and Trn3; "arch" = NKI architecture
guides; "intra" = intra-node collective communications.
A collective takes its steps, one hop each, and the longer of two transfers at the documented
rates: into the memory of a rank by its DMA engines, and into a chip over its links. Links are
taken to be fully used, and contention with the kernel's own DMAs is not modelled, so sizes that
links bind are modelled as a lower bound.
"""

from __future__ import annotations

from math import log2

from neuroncore.checks.base import refuse
from neuroncore.hardware import Machine

HOP_NS = 1500.0
""""About 1-2 us" a hop of a ring, by the load of HBM (intra); the middle."""
MESH_BYTES, RDH_BYTES = 1e6, 56e6
"""Below 1 MB mesh, up to 56 MB recursive doubling and halving, above a ring (intra, summary)."""
CHIP_LINKS = 4
"""NeuronLinks of a chip (arch, all three)."""


class RankGroup:
    """The ranks of one collective, as they lie on chips: rank 0 on core 0 of chip 0, and so on.

    Raises NkiValidationError where they are more than the links connect.
    """

    def __init__(self, opcode: str, machine: Machine, lnc: int, ranks: tuple[int, ...]) -> None:
        self.machine, self.lnc = machine, lnc
        self.chip_ranks = machine.cores // lnc
        """Ranks that a chip has room for."""
        connected = self.chip_ranks * machine.links.chips
        if max(ranks) >= connected:
            refuse(
                f"{opcode}: {machine.target} connects {connected} ranks "
                f"by NeuronLink, rank {max(ranks)} is beyond; collectives between instances are "
                "not modelled"
            )
        self.size = len(ranks)
        on_chip: dict[int, int] = {}
        for rank in ranks:
            chip = rank // self.chip_ranks
            on_chip[chip] = on_chip.get(chip, 0) + 1
        self.chips = len(on_chip)
        self.fullest, self.even = max(on_chip.values()), len(set(on_chip.values())) == 1

    def steps(self, message: float) -> float:
        """Hops of an all-gather or reduce-scatter by the algorithm for messages of this size."""
        if self.size == 1:
            return 0
        if self.chips == 1:
            return 1
        inside = 1 if self.fullest > 1 else 0
        if message < MESH_BYTES:
            return 1 + inside
        power = self.chips & (self.chips - 1) == 0
        if message <= RDH_BYTES and power and self.even:
            return log2(self.chips) + inside
        whole = self.even and self.fullest == self.chip_ranks and self.fullest > 1
        return self.size / 2 if whole else self.size - 1  # KangaRing, or Ring

    def gather_ns(self, chunk: float) -> float:
        """All-gather of a chunk of bytes from each rank; a reduce-scatter takes as long."""
        moved = self._moved_ns((self.size - 1) * chunk, (self.size - self.fullest) * chunk)
        return self.steps(self.size * chunk) * HOP_NS + moved

    def reduce_ns(self, message: float) -> float:
        """All-reduce of so many bytes: reduce-scatter and all-gather, or all to all in one step."""
        if self.size == 1:
            return 0.0
        halves = self._moved_ns(
            (self.size - 1) * message / self.size, (self.size - self.fullest) * message / self.size
        )
        twice = 2 * (self.steps(message) * HOP_NS + halves)
        if message >= MESH_BYTES:
            return twice
        whole = self._moved_ns((self.size - 1) * message, (self.size - self.fullest) * message)
        return min(twice, HOP_NS + whole)  # single-step mesh

    def exchange_ns(self, message: float) -> float:
        """All-to-all by mesh of so many bytes a rank, an equal part of them for each rank."""
        if self.size == 1:
            return 0.0
        part = message / self.size
        away = (self.size - self.fullest) * part
        moved = self._moved_ns((self.size - 1) * part, self.fullest * away)
        return self.steps(0) * HOP_NS + moved

    def shift_ns(self, message: float, channels: int = 1) -> float:
        """Each rank to the next of a ring; a channel has one link of a chip."""
        link_gbps = channels * self.machine.links.chip_gbps / 2 / CHIP_LINKS
        crossing = message / link_gbps if self.chips > 1 else 0.0
        return HOP_NS + max(message / self._dma_gbps, crossing)

    @property
    def _dma_gbps(self) -> float:
        return self.machine.dma_peak_gbps * self.lnc

    def _moved_ns(self, into_rank: float, into_chip: float) -> float:
        crossing = into_chip / (self.machine.links.chip_gbps / 2) if self.chips > 1 else 0.0
        return max(into_rank / self._dma_gbps, crossing)
