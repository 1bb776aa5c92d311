"""Attention with 128 queries on the partitions, their softmax over all the keys that they see."""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128
BANK = 512


def blocks(start, end, step=P):
    return [(i, min(step, end - i)) for i in range(start, end, step)]


def whole(x):
    tile = nl.ndarray(x.shape, dtype=x.dtype)
    nisa.dma_copy(tile, x)
    return tile


def masked(scores, q, rows, k, n, behind, causal):
    """Scores of queries q .. with keys k .., those out of sight at -3e4."""
    tile = scores[:, :n]
    if causal and k + n > q + 1:
        nisa.affine_select(tile, [[-1, n]], 1, tile, -3e4, cmp_op=nl.greater_equal, offset=q - k)
    if behind is not None and k < q + rows - behind:
        nisa.affine_select(
            tile, [[1, n]], -1, tile, -3e4, cmp_op=nl.greater_equal, offset=k - q + behind
        )


def attend(out, queries, keys, values, q, rows, seen, behind, causal):
    """out [rows, D]: softmax over the keys of `seen`, start and end."""
    D = queries.shape[0]
    start, end = seen
    scores = nl.ndarray((rows, end - start), dtype=nl.float32)
    for i, (k, n) in enumerate(blocks(start, end, BANK)):
        part = nl.ndarray((rows, n), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(part, queries[:, q : q + rows], keys[:, k : k + n])
        here = scores[:, k - start : k - start + n]
        if i % 2:
            nisa.activation(here, nl.copy, part)
        else:
            nisa.tensor_copy(here, part, engine=nisa.engine.vector)
        for j, m in blocks(k, k + n):
            masked(scores[:, j - start : j - start + m], q, rows, j, m, behind, causal)
    least, total = (nl.ndarray((rows, 1), dtype=nl.float32) for _ in range(2))
    scale = D**-0.5
    nisa.tensor_reduce(least, nl.maximum, scores, axis=1, negate=True)
    nisa.tensor_scalar(least, least, nl.multiply, scale)
    shares = nl.ndarray((rows, end - start), dtype=out.dtype)
    nisa.activation_reduce(
        shares, nl.exp, scores, reduce_op=nl.add, reduce_res=total, bias=least, scale=scale
    )
    nisa.reciprocal(total, total)
    sums = nl.ndarray((rows, D), dtype=nl.float32, buffer=nl.psum)
    for i, (k, n) in enumerate(blocks(start, end)):
        turned = nl.ndarray((n, rows), dtype=out.dtype, buffer=nl.psum)
        moved = nl.ndarray((n, rows), dtype=out.dtype)
        nisa.nc_transpose(turned, shares[:, k - start : k - start + n])
        if i % 2:
            nisa.activation(moved, nl.copy, turned)
        else:
            nisa.tensor_copy(moved, turned, engine=nisa.engine.vector)
        nisa.nc_matmul(sums, moved, values[:, k // P, :], accumulate=i > 0)
    y = nl.ndarray((rows, D), dtype=out.dtype)
    nisa.tensor_scalar(y, sums, nl.multiply, total)
    nisa.dma_copy(out[q : q + rows], y)


def heads(qt, kt, v, behind=None, causal=False, skips=True, reloads=False):
    """`skips` keys that no query of a block sees, or `reloads` keys for each block."""
    H, D, S = qt.shape
    T = kt.shape[2]
    out = nl.ndarray((H, S, D), dtype=qt.dtype, buffer=nl.shared_hbm)
    for h in range(H):
        queries = whole(qt[h])
        for q, rows in blocks(0, S):
            if q == 0 or reloads:
                keys = whole(kt[h])
                values = whole(v[h].reshape_dim(0, (T // P, P)).permute((1, 0, 2)))
            start = max(0, q - behind) // P * P if skips and behind is not None else 0
            end = q + rows if skips and causal else T
            attend(out[h], queries, keys, values, q, rows, (start, end), behind, causal)
    return out


@nki.jit
def attention(qt, kt, v):
    return heads(qt, kt, v)


@nki.jit
def attention_naive(qt, kt, v):
    return heads(qt, kt, v, reloads=True)


@nki.jit
def attention_causal(qt, kt, v):
    return heads(qt, kt, v, causal=True)


@nki.jit
def attention_causal_naive(qt, kt, v):
    return heads(qt, kt, v, causal=True, skips=False, reloads=True)


@nki.jit
def attention_causal_tiled(qt, kt, v):
    return heads(qt, kt, v, causal=True, skips=False)


@nki.jit
def attention_window(qt, kt, v):
    return heads(qt, kt, v, behind=255, causal=True)


@nki.jit
def attention_window_naive(qt, kt, v):
    return heads(qt, kt, v, behind=255, causal=True, skips=False)


@nki.jit
def attention_decode(qt, kt, v):
    return heads(qt, kt, v)
