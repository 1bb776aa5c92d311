"""The last product of a stage, and where it goes: to HBM, or as a later contraction takes it."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.chunks import Chunk, KChunk
from neuronmm_ops.kernels.stages.decode import contract, own_columns
from neuronmm_ops.kernels.stages.decode_tiling import ColumnTile, Loads, output_tiles
from neuronmm_ops.kernels.stages.stationary import (
    Turned,
    TurnedSums,
    contract_turned,
    rounded_output,
    rounded_turned,
    store_turned,
)
from neuronmm_ops.kernels.stages.sums import Sums
from neuronmm_ops.kernels.stages.tiling import OUTPUT_UNIT, Span, chunk_parts
from neuronmm_ops.kernels.stages.weights import DecodeWeight


class ToHbm(nl.NKIObject):
    """[M, N] in HBM, of which each core stores its columns; other outputs have these methods.

    Args:
        hbm: to which.
        own: the core's columns; None: as `own_columns`.
    """

    def __init__(self, hbm: NkiTensor, own: Span | None = None) -> None:
        self.hbm = hbm
        self.tokens = hbm.shape[0]
        self.own: Any = own

    def columns(self, ahead: int = 0) -> Span:
        """This core's."""
        if not is_none(self.own):
            return self.own
        return own_columns(self.hbm.shape[1], ahead)

    def put(self, sums: Sums, last: bool) -> None:
        """Store sums of moving weights; is it the `last` block?"""
        if last or self.tokens == 1:
            sums.store_at_once(self.hbm)
        else:
            sums.store(self.hbm, 0, sums.rounded(self.hbm.dtype))

    def tiles(self, blocks: list[Span]) -> list[list[ColumnTile]]:
        """Columns of stationary weights that are summed in a pass."""
        tiles: list[list[ColumnTile]] = []
        for columns in blocks:
            tiles.append(output_tiles(columns, self.tokens))
        return tiles

    def put_turned(self, sums: TurnedSums, bias: NkiTensor | None) -> None:
        """Store sums of stationary weights."""
        for n in range(len(sums.tiles)):
            rounded_sb = rounded_output(sums, n, bias, self.hbm.dtype)
            store_turned(self.hbm, rounded_sb, sums.tiles[n])


def each_to_hbm(parts: list[NkiTensor]) -> list[ToHbm]:
    """Of each part [M, N] in HBM."""
    outputs: list[ToHbm] = []
    for hbm in parts:
        outputs.append(ToHbm(hbm))
    return outputs


class Kept(nl.NKIObject):
    """A core's columns of [M, N] in SBUF, where a later contraction has them as its K chunk.

    Args:
        M: tokens.
        own: the core's columns.
        group: rows of the later weights that share a scale; 0: all.
        dtype: of what is kept.
    """

    def __init__(self, M: int, own: Span, group: int, dtype: nl.DType) -> None:
        self.tokens = M
        self.own = own
        self.group = group
        self.dtype = dtype
        # as moving weights make them: [M, columns]
        self.rows_sb: list[NkiTensor] = []
        # [rows, tiles, M] of each part of the chunk
        self.parts_sb: list[NkiTensor] = []

    def columns(self, ahead: int = 0) -> Span:
        """This core's: those that it has of the later contraction."""
        assert ahead == 0, "what is kept is a core's part of a contraction; leave balance out"
        return self.own

    def put(self, sums: Sums, last: bool) -> None:
        """Keep sums of moving weights; after the `last` block all are transposed."""
        if len(self.rows_sb) == 0:
            self.rows_sb.append(nl.ndarray((self.tokens, self.own.size), dtype=self.dtype))
        rows_sb, parts = self.rows_sb[0], sums.tiling.evictions()
        for i in range(len(parts)):
            part = parts[i]
            start = sums.columns.start + part.group * sums.tiling.width + part.start
            sums.evict(rows_sb[:, nl.ds(start - self.own.start, part.size)], part, i)
        if last:
            chunk = KChunk(0, rows_sb, True, 0, self.dtype, scaled_rows=self.group)
            chunk.transpose()
            self.parts_sb.extend(chunk.transposed_sb)

    def tiles(self, blocks: list[Span]) -> list[list[ColumnTile]]:
        """Columns of stationary weights that are summed in a pass: all, whose tiles are strided."""
        tiles: list[ColumnTile] = []
        slot = 0
        for part in chunk_parts(self.own.size, self.group):
            start = self.own.start + part.start
            tiles.append(ColumnTile(start, part.rows, part.tiles, True, slot))
            slot += part.tiles
        return [tiles]

    def put_turned(self, sums: TurnedSums, bias: NkiTensor | None) -> None:
        """Keep sums of stationary weights."""
        assert is_none(bias), "a bias does not lie as strided tiles do"
        for n in range(len(sums.tiles)):
            tile = sums.tiles[n]
            part_sb = nl.ndarray((tile.rows, tile.count, self.tokens), dtype=self.dtype)
            rounded_turned(part_sb, sums, n, None)
            self.parts_sb.append(part_sb)

    def of_cores(self) -> list[list[NkiTensor]]:
        """The parts of each core, whose ranges are equal: they are exchanged."""
        if nl.num_programs(0) == 1:
            return [self.parts_sb]
        received: list[NkiTensor] = []
        other = 1 - nl.program_id(0)
        for part_sb in self.parts_sb:
            received_sb = nl.ndarray(part_sb.shape, dtype=self.dtype)
            nisa.sendrecv(part_sb, received_sb, other, other, 0)
            received.append(received_sb)
        return [received, self.parts_sb] if other == 0 else [self.parts_sb, received]


class OutputBlock(nl.NKIObject):
    """Some columns of an output: chunks . w[:, columns] + bias.

    Args:
        out: [M, N], as `ToHbm`.
        chunks: what is contracted.
        w: [K, N].
        bias: [N] or None.
        columns: which of N.
        first: of all blocks.
        last: of all; its loads are short, so that little is left to do when the last byte has come.
    """

    def __init__(
        self,
        out: Any,
        chunks: list[Chunk],
        w: DecodeWeight,
        bias: NkiTensor | None,
        columns: Span,
        first: bool,
        last: bool,
    ) -> None:
        self.out = out
        self.chunks = chunks
        self.bias = bias
        self.first = first
        self.last = last
        self.sums = Sums(w, columns, out.tokens, OUTPUT_UNIT, last)

    def load_rows(self) -> None:
        """Load the rows that the sums of a weight in one byte are multiplied by."""
        if not is_none(self.sums.weight.scale):
            self.sums.load_rows(self.bias)

    def contract(self, loads: Loads) -> None:
        """Make the sums."""
        if is_none(self.sums.weight.scale) and not is_none(self.bias):
            self.sums.add_bias(self.bias)
        contract(self.chunks, [self.sums], loads, self.first, self.last)


def write_blocks(blocks: list[OutputBlock], loads: Loads) -> None:
    """Write blocks of outputs in turn, each one's rows loaded while the one before it is summed.

    They are before its evictions in the program: GpSimdE, which prepares them, shares VectorE's
    port to SBUF.
    """
    if len(blocks) > 0:
        blocks[0].load_rows()
    for i in range(len(blocks)):
        block = blocks[i]
        block.contract(loads)
        if i + 1 < len(blocks):
            blocks[i + 1].load_rows()
        block.out.put(block.sums, block.last)


def write_product(
    out: Any, chunks: list[Chunk], w: DecodeWeight, blocks: list[Span], loads: Loads
) -> None:
    """out[:, blocks] = chunks . w[:, blocks]: the launch's only output."""
    of_out: list[OutputBlock] = []
    for i in range(len(blocks)):
        first, last = i == 0, i + 1 == len(blocks)
        of_out.append(OutputBlock(out, chunks, w, None, blocks[i], first, last))
    write_blocks(of_out, loads)


def write_turned(
    out: Any,
    activations: list[Turned],
    w: DecodeWeight,
    bias: NkiTensor | None,
    blocks: list[Span],
    loads: Loads,
    first: bool = True,
    last: bool = True,
) -> None:
    """out[:, blocks] = activations . w[:, blocks] + bias.

    `loads` cuts the weights, shorter at the start of the `first` one with an output and at the end
    of the `last`.
    """
    passes = out.tiles(blocks)
    for i in range(len(passes)):
        sums = TurnedSums(w, passes[i], out.tokens)
        ends = last and i + 1 == len(passes)
        contract_turned(activations, sums, loads, first and i == 0, ends)
        out.put_turned(sums, bias)
