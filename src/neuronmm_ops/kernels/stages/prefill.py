"""Stages of the prefill kernels: a block of tokens stays in SBUF while weights stream past it.

Every sum is held in PSUM (fp32) over its whole contraction. Tiles are loaded where they are first
used, each into SBUF of its own, so that they are fetched ahead as far as there is room.
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
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    PARTITIONS,
    SETTLED_MATMULS,
    TAIL_TILES,
    Group,
    Span,
    core_span,
    looped_tokens,
    natural_groups,
    spans,
    transposed_groups,
)


class TokenBlocks(nl.NKIObject):
    """This core's tokens, a block at a time: each runs a kernel's stages on rows of x and out.

    Args:
        stages: an object whose `run(out_hbm, x_hbm, tokens)` computes rows `tokens` of out from
            those of x, and whose `prepare(rows)` loads what stays in SBUF.
        out_hbm: [M, N].
        x_hbm: [M, K].
        size: tokens of a block.
        beside_hbm: [M, columns] whose rows `run` takes after those of x, or None.
    """

    def __init__(
        self,
        stages: Any,
        out_hbm: NkiTensor,
        x_hbm: NkiTensor,
        size: int,
        beside_hbm: NkiTensor | None = None,
    ) -> None:
        self.stages = stages
        self.out_hbm = out_hbm
        self.x_hbm = x_hbm
        self.size = size
        self.beside_hbm: Any = beside_hbm

    def run(self, device_loop: bool) -> None:
        """Run all blocks; with `device_loop` those of full size are a loop on the device."""
        own = core_span(self.x_hbm.shape[0], nl.program_id(0), nl.num_programs(0))
        looped = looped_tokens(own.size, self.size) if device_loop else 0
        if looped > 0:
            self.stages.prepare(min(PARTITIONS, self.size))  # not in the loop

            def block(first: Any) -> None:  # a method is no body for NKI's parser
                self.block_at(first)

            nl.fori_loop(own.start, own.start + looped, block, step=self.size)
        for tokens in spans(own.start + looped, own.size - looped, self.size):
            if is_none(self.beside_hbm):
                self.stages.run(self.out_hbm, self.x_hbm, tokens)
            else:
                self.stages.run(self.out_hbm, self.x_hbm, tokens, self.beside_hbm)

    def block_at(self, first: Any) -> None:
        """The body of the loop on the device: the block from token `first`, a register, on."""
        out_hbm, tokens = self.rows_at(self.out_hbm, first), Span(0, self.size)
        x_hbm = self.rows_at(self.x_hbm, first)
        if is_none(self.beside_hbm):
            self.stages.run(out_hbm, x_hbm, tokens)
        else:
            self.stages.run(out_hbm, x_hbm, tokens, self.rows_at(self.beside_hbm, first))

    def rows_at(self, source_hbm: NkiTensor, first: Any) -> NkiTensor:
        """The block's rows of a tensor [M, columns]."""
        columns = source_hbm.shape[1]
        pattern = [[columns, self.size], [1, columns]]
        return source_hbm.ap(pattern, scalar_offset=first, indirect_dim=0)


def accumulate(
    stationary: Any, moving: Any, group: Group, tail: int = 1, between: Any = None
) -> list[Tiles]:
    """PSUM tiles stationary[:, group.rows].T @ moving[:, group.columns], fp32, row by row.

    All PSUM tiles take a tile of the contraction before any takes the next, except for the last
    `tail`: these, one PSUM tile takes after the other, which spreads the evictions. `between` is
    an object to `settle` at the end, and before if its data are there by then.
    """
    rows = spans(group.rows.start, group.rows.size, PARTITIONS)
    columns = spans(group.columns.start, group.columns.size, BANK_COLUMNS)
    sums_psum: list[Tiles] = []
    for i in rows:
        row_psum: Tiles = []
        for j in columns:
            row_psum.append(nl.ndarray((i.size, j.size), dtype=nl.float32, buffer=nl.psum))
        sums_psum.append(row_psum)
    parts = contraction_parts(stationary.count, tail)
    for n in range(len(parts)):
        part = parts[n]
        stationary_sb: Tiles = []
        moving_sb: Tiles = []
        for k in range(part.start, part.start + part.size):
            stationary_sb.append(stationary.tile(k))
            moving_sb.append(moving.tile(k))
        for i in range(len(rows)):
            for j in range(len(columns)):
                for k in range(part.size):
                    a, b, adds = stationary_sb[k], moving_sb[k], part.start + k > 0
                    left = nl.ds(rows[i].start, rows[i].size)
                    right = nl.ds(columns[j].start, columns[j].size)
                    if len(a.shape) == 3:
                        nisa.nc_matmul(
                            sums_psum[i][j],
                            a[:, :, left],
                            b[:, :, right],
                            accumulate=adds,
                            perf_mode=nisa.matmul_perf_mode.double_row,
                        )
                    else:
                        nisa.nc_matmul(sums_psum[i][j], a[:, left], b[:, right], accumulate=adds)
        done = n * len(rows) * len(columns)
        if not is_none(between) and (n + 1 == len(parts) or done >= SETTLED_MATMULS):
            between.settle()
    return sums_psum


def keep_scales(weights: list[Weight], rows: int) -> None:
    """Load the scales that stay in SBUF: those of the last weight as a row on `rows` partitions."""
    for i in range(len(weights)):
        weights[i].keep(rows if i + 1 == len(weights) else 0)


def contraction_parts(count: int, tail: int) -> list[Span]:
    """Tiles of a contraction, one by one but the last `tail`."""
    parts = spans(0, max(0, count - tail), 1)
    parts.append(Span(max(0, count - tail), min(tail, count)))
    return parts


def evict_row(
    dst_sb: NkiTensor, row_psum: Tiles, number: int, engines: int, scale_sb: Any = None
) -> None:
    """dst [<=128, columns] = PSUM tiles of 512 columns side by side, times [<=128, 1], if any."""
    for j in range(len(row_psum)):
        own = nl.ds(j * BANK_COLUMNS, row_psum[j].shape[1])
        evict(dst_sb[:, own], row_psum[j], number + j, engines, scale_sb)


def add_row(dst_sb: NkiTensor, before_sb: NkiTensor, row_psum: Tiles, scale_sb: Any = None) -> None:
    """dst = before + PSUM tiles of 512 columns side by side, on VectorE; these times the scale."""
    for j in range(len(row_psum)):
        own = nl.ds(j * BANK_COLUMNS, row_psum[j].shape[1])
        dst, before = dst_sb[:, own], before_sb[:, own]
        if is_none(scale_sb):
            nisa.tensor_tensor(dst, before, row_psum[j], nl.add)
        else:
            nisa.scalar_tensor_tensor(dst, row_psum[j], nl.multiply, scale_sb, nl.add, before)


def scale_row(dst_sb: NkiTensor, row_psum: Tiles, scale_sb: NkiTensor, bias_sb: Any) -> None:
    """dst = PSUM tiles of 512 columns side by side * scale + bias, on VectorE, in fp32."""
    for j in range(len(row_psum)):
        own = nl.ds(j * BANK_COLUMNS, row_psum[j].shape[1])
        if is_none(bias_sb):
            nisa.tensor_tensor(dst_sb[:, own], row_psum[j], scale_sb[:, own], nl.multiply)
        else:
            scaled_sb = nl.ndarray(row_psum[j].shape, dtype=nl.float32)
            nisa.tensor_tensor(scaled_sb, row_psum[j], scale_sb[:, own], nl.multiply)
            nisa.tensor_tensor(dst_sb[:, own], scaled_sb, bias_sb[:, own], nl.add)


def new_tiles(size: int, width: int, dtype: nl.DType) -> Tiles:
    """SBUF tiles of 128 rows each, [size, width] together."""
    tiles: Tiles = []
    for t in spans(0, size, PARTITIONS):
        tiles.append(nl.ndarray((t.size, width), dtype=dtype))
    return tiles


def project(
    x: Any,
    w: Weight,
    block: int,
    tokens: int,
    banks: int,
    engines: int,
    k_block: int = 0,
    bf16_partial_sums: bool = False,
) -> TiledOperand:
    """(x @ w)^T [N, width] in SBUF, of x's dtype: w stationary, x moving.

    Args:
        x: [K, width], a TiledOperand or an object with its methods.
        w: [K, N].
        block: columns of w that are loaded together.
        tokens: columns of x that one group of PSUM tiles covers.
        banks: PSUM tiles in a group.
        engines: that evict.
        k_block: rows of the contraction that a pass over all columns covers; 0 for all. Partial
            sums of several passes are kept in SBUF.
        bf16_partial_sums: partial sums are rounded to x's dtype, instead of fp32.
    """
    K, N = w.size, w.width
    passes = spans(0, K, k_block if k_block > 0 else K)
    result_sb: Tiles = []
    for n in range(len(passes)):
        x_parts: list[Any] = []
        before_sb = result_sb
        last = n + 1 == len(passes)
        if n == 0 or (last and not bf16_partial_sums):
            exact = not last and not bf16_partial_sums
            result_sb = new_tiles(N, x.width, nl.float32 if exact else w.dtype)
        for b in spans(0, N, block):
            w_block = w.block(passes[n], b)
            for group in transposed_groups(b.size, x.width, tokens, banks):
                own = nl.ds(group.columns.start, group.columns.size)
                at = group.columns.start // tokens
                if at == len(x_parts):
                    x_parts.append(x.part(passes[n], group.columns))
                if x.split:  # the tokens of the group are all that the part has
                    group = Group(group.rows, Span(0, group.columns.size))
                sums_psum = accumulate(w_block, x_parts[at], group)
                for i in range(len(sums_psum)):
                    tile = (b.start + group.rows.start) // PARTITIONS + i
                    dst_sb, scale_sb = result_sb[tile][:, own], w.column_scale(tile)
                    if n == 0:
                        evict_row(dst_sb, sums_psum[i], i * len(sums_psum[i]), engines, scale_sb)
                    else:
                        add_row(dst_sb, before_sb[tile][:, own], sums_psum[i], scale_sb)
    return in_sbuf(result_sb, N)


def write_rows(
    out_hbm: NkiTensor,
    x: Any,
    w: Weight,
    bias_hbm: NkiTensor | None,
    start: int,
    block: int,
    token_tiles: int,
    banks: int,
    engines: int,
) -> None:
    """out[start : start + width] = x.T @ w + bias: x stationary, w moving.

    Args:
        out_hbm: [M, N].
        x: [K, width], a TiledOperand or an object with its methods.
        w: [K, N].
        bias_hbm: [N] or None.
        start: first token in out.
        block: columns of w that are loaded, and of out that are stored, together.
        token_tiles: of 128, that one group of PSUM tiles covers.
        banks: PSUM tiles in a group.
        engines: that evict.
    """
    K, N = w.size, w.width
    tail = TAIL_TILES if w.scaled else 1  # VectorE alone evicts
    mode = nisa.dge_mode.none
    if out_hbm.is_indirect():  # in a loop of the device
        mode = nisa.dge_mode.unknown
    for b in spans(0, N, block):
        w_block = w.block(Span(0, K), b)
        partitions = min(PARTITIONS, x.width)
        bias_sb = load_row(bias_hbm, b, partitions) if not is_none(bias_hbm) else None
        scale_sb = w.row_scale(b, partitions)
        results_sb: Tiles = []
        for group in natural_groups(x.width, b.size, token_tiles, banks):
            if group.columns.start == 0:
                results_sb = new_tiles(group.rows.size, b.size, out_hbm.dtype)
            sums_psum = accumulate(x, w_block, group, tail)
            for i in range(len(sums_psum)):
                own = nl.ds(group.columns.start, group.columns.size)
                dst_sb, rows = results_sb[i][:, own], results_sb[i].shape[0]
                own_bias_sb: Any = bias_sb[:rows, own] if not is_none(bias_sb) else None
                if not is_none(scale_sb):
                    scale_row(dst_sb, sums_psum[i], scale_sb[:rows, own], own_bias_sb)
                elif not is_none(bias_sb):
                    add_row(dst_sb, own_bias_sb, sums_psum[i])
                else:
                    evict_row(dst_sb, sums_psum[i], i * len(sums_psum[i]), engines)
            if group.columns.start + group.columns.size == b.size:
                tokens = spans(start + group.rows.start, group.rows.size, PARTITIONS)
                for i in range(len(tokens)):
                    rows = nl.ds(tokens[i].start, tokens[i].size)
                    own_hbm = out_hbm[rows, nl.ds(b.start, b.size)]
                    nisa.dma_copy(own_hbm, results_sb[i], dge_mode=mode)
