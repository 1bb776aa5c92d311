"""What the ranks of tensor parallel sum, and a rank's part of what all of them have."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, ncc, nisa, nl
from neuronmm_ops.kernels.stages.tiling import KPart


class TensorParallel(nl.NKIObject):
    """Ranks 0 to count - 1 of a launch, which sum with each other."""

    def __init__(self, count: int) -> None:
        self.count = count
        numbers: list[int] = []
        for n in range(count):
            numbers.append(n)
        self.numbers = numbers

    def summed(self, hbm: NkiTensor) -> NkiTensor:
        """The sum over the ranks of a tensor in shared HBM that both cores write, for both.

        Rounded once, as what is summed. Weights of later stages load in the meantime.
        """
        if self.count == 1:
            if nl.num_programs(0) > 1:
                nisa.core_barrier(hbm, (0, 1))
            return hbm
        sum_hbm = nl.ndarray(hbm.shape, dtype=hbm.dtype, buffer=nl.shared_hbm)
        ncc.all_reduce([hbm], [sum_hbm], ncc.ReplicaGroup([self.numbers]), nl.add)
        return sum_hbm

    def divide(self, whole: int, part: int) -> bool:
        """Whether a rank has a part of a contraction whose other side is whole."""
        if whole == part or self.count == 1:
            return False
        assert part * self.count == whole, (
            f"{self.count} ranks must divide {whole} rows equally, got {part} rows of a rank"
        )
        return True

    def loaded(self, hbm: NkiTensor, part: KPart) -> NkiTensor:
        """Features of a part of this rank's K chunk, of all features [M, H]; [rows, M, tiles]."""
        M, H = hbm.shape
        sb = nl.ndarray((part.rows, M, part.tiles), dtype=hbm.dtype)
        pattern = [[part.tiles, part.rows], [H, M], [1, part.tiles]]
        nisa.dma_copy(sb, self.own(hbm, pattern, part.start))
        return sb

    def own(self, hbm: NkiTensor, pattern: list[list[int]], start: int) -> NkiTensor:
        """A pattern in [M, K] from column `start` of this rank's on; which is known at run time."""
        by_rank = hbm.reshape_dim(1, (self.count, hbm.shape[1] // self.count))
        return by_rank.ap(pattern, start, scalar_offset=ncc.rank_id(), indirect_dim=1)
