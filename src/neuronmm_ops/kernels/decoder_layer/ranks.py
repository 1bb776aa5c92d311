"""What the ranks of tensor parallel sum, and what of the stream each of them has."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, ncc, nisa, nl


class TensorParallel(nl.NKIObject):
    """Ranks 0 to count - 1 of a launch, which sum with each other."""

    def __init__(self, count: int) -> None:
        self.count = count
        numbers: list[int] = []
        for n in range(count):
            numbers.append(n)
        self.numbers = numbers

    def summed(self, parts: list[NkiTensor]) -> list[NkiTensor]:
        """Sums over the ranks of tensors in shared HBM that both cores write, for both.

        Rounded once, as what is summed. Weights of later stages load in the meantime.
        """
        if self.count == 1:
            for hbm in parts:
                meet(hbm)
            return parts
        sums: list[NkiTensor] = []
        for hbm in parts:
            sums.append(nl.ndarray(hbm.shape, dtype=hbm.dtype, buffer=nl.shared_hbm))
        ncc.all_reduce(parts, sums, ncc.ReplicaGroup([self.numbers]), nl.add)
        return sums

    def fitted(self, streams: list[NkiTensor], features: int) -> list[NkiTensor]:
        """Streams [M, ...] in HBM of which a stage contracts `features`: all, or its rank's."""
        parts: list[NkiTensor] = []
        for hbm in streams:
            if hbm.shape[1] < features:
                parts.append(hbm)
        rows: list[NkiTensor] = []
        if len(parts) > 0:
            rows = self.gathered(parts)
        fitted: list[NkiTensor] = []
        row = 0
        for hbm in streams:
            if hbm.shape[1] < features:
                fitted.append(self.side_by_side(rows[row]))
                row += 1
            else:
                fitted.append(hbm)
        return fitted

    def gathered(self, parts: list[NkiTensor]) -> list[NkiTensor]:
        """[M, size] of all ranks, one below the other."""
        rows: list[NkiTensor] = []
        for hbm in parts:
            M, size = hbm.shape
            rows.append(nl.ndarray((self.count * M, size), dtype=hbm.dtype, buffer=hbm.buffer))
        ncc.all_gather(parts, rows, ncc.ReplicaGroup([self.numbers]), 0)
        return rows

    def side_by_side(self, rows_hbm: NkiTensor) -> NkiTensor:
        """[M, H] of what ranks have [M, H / count] of, one below the other."""
        M, size = rows_hbm.shape[0] // self.count, rows_hbm.shape[1]
        if M == 1:
            return rows_hbm.reshape((1, self.count * size))
        whole_hbm = nl.ndarray((M, self.count * size), dtype=rows_hbm.dtype, buffer=nl.private_hbm)
        columns = whole_hbm.reshape_dim(1, (self.count, size))
        nisa.dma_copy(columns, rows_hbm.reshape_dim(0, (self.count, M)).permute((1, 0, 2)))
        return whole_hbm


def meet(hbm: NkiTensor) -> None:
    """Wait until both cores have written their parts."""
    if nl.num_programs(0) > 1:
        nisa.core_barrier(hbm, (0, 1))
