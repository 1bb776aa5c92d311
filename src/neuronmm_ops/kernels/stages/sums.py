"""Sums of the decode kernels in PSUM, in PE column groups.

Sums of weights in one byte have yet to be multiplied by a scale a column. What is contracted next
is scaled where it is transposed: a column is a partition there, and it costs nothing. The others
are multiplied by a row of scales when they are evicted.
"""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.chunks import Chunk, KChunk, Stack, evict, itemsize
from neuronmm_ops.kernels.stages.decode_tiling import (
    SHUFFLED,
    GroupSpan,
    Loads,
    SumTiling,
    groups_in_store,
    lanes_of,
    matmul_columns,
    waited_bytes,
)
from neuronmm_ops.kernels.stages.facts import facts
from neuronmm_ops.kernels.stages.tiling import BANK_COLUMNS, PARTITIONS, Span, spans
from neuronmm_ops.kernels.stages.weights import DecodeWeight

SENT_BYTES = 96 * 1024
"""Sums of all column groups, with what lies between, up to which they are sent together.

A queue starts a DMA each 830 ns; so many bytes take 270 ns. Modelled on trn2, LNC 2, a layer of one
token: Qwen3-0.6B 76.3 to 67.5 us; all sums together would add 4.6 us to Llama-3.1-8B.
"""


class Product(nl.NKIObject):
    """What TensorE has yet to do with a weight tile.

    Args:
        sums: added to.
        stationary: [k, tiles, lanes] activations in SBUF.
        moving: [k, columns] of each K tile, in SBUF.
        columns: which of the sums.
        accumulate: the sums have begun.
        scale_sb: [k, columns of the sums], of `moving` where that is of int4, else None.
    """

    def __init__(
        self,
        sums: Sums,
        stationary: NkiTensor,
        moving: list[NkiTensor],
        columns: Span,
        accumulate: bool,
        scale_sb: NkiTensor | None,
    ) -> None:
        self.scale_sb: Any = scale_sb
        self.sums = sums
        self.stationary = stationary
        self.moving = moving
        self.columns = columns
        self.accumulate = accumulate

    def run(self) -> None:
        """Multiply the K tiles."""
        for j in range(len(self.moving)):
            accumulate = self.accumulate or j > 0
            moving_sb = self.moving[j]
            if not is_none(self.scale_sb):
                scale_sb = self.scale_sb[:, nl.ds(self.columns.start, self.columns.size)]
                moving_sb = self.sums.weight.halves.scaled(moving_sb, scale_sb)
            self.sums.add(self.stationary[:, j, :], moving_sb, self.columns, accumulate)


class Sums(nl.NKIObject):
    """Sums [M, columns] of activations times some columns of a weight, in PSUM.

    Args:
        weight: of N columns.
        columns: which of N.
        M: tokens.
        unit: the width of a PE column group is a multiple of it.
        last: the kernel ends with these sums: their matmuls are short.
        stacked: all column groups are read together, as sums that are scaled are.
    """

    def __init__(
        self,
        weight: DecodeWeight,
        columns: Span,
        M: int,
        unit: int = PARTITIONS,
        last: bool = False,
        stacked: bool = False,
    ) -> None:
        self.weight = weight
        self.columns = columns
        self.tokens = M
        step = BANK_COLUMNS if last else matmul_columns(M, facts().moving_max)
        self.tiling = SumTiling(columns.size, M, facts().pe_tile, unit, step)
        # sums that are scaled are evicted and transposed by all column groups together; the first
        # matmul writes zeros to the partitions next to the tokens
        self.stacked = stacked or not is_none(weight.scale)
        self.lanes = lanes_of(M, facts().pe_tile) if self.stacked else M
        self.parts = self.tiling.stacked_evictions() if self.stacked else self.tiling.evictions()
        self.partitions = self.tiling.partitions - M + self.lanes
        self.banks_psum: list[NkiTensor] = []
        for s in spans(0, self.tiling.width, step):
            shape = (self.partitions, s.size)
            self.banks_psum.append(nl.ndarray(shape, nl.float32, buffer=nl.psum))
        self.started = False
        # by this core, and from the other one
        self.sent_sb: list[NkiTensor] = []
        self.received_sb: list[NkiTensor] = []
        self.seen = 0  # K tiles
        # rows that the sums are multiplied with and added to when they are evicted, as loaded and
        # for every token
        self.loaded_sb: list[NkiTensor] = []
        self.rows_sb: list[NkiTensor] = []

    def psum(self, part: GroupSpan, lanes: int) -> NkiTensor:
        """[lanes, columns] of a part of the sums."""
        first, step = part.group * self.tiling.group_partitions, self.tiling.step
        bank_psum = self.banks_psum[part.start // step]
        return bank_psum[first : first + lanes, nl.ds(part.start % step, part.size)]

    def new_tile(self, dtype: nl.DType) -> NkiTensor:
        """A tile in SBUF for all sums, laid out as they are."""
        return nl.ndarray((self.partitions, self.tiling.width), dtype=dtype)

    def lanes_in(self, part: GroupSpan) -> int:
        """Partitions of a part."""
        return (part.count - 1) * self.tiling.group_partitions + self.lanes

    def like(self, tile_sb: NkiTensor, part: GroupSpan) -> NkiTensor:
        """[lanes, columns] of a part, in a tile of `new_tile`."""
        first = part.group * self.tiling.group_partitions
        return tile_sb[first : first + self.lanes_in(part), nl.ds(part.start, part.size)]

    def group(self, tile_sb: NkiTensor, i: int) -> NkiTensor:
        """[M, width] of a column group, in a tile of `new_tile`."""
        first = i * self.tiling.group_partitions
        return tile_sb[first : first + self.tokens, 0 : self.tiling.groups[i].size]

    def add(
        self, stationary_sb: NkiTensor, moving_sb: NkiTensor, columns: Span, accumulate: bool
    ) -> None:
        """sums[:, columns] (+)= stationary [k, lanes]^T . moving [k, columns]."""
        rows = self.tiling.group_partitions
        lanes = self.tokens if accumulate else self.lanes
        stationary_sb = stationary_sb[:, 0:lanes]
        for part in self.tiling.matmuls(columns):
            start = self.tiling.groups[part.group].start + part.start - columns.start
            moving = moving_sb[:, nl.ds(start, part.size)]
            if rows == PARTITIONS:
                nisa.nc_matmul(self.psum(part, lanes), stationary_sb, moving, accumulate=accumulate)
            else:
                nisa.nc_matmul(
                    self.psum(part, lanes),
                    stationary_sb,
                    moving,
                    accumulate=accumulate,
                    tile_position=(0, part.group * rows),
                    tile_size=(PARTITIONS, rows),
                )

    def add_bias(self, bias: NkiTensor) -> None:
        """sums = bias [N]: a matmul of ones [1, M] and the bias, which broadcasts it."""
        ones_sb = nl.ndarray((1, self.tokens), dtype=bias.dtype)
        nisa.memset(ones_sb, 1.0)
        row_sb = nl.ndarray((1, self.columns.size), dtype=bias.dtype)
        nisa.dma_copy(
            row_sb, bias[nl.ds(self.columns.start, self.columns.size)], dge_mode=nisa.dge_mode.none
        )
        self.add(ones_sb, row_sb, Span(0, self.columns.size), False)
        self.started = True

    def add_chunk(
        self,
        chunk: Chunk,
        loads: Loads,
        first: bool,
        last: bool,
        stage_ends: bool,
        later: list[Product],
    ) -> None:
        """Stream the weight rows of a K chunk as `loads` cuts them; `later` as `add_tile`."""
        row_bytes = self.columns.size * itemsize(self.weight.hbm.dtype)
        first = first and not self.stacked
        least = waited_bytes(facts().slow_short_runs) if stage_ends and self.stacked else 0
        per = 2 if self.weight.group > 0 else 1  # rows of a row in HBM
        for n in range(len(chunk.parts)):
            part = chunk.parts[n]
            tiles = part.tiles // per
            ends = last and n + 1 == len(chunk.parts)
            at = chunk.start + part.start
            rows_hbm = self.weight.hbm[nl.ds(at // per, part.rows * tiles), :]
            rows_hbm = rows_hbm.reshape_dim(0, (part.rows, tiles))
            scale_sb: NkiTensor | None = None
            if per > 1:
                scale_sb = self.weight.halves.scales_of(at, part, self.columns)
            cut = [Span(0, tiles)]
            if part.rows == PARTITIONS:
                cut = loads.tiles(tiles, row_bytes, first, ends, least)
            for s in cut:
                tile_hbm = rows_hbm[:, nl.ds(s.start, s.size), :]
                own = nl.ds(s.start * per, s.size * per)
                stationary_sb = chunk.transposed_sb[n][:, own, :]
                last_tile = ends and loads.ends and s.start + s.size == tiles
                self.add_tile(tile_hbm, stationary_sb, last_tile, later, scale_sb)

    def add_tile(
        self,
        tile_hbm: NkiTensor,
        stationary_sb: NkiTensor,
        last: bool,
        later: list[Product],
        scale_sb: NkiTensor | None = None,
    ) -> None:
        """Load a weight tile [k, tiles, N], the `last` in two halves, and multiply its K tiles.

        Where it is cast it is multiplied after the next one's casts: all that is `later`. The
        engines that cast also evict, and what they evict waits for TensorE. `scale_sb` [k, N] are
        the scales of int4, whose tile holds two K tiles in each of `tiles`.
        """
        tiles = tile_hbm.shape[1]
        by_dma = self.weight.cast_by_dma(self.seen, tiles)
        whole = [Span(0, self.columns.size)]
        for columns in self.tiling.halves(itemsize(self.weight.hbm.dtype)) if last else whole:
            own = Span(self.columns.start + columns.start, columns.size)
            moving = self.weight.loaded(tile_hbm, own, by_dma)
            product = Product(self, stationary_sb, moving, columns, self.started, scale_sb)
            if self.weight.casts:
                if len(later) > 0:
                    later[len(later) - 1].run()
                later.append(product)
            else:
                product.run()
        self.started = True
        self.seen += tiles

    def load_rows(self, bias: NkiTensor | None) -> None:
        """Load the scale of a weight in one byte, and a bias [N] with it, for the evictions."""
        scale = self.weight.scale
        if not is_none(scale):
            self.load_row(scale)
        if not is_none(bias):
            self.load_row(bias)

    def load_row(self, row_hbm: NkiTensor) -> None:
        """Load a number for each column, laid out as the sums are, for the first of 32 tokens."""
        loaded_sb = self.new_tile(row_hbm.dtype)
        # what lies between the rows is read, too
        nisa.memset(loaded_sb, 0.0, engine=nisa.gpsimd_engine)
        for i in range(len(self.tiling.groups)):
            s = self.tiling.groups[i]
            columns_hbm = row_hbm[nl.ds(self.columns.start + s.start, s.size)].expand_dim(0)
            group_sb = self.group(loaded_sb, i)
            for tokens in spans(0, self.tokens, SHUFFLED):
                first_sb = group_sb[tokens.start : tokens.start + 1, :]
                nisa.dma_copy(first_sb, columns_hbm, dge_mode=nisa.dge_mode.none)
        self.loaded_sb.append(loaded_sb)

    def spread_rows(self) -> None:
        """Copy the rows to the other tokens: VectorE does, after what it has to transpose."""
        for loaded_sb in self.loaded_sb:
            if self.tokens == 1:
                self.rows_sb.append(loaded_sb)
                continue
            tile_sb = self.new_tile(loaded_sb.dtype)
            for stack in self.tiling.stacks():
                first_sb = self.like(loaded_sb, stack)
                nisa.nc_stream_shuffle(self.like(tile_sb, stack), first_sb, [0] * SHUFFLED)
            self.rows_sb.append(tile_sb)

    def evict(self, to_sb: NkiTensor, part: GroupSpan, number: int) -> None:
        """Take a part of the sums to SBUF, times the scale and plus the bias that are loaded."""
        lanes = to_sb.shape[0]
        if len(self.rows_sb) == 0:
            evict(to_sb, self.psum(part, lanes), number)
            return
        scale_sb = self.like(self.rows_sb[0], part)[0:lanes, :]
        if len(self.rows_sb) == 1:
            nisa.tensor_tensor(to_sb, self.psum(part, lanes), scale_sb, nl.multiply)
            return
        scaled_sb = self.like(self.new_tile(nl.float32), part)[0:lanes, :]
        nisa.tensor_tensor(scaled_sb, self.psum(part, lanes), scale_sb, nl.multiply)
        bias_sb = self.like(self.rows_sb[1], part)[0:lanes, :]
        nisa.tensor_tensor(to_sb, scaled_sb, bias_sb, nl.add)

    def rounded(self, dtype: nl.DType) -> NkiTensor:
        """The sums in SBUF."""
        tile_sb = self.new_tile(dtype)
        for i in range(len(self.parts)):
            part = self.parts[i]
            self.evict(self.like(tile_sb, part), part, i)
        return tile_sb

    def send(self) -> None:
        """Send the sums to the other core, and receive its, in fp32."""
        sent_sb = self.new_tile(nl.float32)
        received_sb = self.new_tile(nl.float32)
        # what lies between the groups is sent, too, where that is little
        together = self.stacked or self.partitions * self.tiling.width * 4 <= SENT_BYTES
        if together and not self.stacked:
            nisa.memset(sent_sb, 0.0, engine=nisa.gpsimd_engine)
        for i in range(len(self.parts)):
            part = self.parts[i]
            if self.started:
                evict(self.like(sent_sb, part), self.psum(part, self.lanes_in(part)), i)
            else:  # this core has no part of the contraction
                nisa.memset(self.like(sent_sb, part), 0.0)
        other = 1 - nl.program_id(0)
        if together:
            for stack in self.tiling.stacks():
                sent, received = self.like(sent_sb, stack), self.like(received_sb, stack)
                nisa.sendrecv(sent, received, other, other, 0)
        else:
            for i in range(len(self.tiling.groups)):
                nisa.sendrecv(self.group(sent_sb, i), self.group(received_sb, i), other, other, 0)
        self.sent_sb.append(sent_sb)
        self.received_sb.append(received_sb)

    def of_both_cores(self, dtype: nl.DType) -> NkiTensor:
        """What was sent and what was received, added."""
        tile_sb = self.new_tile(dtype)
        for part in self.parts:
            mine = self.like(self.sent_sb[0], part)
            if self.started:
                mine = self.psum(part, self.lanes_in(part))
            received = self.like(self.received_sb[0], part)
            nisa.tensor_tensor(self.like(tile_sb, part), received, mine, nl.add)
        return tile_sb

    def chunks(self, tile_sb: NkiTensor) -> list[Chunk]:
        """What is in a tile of `new_tile`, as K chunks of a contraction over these columns."""
        chunks: list[Chunk] = []
        dtype, scale = self.weight.dtype, self.weight.scale
        stack: Stack | None = None
        for i in range(len(self.tiling.groups)):
            start, number = self.columns.start + self.tiling.groups[i].start, 0
            for s in self.tiling.stacks():
                if not is_none(scale) and i == s.group:
                    sums_sb, tokens = self.like(tile_sb, s), self.tokens
                    stack = Stack(start, sums_sb, s.count, self.lanes, tokens, dtype, scale)
                if i >= s.group:
                    number = i - s.group
            group_sb = self.group(tile_sb, i)
            rows = self.weight.group  # the next weight's, which has the same storage
            chunk = KChunk(start, group_sb, True, 0, dtype, None, self.lanes, stack, number, rows)
            chunks.append(chunk)
        return chunks

    def store(self, to_hbm: NkiTensor, first: int, tile_sb: NkiTensor) -> None:
        """Store a tile of `new_tile`; column 0 of `to_hbm` is column `first` of the weight.

        That of one token goes by one DMA: a queue starts one after the other.
        """
        if self.tokens == 1 and len(self.tiling.groups) > 1:
            row_sb = nl.ndarray((1, self.columns.size), dtype=tile_sb.dtype)
            for i in range(len(self.tiling.groups)):
                s = self.tiling.groups[i]
                evict(row_sb[:, nl.ds(s.start, s.size)], self.group(tile_sb, i), i)
            own = nl.ds(self.columns.start - first, self.columns.size)
            nisa.dma_copy(to_hbm[:, own], row_sb, dge_mode=nisa.dge_mode.none)
            return
        for i in range(len(self.tiling.groups)):
            s = self.tiling.groups[i]
            columns = nl.ds(self.columns.start - first + s.start, s.size)
            nisa.dma_copy(to_hbm[:, columns], self.group(tile_sb, i), dge_mode=nisa.dge_mode.none)

    def store_at_once(self, to_hbm: NkiTensor) -> None:
        """Store the sums by fewer DMAs, of which a queue starts one after the other.

        Fewer DMA engines carry them, too, which loads that follow would feel, but for one token.
        """
        per = groups_in_store(len(self.tiling.groups), self.tokens, self.stacked)
        stores = spans(0, self.columns.size, per * self.tiling.width)
        tiles_sb: list[NkiTensor] = []
        for i in range(len(stores)):
            first = i * per * self.tiling.group_partitions
            tile_sb = nl.ndarray((first + self.tokens, stores[i].size), dtype=to_hbm.dtype)
            tiles_sb.append(tile_sb[first : first + self.tokens, :])
        parts = self.tiling.evictions()
        for i in range(len(parts)):
            part = parts[i]
            own = nl.ds(part.group % per * self.tiling.width + part.start, part.size)
            self.evict(tiles_sb[part.group // per][:, own], part, i)
        for i in range(len(stores)):
            columns = nl.ds(self.columns.start + stores[i].start, stores[i].size)
            nisa.dma_copy(to_hbm[:, columns], tiles_sb[i], dge_mode=nisa.dge_mode.none)
