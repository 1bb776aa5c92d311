"""RoPE of prompts: queries and keys rotated, transposed for attention, and the caches filled."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.units import Shape
from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, jit, nisa, nl
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
        found: list[NkiTensor] = []
        for i in range(len(tiles_sb)):
            x_sb = tiles_sb[i]
            normed_sb = nl.ndarray(x_sb.shape, dtype=x_sb.dtype)
            for h in range(x_sb.shape[1]):
                root_sb = roots_sb[i][:, nl.ds(h, 1)]
                nisa.tensor_scalar(normed_sb[:, h, :], x_sb[:, h, :], nl.multiply, root_sb)
            found.append(normed_sb)
        return found


class Tables(nl.NKIObject):
    """cos, and sin with the sign of its half, of some tokens; times the weights of a norm.

    Args:
        cos: [M, head_dim] in HBM.
        sin: [M, head_dim].
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
        # of queries and keys: [heads * head_dim, M]
        self.outputs_hbm: list[NkiTensor] = []
        self.heads_sb: list[NkiTensor] = []

    def load(self, rows_hbm: NkiTensor, values_hbm: NkiTensor, norms: list[Norm]) -> None:
        """Load the heads, normalise queries and keys and store the values [kv_heads, tokens, d]."""
        kv, _, d = values_hbm.shape
        count = rows_hbm.shape[1] // d
        for tile in spans(0, self.tokens.size, PARTITIONS):
            own = nl.ds(tile.start, tile.size)
            tile_sb = load_heads(rows_hbm[own, :], d)
            own_hbm = values_hbm[:, own, :].permute((1, 0, 2))
            nisa.dma_copy(own_hbm, tile_sb[:, count - kv : count, :], dge_mode=nisa.dge_mode.none)
            self.heads_sb.append(tile_sb[:, 0 : count - kv, :])
        for norm in norms:
            self.heads_sb = norm.run(self.heads_sb)

    def write(self, identity_sb: NkiTensor) -> None:
        """Rotate the heads and write them."""
        d, start = self.heads_sb[0].shape[2], 0
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


@jit
def rope(
    qkv: NkiTensor,
    cos: NkiTensor,
    sin: NkiTensor,
    k_cache: NkiTensor,
    v_cache: NkiTensor,
    q_weight: NkiTensor | None = None,
    k_weight: NkiTensor | None = None,
    eps: float = 1e-6,
    block: int = 512,
) -> tuple[NkiTensor, NkiTensor, NkiTensor]:
    """q, k_cache, v_cache = rope(query), rope(key), value, laid out for `attention`.

    Dimensions:
        batch: sequences. M: tokens of each, any number. head_dim: even, up to 128. heads: a
        multiple of kv_heads.

    Args:
        qkv: [batch * M, (heads + 2 kv_heads) head_dim], query, key and value.
        cos: [M, head_dim], any float dtype.
        sin: [M, head_dim].
        k_cache: [batch, kv_heads, head_dim, M], written.
        v_cache: [batch, kv_heads, M, head_dim], written.
        q_weight: [head_dim], an RMSNorm of each query head before RoPE, or None.
        k_weight: [head_dim] of each key head; both or none.
        eps: of the norm.
        block: tokens that are stored together, at most 512.

    Returns:
        q [batch, heads, head_dim, M] in shared HBM, dtype of qkv, and the two caches.

    Notes:
        RoPE is Llama's: x cos + [-x2, x1] sin, of the halves of a head. The two terms are rounded
        to the dtype of qkv and added in fp32; so are normalised heads rounded. Two cores share the
        tokens of each sequence.

    Pseudocode:
        for each block of tokens:
            x = norm(qkv[tokens]);  kept, turned = x cos, [-x2, x1] sin
            q, k_cache = (kept + turned)^T;  v_cache = qkv[tokens]
    """
    B, kv, d, M = k_cache.shape
    H = qkv.shape[1] // d - 2 * kv
    shape = Shape(B, H, kv, d, M)
    wanted = (B * M, (shape.heads + 2 * kv) * d)
    assert qkv.shape == wanted, f"qkv must be {wanted}, got {qkv.shape}"
    assert v_cache.shape == (B, kv, M, d), f"v_cache must be {(B, kv, M, d)}, got {v_cache.shape}"
    assert is_none(q_weight) == is_none(k_weight), "give both weights of norms, or none"
    q_hbm = nl.ndarray((B, H, d, M), dtype=qkv.dtype, buffer=nl.shared_hbm)
    own = core_span(M, nl.program_id(0), nl.num_programs(0))
    identity_sb = identity(qkv.dtype)
    norms: list[Norm] = []
    if not is_none(q_weight) and not is_none(k_weight):
        norms.append(Norm(q_weight, k_weight, eps, min(PARTITIONS, M)))
    each = PARTITIONS // d
    pieces = Pieces(each, each * max(1, PIECE // each), len(norms) > 0)
    waiting: list[Turn] = []
    for tokens in spans(own.start, own.size, block):
        tables: list[Tables] = []
        for tile in spans(tokens.start, tokens.size, PARTITIONS):
            tables.append(Tables(cos, sin, tile, qkv.dtype, norms))
        for b in range(B):
            rows_hbm = qkv[nl.ds(b * M + tokens.start, tokens.size), :]
            values_hbm = v_cache[b, :, nl.ds(tokens.start, tokens.size), :]
            turn = Turn(tokens, tables, pieces)
            turn.outputs_hbm.append(q_hbm[b, :, :, :].reshape((H * d, M)))
            turn.outputs_hbm.append(k_cache[b, :, :, :].reshape((kv * d, M)))
            turn.load(rows_hbm, values_hbm, norms)
            waiting.append(turn)
            if len(waiting) > len(norms):  # heads are normalised while those before are transposed
                waiting[0].write(identity_sb)
                waiting = waiting[1 : len(waiting)]
    for turn in waiting:
        turn.write(identity_sb)
    return q_hbm, k_cache, v_cache


def load_heads(rows_hbm: NkiTensor, head_dim: int) -> NkiTensor:
    """Rows [tokens, features] in SBUF as [tokens, heads, head_dim]."""
    rows, width = rows_hbm.shape
    heads_sb = nl.ndarray((rows, width // head_dim, head_dim), dtype=rows_hbm.dtype)
    nisa.dma_copy(heads_sb.reshape((rows, width)), rows_hbm, dge_mode=nisa.dge_mode.none)
    return heads_sb


def identity(dtype: nl.DType) -> NkiTensor:
    """The identity [128, 128] in SBUF."""
    shape = (PARTITIONS, PARTITIONS)
    ones_sb, identity_sb = nl.ndarray(shape, dtype=dtype), nl.ndarray(shape, dtype=dtype)
    nisa.memset(ones_sb, 1.0)
    nisa.affine_select(identity_sb, [[-1, PARTITIONS]], 1, ones_sb, 0.0, nl.equal)
    return identity_sb
