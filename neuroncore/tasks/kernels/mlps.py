"""Chains of matmuls with the tokens last, so that a product is the next one's moving operand."""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128
BANK = 512


def blocks(size, step=P):
    return [(i, min(step, size - i)) for i in range(0, size, step)]


def loaded(w):
    """[K, N] as tiles of 128 rows."""
    tiles = []
    for k, depth in blocks(w.shape[0]):
        tile = nl.ndarray((depth, w.shape[1]), dtype=w.dtype)
        nisa.dma_copy(tile, w[k : k + depth])
        tiles.append(tile)
    return tiles


def turned(x, m, tokens):
    """Rows of x as tiles [128 features, tokens]."""
    tiles = []
    for k, depth in blocks(x.shape[1]):
        tile = nl.ndarray((depth, tokens), dtype=x.dtype)
        for t, rows in blocks(tokens):
            nisa.dma_transpose(tile[:, t : t + rows], x[m + t : m + t + rows, k : k + depth])
        tiles.append(tile)
    return tiles


def evict(dst, src, turn):
    if turn % 2:
        nisa.activation(dst, nl.copy, src)
    else:
        nisa.tensor_copy(dst, src, engine=nisa.engine.vector)


def project(w, xt, function=None, gate=None):
    """(x w)^T as tiles; with `function`, that of it, and with `gate` times those tiles."""
    tokens = xt[0].shape[1]
    tiles = []
    for i, (n, columns) in enumerate(blocks(w[0].shape[1])):
        sums = nl.ndarray((columns, tokens), dtype=nl.float32, buffer=nl.psum)
        for k in range(len(w)):
            nisa.nc_matmul(sums, w[k][:, n : n + columns], xt[k], accumulate=k > 0)
        tile = nl.ndarray((columns, tokens), dtype=xt[0].dtype)
        if function is not None:
            nisa.activation(tile, function, sums)
        elif gate is not None:
            nisa.tensor_tensor(tile, sums, gate[i], nl.multiply)
        else:
            evict(tile, sums, i)
        tiles.append(tile)
    return tiles


def stored(out, m, xt, w):
    """out[m ..] = x w, the tokens on the partitions."""
    for t, rows in blocks(xt[0].shape[1]):
        N = w[0].shape[1]
        y = nl.ndarray((rows, N), dtype=out.dtype)
        for i, (n, columns) in enumerate(blocks(N, BANK)):
            sums = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.psum)
            for k in range(len(w)):
                nisa.nc_matmul(
                    sums, xt[k][:, t : t + rows], w[k][:, n : n + columns], accumulate=k > 0
                )
            evict(y[:, n : n + columns], sums, i)
        nisa.dma_copy(out[m + t : m + t + rows], y)


def low_rank_blocks(x, u, v, tokens, reloads):
    out = nl.ndarray((x.shape[0], v.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    for m, rows in blocks(x.shape[0], tokens):
        if reloads or m == 0:
            us, vs = loaded(u), loaded(v)
        stored(out, m, project(us, turned(x, m, rows)), vs)
    return out


@nki.jit
def low_rank(x, u, v):
    return low_rank_blocks(x, u, v, BANK, False)


@nki.jit
def low_rank_naive(x, u, v):
    return low_rank_blocks(x, u, v, P, True)


@nki.jit
def low_rank_tiled(x, u, v):
    return low_rank_blocks(x, u, v, P, False)


def mlp_blocks(x, wg, wu, wd, tokens, reloads):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for m, rows in blocks(x.shape[0], tokens):
        if reloads or m == 0:
            gates, ups, downs = loaded(wg), loaded(wu), loaded(wd)
        xt = turned(x, m, rows)
        gate = project(gates, xt, nl.silu)
        stored(out, m, project(ups, xt, gate=gate), downs)
    return out


@nki.jit
def mlp(x, wg, wu, wd):
    return mlp_blocks(x, wg, wu, wd, BANK, False)


@nki.jit
def mlp_naive(x, wg, wu, wd):
    return mlp_blocks(x, wg, wu, wd, P, True)


@nki.jit
def mlp_tiled(x, wg, wu, wd):
    return mlp_blocks(x, wg, wu, wd, P, False)


def low_rank_mlp_blocks(x, gu, gv, uu, uv, du, dv, tokens, reloads):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for m, rows in blocks(x.shape[0], tokens):
        if reloads or m == 0:
            weights = [loaded(w) for w in (gu, gv, uu, uv, du, dv)]
        xt = turned(x, m, rows)
        gate = project(weights[1], project(weights[0], xt), nl.silu)
        hidden = project(weights[3], project(weights[2], xt), gate=gate)
        stored(out, m, project(weights[4], hidden), weights[5])
    return out


@nki.jit
def low_rank_mlp(x, gu, gv, uu, uv, du, dv):
    return low_rank_mlp_blocks(x, gu, gv, uu, uv, du, dv, BANK, False)


@nki.jit
def low_rank_mlp_naive(x, gu, gv, uu, uv, du, dv):
    return low_rank_mlp_blocks(x, gu, gv, uu, uv, du, dv, P, True)
