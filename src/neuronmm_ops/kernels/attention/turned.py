"""The new tokens' heads in decode, from sums of stationary weights, which lie as scores take them.

A head's features are on the partitions, so that RoPE and norms of heads need no way through HBM,
and no transpose.
"""

from __future__ import annotations

from neuronmm_ops.kernels.attention.heads import HeadNorm, NewHeads, values_of
from neuronmm_ops.kernels.attention.parts import meet
from neuronmm_ops.kernels.attention.units import QUADRANT, Shape, halves, shares_tokens
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.decode_tiling import ColumnTile
from neuronmm_ops.kernels.stages.outputs import ToHbm
from neuronmm_ops.kernels.stages.stationary import TurnedSums, rounded_turned
from neuronmm_ops.kernels.stages.tiling import BANK_COLUMNS, Span


class TurnedRotation(nl.NKIObject):
    """RoPE of transposed heads: tables [head_dim, tokens] in SBUF, for all layers of a launch."""

    def __init__(self, cos: NkiTensor, sin: NkiTensor) -> None:
        tokens, d = cos.shape
        self.tables_sb: list[NkiTensor] = []
        for table_hbm in [cos, sin]:
            table_sb = nl.ndarray((d, tokens), dtype=table_hbm.dtype)
            nisa.dma_copy(table_sb, table_hbm.permute((1, 0)), dge_mode=nisa.dge_mode.none)
            self.tables_sb.append(table_sb)

    def run(self, x_sb: NkiTensor, dtype: nl.DType) -> NkiTensor:
        """Heads [head_dim, heads, tokens], rotated."""
        d, count, _ = x_sb.shape
        half, tables = d // 2, []
        for table_sb in self.tables_sb:
            tables.append(table_sb.expand_dim(1).broadcast(1, count))
        turned_sb = nl.ndarray(x_sb.shape, dtype=nl.float32)
        kept_sb = nl.ndarray(x_sb.shape, dtype=nl.float32)
        rotated_sb = nl.ndarray(x_sb.shape, dtype=dtype)
        nisa.tensor_scalar(turned_sb[0:half, :, :], x_sb[half:d, :, :], nl.multiply, -1.0)
        nisa.activation(turned_sb[half:d, :, :], nl.copy, x_sb[0:half, :, :])
        nisa.tensor_tensor(turned_sb, turned_sb, tables[1], nl.multiply)
        nisa.tensor_tensor(kept_sb, x_sb, tables[0], nl.multiply)
        nisa.tensor_tensor(rotated_sb, kept_sb, turned_sb, nl.add)
        return rotated_sb


class TurnedHeads(nl.NKIObject):
    """Query and key heads of all new tokens, [head_dim, heads, tokens], in SBUF.

    Each core makes those of its units, and their values. Where there is one key head, both make a
    part of the queries, the first the values and the second the keys.

    Args:
        shape: all sizes.
        dtype: of the activations.
        window: of attention.
    """

    def __init__(self, shape: Shape, dtype: nl.DType, window: int) -> None:
        self.shape = shape
        self.dtype = dtype
        count, tokens = shape.heads + shape.kv_heads, shape.batch * shape.new
        size = (tokens, shape.kv_heads * shape.head_dim)
        self.values_hbm = nl.ndarray(size, dtype=dtype, buffer=nl.shared_hbm)
        self.heads_sb = nl.ndarray((shape.head_dim, count, tokens), dtype=dtype)
        core, cores = nl.program_id(0), nl.num_programs(0)
        self.divides_queries = cores > 1 and shape.kv_heads == 1
        keys = halves(shape.kv_heads, shape.stacked, core, cores)
        queries, values = Span(keys.start * shape.group, keys.size * shape.group), keys
        # another core's values are used
        self.meets = False
        if self.divides_queries:
            queries = halves(shape.heads, 1, core, cores)
            keys, values = Span(0, core), Span(0, 1 - core)
            self.meets = shape.batch > 1 or shares_tokens(shape, window, cores)
        if cores > 1:  # what a core does not make is read, and not used
            nisa.memset(self.heads_sb, 0.0, engine=nisa.gpsimd_engine)
        self.outs = [
            HeadColumns(self.heads_sb[:, 0 : shape.heads, :], queries),
            HeadColumns(self.heads_sb[:, shape.heads : count, :], keys),
            ToHbm(self.values_hbm, head_columns(values, shape.head_dim)),
        ]
        # of each sequence
        self.rotated: list[NkiTensor] = []

    def finish(self, rotation: TurnedRotation, norms: list[HeadNorm]) -> None:
        """Normalise and rotate what has been made."""
        x_sb = self.heads_sb
        if self.meets:
            meet(self.values_hbm)
        if self.divides_queries:
            received_sb = nl.ndarray(x_sb.shape, dtype=self.dtype)
            whole_sb = nl.ndarray(x_sb.shape, dtype=self.dtype)
            other = 1 - nl.program_id(0)
            nisa.sendrecv(x_sb, received_sb, other, other, 0)
            nisa.tensor_tensor(whole_sb, x_sb, received_sb, nl.add)
            x_sb = whole_sb
        for norm in norms:
            x_sb = self.normed(x_sb, norm)
        self.rotated.append(rotation.run(x_sb, self.dtype))

    def normed(self, x_sb: NkiTensor, norm: HeadNorm) -> NkiTensor:
        """Each head over its root mean square, times the weight of its kind, fp32."""
        d, count, _ = x_sb.shape
        squares_sb = nl.ndarray(x_sb.shape, dtype=nl.float32)
        ones_sb = nl.ndarray((d, d), dtype=nl.float32)
        sums_psum = nl.ndarray(x_sb.shape, dtype=nl.float32, buffer=nl.psum)
        root_sb = nl.ndarray(x_sb.shape, dtype=nl.float32)
        normed_sb = nl.ndarray(x_sb.shape, dtype=nl.float32)
        nisa.memset(ones_sb, 1.0, engine=nisa.gpsimd_engine)
        nisa.tensor_tensor(squares_sb, x_sb, x_sb, nl.multiply)
        nisa.nc_matmul(sums_psum, ones_sb, squares_sb, accumulate=False)
        nisa.tensor_scalar(root_sb, sums_psum, nl.add, d * norm.eps, op1=nl.power, operand1=-0.5)
        weights = [norm.q_weight, norm.k_weight]
        for n in range(2):
            own = nl.ds(0, norm.heads) if n == 0 else nl.ds(norm.heads, count - norm.heads)
            weight_sb = nl.ndarray((d, 1), dtype=weights[n].dtype)
            scaled_sb = nl.ndarray((d, 1), dtype=nl.float32)
            nisa.dma_copy(weight_sb, weights[n].expand_dim(1), dge_mode=nisa.dge_mode.none)
            nisa.tensor_scalar(scaled_sb, weight_sb, nl.multiply, d**0.5)
            to_sb, from_sb = normed_sb[:, own, :], x_sb[:, own, :]
            roots_sb = root_sb[:, own, :]
            nisa.scalar_tensor_tensor(to_sb, from_sb, nl.multiply, scaled_sb, nl.multiply, roots_sb)
        return normed_sb

    def of(self, sequence: int) -> NewHeads:
        """The heads of a sequence's new tokens."""
        columns: list[NkiTensor] = []
        for m in range(self.shape.new):
            columns.append(self.rotated[0][:, :, sequence * self.shape.new + m])
        values_hbm = values_of(self.values_hbm, self.shape, sequence, 0)
        return NewHeads(self.shape, self.dtype, values_hbm, columns)


class HeadColumns(nl.NKIObject):
    """Columns of a stationary weight that are heads, an output as those of `stages.outputs`.

    Args:
        heads_sb: [head_dim, heads, tokens].
        own: the core's heads.
    """

    def __init__(self, heads_sb: NkiTensor, own: Span) -> None:
        self.heads_sb = heads_sb
        self.own = own
        self.head_dim = heads_sb.shape[0]
        self.tokens = heads_sb.shape[2]

    def columns(self, ahead: int = 0) -> Span:
        """This core's."""
        assert ahead == 0, "a core has whole heads; leave balance out"
        return head_columns(self.own, self.head_dim)

    def tiles(self, blocks: list[Span]) -> list[list[ColumnTile]]:
        """Columns that are summed in a pass: all, a head a tile."""
        if len(blocks) == 0:
            return []
        start = self.own.start * self.head_dim
        return [[ColumnTile(start, self.head_dim, self.own.size, False, 0)]]

    def put_turned(self, sums: TurnedSums, bias: NkiTensor | None) -> None:
        """Keep sums of stationary weights."""
        own_sb = self.heads_sb[:, nl.ds(self.own.start, self.own.size), :]
        rounded_turned(own_sb, sums, 0, bias)


def head_columns(heads: Span, head_dim: int) -> Span:
    """Columns that are heads."""
    return Span(heads.start * head_dim, heads.size * head_dim)


def may_turn(shape: Shape) -> bool:
    """Whether the sums of all heads fit a bank of PSUM, and RoPE's halves begin at quadrants."""
    columns = (shape.heads + shape.kv_heads) * shape.batch * shape.new
    return shape.head_dim % (2 * QUADRANT) == 0 and columns <= BANK_COLUMNS
