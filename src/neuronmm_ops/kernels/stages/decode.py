"""Stages of the decode kernels: tokens are stationary and every weight byte streams past them once.

A weight tile is the moving operand and x^T the stationary one, so that sums come out as tokens
[M, columns] and are transposed by TensorE where they are contracted next. Up to 64 tokens fill a
part of the PE columns only: two or four *column groups* then take different weight columns at the
same time, which keeps TensorE ahead of the DMA engines.
"""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.chunks import KChunk, Stack, evict, generation, itemsize
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    OUTPUT_UNIT,
    PARTITIONS,
    SHUFFLED,
    GroupSpan,
    Span,
    SumTiling,
    cast_shares,
    core_span,
    groups_in_store,
    lanes_of,
    matmul_columns,
    spans,
    waited_bytes,
    weight_tiles,
)


def own(size: int) -> Span:
    """This core's range of a dimension."""
    return core_span(size, nl.program_id(0), nl.num_programs(0))


class Weight(nl.NKIObject):
    """A weight in HBM.

    Args:
        hbm: [K, N], of the dtype of the activations, or of one byte: float8_e4m3fn (legacy
            float8_e4m3, whose bits are the same up to 240, before gen4) or int8.
        dtype: of the activations.
        scale: fp32 [N], a factor of each column of a weight in one byte, else None.
    """

    def __init__(self, hbm: NkiTensor, dtype: nl.DType, scale: NkiTensor | None) -> None:
        columns = hbm.shape[1]
        if scale == None:  # noqa: E711 - strict NKI has no `is`
            assert hbm.dtype == dtype, (
                f"a weight without a scale must have the dtype of x, {dtype}; got {hbm.dtype}"
            )
        else:
            assert itemsize(hbm.dtype) == 1, f"a scale is for one-byte weights, got {hbm.dtype}"
            assert scale.shape[0] == columns, f"scale must be [{columns}], got [{scale.shape[0]}]"
        if hbm.dtype == nl.float8_e4m3fn and generation() < 4:
            hbm = hbm.view(nl.float8_e4m3)
        self.hbm = hbm
        self.dtype = dtype
        self.scale = scale
        # TensorE takes fp8 beside 16-bit activations; what else differs is cast on the way there
        self.casts = hbm.dtype != dtype and (dtype == nl.float32 or hbm.dtype == nl.int8)


def plain(tensors: list[NkiTensor]) -> list[Weight]:
    """Weights of the dtype of the activations."""
    found: list[Weight] = []
    for tensor in tensors:
        found.append(Weight(tensor, tensor.dtype, None))
    return found


def lanes_for(weights: list[Weight], M: int) -> int:
    """Columns of the transposes of what is multiplied by weights; as `KChunk`."""
    return lanes_of(M, generation()) if weights[0].scale != None else 0  # noqa: E711


class Product(nl.NKIObject):
    """What TensorE has yet to do with a weight tile.

    Args:
        sums: added to.
        stationary: [k, tiles, lanes] activations in SBUF.
        moving: [k, columns] of each K tile, in SBUF.
        columns: which of the sums.
        accumulate: the sums have begun.
    """

    def __init__(
        self,
        sums: Sums,
        stationary: NkiTensor,
        moving: list[NkiTensor],
        columns: Span,
        accumulate: bool,
    ) -> None:
        self.sums = sums
        self.stationary = stationary
        self.moving = moving
        self.columns = columns
        self.accumulate = accumulate

    def run(self) -> None:
        """Multiply the K tiles."""
        for j in range(len(self.moving)):
            accumulate = self.accumulate or j > 0
            self.sums.add(self.stationary[:, j, :], self.moving[j], self.columns, accumulate)


class Sums(nl.NKIObject):
    """Sums [M, columns] of activations times some columns of a weight, in PSUM.

    Args:
        weight: of N columns.
        columns: which of N.
        M: tokens.
        unit: the width of a PE column group is a multiple of it.
        last: the kernel ends with these sums: their matmuls are short.
    """

    def __init__(
        self,
        weight: Weight,
        columns: Span,
        M: int,
        unit: int = PARTITIONS,
        last: bool = False,
    ) -> None:
        self.weight = weight
        self.columns = columns
        self.tokens = M
        step = BANK_COLUMNS if last else matmul_columns(M, generation())
        self.tiling = SumTiling(columns.size, M, generation(), unit, step)
        # sums that are scaled are evicted and transposed by all column groups together; the first
        # matmul writes zeros to the partitions beside the tokens
        self.stacked = weight.scale != None  # noqa: E711 - strict NKI has no `is`
        self.lanes = lanes_of(M, generation()) if self.stacked else M
        self.parts = self.tiling.stacked_evictions() if self.stacked else self.tiling.evictions()
        self.partitions = self.tiling.partitions - M + self.lanes
        self.banks_psum: list[NkiTensor] = []
        for s in spans(0, self.tiling.width, step):
            shape = (self.partitions, s.size)
            self.banks_psum.append(nl.ndarray(shape, nl.float32, buffer=nl.psum))
        self.started = False
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
        chunk: KChunk,
        tile_bytes: int,
        first: bool,
        last: bool,
        stage_ends: bool,
        later: list[Product],
    ) -> None:
        """Stream the weight rows of a K chunk in tiles of `weight_tiles`; `later` as `add_tile`."""
        tiles = chunk.size // PARTITIONS
        whole = tiles * PARTITIONS
        ends = last and whole == chunk.size
        if tiles > 0:
            rows_hbm = self.weight.hbm[nl.ds(chunk.start, whole), :]
            rows_hbm = rows_hbm.reshape_dim(0, (PARTITIONS, tiles))
            row_bytes = self.columns.size * itemsize(self.weight.hbm.dtype)
            first = first and not self.stacked
            least = waited_bytes(generation()) if stage_ends and self.stacked else 0
            for s in weight_tiles(tiles, row_bytes, tile_bytes, first, ends, least):
                tile_hbm = rows_hbm[:, nl.ds(s.start, s.size), :]
                stationary_sb = chunk.transposed_sb[0][:, nl.ds(s.start, s.size), :]
                last_tile = ends and s.start + s.size == tiles
                self.add_tile(tile_hbm, stationary_sb, last_tile, later)
        if whole < chunk.size:
            rest = nl.ds(chunk.start + whole, chunk.size - whole)
            stationary_sb = chunk.transposed_sb[len(chunk.transposed_sb) - 1]
            rest_hbm = self.weight.hbm[rest, :].expand_dim(1)
            self.add_tile(rest_hbm, stationary_sb, last, later)

    def add_tile(
        self, tile_hbm: NkiTensor, stationary_sb: NkiTensor, last: bool, later: list[Product]
    ) -> None:
        """Load a weight tile [k, tiles, N], the `last` in two halves, and multiply its K tiles.

        Where it is cast it is multiplied after the next one's casts: all that is `later`. The
        engines that cast also evict, and what they evict waits for TensorE.
        """
        k, tiles, _ = tile_hbm.shape
        dtype = self.weight.hbm.dtype
        whole = [Span(0, self.columns.size)]
        for columns in self.tiling.halves(itemsize(dtype)) if last else whole:
            tile_sb = nl.ndarray((k, tiles, columns.size), dtype=dtype)
            start = self.columns.start + columns.start
            nisa.dma_copy(
                tile_sb, tile_hbm[:, :, nl.ds(start, columns.size)], dge_mode=nisa.dge_mode.none
            )
            moving: list[NkiTensor] = []
            for j in range(tiles):
                moving_sb = tile_sb[:, j, :]
                moving.append(
                    cast(moving_sb, self.weight.dtype) if self.weight.casts else moving_sb
                )
            product = Product(self, stationary_sb, moving, columns, self.started)
            if self.weight.casts:
                if len(later) > 0:
                    later[len(later) - 1].run()
                later.append(product)
            else:
                product.run()
        self.started = True

    def load_rows(self, bias: NkiTensor | None) -> None:
        """Load the scale of a weight in one byte, and a bias [N] with it, for the evictions."""
        scale = self.weight.scale
        if scale != None:  # noqa: E711 - strict NKI has no `is`
            self.load_row(scale)
        if bias != None:  # noqa: E711
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

    def exchanged(self, dtype: nl.DType) -> NkiTensor:
        """The sums of both cores together, in SBUF: fp32 until they are added."""
        sent_sb = self.new_tile(nl.float32)
        received_sb = self.new_tile(nl.float32)
        for i in range(len(self.parts)):
            part = self.parts[i]
            if self.started:
                evict(self.like(sent_sb, part), self.psum(part, self.lanes_in(part)), i)
            else:  # this core has no part of the contraction
                nisa.memset(self.like(sent_sb, part), 0.0)
        other = 1 - nl.program_id(0)
        if self.stacked:
            for stack in self.tiling.stacks():
                sent, received = self.like(sent_sb, stack), self.like(received_sb, stack)
                nisa.sendrecv(sent, received, other, other, 0)
        else:
            for i in range(len(self.tiling.groups)):
                nisa.sendrecv(self.group(sent_sb, i), self.group(received_sb, i), other, other, 0)
        tile_sb = self.new_tile(dtype)
        for part in self.parts:
            mine = (
                self.psum(part, self.lanes_in(part)) if self.started else self.like(sent_sb, part)
            )
            received = self.like(received_sb, part)
            nisa.tensor_tensor(self.like(tile_sb, part), received, mine, nl.add)
        return tile_sb

    def chunks(self, tile_sb: NkiTensor) -> list[KChunk]:
        """What is in a tile of `new_tile`, as K chunks of a contraction over these columns."""
        found: list[KChunk] = []
        dtype, scale = self.weight.dtype, self.weight.scale
        stack: Stack | None = None
        for i in range(len(self.tiling.groups)):
            start, number = self.columns.start + self.tiling.groups[i].start, 0
            for s in self.tiling.stacks():
                if scale != None and i == s.group:  # noqa: E711 - strict NKI has no `is`
                    sums_sb, tokens = self.like(tile_sb, s), self.tokens
                    stack = Stack(start, sums_sb, s.count, self.lanes, tokens, dtype, scale)
                if i >= s.group:
                    number = i - s.group
            group_sb = self.group(tile_sb, i)
            chunk = KChunk(start, group_sb, True, 0, dtype, None, self.lanes, stack, number)
            found.append(chunk)
        return found

    def store(self, to_hbm: NkiTensor, first: int, tile_sb: NkiTensor) -> None:
        """Store a tile of `new_tile`; column 0 of `to_hbm` is column `first` of the weight."""
        for i in range(len(self.tiling.groups)):
            s = self.tiling.groups[i]
            columns = nl.ds(self.columns.start - first + s.start, s.size)
            nisa.dma_copy(to_hbm[:, columns], self.group(tile_sb, i), dge_mode=nisa.dge_mode.none)

    def store_last(self, to_hbm: NkiTensor) -> None:
        """Store the sums by fewer DMAs, of which a queue starts one after the other.

        Fewer DMA engines carry them, too, which loads that follow would feel.
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


def cast(tile_sb: NkiTensor, dtype: nl.DType) -> NkiTensor:
    """A weight tile [k, columns] in another dtype: the engines that read SBUF share the columns."""
    cast_sb = nl.ndarray(tile_sb.shape, dtype=dtype)
    shares = cast_shares(tile_sb.shape[1], generation())
    for i in range(len(shares)):
        columns = nl.ds(shares[i].start, shares[i].size)
        if i == 0:
            nisa.activation(cast_sb[:, columns], nl.copy, tile_sb[:, columns])
        elif i == 1:
            nisa.tensor_copy(cast_sb[:, columns], tile_sb[:, columns], engine=nisa.gpsimd_engine)
        else:
            nisa.tensor_copy(cast_sb[:, columns], tile_sb[:, columns], engine=nisa.vector_engine)
    return cast_sb


def contract(
    chunks: list[KChunk],
    sums: list[Sums],
    tile_bytes: int,
    first: bool,
    last: bool,
    waited: bool = False,
) -> None:
    """Add all K chunks to all sums; each is transposed while the one before it is multiplied.

    Weight tiles have `tile_bytes` a partition; the `first` and the `last` of all have fewer, and
    those of the last chunk, if the next stage has `waited` for their weights of one byte only.
    """
    if len(chunks) > 0:
        chunks[0].transpose()
    later: list[Product] = []
    for i in range(len(chunks)):
        if i + 1 < len(chunks):
            chunks[i + 1].transpose()
        ends = i + 1 == len(chunks)
        for s in sums:
            if ends:
                s.spread_rows()
            edges = first and i == 0, last and ends, waited and ends
            s.add_chunk(chunks[i], tile_bytes, edges[0], edges[1], edges[2], later)
    if len(later) > 0:
        later[len(later) - 1].run()


def project(
    chunks: list[KChunk],
    weights: list[Weight],
    rank_block: int,
    fuse: bool,
    tile_bytes: int,
    M: int,
) -> list[list[KChunk]]:
    """For each weight [K, r] the product of the K chunks and it, over both cores, as K chunks of r.

    `rank_block` columns of a weight are summed in a pass over the K chunks. `fuse`: there is one
    pass for all weights.
    """
    found: list[list[KChunk]] = []
    if fuse:
        sums: list[Sums] = []
        for w in weights:
            sums.append(Sums(w, Span(0, w.hbm.shape[1]), M))
        contract(chunks, sums, tile_bytes, True, False)
        for s in sums:
            found.append(s.chunks(of_both_cores(s)))
        return found
    for w in weights:
        of_weight: list[KChunk] = []
        for columns in spans(0, w.hbm.shape[1], rank_block):
            s = Sums(w, columns, M)
            contract(again(chunks), [s], tile_bytes, True, False, True)
            of_weight.extend(s.chunks(of_both_cores(s)))
        found.append(of_weight)
    return found


def again(chunks: list[KChunk]) -> list[KChunk]:
    """The same K chunks, not transposed."""
    found: list[KChunk] = []
    for chunk in chunks:
        found.append(chunk.again())
    return found


def of_both_cores(sums: Sums) -> NkiTensor:
    """The sums of both cores where two run, rounded unless they have yet to be scaled."""
    dtype = sums.weight.dtype if sums.weight.scale == None else nl.float32  # noqa: E711
    if nl.num_programs(0) == 1:
        return sums.rounded(dtype)
    return sums.exchanged(dtype)


def write_block(
    out_hbm: NkiTensor,
    chunks: list[KChunk],
    w: Weight,
    bias: NkiTensor | None,
    columns: Span,
    tile_bytes: int,
    first: bool,
    last: bool,
) -> None:
    """out[:, columns] = chunks . w[:, columns] + bias; is it the `first` block, or the `last`?

    The last weight tiles are small, so that little is left to do when the last byte has come.
    """
    sums = Sums(w, columns, out_hbm.shape[0], OUTPUT_UNIT, last)
    if w.scale != None:  # noqa: E711 - strict NKI has no `is`
        sums.load_rows(bias)
    elif bias != None:  # noqa: E711
        sums.add_bias(bias)
    contract(chunks, [sums], tile_bytes, first, last)
    if last:
        sums.store_last(out_hbm)
    else:
        sums.store(out_hbm, 0, sums.rounded(out_hbm.dtype))
