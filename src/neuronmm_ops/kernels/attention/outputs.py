"""Where decode's output goes: to HBM, or as the output projection contracts it."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.heads import NewTokens
from neuronmm_ops.kernels.attention.units import Shape, halves
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.chunks import TransposedChunk, evict
from neuronmm_ops.kernels.stages.tiling import BANK_COLUMNS, PARTITIONS, KPart, Span, chunk_parts

MOST_SPREADS = 16
"""Matmuls a token, at most, that lay out what a unit has made: 64 cycles of TensorE each."""


class HeadsToHbm(nl.NKIObject):
    """The output in HBM.

    Args:
        hbm: [batch * new, heads * head_dim].
    """

    def __init__(self, hbm: NkiTensor) -> None:
        self.hbm = hbm
        self.dtype = hbm.dtype

    def put(self, new: NewTokens, out_sb: NkiTensor) -> None:
        """Store a unit's output [queries, head_dim]."""
        first, M = new.unit.keys.start * new.shape.group * new.head_dim, new.shape.new
        heads = new.keys * new.shape.group
        columns = nl.ds(first, heads * new.head_dim)
        rows_hbm = self.hbm[nl.ds(new.unit.sequence * M, M), columns]
        rows_hbm = rows_hbm.reshape_dim(1, (heads, new.head_dim))
        rows_hbm = rows_hbm.reshape_dim(1, (new.keys, new.shape.group))
        nisa.dma_copy(rows_hbm.permute((1, 0, 2, 3)), out_sb, dge_mode=nisa.dge_mode.none)


class Spreads(nl.NKIObject):
    """Which partition of a K chunk has a head's features, for all layers of a launch.

    A partition has `tiles` neighbouring features: a head is on head_dim / tiles of them. So many
    products with matrices of ones and zeros, a matrix for each, take heads on the partitions there.

    Args:
        dtype: of the activations.
        head_dim: features of a head.
    """

    def __init__(self, dtype: nl.DType, head_dim: int) -> None:
        self.dtype = dtype
        self.head_dim = head_dim
        self.keys: list[tuple[int, int, int, int]] = []
        self.made_sb: list[NkiTensor] = []

    def of(self, first: int, queries: int, part: KPart) -> NkiTensor:
        """[queries, head_dim / tiles, rows]: 1 where the row has those features of the query.

        Args:
            first: of the queries, from the first of the K chunk on.
            queries: heads that lie one below the other.
            part: of the K chunk.
        """
        key = first, queries, part.start, part.tiles
        for n in range(len(self.keys)):
            if self.keys[n] == key:
                return self.made_sb[n]
        each = self.head_dim // part.tiles
        spread_sb = nl.ndarray((queries, each, part.rows), dtype=self.dtype)
        nisa.memset(spread_sb, 1.0, engine=nisa.gpsimd_engine)
        steps = [[1, each], [-1, part.rows]]
        offset = first * each - part.start // part.tiles
        nisa.affine_select(spread_sb, steps, each, spread_sb, 0.0, nl.equal, offset=offset)
        self.keys.append(key)
        self.made_sb.append(spread_sb)
        return spread_sb


class HeadsKept(nl.NKIObject):
    """The output in SBUF, of one new token a sequence, as a K chunk of the output projection.

    Args:
        shape: all sizes.
        own: this core's features, which it makes and contracts.
        lanes: of the K chunk.
        spreads: of the launch.
    """

    def __init__(self, shape: Shape, own: Span, lanes: int, spreads: Spreads) -> None:
        self.dtype = spreads.dtype
        self.first = own.start // shape.head_dim
        self.spreads = spreads
        parts = chunk_parts(own.size, PARTITIONS)
        self.chunk = TransposedChunk(own.start, parts, shape.batch, lanes)
        size = (PARTITIONS, shape.batch, tiles_of(parts))
        self.sums_psum = nl.ndarray(size, dtype=nl.float32, buffer=nl.psum)
        self.tokens = 0  # that have sums

    def put(self, new: NewTokens, out_sb: NkiTensor) -> None:
        """Lay out a unit's output [queries, head_dim]."""
        token, d, slot = new.unit.sequence, new.head_dim, 0
        first = new.unit.keys.start * new.shape.group - self.first
        for part in self.chunk.parts:
            spread_sb = self.spreads.of(first, new.queries, part)
            sums_psum = self.sums_psum[0 : part.rows, token, nl.ds(slot, part.tiles)]
            slot += part.tiles
            for a in range(d // part.tiles):
                own_sb = out_sb[:, nl.ds(a * part.tiles, part.tiles)]
                started = self.tokens > token or a > 0
                nisa.nc_matmul(sums_psum, spread_sb[:, a, :], own_sb, accumulate=started)
        self.tokens = token + 1

    def finish(self) -> TransposedChunk:
        """The K chunk, when all units have been put."""
        slot = 0
        for part in self.chunk.parts:
            to_sb = self.chunk.add(part, self.dtype).permute((0, 2, 1))
            evict(to_sb, self.sums_psum[0 : part.rows, :, nl.ds(slot, part.tiles)], 0)
            slot += part.tiles
        return self.chunk


def tiles_of(parts: list[KPart]) -> int:
    """Tiles of all parts."""
    tiles = 0
    for part in parts:
        tiles += part.tiles
    return tiles


def may_keep(shape: Shape, own: Span) -> bool:
    """Whether a core makes the features that it contracts, and can lay them out for that."""
    d, cores = shape.head_dim, nl.num_programs(0)
    keys, each = halves(shape.kv_heads, shape.stacked, nl.program_id(0), cores), shape.group * d
    is_made = own.start == keys.start * each and own.size == keys.size * each
    if not is_made or shape.new > 1 or (cores > 1 and shape.kv_heads == 1):
        return False
    parts, matmuls = chunk_parts(own.size, PARTITIONS), 0
    for part in parts:
        if d % part.tiles > 0:
            return False
        matmuls += d // part.tiles
    return matmuls <= MOST_SPREADS and tiles_of(parts) * shape.batch <= BANK_COLUMNS
