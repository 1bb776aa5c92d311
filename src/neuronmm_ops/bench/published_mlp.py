"""NeuronMM's pair of MLP kernels, and its X U V at any shape, rewritten to be measured.

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

from neuronmm_ops.neuroncore import isa as nisa
from neuronmm_ops.neuroncore import jit
from neuronmm_ops.neuroncore import language as nl
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor

Tiles = list[NkiTensor]
P = 128
COLUMNS = 512


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
"""Signature defaults going up: strips of 1024 tokens, with which the paper's plots agree."""
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
    tiles_k: int,
    tiles_r: int,
    tiles_m: int,
    tiles_n: int,
) -> NkiTensor:
    """x [M, H], u [H, r] and v [r, I] twice -> (silu(x u_gate v_gate) * (x u_up v_up))^T [I, M]."""
    us, vs = [u_gate, u_up], [v_gate, v_up]
    return _transposed_xuv(x, us, vs, tiles_k, tiles_r, tiles_m, tiles_n)


@jit
def neuronmm_xuv(
    x: NkiTensor,
    u: NkiTensor,
    v: NkiTensor,
    tiles_k: int = 4,
    tiles_r: int = 8,
    tiles_m: int = 2,
    tiles_n: int = 4,
) -> NkiTensor:
    """x [M, K], u [K, r], v [r, N] -> (x u v)^T [N, M]: the up kernel with one branch, no silu."""
    return _transposed_xuv(x, [u], [v], tiles_k, tiles_r, tiles_m, tiles_n)


def _transposed_xuv(
    x: NkiTensor,
    us: Tiles,
    vs: Tiles,
    tiles_k: int,
    tiles_r: int,
    tiles_m: int,
    tiles_n: int,
) -> NkiTensor:
    """x [M, K], a u [K, r] and v [r, N] for each branch -> [N, M]."""
    M, N = x.shape[0], vs[0].shape[1]
    out = nl.ndarray((N, M), dtype=x.dtype, buffer=nl.shared_hbm)
    tile, tiles = _fitted(M, COLUMNS, tiles_m)
    strip = tile * tiles
    for m in range(_blocks(M, strip)):
        moving: list[Tiles] = []
        for u in us:
            moving.append(_zero_tiles(_blocks(u.shape[1], tiles_r * P) * tiles_r, P, strip, x))
        for k in range(_blocks(x.shape[1], tiles_k * P)):
            xt = _load_transposed(x, k * tiles_k * P, tiles_k, m * strip, strip)
            _add_to_rank_strip(moving, us, xt, k * tiles_k * P, tiles_r, tile, tiles)
        for n in range(_blocks(N, tiles_n * P)):
            sums: list[Tiles] = []
            for _v in vs:
                sums.append(_zero_tiles(tiles_n, P, strip, x))
            for b in range(len(moving[0]) // tiles_r):
                weights: list[Tiles] = []
                ranks: list[Tiles] = []
                for i in range(len(vs)):
                    row, column = b * tiles_r * P, n * tiles_n * P
                    weights.append(_load_tiles(vs[i], row, tiles_r, P, column, tiles_n * P))
                    ranks.append(moving[i][b * tiles_r : (b + 1) * tiles_r])
                _add_block(sums, 0, weights, ranks, tile, tiles)
            for i in range(tiles_n):
                row = (n * tiles_n + i) * P
                _store(out, _finished(sums, i), row, m * strip)
    return out


def _finished(sums: list[Tiles], i: int) -> NkiTensor:
    """Tile i of the only branch, or silu of the first branch times the second."""
    if len(sums) == 1:
        return sums[0][i]
    product = nl.ndarray(sums[0][i].shape, dtype=sums[0][i].dtype)
    nisa.activation(product, nl.silu, sums[0][i])
    nisa.tensor_tensor(product, product, sums[1][i], nl.multiply)
    return product


@jit
def neuronmm_mlp_down(
    xt: NkiTensor,
    u: NkiTensor,
    v: NkiTensor,
    tiles_k: int,
    tiles_r: int,
    tiles_m: int,
    tiles_n: int,
) -> NkiTensor:
    """xt [I, M], u [I, r], v [r, H] -> (xt^T u v) [M, H], 128 tokens a matmul in both stages."""
    I, M = xt.shape  # noqa: E741
    N = v.shape[1]
    out = nl.ndarray((M, N), dtype=v.dtype, buffer=nl.shared_hbm)
    depth, deep = _fitted(I, P, tiles_k)
    tile, tiles = _fitted(M, P, tiles_m)
    width, wide = _fitted(N, COLUMNS, tiles_n)
    strip = tile * tiles
    for m in range(_blocks(M, strip)):
        xu = _zero_tiles(_blocks(u.shape[1], tiles_r * P) * tiles_r, P, strip, xt)
        for k in range(_blocks(I, depth * deep)):
            row = k * depth * deep
            moving = _load_tiles(xt, row, deep, depth, m * strip, strip)
            _add_to_rank_strip([xu], [u], moving, row, tiles_r, tile, tiles)
        for n in range(_blocks(N, width * wide)):
            sums = _zero_tiles(tiles, tile, width * wide, xt)
            for b in range(len(xu) // tiles_r):
                column = n * width * wide
                vb = _load_tiles(v, b * tiles_r * P, tiles_r, P, column, width * wide)
                _add_rows(sums, xu[b * tiles_r : (b + 1) * tiles_r], vb, tile, width)
            for i in range(tiles):
                _store(out, sums[i], m * strip + i * tile, n * width * wide)
    return out


# --- blocks


def _blocks(size: int, block: int) -> int:
    """How many blocks cover a size; the last may hang over."""
    return (size + block - 1) // block


def _fitted(size: int, tile: int, tiles: int) -> tuple[int, int]:
    """Tile size and tiles in a block: where the size is below a block, one tile, cut to it."""
    if size < tile * tiles:
        return min(size, tile), 1
    return tile, tiles


def _zero_tiles(count: int, rows: int, columns: int, like: NkiTensor) -> Tiles:
    """`count` tiles [rows, columns] of zeros."""
    tiles: Tiles = []
    for _i in range(count):
        tile = nl.ndarray((rows, columns), dtype=like.dtype)
        nisa.memset(tile, 0.0)
        tiles.append(tile)
    return tiles


def _load_tiles(
    source: NkiTensor, row: int, count: int, rows: int, column: int, columns: int
) -> Tiles:
    """`count` tiles [rows, columns] below each other, zero outside the source."""
    tiles: Tiles = []
    real_columns = min(columns, source.shape[1] - column)
    for i in range(count):
        first = row + i * rows
        real_rows = min(rows, source.shape[0] - first)
        tile = nl.ndarray((rows, columns), dtype=source.dtype)
        if real_rows < rows or real_columns < columns:
            nisa.memset(tile, 0.0)
        if real_rows > 0:
            real = source[nl.ds(first, real_rows), nl.ds(column, real_columns)]
            nisa.dma_copy(tile[0:real_rows, 0:real_columns], real)
        tiles.append(tile)
    return tiles


def _load_transposed(x: NkiTensor, feature: int, count: int, token: int, tokens: int) -> Tiles:
    """x [M, K] as `count` tiles [128 features, tokens], zero outside x."""
    tiles: Tiles = []
    real_tokens = min(tokens, x.shape[0] - token)
    for i in range(count):
        first = feature + i * P
        real = min(P, x.shape[1] - first)
        tile = nl.ndarray((P, tokens), dtype=x.dtype)
        if real < P or real_tokens < tokens:
            nisa.memset(tile, 0.0)
        if real > 0:
            block = x[nl.ds(token, real_tokens), nl.ds(first, real)]
            nisa.dma_transpose(tile[0:real, 0:real_tokens], block)
        tiles.append(tile)
    return tiles


def _store(out: NkiTensor, tile: NkiTensor, row: int, column: int) -> None:
    """Store what of a tile lies within the output."""
    rows = min(tile.shape[0], out.shape[0] - row)
    columns = min(tile.shape[1], out.shape[1] - column)
    if rows > 0:
        nisa.dma_copy(out[nl.ds(row, rows), nl.ds(column, columns)], tile[0:rows, 0:columns])


# --- products


def _add_to_rank_strip(
    strips: list[Tiles], us: Tiles, xt: Tiles, row: int, tiles_r: int, tile: int, tiles: int
) -> None:
    """strips[i] += (x u_i)^T for one block of the contraction, all ranks; xt is shared."""
    shared: list[Tiles] = []
    for _u in us:
        shared.append(xt)
    for b in range(len(strips[0]) // tiles_r):
        weights: list[Tiles] = []
        for u in us:
            column = b * tiles_r * P
            weights.append(_load_tiles(u, row, len(xt), xt[0].shape[0], column, tiles_r * P))
        _add_block(strips, b * tiles_r, weights, shared, tile, tiles)


def _add_block(
    sums: list[Tiles],
    first: int,
    weights: list[Tiles],
    moving: list[Tiles],
    tile: int,
    tiles: int,
) -> None:
    """sums[i][first + c] += weights[i][:, tile c].T @ moving[i], branches in turn."""
    for t in range(tiles):
        tokens = nl.ds(t * tile, tile)
        for c in range(weights[0][0].shape[1] // P):
            accs: Tiles = []
            for _w in weights:
                accs.append(nl.ndarray((P, tile), dtype=nl.float32, buffer=nl.psum))
            for j in range(len(weights[0])):
                for i in range(len(weights)):
                    stationary = weights[i][j][:, c * P : (c + 1) * P]
                    nisa.nc_matmul(accs[i], stationary, moving[i][j][:, tokens])
            for i in range(len(weights)):
                total = sums[i][first + c][:, tokens]
                nisa.tensor_tensor(total, total, accs[i], nl.add)


def _add_rows(sums: Tiles, xu: Tiles, v: Tiles, tile: int, width: int) -> None:
    """sums[t] [tokens, outputs] += xu[:, tokens of t].T @ v, `width` outputs a matmul."""
    for t in range(len(sums)):
        for c in range(sums[t].shape[1] // width):
            outputs = nl.ds(c * width, width)
            acc = nl.ndarray((tile, width), dtype=nl.float32, buffer=nl.psum)
            for j in range(len(xu)):
                nisa.nc_matmul(acc, xu[j][:, nl.ds(t * tile, tile)], v[j][:, outputs])
            total = sums[t][:, outputs]
            nisa.tensor_tensor(total, total, acc, nl.add)
