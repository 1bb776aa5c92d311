"""RoPE of many tokens: queries and keys normalised, rotated and transposed for attention."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.chunks import evict
from neuronmm_ops.kernels.stages.operands import load_row
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, Span, core_span, spans

PIECE = 8
"""Heads, at most, that an instruction multiplies."""


class Norm(nl.NKIObject):
    """An RMSNorm of every query and key head, whose weights are in the tables.

    Args:
        q_weight: [head_dim] in HBM.
        k_weight: [head_dim].
        eps: added to the mean square.
        rows: tokens of a tile.
    """

    def __init__(self, q_weight: NkiTensor, k_weight: NkiTensor, eps: float, rows: int) -> None:
        d = q_weight.shape[0]
        half = d // 2
        self.eps = eps
        # of each kind as they are, and as its halves meet the sine
        self.weights_sb: list[NkiTensor] = []
        self.turned_sb: list[NkiTensor] = []
        for weight_hbm in [q_weight, k_weight]:
            weight_sb = load_row(weight_hbm, Span(0, d), rows)
            turned_sb = nl.ndarray((rows, d), dtype=nl.float32)
            nisa.tensor_scalar(turned_sb[:, 0:half], weight_sb[:, half:d], nl.multiply, -1.0)
            nisa.tensor_copy(turned_sb[:, half:d], weight_sb[:, 0:half])
            self.weights_sb.append(weight_sb)
            self.turned_sb.append(turned_sb)

    def run(self, tiles_sb: list[NkiTensor]) -> list[NkiTensor]:
        """Heads [tokens, heads, head_dim] of some tiles over their root mean square."""
        d = tiles_sb[0].shape[2]
        roots_sb: list[NkiTensor] = []
        for x_sb in tiles_sb:
            squares_sb = nl.ndarray(x_sb.shape, dtype=nl.float32)
            means_sb = nl.ndarray((x_sb.shape[0], x_sb.shape[1]), dtype=nl.float32)
            nisa.activation(squares_sb, nl.square, x_sb)
            nisa.tensor_reduce(means_sb, nl.add, squares_sb, axis=2)
            nisa.tensor_scalar(
                means_sb, means_sb, nl.multiply, 1.0 / d, op1=nl.add, operand1=self.eps
            )
            nisa.tensor_scalar(means_sb, means_sb, nl.power, -0.5)
            roots_sb.append(means_sb)
        normed: list[NkiTensor] = []
        for i in range(len(tiles_sb)):
            x_sb = tiles_sb[i]
            normed_sb = nl.ndarray(x_sb.shape, dtype=x_sb.dtype)
            for h in range(x_sb.shape[1]):
                root_sb = roots_sb[i][:, nl.ds(h, 1)]
                nisa.tensor_scalar(normed_sb[:, h, :], x_sb[:, h, :], nl.multiply, root_sb)
            normed.append(normed_sb)
        return normed


class Tables(nl.NKIObject):
    """cos, and sin with the sign of its half, of some tokens; times the weights of a norm.

    Args:
        cos: [tokens of all, head_dim] in HBM.
        sin: as cos.
        tokens: up to 128.
        dtype: of heads.
        norms: of heads, one or none.
    """

    def __init__(
        self, cos: NkiTensor, sin: NkiTensor, tokens: Span, dtype: nl.DType, norms: list[Norm]
    ) -> None:
        d, rows = cos.shape[1], tokens.size
        own = nl.ds(tokens.start, rows)
        cos_sb = nl.ndarray((rows, d), dtype=cos.dtype)
        sin_sb = nl.ndarray((rows, d), dtype=sin.dtype)
        nisa.dma_copy(cos_sb, cos[own, :], dge_mode=nisa.dge_mode.none)
        nisa.dma_copy(sin_sb, sin[own, :], dge_mode=nisa.dge_mode.none)
        # of queries and keys
        self.cos_sb = [cos_sb, cos_sb]
        self.sin_sb = [sin_sb, sin_sb]
        for norm in norms:
            self.cos_sb = []
            self.sin_sb = []
            for i in range(2):
                weighted_sb = nl.ndarray((rows, d), dtype=dtype)
                turned_sb = nl.ndarray((rows, d), dtype=dtype)
                weight_sb, swapped_sb = norm.weights_sb[i], norm.turned_sb[i]
                nisa.tensor_tensor(weighted_sb, cos_sb, weight_sb[0:rows, :], nl.multiply)
                nisa.tensor_tensor(turned_sb, sin_sb, swapped_sb[0:rows, :], nl.multiply)
                self.cos_sb.append(weighted_sb)
                self.sin_sb.append(turned_sb)
        if len(norms) == 0:
            first_sb = sin_sb[:, 0 : d // 2]
            nisa.tensor_scalar(first_sb, first_sb, nl.multiply, -1.0)


class Rotated(nl.NKIObject):
    """Heads of one kind, rotated but for one sum, which TensorE adds as it transposes.

    Args:
        x_sb: [tokens, heads, head_dim].
        cos_sb: [tokens, head_dim].
        sin_sb: [tokens, head_dim].
        piece: heads of an instruction.
        busy: VectorE has normalised the heads: GpSimdE computes both terms.
    """

    def __init__(
        self, x_sb: NkiTensor, cos_sb: NkiTensor, sin_sb: NkiTensor, piece: int, busy: bool
    ) -> None:
        rows, count, d = x_sb.shape
        half = d // 2
        self.head_dim = d
        self.piece = piece
        self.kept_sb: list[NkiTensor] = []
        # [tokens, 2, heads, half]: what an instruction writes has no holes
        self.turned_sb: list[NkiTensor] = []
        engine = nisa.gpsimd_engine if busy else nisa.vector_engine
        for s in spans(0, count, piece):
            own_sb = x_sb[:, nl.ds(s.start, s.size), :]
            kept_sb = nl.ndarray((rows, s.size, d), dtype=x_sb.dtype)
            turned_sb = nl.ndarray((rows, 2, s.size, half), dtype=x_sb.dtype)
            own_cos = cos_sb.expand_dim(1).broadcast(1, s.size)
            own_sin = sin_sb.expand_dim(1).broadcast(1, s.size)
            nisa.tensor_tensor(kept_sb, own_sb, own_cos, nl.multiply, engine=engine)
            for n in range(2):
                to, start = nl.ds(n * half, half), nl.ds(half - n * half, half)
                nisa.tensor_tensor(
                    turned_sb[:, n, :, :],
                    own_sb[:, :, start],
                    own_sin[:, :, to],
                    nl.multiply,
                    engine=nisa.gpsimd_engine,
                )
            self.kept_sb.append(kept_sb)
            self.turned_sb.append(turned_sb)

    def transpose(self, dst_psum: NkiTensor, heads: Span, identity_sb: NkiTensor) -> None:
        """dst [heads * head_dim, tokens] = the sum of the terms of heads in a piece, transposed."""
        number, first = heads.start // self.piece, heads.start % self.piece
        own, rows = nl.ds(first, heads.size), self.kept_sb[0].shape[0]
        routes = identity_sb[0:rows, 0:rows]
        kept = self.kept_sb[number][:, own, :]
        turned = self.turned_sb[number][:, :, own, :].permute((0, 2, 1, 3))
        nisa.nc_matmul(dst_psum, kept, routes, is_moving_onezero=True, accumulate=False)
        nisa.nc_matmul(dst_psum, turned, routes, is_moving_onezero=True, accumulate=True)


class Output(nl.NKIObject):
    """Heads that come out transposed.

    Args:
        to_hbm: [heads * head_dim, M].
        heads: how many.
        each: heads of a PSUM tile.
    """

    def __init__(self, to_hbm: NkiTensor, heads: int, each: int) -> None:
        self.to_hbm = to_hbm
        self.heads = heads
        self.each = each

    def write(self, tokens: Span, rotated: list[Rotated], identity_sb: NkiTensor) -> None:
        """Write a block of tokens, of which `rotated` has 128 each."""
        d = rotated[0].head_dim
        rows = self.each * d
        tiles = spans(0, tokens.size, PARTITIONS)
        parts = spans(0, self.heads, self.each)
        made_sb = nl.ndarray((rows, len(parts), tokens.size), dtype=self.to_hbm.dtype)
        for c in range(len(parts)):
            size = parts[c].size * d
            sums_psum = nl.ndarray((size, tokens.size), nl.float32, buffer=nl.psum)
            for i in range(len(tiles)):
                dst_psum = sums_psum[:, nl.ds(tiles[i].start, tiles[i].size)]
                rotated[i].transpose(dst_psum, parts[c], identity_sb)
            evict(made_sb[0:size, c, :], sums_psum, 1)
        columns_hbm = self.to_hbm[:, nl.ds(tokens.start, tokens.size)]
        whole = self.heads // self.each
        if whole > 0:
            own_hbm = columns_hbm[nl.ds(0, whole * rows), :]
            own_hbm = own_hbm.reshape_dim(0, (whole, rows)).permute((1, 0, 2))
            nisa.dma_copy(own_hbm, made_sb[:, 0:whole, :], dge_mode=nisa.dge_mode.none)
        rest = self.heads * d - whole * rows
        if rest > 0:
            own_hbm = columns_hbm[nl.ds(whole * rows, rest), :]
            nisa.dma_copy(own_hbm, made_sb[0:rest, whole, :], dge_mode=nisa.dge_mode.none)


class Pieces(nl.NKIObject):
    """How heads are taken together.

    Args:
        each: heads of a PSUM tile.
        piece: heads of an instruction, a multiple of that.
        busy: VectorE normalises heads.
    """

    def __init__(self, each: int, piece: int, busy: bool) -> None:
        self.each = each
        self.piece = piece
        self.busy = busy


class Turn(nl.NKIObject):
    """A block of tokens of a sequence.

    Args:
        tokens: which.
        tables: of each 128 of them.
        pieces: of its heads.
    """

    def __init__(self, tokens: Span, tables: list[Tables], pieces: Pieces) -> None:
        self.tokens = tokens
        self.tables = tables
        self.pieces = pieces
        self.head_dim = tables[0].cos_sb[0].shape[1]
        # of queries and keys: [heads * head_dim, M]
        self.outputs_hbm: list[NkiTensor] = []
        self.heads_sb: list[NkiTensor] = []

    def load(
        self, parts_hbm: list[NkiTensor], values_hbm: list[NkiTensor], norms: list[Norm]
    ) -> None:
        """Load heads side by side, normalise queries and keys; values [kv_heads, tokens, d] go on.

        Args:
            parts_hbm: [tokens, features] each: queries and keys, and values that go on.
            values_hbm: where to, if they do.
            norms: of queries and keys, one or none.
        """
        d = self.head_dim
        count = 0  # of queries and keys
        for output_hbm in self.outputs_hbm:
            count += output_hbm.shape[0] // d
        for tile in spans(0, self.tokens.size, PARTITIONS):
            own = nl.ds(tile.start, tile.size)
            rows_hbm: list[NkiTensor] = []
            for part_hbm in parts_hbm:
                rows_hbm.append(part_hbm[own, :])
            tile_sb = load_heads(rows_hbm, d)
            for to_hbm in values_hbm:
                own_hbm = to_hbm[:, own, :].permute((1, 0, 2))
                values_sb = tile_sb[:, count : tile_sb.shape[1], :]
                nisa.dma_copy(own_hbm, values_sb, dge_mode=nisa.dge_mode.none)
            self.heads_sb.append(tile_sb[:, 0:count, :])
        for norm in norms:
            self.heads_sb = norm.run(self.heads_sb)

    def write(self, identity_sb: NkiTensor) -> None:
        """Rotate the heads and write them."""
        d, start = self.head_dim, 0
        for n in range(2):
            count = self.outputs_hbm[n].shape[0] // d
            rotated: list[Rotated] = []
            for i in range(len(self.tables)):
                x_sb = self.heads_sb[i][:, nl.ds(start, count), :]
                cos_sb, sin_sb = self.tables[i].cos_sb[n], self.tables[i].sin_sb[n]
                pieces = self.pieces
                rotated.append(Rotated(x_sb, cos_sb, sin_sb, pieces.piece, pieces.busy))
            output = Output(self.outputs_hbm[n], count, self.pieces.each)
            output.write(self.tokens, rotated, identity_sb)
            start += count


def turn_heads(
    parts: list[NkiTensor],
    tables: list[NkiTensor],
    q_hbm: NkiTensor,
    k_hbm: NkiTensor,
    values: list[NkiTensor],
    norms: list[Norm],
    block: int,
) -> None:
    """q, k = rope(norm(queries)), rope(norm(keys)), transposed; cores share the tokens.

    Args:
        parts: [batch * M, features] each: queries and keys side by side, and values to be copied.
        tables: cos and sin, [M, head_dim] of all sequences, or [batch * M, head_dim] of each.
        q_hbm: [batch, heads, head_dim, M], written.
        k_hbm: [batch, kv_heads, head_dim, M], written.
        values: where values are copied to, [batch, kv_heads, M, head_dim], or none.
        norms: of heads, one or none.
        block: tokens that are stored together, at most 512.
    """
    B, H, d, M = q_hbm.shape
    kv, each = k_hbm.shape[1], PARTITIONS // d
    own = core_span(M, nl.program_id(0), nl.num_programs(0))
    identity_sb = identity(q_hbm.dtype)
    pieces = Pieces(each, each * max(1, PIECE // each), len(norms) > 0)
    apart = tables[0].shape[0] > M  # sequences are at different positions
    waiting: list[Turn] = []
    for tokens in spans(own.start, own.size, block):
        made: list[Tables] = []
        for b in range(B):
            if b == 0 or apart:
                made = []
                first = b * M if apart else 0
                for tile in spans(first + tokens.start, tokens.size, PARTITIONS):
                    made.append(Tables(tables[0], tables[1], tile, q_hbm.dtype, norms))
            rows = nl.ds(b * M + tokens.start, tokens.size)
            turn = Turn(tokens, made, pieces)
            turn.outputs_hbm.append(q_hbm[b, :, :, :].reshape((H * d, M)))
            turn.outputs_hbm.append(k_hbm[b, :, :, :].reshape((kv * d, M)))
            parts_hbm: list[NkiTensor] = []
            for part in parts:
                parts_hbm.append(part[rows, :])
            values_hbm: list[NkiTensor] = []
            for to in values:
                values_hbm.append(to[b, :, nl.ds(tokens.start, tokens.size), :])
            turn.load(parts_hbm, values_hbm, norms)
            waiting.append(turn)
            if len(waiting) > len(norms):  # heads are normalised while those before are transposed
                waiting[0].write(identity_sb)
                waiting = waiting[1 : len(waiting)]
    for turn in waiting:
        turn.write(identity_sb)


def load_heads(parts_hbm: list[NkiTensor], head_dim: int) -> NkiTensor:
    """Rows [tokens, features] of each part in SBUF, side by side as [tokens, heads, head_dim]."""
    rows, width = parts_hbm[0].shape[0], 0
    for part_hbm in parts_hbm:
        width += part_hbm.shape[1]
    rows_sb = nl.ndarray((rows, width), dtype=parts_hbm[0].dtype)
    start = 0
    for part_hbm in parts_hbm:
        own_sb = rows_sb[:, nl.ds(start, part_hbm.shape[1])]
        nisa.dma_copy(own_sb, part_hbm, dge_mode=nisa.dge_mode.none)
        start += part_hbm.shape[1]
    return rows_sb.reshape((rows, width // head_dim, head_dim))


def identity(dtype: nl.DType) -> NkiTensor:
    """The identity [128, 128] in SBUF."""
    shape = (PARTITIONS, PARTITIONS)
    ones_sb, identity_sb = nl.ndarray(shape, dtype=dtype), nl.ndarray(shape, dtype=dtype)
    nisa.memset(ones_sb, 1.0)
    nisa.affine_select(identity_sb, [[-1, PARTITIONS]], 1, ones_sb, 0.0, nl.equal)
    return identity_sb
