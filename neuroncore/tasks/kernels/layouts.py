"""Layouts, gathers and windows."""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128


def blocks(size, step=P):
    return [(i, min(step, size - i)) for i in range(0, size, step)]


@nki.jit
def transpose(x):
    """TensorE turns tiles of 128 x 128; whole rows go out."""
    M, N = x.shape
    out = nl.ndarray((N, M), dtype=x.dtype, buffer=nl.shared_hbm)
    rows_in = []
    for m, rows in blocks(M):
        tile = nl.ndarray((rows, N), dtype=x.dtype)
        nisa.dma_copy(tile, x[m : m + rows])
        rows_in.append(tile)
    for n, columns in blocks(N):
        y = nl.ndarray((columns, M), dtype=x.dtype)
        for i, (m, rows) in enumerate(blocks(M)):
            turned = nl.ndarray((columns, rows), dtype=x.dtype, buffer=nl.psum)
            nisa.nc_transpose(turned, rows_in[i][:, n : n + columns])
            if i % 2:
                nisa.activation(y[:, m : m + rows], nl.copy, turned)
            else:
                nisa.tensor_copy(y[:, m : m + rows], turned, engine=nisa.engine.vector)
        nisa.dma_copy(out[n : n + columns], y)
    return out


@nki.jit
def transpose_naive(x):
    """The DMA reads columns: a run of one element."""
    M, N = x.shape
    out = nl.ndarray((N, M), dtype=x.dtype, buffer=nl.shared_hbm)
    for n, columns in blocks(N):
        tile = nl.ndarray((columns, M), dtype=x.dtype)
        nisa.dma_copy(tile, x[:, n : n + columns].permute((1, 0)))
        nisa.dma_copy(out[n : n + columns], tile)
    return out


@nki.jit
def permute(x):
    """From HBM to HBM."""
    A, B, C = x.shape
    out = nl.ndarray((B, A, C), dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, x.permute((1, 0, 2)))
    return out


@nki.jit
def permute_naive(x):
    """Through SBUF, one A at a time."""
    A, B, C = x.shape
    out = nl.ndarray((B, A, C), dtype=x.dtype, buffer=nl.shared_hbm)
    for a in range(A):
        tile = nl.ndarray((B, C), dtype=x.dtype)
        nisa.dma_copy(tile, x[a])
        nisa.dma_copy(out[:, a], tile)
    return out


@nki.jit
def permute_tiled(x):
    """Through SBUF, B on the partitions."""
    A, B, C = x.shape
    out = nl.ndarray((B, A, C), dtype=x.dtype, buffer=nl.shared_hbm)
    step = max(1, A // 4)
    for a, count in blocks(A, step):
        tile = nl.ndarray((B, count, C), dtype=x.dtype)
        nisa.dma_copy(tile, x[a : a + count].permute((1, 0, 2)))
        nisa.dma_copy(out[:, a : a + count], tile)
    return out


@nki.jit
def embedding(ids, table):
    M, D = ids.shape[0], table.shape[1]
    out = nl.ndarray((M, D), dtype=table.dtype, buffer=nl.shared_hbm)
    for m, rows in blocks(M):
        places = nl.ndarray((rows, 1), dtype=nl.int32)
        tile = nl.ndarray((rows, D), dtype=table.dtype)
        nisa.dma_copy(places, ids[m : m + rows])
        nisa.dma_copy(tile, table.ap([[D, rows], [1, D]], vector_offset=places))
        nisa.dma_copy(out[m : m + rows], tile)
    return out


def neighbours(x, count):
    """Rows on 128 partitions, `count` neighbours on each."""
    tile = nl.ndarray((P, count, x.shape[1]), dtype=x.dtype)
    nisa.dma_copy(tile, x.reshape_dim(0, (P, count)))
    return tile


@nki.jit
def rope(x, cos, sin):
    T, D = x.shape
    half = D // 2
    out = nl.ndarray((T, D), dtype=x.dtype, buffer=nl.shared_hbm)
    n = T // P
    for first, count in blocks(n, max(1, n // 2)):
        tokens = slice(first * P, (first + count) * P)
        tile, c, s = [neighbours(t[tokens], count) for t in (x, cos, sin)]
        y = nl.ndarray((P, count, D), dtype=x.dtype)
        a, b = tile[:, :, :half], tile[:, :, half:]
        parts = [nl.ndarray((P, count, half), dtype=nl.float32) for _ in range(4)]
        engines = [nisa.engine.vector, nisa.engine.gpsimd, nisa.engine.vector, nisa.engine.gpsimd]
        for i, (one, other) in enumerate([(a, c), (b, s), (b, c), (a, s)]):
            nisa.tensor_tensor(parts[i], one, other, nl.multiply, engine=engines[i])
        nisa.tensor_tensor(y[:, :, :half], parts[0], parts[1], nl.subtract)
        nisa.tensor_tensor(y[:, :, half:], parts[2], parts[3], nl.add)
        nisa.dma_copy(out[tokens].reshape_dim(0, (P, count)), y)
    return out


@nki.jit
def rope_naive(x, cos, sin):
    """128 tokens at a time."""
    T, D = x.shape
    half = D // 2
    out = nl.ndarray((T, D), dtype=x.dtype, buffer=nl.shared_hbm)
    for t, rows in blocks(T):
        tile, y = nl.ndarray((rows, D), dtype=x.dtype), nl.ndarray((rows, D), dtype=x.dtype)
        c, s = (nl.ndarray((rows, half), dtype=x.dtype) for _ in range(2))
        p, q = (nl.ndarray((rows, half), dtype=nl.float32) for _ in range(2))
        nisa.dma_copy(tile, x[t : t + rows])
        nisa.dma_copy(c, cos[t : t + rows])
        nisa.dma_copy(s, sin[t : t + rows])
        nisa.tensor_tensor(p, tile[:, :half], c, nl.multiply)
        nisa.tensor_tensor(q, tile[:, half:], s, nl.multiply)
        nisa.tensor_tensor(y[:, :half], p, q, nl.subtract)
        nisa.tensor_tensor(p, tile[:, half:], c, nl.multiply)
        nisa.tensor_tensor(q, tile[:, :half], s, nl.multiply)
        nisa.tensor_tensor(y[:, half:], p, q, nl.add)
        nisa.dma_copy(out[t : t + rows], y)
    return out


@nki.jit
def conv1d(x, w):
    """Four shifted products, each added to the sum of those before."""
    C, T = x.shape
    out = nl.ndarray((C, T), dtype=x.dtype, buffer=nl.shared_hbm)
    for c, rows in blocks(C):
        tile, taps = nl.ndarray((rows, T + 3), dtype=x.dtype), nl.ndarray((rows, 4), dtype=w.dtype)
        nisa.memset(tile[:, :3], 0.0)
        nisa.dma_copy(tile[:, 3:], x[c : c + rows])
        nisa.dma_copy(taps, w[c : c + rows])
        y = nl.ndarray((rows, T), dtype=nl.float32)
        nisa.activation(y, nl.copy, tile[:, :T], scale=taps[:, 0:1])
        for i in range(1, 4):
            nisa.scalar_tensor_tensor(
                y, tile[:, i : i + T], nl.multiply, taps[:, i : i + 1], nl.add, y
            )
        nisa.dma_copy(out[c : c + rows], y)
    return out


@nki.jit
def conv1d_naive(x, w):
    """Loads x again for each tap."""
    C, T = x.shape
    out = nl.ndarray((C, T), dtype=x.dtype, buffer=nl.shared_hbm)
    for c, rows in blocks(C):
        taps, y = nl.ndarray((rows, 4), dtype=w.dtype), nl.ndarray((rows, T), dtype=nl.float32)
        nisa.dma_copy(taps, w[c : c + rows])
        nisa.memset(y, 0.0)
        for i in range(4):
            tile, part = nl.ndarray((rows, T), dtype=x.dtype), nl.ndarray((rows, T), dtype=x.dtype)
            nisa.memset(tile, 0.0)
            shift = 3 - i
            nisa.dma_copy(tile[:, shift:], x[c : c + rows, : T - shift])
            nisa.tensor_scalar(part, tile, nl.multiply, taps[:, i : i + 1])
            nisa.tensor_tensor(y, y, part, nl.add)
        nisa.dma_copy(out[c : c + rows], y)
    return out


@nki.jit
def max_pool(x):
    """Rows of whole images; the pairs of columns first."""
    C, H, W = x.shape
    out = nl.ndarray((C, H // 2, W // 2), dtype=x.dtype, buffer=nl.shared_hbm)
    for c, rows in blocks(C):
        for h, height in blocks(H, max(2, H // 2)):
            tile = nl.ndarray((rows, height, W), dtype=x.dtype)
            nisa.dma_copy(tile, x[c : c + rows, h : h + height])
            half = nl.ndarray((rows, height, W // 2), dtype=x.dtype)
            y = nl.ndarray((rows, height // 2, W // 2), dtype=x.dtype)
            nisa.tensor_tensor(half, tile[:, :, 0:W:2], tile[:, :, 1:W:2], nl.maximum)
            nisa.tensor_tensor(y, half[:, 0:height:2], half[:, 1:height:2], nl.maximum)
            nisa.dma_copy(out[c : c + rows, h // 2 : (h + height) // 2], y)
    return out


@nki.jit
def conv2d(x, w):
    """Nine matmuls on shifted views add up in PSUM."""
    C, H, W = x.shape
    F = w.shape[2]
    out = nl.ndarray((F, H - 2, W - 2), dtype=x.dtype, buffer=nl.shared_hbm)
    image, taps = nl.ndarray((C, H, W), dtype=x.dtype), nl.ndarray((C, 9, F), dtype=w.dtype)
    nisa.dma_copy(taps, w)
    nisa.dma_copy(image, x)
    tall = 512 // (W - 2)
    for h, rows in blocks(H - 2, tall):
        sums = nl.ndarray((F, rows, W - 2), dtype=nl.float32, buffer=nl.psum)
        for i in range(9):
            top, left = h + i // 3, i % 3
            moving = image[:, top : top + rows, left : left + W - 2]
            nisa.nc_matmul(sums, taps[:, i], moving, accumulate=i > 0)
        y = nl.ndarray((F, rows, W - 2), dtype=x.dtype)
        nisa.tensor_copy(y, sums)
        nisa.dma_copy(out[:, h : h + rows], y)
    return out


@nki.jit
def conv2d_naive(x, w):
    """A row of the result at a time."""
    C, H, W = x.shape
    F = w.shape[2]
    out = nl.ndarray((F, H - 2, W - 2), dtype=x.dtype, buffer=nl.shared_hbm)
    for h in range(H - 2):
        sums = nl.ndarray((F, W - 2), dtype=nl.float32, buffer=nl.psum)
        for i in range(9):
            tap, row = nl.ndarray((C, F), dtype=w.dtype), nl.ndarray((C, W - 2), dtype=x.dtype)
            nisa.dma_copy(tap, w[:, i])
            nisa.dma_copy(row, x[:, h + i // 3, i % 3 : i % 3 + W - 2])
            nisa.nc_matmul(sums, tap, row, accumulate=i > 0)
        y = nl.ndarray((F, W - 2), dtype=x.dtype)
        nisa.tensor_copy(y, sums)
        nisa.dma_copy(out[:, h], y)
    return out
