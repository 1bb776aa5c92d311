"""The values of the cache mixed by probabilities, and the sum over groups of partitions."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.heads import NewTokens
from neuronmm_ops.kernels.attention.keys import mode_of
from neuronmm_ops.kernels.attention.scores import LOAD_BYTES, Scores, lay
from neuronmm_ops.kernels.attention.units import CacheBlock
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.chunks import evict, itemsize
from neuronmm_ops.kernels.stages.tiling import BANK_COLUMNS, Span, spans, tiles_in


class Rescaling(nl.NKIObject):
    """How groups of partitions join: with weights exp(their maximum - the greatest of all).

    Args:
        same_sb: [partitions, lanes], 1 where the partition is the lane's, of any group.
        dtype: of the weights.
        ahead: values come before they are needed.
    """

    def __init__(self, same_sb: NkiTensor, dtype: nl.DType, ahead: bool) -> None:
        self.same_sb = same_sb
        self.dtype = dtype
        self.ahead = ahead

    def least(self, scores: Scores) -> NkiTensor:
        """The least of the groups' negated maxima, [lanes, 1]."""
        lanes, groups = scores.new.lanes, scores.groups
        first_sb = scores.least_sb[0:lanes, :]
        if groups == 1:
            return first_sb
        least_sb = nl.ndarray((lanes, 1), dtype=nl.float32)
        for c in range(1, groups):
            before_sb = first_sb if c == 1 else least_sb
            own_sb = scores.least_sb[nl.ds(c * lanes, lanes), :]
            nisa.tensor_tensor(least_sb, before_sb, own_sb, nl.minimum)
        return least_sb

    def factors(self, scores: Scores, least_sb: NkiTensor) -> NkiTensor:
        """exp(maximum - greatest maximum of the groups) of each partition, [partitions, 1]."""
        spread_sb = nl.ndarray((scores.partitions, 1), dtype=nl.float32)
        for c in range(scores.groups):
            nisa.tensor_copy(spread_sb[nl.ds(c * scores.new.lanes, scores.new.lanes), :], least_sb)
        factors_sb = nl.ndarray((scores.partitions, 1), dtype=nl.float32)
        nisa.activation(factors_sb, nl.exp, scores.least_sb, scale=-1.0, bias=spread_sb)
        return factors_sb


class ValueLoad(nl.NKIObject):
    """A load of values.

    Args:
        number: of the block.
        heads: of the unit.
    """

    def __init__(self, number: int, heads: Span) -> None:
        self.number = number
        self.heads = heads


class Mixture(nl.NKIObject):
    """Sums of values times probabilities in PSUM: [partitions, heads, head_dim], a bank each.

    `run` and then `join` make the sums of all groups, before they are divided. Of a partition only
    the columns of its head's own key are of use.

    Args:
        new: of the unit.
        values: [n, T, head_dim] in HBM.
        scores: of the unit.
    """

    def __init__(self, new: NewTokens, values: NkiTensor, scores: Scores) -> None:
        self.new = new
        self.values = values
        self.scores = scores
        self.each = max(1, BANK_COLUMNS // new.head_dim)
        self.banks_psum: list[NkiTensor] = []
        for s in spans(0, new.keys, self.each):
            shape = (scores.partitions, s.size, new.head_dim)
            self.banks_psum.append(nl.ndarray(shape, nl.float32, buffer=nl.psum))
        # of each head in each group
        self.started: list[list[bool]] = []
        for _ in range(new.keys):
            self.started.append([False] * scores.groups)

    def parts(self, number: int) -> list[ValueLoad]:
        """The loads of a block's values."""
        block = self.scores.blocks[number]
        most = max(1, BANK_COLUMNS // self.new.head_dim)
        each = LOAD_BYTES // (block.size * self.new.head_dim * itemsize(self.values.dtype))
        each = most // tiles_in(most, max(1, min(each, most)))  # of one bank
        loads: list[ValueLoad] = []
        for heads in spans(0, self.new.keys, most if block.new else each):
            loads.append(ValueLoad(number, heads))
        return loads

    def run(self, sums: Rescaling) -> None:
        """Add all blocks, and make what `join` needs, and `inverse_sb`.

        A block's probabilities are transposed while the values of the one before it are added.
        """
        blocks = len(self.scores.blocks)
        weights_sb: list[NkiTensor] = [self.scores.weights(0)]
        parts: list[ValueLoad] = []
        first = 0  # part of the last block
        for number in range(blocks):
            first = len(parts)
            parts.extend(self.parts(number))
        for i in range(len(parts)):
            part = parts[i]
            if part.number + 1 == len(weights_sb):
                if part.number + 1 < blocks:
                    weights_sb.append(self.scores.weights(part.number + 1))
                else:
                    self.prepare(sums)
                    weights_sb.append(weights_sb[part.number])
            block = self.scores.blocks[part.number]
            self.add(block, part.heads, weights_sb[part.number])
            if i == max(first, len(parts) - 2) and not sums.ahead:  # while the last values come
                self.add_up()
        if sums.ahead:  # TensorE would wait for what `prepare` makes
            self.add_up()

    def add(self, block: CacheBlock, heads: Span, weights_sb: NkiTensor) -> None:
        """Add the tokens of a block to the sums of some heads."""
        values_sb = self.load(block, heads)
        lanes = self.new.lanes
        bank_psum = self.banks_psum[heads.start // self.each]
        columns = nl.ds(heads.start % self.each, heads.size)
        for tile in range(block.tiles):
            c = tile % block.groups
            own = nl.ds(c * lanes, lanes)
            chosen_sb = weights_sb[:, tile // block.groups, own]
            started = self.started[heads.start][c]
            lay(bank_psum[own, columns, :], chosen_sb, values_sb[:, :, tile, :], c, lanes, started)
            for h in range(heads.size):
                self.started[heads.start + h][c] = True

    def load(self, block: CacheBlock, heads: Span) -> NkiTensor:
        """Values [rows, heads, tiles, head_dim] in SBUF; the new ones are not in the cache."""
        shape = (block.rows, heads.size, block.tiles, self.new.head_dim)
        values_sb = nl.ndarray(shape, dtype=self.values.dtype)
        own = nl.ds(heads.start, heads.size)
        if block.new:
            own_hbm = self.new.values_hbm[:, own, :].expand_dim(2)
        else:
            own_hbm = self.values[own, nl.ds(block.start, block.size), :]
            own_hbm = own_hbm.reshape_dim(1, (block.rows, block.tiles)).permute((1, 0, 2, 3))
        nisa.dma_copy(values_sb, own_hbm, dge_mode=mode_of(own_hbm))
        return values_sb

    def prepare(self, sums: Rescaling) -> None:
        """Choose each head's own columns: [partitions, keys x lanes] in `own_sb`."""
        new, scores = self.new, self.scores
        P, n, g, lanes = scores.partitions, new.keys, new.each, new.lanes
        same_sb = sums.same_sb[0:P, :]
        self.own_sb = nl.ndarray((P, n * (lanes + g)), dtype=sums.dtype)
        nisa.memset(self.own_sb, 0.0, engine=nisa.gpsimd_engine)
        diagonal = self.own_sb.reshape((P, n, lanes + g))[:, :, 0:g]
        self.lanes_sb = nl.ndarray((P, lanes), dtype=nl.float32)
        self.least_sb = sums.least(scores)
        if scores.groups > 1:
            factors_sb = sums.factors(scores, self.least_sb)
            nisa.tensor_scalar(self.lanes_sb, same_sb, nl.multiply, factors_sb)
        else:
            nisa.tensor_copy(self.lanes_sb, same_sb)
        nisa.tensor_copy(diagonal, self.lanes_sb[:, 0 : n * g].reshape_dim(1, (n, g)))
        self.total_sb = nl.ndarray((P, 1), dtype=nl.float32)
        nisa.tensor_reduce(self.total_sb, nl.add, scores.sums_sb, axis=1)

    def add_up(self) -> None:
        """The sums of probabilities of all groups, [queries, 1], in PSUM and `inverse_sb` of it."""
        queries = self.new.queries
        self.sum_psum = nl.ndarray((queries, 1), nl.float32, buffer=nl.psum)
        own_sb = self.lanes_sb[:, 0:queries]
        nisa.nc_matmul(self.sum_psum, own_sb, self.total_sb, accumulate=False)
        self.inverse_sb = nl.ndarray((queries, 1), dtype=nl.float32)
        nisa.reciprocal(self.inverse_sb, self.sum_psum)

    def join(self, sums: Rescaling) -> NkiTensor:
        """The sums of all groups [queries, head_dim], in PSUM."""
        new, P = self.new, self.scores.partitions
        out_psum = nl.ndarray((new.queries, new.head_dim), nl.float32, buffer=nl.psum)
        for n in range(len(self.banks_psum)):
            size = self.banks_psum[n].shape[1]
            mixed_sb = nl.ndarray(self.banks_psum[n].shape, dtype=sums.dtype)
            halves = spans(0, size, (size + 1) // 2)
            for h in range(len(halves)):
                own = nl.ds(halves[h].start, halves[h].size)
                evict(mixed_sb[:, own, :], self.banks_psum[n][:, own, :], h)
            for i in range(size):
                number = n * self.each + i
                own_queries = self.own_sb[0:P, nl.ds(number * new.lanes, new.queries)]
                nisa.nc_matmul(out_psum, own_queries, mixed_sb[:, i, :], accumulate=number > 0)
        return out_psum
