"""NeuronMM's pair of MLP kernels, and its X U V at any shape.

Source: github.com/dinghongsong/NeuronMM, commit f13583f, test_speedup.py: `fused_mlp_up_T`,
`fused_three_mm_XTUV` and their tables of blocks, which the number of tokens alone chooses. As in
the original, blocks that hang over an edge are multiplied whole, and partial sums are rounded to
the dtype of x in SBUF after every block. Its masked loads filled zeros; here a tile that hangs
over is set to zero before the real part is loaded. Left out: the memset of every tile that a load
fills whole, and of PSUM, which would only stall the modelled engines.

Letters: M tokens, K input features, r rank, N output features. Where the original has K for
tokens and M for its contraction, these names are translated.
"""

from __future__ import annotations

from typing import NamedTuple

from neuroncore import isa as nisa
from neuroncore import jit
from neuroncore import language as nl
from neuronmm_ops.estimate.baselines.tiles import (
    COLUMNS,
    NkiTensor,
    P,
    Tiles,
    add,
    load_tiles,
    load_transposed,
    multiply,
    zero_tiles,
)


class Blocks(NamedTuple):
    """Tiles in a block.

    Attributes:
        tiles_k: of the first contraction, 128 each.
        tiles_r: of the rank, 128 each.
        tiles_m: of the tokens, 512 each going up, 128 going down.
        tiles_n: of the outputs, 128 each going up, 512 going down.
    """

    tiles_k: int
    tiles_r: int
    tiles_m: int
    tiles_n: int


UP_DEFAULTS = Blocks(tiles_k=4, tiles_r=8, tiles_m=2, tiles_n=4)
"""Signature defaults going up, in blocks of 1024 tokens: the paper's traffic agrees with them."""
DOWN_DEFAULTS = Blocks(tiles_k=4, tiles_r=8, tiles_m=8, tiles_n=2)
"""Signature defaults going down."""


def up_blocks(tokens: int) -> Blocks:
    """The shipped table of the up and gate kernel (`get_fused_mlp_up_T_params`)."""
    if tokens < 128:
        return Blocks(1, 1, 1, 8)
    if tokens < 512 or tokens == 1024:
        return Blocks(8, 4, 1, 4)
    return Blocks(8, 4, 1, 16) if tokens == 512 else Blocks(8, 4, 2, 1)


def down_blocks(tokens: int) -> Blocks:
    """The shipped table of the down kernel (`get_fused_three_mm_XTUV_params`)."""
    if tokens < 256:
        return Blocks(8, 2, 1, 4)
    if tokens < 512:
        return Blocks(4, 2, 2, 4)
    if tokens < 1024:
        return Blocks(4, 4 if tokens == 512 else 2, 4, 4)
    return Blocks(4, 4, 8, 1) if tokens == 1024 else Blocks(4, 2, 8, 4)


@jit
def neuronmm_mlp_up(
    x: NkiTensor,
    u_gate: NkiTensor,
    v_gate: NkiTensor,
    u_up: NkiTensor,
    v_up: NkiTensor,
    blocks: Blocks,
) -> NkiTensor:
    """x [M, H], u [H, r] and v [r, I] twice -> (silu(x u_gate v_gate) * (x u_up v_up))^T [I, M]."""
    return _transposed_xuv(x, [u_gate, u_up], [v_gate, v_up], blocks)


@jit
def neuronmm_xuv(
    x: NkiTensor, u: NkiTensor, v: NkiTensor, blocks: Blocks = UP_DEFAULTS
) -> NkiTensor:
    """x [M, K], u [K, r], v [r, N] -> (x u v)^T [N, M]: the up kernel with one branch, no silu."""
    return _transposed_xuv(x, [u], [v], blocks)


def _transposed_xuv(x: NkiTensor, us: Tiles, vs: Tiles, blocks: Blocks) -> NkiTensor:
    """x [M, K], a u [K, r] and a v [r, N] for each branch -> [N, M]."""
    tiles_k, tiles_r, tiles_m, tiles_n = blocks
    M, N = x.shape[0], vs[0].shape[1]
    out_hbm = nl.ndarray((N, M), dtype=x.dtype, buffer=nl.shared_hbm)
    tile, tiles = _fitted(M, COLUMNS, tiles_m)
    block, depth = tile * tiles, tiles_r * P
    for m in range(_blocks(M, block)):
        xu_sb: list[Tiles] = []
        for u in us:
            xu_sb.append(zero_tiles(_blocks(u.shape[1], depth) * tiles_r, P, block, x.dtype))
        for k in range(_blocks(x.shape[1], tiles_k * P)):
            xt_sb = load_transposed(x, k * tiles_k * P, tiles_k, m * block, block)
            _add_to_ranks(xu_sb, us, xt_sb, k * tiles_k * P, tiles_r, tile, tiles)
        for n in range(_blocks(N, tiles_n * P)):
            sums_sb: list[Tiles] = []
            for _v in vs:
                sums_sb.append(zero_tiles(tiles_n, P, block, x.dtype))
            for b in range(len(xu_sb[0]) // tiles_r):
                v_sb: list[Tiles] = []
                ranks_sb: list[Tiles] = []
                for i in range(len(vs)):
                    column = n * tiles_n * P
                    v_sb.append(load_tiles(vs[i], b * depth, tiles_r, P, column, tiles_n * P))
                    ranks_sb.append(xu_sb[i][b * tiles_r : (b + 1) * tiles_r])
                _add_branches(sums_sb, 0, v_sb, ranks_sb, tile, tiles)
            for i in range(tiles_n):
                _store(out_hbm, _finished(sums_sb, i), (n * tiles_n + i) * P, m * block)
    return out_hbm


@jit
def neuronmm_mlp_down(xt: NkiTensor, u: NkiTensor, v: NkiTensor, blocks: Blocks) -> NkiTensor:
    """xt [I, M], u [I, r], v [r, H] -> (xt^T u v) [M, H], 128 tokens a matmul in both stages."""
    I, M = xt.shape  # noqa: E741
    N = v.shape[1]
    out_hbm = nl.ndarray((M, N), dtype=v.dtype, buffer=nl.shared_hbm)
    tiles_k, tiles_r, tiles_m, tiles_n = blocks
    rows, tiles_k = _fitted(I, P, tiles_k)
    tile, tiles = _fitted(M, P, tiles_m)
    columns, tiles_n = _fitted(N, COLUMNS, tiles_n)
    block, width, depth = tile * tiles, columns * tiles_n, tiles_r * P
    for m in range(_blocks(M, block)):
        xu_sb = zero_tiles(_blocks(u.shape[1], depth) * tiles_r, P, block, xt.dtype)
        for k in range(_blocks(I, rows * tiles_k)):
            row = k * rows * tiles_k
            xt_sb = load_tiles(xt, row, tiles_k, rows, m * block, block)
            _add_to_ranks([xu_sb], [u], xt_sb, row, tiles_r, tile, tiles)
        for n in range(_blocks(N, width)):
            sums_sb = zero_tiles(tiles, tile, width, xt.dtype)
            for b in range(len(xu_sb) // tiles_r):
                v_sb = load_tiles(v, b * depth, tiles_r, P, n * width, width)
                ranks_sb = xu_sb[b * tiles_r : (b + 1) * tiles_r]
                for t in range(tiles):
                    for c in range(tiles_n):
                        part_psum = multiply(ranks_sb, t * tile, tile, v_sb, c * columns, columns)
                        add(sums_sb[t][:, nl.ds(c * columns, columns)], part_psum)
            for t in range(tiles):
                _store(out_hbm, sums_sb[t], m * block + t * tile, n * width)
    return out_hbm


def _blocks(size: int, block: int) -> int:
    """How many blocks cover a size; the last may hang over."""
    return (size + block - 1) // block


def _fitted(size: int, tile: int, tiles: int) -> tuple[int, int]:
    """Tile size and tiles in a block: where the size is below a block, one tile, cut to it."""
    if size < tile * tiles:
        return min(size, tile), 1
    return tile, tiles


def _add_to_ranks(
    xu_sb: list[Tiles], us: Tiles, xt_sb: Tiles, row: int, tiles_r: int, tile: int, tiles: int
) -> None:
    """xu_sb[i] += (x u_i)^T for one block of the contraction, all ranks; x^T is shared."""
    moving_sb: list[Tiles] = []
    for _u in us:
        moving_sb.append(xt_sb)
    for b in range(len(xu_sb[0]) // tiles_r):
        u_sb: list[Tiles] = []
        for u in us:
            column, rows = b * tiles_r * P, xt_sb[0].shape[0]
            u_sb.append(load_tiles(u, row, len(xt_sb), rows, column, tiles_r * P))
        _add_branches(xu_sb, b * tiles_r, u_sb, moving_sb, tile, tiles)


def _add_branches(
    sums_sb: list[Tiles],
    first: int,
    weights_sb: list[Tiles],
    moving_sb: list[Tiles],
    tile: int,
    tiles: int,
) -> None:
    """sums_sb[i][first + c] += weights_sb[i][:, tile c].T @ moving_sb[i], branches in turn."""
    for t in range(tiles):
        tokens = nl.ds(t * tile, tile)
        for c in range(weights_sb[0][0].shape[1] // P):
            sums_psum: Tiles = []
            for _w in weights_sb:
                sums_psum.append(nl.ndarray((P, tile), dtype=nl.float32, buffer=nl.psum))
            for j in range(len(weights_sb[0])):
                for i in range(len(weights_sb)):
                    stationary_sb = weights_sb[i][j][:, nl.ds(c * P, P)]
                    nisa.nc_matmul(sums_psum[i], stationary_sb, moving_sb[i][j][:, tokens])
            for i in range(len(weights_sb)):
                add(sums_sb[i][first + c][:, tokens], sums_psum[i])


def _finished(sums_sb: list[Tiles], i: int) -> NkiTensor:
    """Tile i of the only branch, or silu of the first branch times the second."""
    if len(sums_sb) == 1:
        return sums_sb[0][i]
    product_sb = nl.ndarray(sums_sb[0][i].shape, dtype=sums_sb[0][i].dtype)
    nisa.activation(product_sb, nl.silu, sums_sb[0][i])
    nisa.tensor_tensor(product_sb, product_sb, sums_sb[1][i], nl.multiply)
    return product_sb


def _store(out_hbm: NkiTensor, tile_sb: NkiTensor, row: int, column: int) -> None:
    """Store what of a tile lies within the output."""
    rows = min(tile_sb.shape[0], out_hbm.shape[0] - row)
    columns = min(tile_sb.shape[1], out_hbm.shape[1] - column)
    if rows > 0:
        real_hbm = out_hbm[nl.ds(row, rows), nl.ds(column, columns)]
        nisa.dma_copy(real_hbm, tile_sb[0:rows, 0:columns])
