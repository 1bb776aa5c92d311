"""The new tokens' heads in decode: RMSNorm, RoPE, and their places on the partitions."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.units import Shape, Unit
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.chunks import evict
from neuronmm_ops.kernels.stages.decode_tiling import column_groups
from neuronmm_ops.kernels.stages.facts import facts, transposed_dtype
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, Span, spans, tiles_in


class HeadNorm(nl.NKIObject):
    """An RMSNorm of query and key heads.

    Args:
        q_weight: [head_dim] in HBM.
        k_weight: [head_dim].
        heads: query heads.
        eps: added to the mean square.
    """

    def __init__(self, q_weight: NkiTensor, k_weight: NkiTensor, heads: int, eps: float) -> None:
        self.q_weight = q_weight
        self.k_weight = k_weight
        self.heads = heads
        self.eps = eps
        # of each tile of rows, fp32
        self.weights_sb: list[NkiTensor] = []

    def weights(self, number: int, rows: Span) -> NkiTensor:
        """Weights of a tile of rows, query heads first, times sqrt(head_dim), in SBUF."""
        if number < len(self.weights_sb):
            return self.weights_sb[number]
        d, none = self.q_weight.shape[0], nisa.dge_mode.none
        weight_sb = nl.ndarray((rows.size, d), dtype=self.q_weight.dtype)
        queries = max(0, min(rows.size, self.heads - rows.start))
        if queries > 0:
            own_hbm = self.q_weight.expand_dim(0).broadcast(0, queries)
            nisa.dma_copy(weight_sb[0:queries, :], own_hbm, dge_mode=none)
        if queries < rows.size:
            own_hbm = self.k_weight.expand_dim(0).broadcast(0, rows.size - queries)
            nisa.dma_copy(weight_sb[queries : rows.size, :], own_hbm, dge_mode=none)
        scaled_sb = nl.ndarray((rows.size, d), dtype=nl.float32)
        nisa.tensor_scalar(scaled_sb, weight_sb, nl.multiply, d**0.5)
        self.weights_sb.append(scaled_sb)
        return scaled_sb

    def run(self, number: int, rows: Span, x_sb: NkiTensor) -> NkiTensor:
        """Each row of a tile over its root mean square, times the weight of its kind, fp32."""
        size, d = x_sb.shape
        weights_sb = self.weights(number, rows)
        squares_sb = nl.ndarray((size, d), dtype=nl.float32)
        sum_sb = nl.ndarray((size, 1), dtype=nl.float32)
        root_sb = nl.ndarray((size, 1), dtype=nl.float32)
        normed_sb = nl.ndarray((size, d), dtype=nl.float32)
        nisa.tensor_tensor(squares_sb, x_sb, x_sb, nl.multiply)
        nisa.tensor_reduce(sum_sb, nl.add, squares_sb, axis=1)
        nisa.tensor_scalar(root_sb, sum_sb, nl.add, d * self.eps, op1=nl.power, operand1=-0.5)
        nisa.scalar_tensor_tensor(normed_sb, x_sb, nl.multiply, root_sb, nl.multiply, weights_sb)
        return normed_sb


class Rotation(nl.NKIObject):
    """RoPE, after an RMSNorm, if any.

    Args:
        cos: [tokens, head_dim] in HBM.
        sin: [tokens, head_dim].
        rows: on which the tables are wanted.
        norms: one or none.
    """

    def __init__(self, cos: NkiTensor, sin: NkiTensor, rows: int, norms: list[HeadNorm]) -> None:
        self.tables_hbm = [cos, sin]
        self.rows = rows
        self.norms = norms
        self.tables_sb: list[NkiTensor] = []

    def load(self, token: int) -> None:
        """Load the tables of a token."""
        tables_sb: list[NkiTensor] = []
        for table_hbm in self.tables_hbm:
            table_sb = nl.ndarray((self.rows, table_hbm.shape[1]), dtype=table_hbm.dtype)
            own_hbm = table_hbm[nl.ds(token, 1), :].broadcast(0, self.rows)
            nisa.dma_copy(table_sb, own_hbm, dge_mode=nisa.dge_mode.none)
            tables_sb.append(table_sb)
        self.tables_sb = tables_sb

    def run(self, number: int, rows: Span, rows_sb: NkiTensor) -> NkiTensor:
        """A tile of rows [rows, head_dim], query heads first, normalised and rotated."""
        size, d = rows_sb.shape
        half = d // 2
        x_sb = rows_sb
        for norm in self.norms:
            x_sb = norm.run(number, rows, rows_sb)
        cos_sb, sin_sb = self.tables_sb[0][0:size, :], self.tables_sb[1][0:size, :]
        kept_sb = nl.ndarray((size, d), dtype=nl.float32)
        turned_sb = nl.ndarray((size, d), dtype=nl.float32)
        rotated_sb = nl.ndarray((size, d), dtype=rows_sb.dtype)
        nisa.scalar_tensor_tensor(
            turned_sb[:, 0:half],
            x_sb[:, half:d],
            nl.multiply,
            -1.0,
            nl.multiply,
            sin_sb[:, 0:half],
        )
        nisa.tensor_tensor(turned_sb[:, half:d], x_sb[:, 0:half], sin_sb[:, half:d], nl.multiply)
        nisa.tensor_tensor(kept_sb, x_sb, cos_sb, nl.multiply)
        nisa.tensor_tensor(rotated_sb, kept_sb, turned_sb, nl.add)
        return rotated_sb


class NewHeads(nl.NKIObject):
    """The heads of a sequence's new tokens, transposed.

    Args:
        shape: all sizes.
        dtype: of the activations.
        values_hbm: [new, kv_heads, head_dim].
        columns: of each token [head_dim, query heads and keys].
    """

    def __init__(
        self, shape: Shape, dtype: nl.DType, values_hbm: NkiTensor, columns: list[NkiTensor]
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.values_hbm = values_hbm
        self.columns = columns


def values_of(hbm: NkiTensor, shape: Shape, sequence: int, before: int) -> NkiTensor:
    """[new, kv_heads, head_dim] of a sequence, of [batch * new, ...] with so many heads before."""
    rows_hbm = hbm[nl.ds(sequence * shape.new, shape.new), :]
    rows_hbm = rows_hbm.reshape((shape.new, before + shape.kv_heads, shape.head_dim))
    return rows_hbm[:, nl.ds(before, shape.kv_heads), :]


class RowHeads(nl.NKIObject):
    """The heads of all new tokens, as rows in HBM.

    Args:
        qkv: [batch * new, (heads + 2 kv_heads) head_dim].
        shape: all sizes.
        rotation: of queries and keys.
    """

    def __init__(self, qkv: NkiTensor, shape: Shape, rotation: Rotation) -> None:
        self.qkv = qkv
        self.dtype = qkv.dtype
        self.shape = shape
        self.rotation = rotation

    def of(self, sequence: int) -> NewHeads:
        """The heads of a sequence's new tokens."""
        shape, dtype = self.shape, self.qkv.dtype
        d, count = shape.head_dim, shape.heads + shape.kv_heads
        rows_hbm = self.qkv[nl.ds(sequence * shape.new, shape.new), :]
        rows_hbm = rows_hbm.reshape((shape.new, count + shape.kv_heads, d))
        columns: list[NkiTensor] = []
        for m in range(shape.new):
            columns_psum = nl.ndarray((d, count), dtype=transposed_dtype(dtype), buffer=nl.psum)
            tiles = spans(0, count, PARTITIONS)
            for n in range(len(tiles)):
                own = nl.ds(tiles[n].start, tiles[n].size)
                rows_sb = nl.ndarray((tiles[n].size, d), dtype=dtype)
                nisa.dma_copy(rows_sb, rows_hbm[m, own, :], dge_mode=nisa.dge_mode.none)
                if n == 0:
                    self.rotation.load(sequence * shape.new + m)
                nisa.nc_transpose(columns_psum[:, own], self.rotation.run(n, tiles[n], rows_sb))
            columns.append(columns_psum)
        return NewHeads(shape, dtype, values_of(self.qkv, shape, sequence, count), columns)


class NewTokens(nl.NKIObject):
    """The new tokens' heads of a unit: queries on the diagonal, and the keys.

    Key heads lie one below the other in tiles of `stacked` heads. A query has zeros next to the
    features of its key, so that one matmul has the scores of all queries with a tile of keys.

    Args:
        heads: of its sequence.
        unit: which of them.
    """

    def __init__(self, heads: NewHeads, unit: Unit) -> None:
        shape = heads.shape
        n, d = unit.keys.size, shape.head_dim
        self.unit = unit
        self.shape = shape
        self.keys = n
        self.head_dim = d
        self.each = shape.group * shape.new
        self.stacked = min(n, shape.stacked)
        self.queries = n * self.each
        self.rows = self.stacked * d
        self.tiles = tiles_in(n, self.stacked)
        self.groups = column_groups(self.queries, facts().pe_tile)
        self.lanes = PARTITIONS // self.groups
        self.values_hbm = heads.values_hbm[:, nl.ds(unit.keys.start, n), :]
        self.width = self.lanes + self.stacked * self.each
        self.queries_sb = nl.ndarray((self.rows, self.tiles * self.width), dtype=heads.dtype)
        self.keys_sb = nl.ndarray((self.rows, self.tiles, shape.new), dtype=heads.dtype)
        nisa.memset(self.queries_sb, 0.0, engine=nisa.gpsimd_engine)
        for m in range(shape.new):
            self.lay_out(m, heads.columns[m])

    def lay_out(self, m: int, columns: NkiTensor) -> None:
        """Copy the heads of a token [head_dim, query heads and keys] to their places."""
        n, g, d, step = self.keys, self.shape.group, self.head_dim, self.stacked
        diagonal_sb = self.queries_sb.reshape((self.rows, self.tiles, self.width))
        first, full = self.unit.keys.start, n // step  # tiles that have all of their heads
        last = self.shape.heads + first + n
        whole = columns[:, nl.ds(first * g, full * step * g)].reshape_dim(1, (full, step * g))
        for a in range(step):
            rows, own = nl.ds(a * d, d), nl.ds(a * self.each + m * g, g)
            evict(diagonal_sb[rows, 0:full, own], whole[:, :, nl.ds(a * g, g)], a)
            if a < n - full * step:
                rest = columns[:, nl.ds((first + full * step + a) * g, g)]
                evict(diagonal_sb[rows, full, own], rest, a)
        for a in range(step):
            keys = columns[:, self.shape.heads + first + a : last : step]
            evict(self.keys_sb[nl.ds(a * d, d), 0 : tiles_in(n - a, step), m], keys, a + 1)

    def rows_of(self, tile: int) -> int:
        """Rows of a tile of keys."""
        return min(self.stacked, self.keys - tile * self.stacked) * self.head_dim

    def query(self, tile: int) -> NkiTensor:
        """[rows of a tile of keys, lanes], zero beyond the queries."""
        start = tile * self.lanes
        return self.queries_sb[0 : self.rows_of(tile), nl.ds(start, self.lanes)]

    def key(self, tile: int) -> NkiTensor:
        """[rows of a tile, new], the new keys."""
        return self.keys_sb[0 : self.rows_of(tile), tile, :]
