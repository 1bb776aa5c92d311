"""Activations of the decode kernels, in pieces of the contraction, transposed by TensorE."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.tiling import P, Span, spans


class Piece(nl.NKIObject):
    """A range of a contraction, whose weight rows are split over partitions: p * tiles + j.

    Each partition so reads neighbouring rows of the weight, in one long run.

    Args:
        start: first feature of the contraction.
        source: [M, size] activations, in HBM or in SBUF.
        loaded: whether they are in SBUF.
        lane: which quarter or half of the partitions they are loaded to.
    """

    def __init__(self, start: int, source: NkiTensor, loaded: bool, lane: int) -> None:
        self.start = start
        self.source = source
        self.loaded = loaded
        self.lane = lane
        self.tokens, self.size = source.shape
        self.turned: list[NkiTensor] = []

    def turn(self) -> None:
        """Fill `turned`: [128, size // 128, M] and [size % 128, M], where they are not empty."""
        if len(self.turned) > 0:
            return
        tokens = self.source if self.loaded else self.load()
        tiles = self.size // P
        whole = tiles * P
        if tiles > 0:
            full = nl.ndarray((P, tiles, self.tokens), dtype=self.source.dtype)
            for group in spans(0, tiles, transposes_in_bank(self.tokens, self.source.dtype)):
                turn_columns(full, tokens[:, 0:whole], group)
            self.turned.append(full)
        if whole < self.size:
            rest = nl.ndarray((self.size - whole, 1, self.tokens), dtype=self.source.dtype)
            turn_columns(rest, tokens[:, whole : self.size], Span(0, 1))
            self.turned.append(rest)

    def rows_of(self, weight: NkiTensor) -> NkiTensor:
        """[128, size // 128, N]: the whole tiles of weight rows, by partition."""
        tiles = self.size // P
        return weight[self.start : self.start + tiles * P, :].reshape_dim(0, (P, tiles))

    def load(self) -> NkiTensor:
        """Load the activations to the partitions of the lane."""
        first = self.lane * P // load_lanes(self.tokens)
        tile = nl.ndarray((first + self.tokens, self.size), dtype=self.source.dtype)
        tokens = tile[first : first + self.tokens, :]
        nisa.dma_copy(tokens, self.source)
        return tokens


def turn_columns(to: NkiTensor, tokens: NkiTensor, group: Span) -> None:
    """to[:, j, :] = tokens[:, j::tiles]^T for the j of a group, through one bank of PSUM."""
    rows, tiles, M = to.shape
    width = tokens.shape[1]
    bank = nl.ndarray((rows, group.size, M + M % 2), dtype=to.dtype, buffer=nl.psum)
    for i in range(group.size):
        j = group.start + i
        nisa.nc_transpose(bank[:, i, 0:M], tokens[:, j:width:tiles])
    evict(to[:, group.start : group.start + group.size, :], bank[:, :, 0:M], 0)


def evict(to: NkiTensor, bank: NkiTensor, turn: int) -> None:
    """Copy PSUM to SBUF: on ScalarE, and from trn2 on every other time on VectorE.

    On trn1 the two exclude each other on PSUM, and ScalarE is the faster.
    """
    if nisa.get_nc_version() == nisa.nc_version.gen2 or turn % 2 == 1:
        nisa.activation(to, nl.copy, bank)
    else:
        nisa.tensor_copy(to, bank)


def item_bytes(dtype: nl.DType) -> int:
    """Bytes of an element."""
    return 4 if dtype == nl.float32 else 2


def transposes_in_bank(M: int, dtype: nl.DType) -> int:
    """How many transposed tiles [128, M] fit in a bank of PSUM; 2-byte ones start on 4 bytes."""
    return 2048 // item_bytes(dtype) // (M + M % 2)


def load_lanes(M: int) -> int:
    """Parts of the partitions that M tokens may be loaded to."""
    return 4 if M <= 32 else 2 if M <= 64 else 1


def pieces_of(x: NkiTensor, start: int, part: Span, width: int) -> list[Piece]:
    """Columns `part` of x [M, K] in HBM as pieces of `width`; x's column 0 is row `start`."""
    found: list[Piece] = []
    lanes = load_lanes(x.shape[0])
    for s in spans(part.start, part.size, width):
        lane = lanes - 1 - len(found) % lanes
        found.append(Piece(start + s.start, x[:, s.start : s.start + s.size], False, lane))
    return found


def again(pieces: list[Piece]) -> list[Piece]:
    """The same pieces, not transposed: what was is free for other tiles."""
    found: list[Piece] = []
    for piece in pieces:
        found.append(Piece(piece.start, piece.source, piece.loaded, piece.lane))
    return found
