"""Products of fp8 with fp8, two rows of the contraction a partition (`double_row`).

Activations are rounded to fp8 token by token: each is multiplied by s = 2^floor(log2(1 / rms)) of
its token's vector. A power of two changes no mantissa, so that intermediates stay multiplied by the
scales of all roundings before them (`Rounded.total_sb`); only an activation function, and the
output, need their true size.

Tokens go through a stage `DOUBLED_TOKENS` at a time: some are rounded while others are multiplied.
"""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.operands import (
    TiledOperand,
    Tiles,
    Weight,
    evict,
    in_sbuf,
    load_row,
)
from neuronmm_ops.kernels.stages.prefill import accumulate, new_tiles
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    DOUBLED_BANKS,
    DOUBLED_TOKENS,
    PARTITIONS,
    ROUNDED_AHEAD,
    SQUARES_OF_LOW,
    SQUARES_OF_X,
    TAIL_TILES,
    Group,
    Span,
    natural_groups,
    spans,
    tiles_in,
    unit_tiles,
    units_in,
)

LEAST_MEAN_SQUARE = 2.0**-100
"""A token of less is scaled by 2^50: it is zero, or so near to it that no scale is meant."""
EXPONENT = 0x7F800000
"""The exponent's bits of fp32: what is left of a positive number is a power of two."""


class Rounding(nl.NKIObject):
    """What waits to be rounded, in the order in which it is needed, and constants.

    Args:
        dtype: of the rounded activations: that of weights in fp8.
    """

    def __init__(self, dtype: nl.DType) -> None:
        self.dtype = dtype
        self.waiting: list[Any] = []
        self.ones_sb = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.bfloat16)
        nisa.memset(self.ones_sb, 1.0)

    def settle(self) -> None:
        """Go on with what waits; called after each group of products, which hides it."""
        while len(self.waiting) > 0 and self.waiting[0].done():
            self.waiting = self.waiting[1:]
        if len(self.waiting) > 0:
            self.waiting[0].go_on()


class Rounded(nl.NKIObject):
    """Activations of some tokens [size, width], rounded to fp8 once all features are there.

    Args:
        shared: what is common to all.
        source: the activations, tile by tile in SBUF: a TiledOperand or an object with its methods.
        before: the activations that these were made of, whose scales are still on them, or None.
        assisted: GpSimdE rounds them, too: with 1 every other unit, with 2 all.
        squares: tiles of squares that it adds up before TensorE does.
    """

    def __init__(
        self, shared: Rounding, source: Any, before: Any, assisted: int, squares: int
    ) -> None:
        self.shared = shared
        self.source = source
        self.before: Any = before
        self.assisted = assisted
        self.squares = squares
        self.size = source.size
        self.width = source.width
        self.count = units_in(source.size)
        self.squares_sb: Tiles = []
        self.scale_psum: Tiles = []
        self.scale_sb: Tiles = []
        self.total_sb: Tiles = []
        self.rounded_sb: Tiles = []

    def add(self, k: int, tile_sb: NkiTensor) -> None:
        """Tile k of the source is complete: take its squares; with the last one it can be rounded.

        They are added up in bfloat16 over few tiles, then in fp32: an error of the sum moves a
        scale by a factor of 2 at most, and what e4m3 keeps of normal numbers not at all.
        """
        square_sb = nl.ndarray(tile_sb.shape, dtype=nl.bfloat16)
        mean = 1.0 / self.size
        nisa.tensor_scalar(square_sb, tile_sb, nl.square, None, op1=nl.multiply, operand1=mean)
        if k % self.squares == 0:
            self.squares_sb.append(square_sb)
        else:
            sum_sb = self.squares_sb[k // self.squares][: tile_sb.shape[0], :]
            nisa.tensor_tensor(sum_sb, sum_sb, square_sb, nl.add, engine=nisa.engine.gpsimd)
        if k + 1 == tiles_in(self.size, PARTITIONS):
            self.shared.waiting.append(self)

    def load(self) -> None:
        """Take the squares of all tiles of a source that comes from HBM."""
        for k in range(self.source.count):
            self.add(k, self.source.tile(k))

    def finish(self) -> None:
        """Round all of it now."""
        self.tile(self.count - 1)

    def done(self) -> bool:
        """Whether all is rounded."""
        return len(self.rounded_sb) == self.count

    def go_on(self) -> None:
        """Find the scales, or round some more units."""
        if len(self.scale_psum) == 0:
            self.find_scales()
        else:
            for _ in range(min(ROUNDED_AHEAD, self.count - len(self.rounded_sb))):
                self.round()

    def find_scales(self) -> None:
        """The scale of each token, on all partitions, and the product with those before."""
        scale_psum = nl.ndarray((PARTITIONS, self.width), dtype=nl.float32, buffer=nl.psum)
        for n in range(len(self.squares_sb)):
            square_sb = self.squares_sb[n]
            ones_sb = self.shared.ones_sb[: square_sb.shape[0], :]
            nisa.nc_matmul(scale_psum, ones_sb, square_sb, accumulate=n > 0)
        nisa.tensor_scalar(
            scale_psum, scale_psum, nl.maximum, LEAST_MEAN_SQUARE, op1=nl.power, operand1=-0.5
        )
        bits = scale_psum.view(nl.int32)
        nisa.tensor_scalar(bits, bits, nl.bitwise_and, EXPONENT)
        self.scale_psum.append(scale_psum)
        if self.assisted > 0:
            self.scale_sb.append(nl.ndarray(scale_psum.shape, dtype=nl.bfloat16))
            nisa.tensor_copy(self.scale_sb[0], scale_psum)
        self.round()
        total_sb = nl.ndarray(scale_psum.shape, dtype=nl.bfloat16)
        if is_none(self.before):
            nisa.tensor_copy(total_sb, scale_psum)
        else:
            nisa.tensor_tensor(total_sb, scale_psum, self.before.total_sb[0], nl.multiply)
        self.total_sb.append(total_sb)

    def round(self) -> None:
        """Round the next unit."""
        unit = len(self.rounded_sb)
        tiles = unit_tiles(self.size, unit)
        rows = min(PARTITIONS, self.size - tiles.start * PARTITIONS)
        shape = (rows, self.width) if tiles.size == 1 else (rows, tiles.size, self.width)
        rounded_sb = nl.ndarray(shape, dtype=self.shared.dtype)
        for n in range(tiles.size):
            dst_sb = rounded_sb if tiles.size == 1 else rounded_sb[:, n, :]
            source_sb = self.source.tile(tiles.start + n)
            if self.assisted > 0 and (self.assisted == 2 or unit % 2 == 1):
                scale_sb = self.scale_sb[0][:rows, :]
                gpsimd = nisa.engine.gpsimd
                nisa.tensor_tensor(dst_sb, source_sb, scale_sb, nl.multiply, engine=gpsimd)
            else:
                nisa.tensor_tensor(dst_sb, source_sb, self.scale_psum[0][:rows, :], nl.multiply)
        self.rounded_sb.append(rounded_sb)

    def tile(self, unit: int) -> NkiTensor:
        """A unit of the contraction, [128, 2, width] or [<=128, width]."""
        while len(self.rounded_sb) <= unit:
            self.go_on()
        return self.rounded_sb[unit]

    def inverse(self) -> NkiTensor:
        """What makes products of these as large as they are, [128, width]."""
        inverse_sb = nl.ndarray(self.total_sb[0].shape, dtype=nl.bfloat16)
        nisa.tensor_scalar(inverse_sb, self.total_sb[0], nl.power, -1.0)
        return inverse_sb

    def inverse_columns(self) -> NkiTensor:
        """The same with tokens on partitions, [128, tiles of tokens]."""
        tokens = spans(0, self.width, PARTITIONS)
        columns_psum = nl.ndarray((PARTITIONS, len(tokens)), dtype=nl.float32, buffer=nl.psum)
        columns_sb = nl.ndarray((PARTITIONS, len(tokens)), dtype=nl.float32)
        for n in range(len(tokens)):
            t = tokens[n]
            total_sb = self.total_sb[0][:1, nl.ds(t.start, t.size)]
            column_psum = columns_psum[: t.size, nl.ds(n, 1)]
            nisa.nc_matmul(column_psum, total_sb, self.shared.ones_sb[:1, nl.ds(0, 1)])
            nisa.tensor_scalar(columns_sb[: t.size, nl.ds(n, 1)], column_psum, nl.power, -1.0)
        return columns_sb


def rounded_rows(shared: Rounding, x_hbm: NkiTensor, t: Span, layout: str) -> list[Rounded]:
    """Rows `t` of x [M, K] as [K, tokens], some tokens each."""
    K = x_hbm.shape[1]
    # in a loop of the device GpSimdE makes the loads' descriptors, and must not wait for them
    squares = 1 if x_hbm.is_indirect() else SQUARES_OF_X
    rows: list[Rounded] = []
    for own in spans(t.start, t.size, DOUBLED_TOKENS):
        source = TiledOperand(x_hbm, Span(0, K), own, tiles_in(K, PARTITIONS), layout)
        rows.append(Rounded(shared, source, None, 0, squares))
    rows[0].load()
    return rows


def load_next(xs: list[Rounded], c: int) -> None:
    """Round x's tokens `c`, then load those after them, which are rounded between products."""
    xs[c].finish()
    if c + 1 < len(xs):
        xs[c + 1].load()


def project_rounded(
    shared: Rounding, xs: list[Rounded], w: Weight, block: int, dtype: nl.DType, loads: bool
) -> list[Rounded]:
    """(x @ w)^T [N, tokens] of all tokens, each multiplied by the scales on it.

    Args:
        shared: what is common to all.
        xs: [K, tokens], some tokens each.
        w: [K, N].
        block: columns of w that are loaded together.
        dtype: of the result before it is rounded.
        loads: x comes from HBM and is used for the first time.
    """
    products: list[Rounded] = []
    for x in xs:
        source = in_sbuf(new_tiles(w.width, x.width, dtype), w.width)
        products.append(Rounded(shared, source, x, 0, SQUARES_OF_LOW))
    for b in spans(0, w.width, block):
        w_block = w.paired(b)
        for c in range(len(xs)):
            if loads and b.start == 0:
                load_next(xs, c)
            for rows in spans(0, b.size, DOUBLED_BANKS * PARTITIONS):
                group = Group(rows, Span(0, xs[c].width))
                sums_psum = accumulate(w_block, xs[c], group, 1, shared)
                for i in range(len(sums_psum)):
                    k = (b.start + rows.start) // PARTITIONS + i
                    tile_sb = products[c].source.tile(k)
                    evict(tile_sb, sums_psum[i][0], 0, 1, w.column_scale(k))
                    products[c].add(k, tile_sb)
    return products


def write_rounded(
    shared: Rounding,
    out_hbm: NkiTensor,
    xs: list[Rounded],
    w: Weight,
    bias_hbm: NkiTensor | None,
    start: int,
    block: int,
    token_tiles: int,
    loads: bool,
) -> None:
    """out[start :] = x.T @ w + bias: x stationary, w moving.

    Args:
        shared: what is common to all.
        out_hbm: [M, N].
        xs: [K, tokens], some tokens each.
        w: [K, N].
        bias_hbm: [N] or None.
        start: first token in out.
        block: columns of w that are loaded, and of out that are stored, together.
        token_tiles: of 128, that one group of PSUM tiles covers: 1, 2 or 4.
        loads: x comes from HBM and is used for the first time.
    """
    mode = nisa.dge_mode.none
    if out_hbm.is_indirect():  # in a loop of the device
        mode = nisa.dge_mode.unknown
    columns_sb: Tiles = []
    partitions = min(PARTITIONS, xs[0].width)
    for b in spans(0, w.width, block):
        w_block = w.paired(b)
        bias_sb = load_row(bias_hbm, b, partitions) if not is_none(bias_hbm) else None
        scale_sb = w.row_scale(b, partitions)
        for c in range(len(xs)):
            if loads and b.start == 0:
                load_next(xs, c)
            results_sb: Tiles = []
            for group in natural_groups(xs[c].width, b.size, token_tiles, DOUBLED_BANKS):
                if group.columns.start == 0:
                    results_sb = new_tiles(group.rows.size, b.size, out_hbm.dtype)
                sums_psum = accumulate(xs[c], w_block, group, TAIL_TILES, shared)
                if c == len(columns_sb):
                    columns_sb.append(xs[c].inverse_columns())
                for i in range(len(sums_psum)):
                    rows = results_sb[i].shape[0]
                    column = nl.ds(group.rows.start // PARTITIONS + i, 1)
                    for j in range(len(sums_psum[i])):
                        size = sums_psum[i][j].shape[1]
                        own = nl.ds(group.columns.start + j * BANK_COLUMNS, size)
                        own_bias_sb = bias_sb[:rows, own] if not is_none(bias_sb) else None
                        unscale(
                            results_sb[i][:, own],
                            sums_psum[i][j],
                            scale_sb[:rows, own],
                            columns_sb[c][:rows, column],
                            own_bias_sb,
                        )
                if group.columns.start + group.columns.size == b.size:
                    first = start + c * DOUBLED_TOKENS + group.rows.start
                    tokens = spans(first, group.rows.size, PARTITIONS)
                    for i in range(len(tokens)):
                        rows = nl.ds(tokens[i].start, tokens[i].size)
                        own_hbm = out_hbm[rows, nl.ds(b.start, b.size)]
                        nisa.dma_copy(own_hbm, results_sb[i], dge_mode=mode)


def unscale(
    dst_sb: NkiTensor, sum_psum: NkiTensor, scale_sb: NkiTensor, column_sb: NkiTensor, bias_sb: Any
) -> None:
    """dst = sum * scale [tokens, columns] * column [tokens, 1] + bias, in fp32 until dst."""
    scaled_sb = nl.ndarray(sum_psum.shape, dtype=nl.float32)
    nisa.tensor_tensor(scaled_sb, sum_psum, scale_sb, nl.multiply)
    if is_none(bias_sb):
        nisa.activation(dst_sb, nl.copy, scaled_sb, scale=column_sb)
    else:
        nisa.scalar_tensor_tensor(dst_sb, scaled_sb, nl.multiply, column_sb, nl.add, bias_sb)
