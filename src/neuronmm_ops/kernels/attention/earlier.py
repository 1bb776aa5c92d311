"""What a chunk of a prompt sees of the cache that holds the tokens before it."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.keys import Keys
from neuronmm_ops.kernels.attention.visible import LOWEST, Positions, Seen
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, Span, tiles_in

LAST = 1.0e9
"""Beyond the number of any token."""


class Bounds(nl.NKIObject):
    """Which keys the tokens of a sequence's chunk see: those before it, and in the window.

    Args:
        positions: where the chunks of all sequences begin.
        sequence: which of them.
        tokens: that the cache has room for.
        window: tokens that a query sees, its own included; 0 where it sees all.
    """

    def __init__(self, positions: Positions, sequence: int, tokens: int, window: int) -> None:
        tiles = tiles_in(tokens, PARTITIONS)
        self.window = window
        self.start_sb = positions.tokens_sb[:, nl.ds(sequence, 1)]
        self.row_sb = nl.ndarray((PARTITIONS, 1), dtype=nl.float32)
        self.none_sb = nl.ndarray((PARTITIONS, 1), dtype=nl.float32)
        self.last_sb = nl.ndarray((PARTITIONS, 1), dtype=nl.float32)
        nisa.iota(self.row_sb, [[1, 1]], channel_multiplier=1)
        nisa.memset(self.none_sb, 0.0)
        nisa.memset(self.last_sb, LAST)
        token_sb = nl.ndarray((PARTITIONS, tiles), dtype=nl.float32)
        nisa.iota(token_sb, [[PARTITIONS, tiles]], channel_multiplier=1)
        # of each token of the cache what its scores lose, or, in a window, the first of the chunk
        # that does not see it
        self.limits_sb = nl.ndarray((PARTITIONS, tiles), dtype=nl.float32)
        if window == 0:
            nisa.tensor_scalar(
                self.limits_sb,
                token_sb,
                nl.greater_equal,
                self.start_sb,
                op1=nl.multiply,
                operand1=LOWEST,
            )
            return
        before_sb = nl.ndarray((PARTITIONS, tiles), dtype=nl.float32)
        nisa.tensor_scalar(before_sb, token_sb, nl.less, self.start_sb)
        nisa.tensor_scalar(
            token_sb, token_sb, nl.subtract, self.start_sb, op1=nl.add, operand1=float(window)
        )
        nisa.tensor_tensor(self.limits_sb, token_sb, before_sb, nl.multiply)

    def shifted(self, by: int) -> NkiTensor:
        """The number of each partition plus `by`, [128, 1]."""
        shifted_sb = nl.ndarray((PARTITIONS, 1), dtype=nl.float32)
        nisa.tensor_scalar(shifted_sb, self.row_sb, nl.add, float(by))
        return shifted_sb


class Earlier(nl.NKIObject):
    """The tokens before a chunk, of one key head.

    Args:
        keys: of all of the cache.
        bounds: of the sequence.
    """

    def __init__(self, keys: Keys, bounds: Bounds) -> None:
        self.keys = keys
        self.bounds = bounds

    def first_key(self, token: int) -> int:
        """The first key of the chunk that a token of it sees."""
        window = self.bounds.window
        return 0 if window == 0 else max(0, token - window + 1)

    def of_queries(self, queries: Span, keys: Span, is_earlier: bool) -> list[Seen]:
        """What a tile of queries, on the partitions, sees of some keys; none where it is all."""
        bounds = self.bounds
        window = bounds.window
        if not is_earlier and self.first_key(queries.start + queries.size - 1) <= keys.start:
            return []
        begin_sb = bounds.none_sb
        if window > 0:
            begin_sb = bounds.shifted(queries.start - window + 1)
            if is_earlier:
                nisa.tensor_tensor(begin_sb, begin_sb, bounds.start_sb, nl.add)
        return [Seen(begin_sb, bounds.start_sb if is_earlier else bounds.last_sb)]

    def exp(
        self,
        dst_sb: NkiTensor,
        scores: NkiTensor,
        scale: float,
        tile: int,
        tokens: Span,
        is_earlier: bool,
    ) -> None:
        """dst = exp(scores * scale) [keys of a tile, tokens], 0 of keys that are not seen."""
        n, bounds = scores.shape[0], self.bounds
        if bounds.window == 0 and is_earlier:
            lost_sb = bounds.limits_sb[0:n, nl.ds(tile, 1)]
            nisa.activation(dst_sb, nl.exp, scores, scale=scale, bias=lost_sb)
            return
        is_seen = self.first_key(tokens.start + tokens.size - 1) <= tile * PARTITIONS
        if is_seen and not is_earlier:
            nisa.activation(dst_sb, nl.exp, scores, scale=scale)
            return
        end_sb = bounds.limits_sb[:, nl.ds(tile, 1)]
        if not is_earlier:
            end_sb = bounds.shifted(tile * PARTITIONS + bounds.window)
        seen_sb = nl.ndarray((n, 1, tokens.size), dtype=nl.float32)
        most_sb = nl.ndarray((n, 1), dtype=nl.float32)
        seen = Seen(bounds.none_sb, end_sb)
        seen.copy(seen_sb, scores.expand_dim(1), tokens.start, most_sb)
        nisa.activation(dst_sb, nl.exp, seen_sb.reshape((n, tokens.size)), scale=scale)
