"""The new token's heads in decode: RMSNorm, RoPE, and their places on the partitions."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.units import Shape, Unit
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.chunks import evict, generation
from neuronmm_ops.kernels.stages.tiling import tiles_in


class HeadNorm(nl.NKIObject):
    """An RMSNorm of key and query heads.

    Args:
        q_weight: [head_dim] in HBM.
        k_weight: [head_dim].
        eps: added to the mean square.
    """

    def __init__(self, q_weight: NkiTensor, k_weight: NkiTensor, eps: float) -> None:
        self.q_weight = q_weight
        self.k_weight = k_weight
        self.eps = eps
        self.weights_sb: list[NkiTensor] = []

    def weights(self, keys: int, rows: int) -> NkiTensor:
        """Weights of `keys` key and then query heads, times sqrt(head_dim), in SBUF."""
        if len(self.weights_sb) > 0 and self.weights_sb[0].shape[0] == rows:
            return self.weights_sb[0]
        d = self.q_weight.shape[0]
        weight_sb = nl.ndarray((rows, d), dtype=self.q_weight.dtype)
        scaled_sb = nl.ndarray((rows, d), dtype=nl.float32)
        k_hbm, q_hbm = self.k_weight.expand_dim(0), self.q_weight.expand_dim(0)
        none = nisa.dge_mode.none
        nisa.dma_copy(weight_sb[0:keys, :], k_hbm.broadcast(0, keys), dge_mode=none)
        nisa.dma_copy(weight_sb[keys:rows, :], q_hbm.broadcast(0, rows - keys), dge_mode=none)
        nisa.tensor_scalar(scaled_sb, weight_sb, nl.multiply, d**0.5)
        self.weights_sb = [scaled_sb]
        return scaled_sb

    def run(self, rows_sb: NkiTensor, keys: int) -> NkiTensor:
        """Each row over its root mean square, times the weight of its kind, fp32."""
        rows, d = rows_sb.shape
        weights_sb = self.weights(keys, rows)
        squares_sb = nl.ndarray((rows, d), dtype=nl.float32)
        sum_sb = nl.ndarray((rows, 1), dtype=nl.float32)
        root_sb = nl.ndarray((rows, 1), dtype=nl.float32)
        normed_sb = nl.ndarray((rows, d), dtype=nl.float32)
        nisa.tensor_tensor(squares_sb, rows_sb, rows_sb, nl.multiply)
        nisa.tensor_reduce(sum_sb, nl.add, squares_sb, axis=1)
        nisa.tensor_scalar(root_sb, sum_sb, nl.add, d * self.eps, op1=nl.power, operand1=-0.5)
        nisa.scalar_tensor_tensor(normed_sb, rows_sb, nl.multiply, root_sb, nl.multiply, weights_sb)
        return normed_sb


class Rotation(nl.NKIObject):
    """RoPE of one position, after an RMSNorm, if any.

    Args:
        cos: [1, head_dim] in HBM.
        sin: [1, head_dim].
        norms: one or none.
    """

    def __init__(self, cos: NkiTensor, sin: NkiTensor, norms: list[HeadNorm]) -> None:
        self.cos = cos
        self.sin = sin
        self.norms = norms
        # cos and sin on as many partitions as the first unit, the largest, has rows
        self.tables_sb: list[NkiTensor] = []

    def load(self, rows: int) -> None:
        """Load the tables once."""
        if len(self.tables_sb) > 0:
            return
        for table_hbm in [self.cos, self.sin]:
            table_sb = nl.ndarray((rows, table_hbm.shape[1]), dtype=table_hbm.dtype)
            nisa.dma_copy(table_sb, table_hbm.broadcast(0, rows), dge_mode=nisa.dge_mode.none)
            self.tables_sb.append(table_sb)

    def run(self, rows_sb: NkiTensor, keys: int) -> NkiTensor:
        """Rows [rows, head_dim] of `keys` key and then query heads, normalised and rotated."""
        rows, d = rows_sb.shape
        half = d // 2
        x_sb = rows_sb
        for norm in self.norms:
            x_sb = norm.run(rows_sb, keys)
        cos_sb, sin_sb = self.tables_sb[0][0:rows, :], self.tables_sb[1][0:rows, :]
        kept_sb = nl.ndarray((rows, d), dtype=nl.float32)
        turned_sb = nl.ndarray((rows, d), dtype=nl.float32)
        rotated_sb = nl.ndarray((rows, d), dtype=rows_sb.dtype)
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


class NewToken(nl.NKIObject):
    """The new token's heads of a unit: queries on the diagonal, and the key.

    Key heads lie one below the other in tiles of `stacked` heads. A query has zeros beside the
    features of its key, so that one matmul has the scores of all queries with a tile of keys.

    Args:
        qkv: [batch, (heads + 2 kv_heads) head_dim] in HBM.
        shape: all sizes.
        unit: which heads.
        rotation: of queries and keys.
    """

    def __init__(self, qkv: NkiTensor, shape: Shape, unit: Unit, rotation: Rotation) -> None:
        n, g, d = unit.keys.size, shape.group, shape.head_dim
        self.keys = n
        self.group = g
        self.head_dim = d
        self.stacked = min(n, shape.stacked)
        self.queries = n * g
        self.rows = self.stacked * d
        self.tiles = tiles_in(n, self.stacked)
        first = unit.keys.start
        row_hbm = qkv[unit.sequence, :].reshape((shape.heads + 2 * shape.kv_heads, d))
        self.value_hbm = row_hbm[nl.ds(shape.heads + shape.kv_heads + first, n), :]
        queries_hbm = row_hbm[nl.ds(first * g, n * g), :]
        keys_hbm = row_hbm[nl.ds(shape.heads + first, n), :]
        rows_sb = nl.ndarray((n + n * g, d), dtype=qkv.dtype)
        nisa.dma_copy(rows_sb[n : n + n * g, :], queries_hbm, dge_mode=nisa.dge_mode.none)
        nisa.dma_copy(rows_sb[0:n, :], keys_hbm, dge_mode=nisa.dge_mode.none)
        rotation.load(n + n * g)
        self.width = self.queries + self.stacked * g
        self.queries_sb = nl.ndarray((self.rows, self.tiles * self.width), dtype=qkv.dtype)
        self.keys_sb = nl.ndarray((self.rows, self.tiles), dtype=qkv.dtype)
        nisa.memset(self.queries_sb, 0.0, engine=nisa.gpsimd_engine)
        self.rotated_sb = rotation.run(rows_sb, n)
        self.place()

    def place(self) -> None:
        """Transpose the rows and copy each to its place."""
        n, g, d = self.keys, self.group, self.head_dim
        in_psum = nl.float32 if generation() == 2 else self.rotated_sb.dtype
        width = self.stacked * g
        columns_psum = nl.ndarray((d, n + self.tiles * width), dtype=in_psum, buffer=nl.psum)
        nisa.nc_transpose(columns_psum[:, 0 : n + n * g], self.rotated_sb)
        queries_psum = columns_psum[:, nl.ds(n, self.tiles * width)]
        queries_psum = queries_psum.reshape_dim(1, (self.tiles, width))
        diagonal_sb = self.queries_sb.reshape((self.rows, self.tiles, self.width))
        for a in range(self.stacked):
            tiles, rows = tiles_in(n - a, self.stacked), nl.ds(a * d, d)
            own = nl.ds(a * g, g)
            evict(diagonal_sb[rows, 0:tiles, own], queries_psum[:, 0:tiles, own], a)
        for a in range(self.stacked):
            tiles, rows = tiles_in(n - a, self.stacked), nl.ds(a * d, d)
            evict(self.keys_sb[rows, 0:tiles], columns_psum[:, a : n : self.stacked], a + 1)

    def rows_of(self, tile: int) -> int:
        """Rows of a tile of keys."""
        return min(self.stacked, self.keys - tile * self.stacked) * self.head_dim

    def query(self, tile: int) -> NkiTensor:
        """[rows of a tile of keys, queries]."""
        start = tile * self.queries
        return self.queries_sb[0 : self.rows_of(tile), nl.ds(start, self.queries)]

    def key(self, tile: int) -> NkiTensor:
        """[rows of a tile, 1], the new key."""
        return self.keys_sb[0 : self.rows_of(tile), nl.ds(tile, 1)]

    def store(self, key_hbm: NkiTensor, value_hbm: NkiTensor) -> None:
        """Write the new token to its place in the caches."""
        n, d = self.keys, self.head_dim
        keys_hbm = key_hbm.reshape_dim(0, (n, d)).select(2, 0)
        nisa.dma_copy(keys_hbm, self.rotated_sb[0:n, :], dge_mode=nisa.dge_mode.none)
        nisa.dma_copy(value_hbm.select(1, 0), self.value_hbm, dge_mode=nisa.dge_mode.none)
