"""Attention of some tokens of a cache, and how such parts become one: flash decoding."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.heads import NewTokens
from neuronmm_ops.kernels.attention.mixture import Mixture, Rescaling
from neuronmm_ops.kernels.attention.outputs import HeadsKept, HeadsToHbm
from neuronmm_ops.kernels.attention.scores import Scores
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl


class UnitOutput(nl.NKIObject):
    """The output of a unit, from one part of its tokens or several.

    A part is [queries, head_dim + 2] in fp32: sums of values, the sum of probabilities, and the
    maximum that these are relative to, negated.

    Args:
        new: tokens of the unit.
        out: where it goes.
        values: of the cache, [n, T, head_dim].
        parts: of the tokens that this core has.
        is_shared: whether the other core has as many tokens as this one.
    """

    def __init__(
        self,
        new: NewTokens,
        out: HeadsToHbm | HeadsKept,
        values: NkiTensor,
        parts: int,
        is_shared: bool,
    ) -> None:
        self.new = new
        self.values = values
        self.out = out
        self.parts = parts
        self.is_shared = is_shared
        self.parts_sb: list[NkiTensor] = []

    def add(self, scores: Scores, sums: Rescaling) -> None:
        """Add a part, of which the scores are known; with the last one the output is made."""
        mixture = Mixture(self.new, self.values, scores)
        mixture.run(sums)
        d, queries = self.new.head_dim, self.new.queries
        if self.parts == 1 and not self.is_shared:
            self.put(mixture.join(sums), mixture.inverse_sb)
            return
        part_sb = nl.ndarray((queries, d + 2), dtype=nl.float32)
        nisa.tensor_copy(part_sb[:, 0:d], mixture.join(sums))
        nisa.tensor_copy(part_sb[:, d : d + 1], mixture.sum_psum)
        nisa.tensor_copy(part_sb[:, d + 1 : d + 2], mixture.least_sb[0:queries, :])
        self.parts_sb.append(part_sb)
        if len(self.parts_sb) < self.parts:
            return
        whole_sb = joined(self.parts_sb)
        if self.is_shared:
            other, received_sb = 1 - nl.program_id(0), nl.ndarray(whole_sb.shape, dtype=nl.float32)
            nisa.sendrecv(whole_sb, received_sb, other, other, 0)
            whole_sb = joined([whole_sb, received_sb])
            if other == 0:
                return
        inverse_sb = nl.ndarray((queries, 1), dtype=nl.float32)
        nisa.reciprocal(inverse_sb, whole_sb[:, d : d + 1])
        self.put(whole_sb[:, 0:d], inverse_sb)

    def put(self, sums: NkiTensor, inverse_sb: NkiTensor) -> None:
        """Put out sums [queries, head_dim] times what is 1 / the sum of probabilities."""
        out_sb = nl.ndarray(sums.shape, dtype=self.out.dtype)
        nisa.tensor_scalar(out_sb, sums, nl.multiply, inverse_sb)
        self.out.put(self.new, out_sb)


def joined(parts: list[NkiTensor]) -> NkiTensor:
    """Parts [queries, head_dim + 2] as one, relative to the greatest of their maxima."""
    if len(parts) == 1:
        return parts[0]
    queries, width = parts[0].shape
    last = nl.ds(width - 1, 1)
    whole_sb = nl.ndarray((queries, width), dtype=nl.float32)
    least_sb = whole_sb[:, last]
    for n in range(1, len(parts)):
        before_sb = parts[0][:, last] if n == 1 else least_sb
        nisa.tensor_tensor(least_sb, before_sb, parts[n][:, last], nl.minimum)
    sums_sb = whole_sb[:, 0 : width - 1]
    for n in range(len(parts)):
        factor_sb = nl.ndarray((queries, 1), dtype=nl.float32)
        nisa.activation(factor_sb, nl.exp, parts[n][:, last], scale=-1.0, bias=least_sb)
        own_sb = parts[n][:, 0 : width - 1]
        if n == 0:
            nisa.tensor_scalar(sums_sb, own_sb, nl.multiply, factor_sb)
        else:
            nisa.scalar_tensor_tensor(sums_sb, own_sb, nl.multiply, factor_sb, nl.add, sums_sb)
    return whole_sb


def meet(hbm: NkiTensor) -> None:
    """Wait until both cores have come here."""
    if nl.num_programs(0) > 1:
        nisa.core_barrier(hbm, (0, 1))
