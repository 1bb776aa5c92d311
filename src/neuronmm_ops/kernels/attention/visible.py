"""Which keys a query sees: those before its token, and in its window."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.units import CacheBlock, Shape, reached
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.facts import facts, transposed_dtype
from neuronmm_ops.kernels.stages.tiling import PARTITIONS

LOWEST = -3.0e38
"""Below every score."""


class Lanes(nl.NKIObject):
    """What the partitions of scores stand for, fp32 [128, 1] each.

    Lane key * group * new + m * group + head of each group of partitions is a query of new token m.

    Args:
        shape: sizes of attention.
        lanes: partitions of a group.
    """

    def __init__(self, shape: Shape, lanes: int) -> None:
        self.shape = shape
        self.groups = PARTITIONS // lanes
        self.group_sb = nl.ndarray((PARTITIONS, 1), dtype=nl.float32)
        self.token_sb = nl.ndarray((PARTITIONS, 1), dtype=nl.float32)
        for c in range(self.groups):
            nisa.memset(self.group_sb[nl.ds(c * lanes, lanes), :], float(c))
        if shape.new == 1:
            nisa.memset(self.token_sb, 0.0)
            return
        each = shape.group * shape.new
        keys = lanes // each
        dtype = nl.float32
        row_sb = nl.ndarray((1, self.groups, lanes), dtype=dtype)
        nisa.memset(row_sb, 0.0)
        queries_sb = row_sb[:, :, 0 : keys * each].reshape_dim(2, (keys, shape.new, shape.group))
        for m in range(1, shape.new):
            nisa.memset(queries_sb[:, :, :, m, :], float(m))
        column_psum = nl.ndarray((PARTITIONS, 1), dtype=transposed_dtype(dtype), buffer=nl.psum)
        nisa.nc_transpose(column_psum, row_sb.reshape((1, PARTITIONS)))
        nisa.tensor_copy(self.token_sb, column_psum)


class Positions(nl.NKIObject):
    """Where the new tokens of all sequences begin.

    Args:
        positions_hbm: int32 [batch].
    """

    def __init__(self, positions_hbm: NkiTensor) -> None:
        shape = (PARTITIONS, positions_hbm.shape[0])
        # int32, and fp32 on every partition
        self.places_sb = nl.ndarray(shape, dtype=nl.int32)
        own_hbm = positions_hbm.expand_dim(0).broadcast(0, PARTITIONS)
        nisa.dma_copy(self.places_sb, own_hbm, dge_mode=nisa.dge_mode.none)
        self.tokens_sb = nl.ndarray(shape, dtype=nl.float32)
        nisa.tensor_copy(self.tokens_sb, self.places_sb)


class Reach(nl.NKIObject):
    """The tokens of a cache that may be seen: all, or as many as a window has, up to the position.

    Args:
        positions: of all sequences.
        tokens: that the cache has room for.
        window: tokens that a query sees, its own included; 0 where it sees all.
    """

    def __init__(self, positions: Positions, tokens: int, window: int) -> None:
        self.tokens = min(tokens, reached(tokens, window))
        # of each sequence where they begin, and its position after that; none where they are all
        self.starts_sb: list[NkiTensor] = []
        self.firsts_sb = positions.tokens_sb
        if self.tokens == tokens:
            return
        shape = positions.tokens_sb.shape
        start_sb = nl.ndarray(shape, dtype=nl.float32)
        nisa.tensor_scalar(
            start_sb, positions.tokens_sb, nl.add, 1.0 - window, op1=nl.maximum, operand1=0.0
        )
        nisa.tensor_scalar(start_sb, start_sb, nl.minimum, float(tokens - self.tokens))
        place_sb = nl.ndarray(shape, dtype=nl.int32)
        nisa.tensor_copy(place_sb, start_sb)
        self.starts_sb.append(place_sb)
        self.firsts_sb = nl.ndarray(shape, dtype=nl.float32)
        nisa.tensor_tensor(self.firsts_sb, positions.tokens_sb, start_sb, nl.subtract)


class Visible(nl.NKIObject):
    """Bounds of the tokens that the queries of a sequence see.

    Args:
        lanes: of all sequences.
        positions: of all sequences.
        reach: of all sequences.
        sequence: which of them.
        window: tokens that a query sees, its own included; 0 where it sees all.
    """

    def __init__(
        self, lanes: Lanes, positions: Positions, reach: Reach, sequence: int, window: int
    ) -> None:
        self.lanes = lanes
        self.sequence = sequence
        self.window = window
        # of each block
        self.bounds: list[Seen] = []
        self.place_sb = positions.places_sb[0:1, nl.ds(sequence, 1)]
        self.first_sb = reach.firsts_sb[:, nl.ds(sequence, 1)]

    def seen(self, number: int, block: CacheBlock) -> Seen:
        """The scores of a block that are seen; blocks are numbered as they are first asked for."""
        if number == len(self.bounds):
            self.bounds.append(Seen(self.begin(block), self.end(block)))
        return self.bounds[number]

    def end(self, block: CacheBlock) -> NkiTensor:
        """The first score of a block that is hidden, as a real number: [128, 1]."""
        end_sb = nl.ndarray((PARTITIONS, 1), dtype=nl.float32)
        if block.new:
            nisa.tensor_scalar(end_sb, self.lanes.token_sb, nl.add, 1.0)
            return end_sb
        return self.score(block, self.first_sb)

    def begin(self, block: CacheBlock) -> NkiTensor:
        """The first score of a block that is seen, as a real number: [128, 1]."""
        begin_sb = nl.ndarray((PARTITIONS, 1), dtype=nl.float32)
        if self.window == 0:
            nisa.memset(begin_sb, 0.0)
            return begin_sb
        oldest = 1.0 - self.window
        if block.new:
            nisa.tensor_scalar(begin_sb, self.lanes.token_sb, nl.add, oldest)
            return begin_sb
        nisa.scalar_tensor_tensor(
            begin_sb, self.lanes.token_sb, nl.add, oldest, nl.add, self.first_sb
        )
        return self.score(block, begin_sb)

    def score(self, block: CacheBlock, token_sb: NkiTensor) -> NkiTensor:
        """The score of a block's token in its group: whole where the group has the token."""
        score_sb = nl.ndarray((PARTITIONS, 1), dtype=nl.float32)
        if block.groups == 1:
            nisa.tensor_scalar(score_sb, token_sb, nl.subtract, float(block.start))
            return score_sb
        nisa.scalar_tensor_tensor(
            score_sb, token_sb, nl.subtract, float(block.start), nl.subtract, self.lanes.group_sb
        )
        nisa.tensor_scalar(score_sb, score_sb, nl.multiply, 1.0 / block.groups)
        return score_sb


class Seen(nl.NKIObject):
    """The scores that are seen, of each partition from one number to another; others are lowest.

    Args:
        begin_sb: [128, 1], fp32, the first number.
        end_sb: [128, 1], the one after the last.
    """

    def __init__(self, begin_sb: NkiTensor, end_sb: NkiTensor) -> None:
        self.begin_sb = begin_sb
        self.end_sb = end_sb

    def copy(self, dst_sb: NkiTensor, scores: NkiTensor, first: int, most_sb: NkiTensor) -> None:
        """Copy scores [partitions, ...], the first of which has number `first`.

        Args:
            dst_sb: in fp32.
            scores: fp32, in PSUM.
            first: number of the first score of each partition.
            most_sb: [partitions, 1], receives the maximum.
        """
        P = scores.shape[0]
        begin_sb, end_sb = self.begin_sb[0:P, :], self.end_sb[0:P, :]
        if facts().range_select:
            nisa.range_select(
                dst_sb,
                scores,
                nl.greater_equal,
                nl.less,
                begin_sb,
                end_sb,
                reduce_res=most_sb,
                range_start=first,
            )
            return
        number_sb = nl.ndarray(scores.shape, dtype=nl.float32)
        pattern = [[scores.shape[2], scores.shape[1]], [1, scores.shape[2]]]
        nisa.iota(number_sb, pattern, offset=first)
        hidden_sb = nl.ndarray(scores.shape, dtype=nl.float32)
        nisa.tensor_scalar(hidden_sb, number_sb, nl.greater_equal, end_sb)
        nisa.scalar_tensor_tensor(hidden_sb, number_sb, nl.less, begin_sb, nl.maximum, hidden_sb)
        nisa.scalar_tensor_tensor(dst_sb, hidden_sb, nl.multiply, LOWEST, nl.add, scores)
        nisa.tensor_reduce(most_sb, nl.maximum, dst_sb, axis=[1, 2])
