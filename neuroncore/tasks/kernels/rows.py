"""Reductions, norms and scans along the rows, whole rows in SBUF."""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128
EPS = 1e-5


def blocks(size, step=P):
    return [(i, min(step, size - i)) for i in range(0, size, step)]


def loaded(x, m, rows):
    tile = nl.ndarray((rows, x.shape[1]), dtype=x.dtype)
    nisa.dma_copy(tile, x[m : m + rows])
    return tile


def column(rows, dtype=nl.float32):
    return nl.ndarray((rows, 1), dtype=dtype)


def broadcast(w):
    tile = nl.ndarray((P, w.shape[1]), dtype=w.dtype)
    nisa.dma_copy(tile, w.ap([[0, P], [1, w.shape[1]]]))
    return tile


def stored(out, m, rows, tile):
    nisa.dma_copy(out[m : m + rows], tile)


@nki.jit
def row_sum(x):
    M, N = x.shape
    out = nl.ndarray((M, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    half = N // 2
    for m, rows in blocks(M):
        tile, sums = loaded(x, m, rows), nl.ndarray((rows, 2), dtype=nl.float32)
        rest = nl.ndarray((rows, N - half), dtype=x.dtype)
        nisa.tensor_reduce(sums[:, 0:1], nl.add, tile[:, :half], axis=1)
        nisa.activation(
            rest,
            nl.copy,
            tile[:, half:],
            reduce_op=nl.add,
            reduce_res=sums[:, 1:2],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        total = column(rows)
        nisa.tensor_tensor(total, sums[:, 0:1], sums[:, 1:2], nl.add)
        stored(out, m, rows, total)
    return out


@nki.jit
def row_sum_naive(x):
    M, N = x.shape
    out = nl.ndarray((M, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    for m, rows in blocks(M):
        total = column(rows)
        nisa.memset(total, 0.0)
        for n, columns in blocks(N):
            tile, part = nl.ndarray((rows, columns), dtype=x.dtype), column(rows)
            nisa.dma_copy(tile, x[m : m + rows, n : n + columns])
            nisa.tensor_reduce(part, nl.add, tile, axis=1)
            nisa.tensor_tensor(total, total, part, nl.add)
        stored(out, m, rows, total)
    return out


@nki.jit
def row_sum_tiled(x):
    M = x.shape[0]
    out = nl.ndarray((M, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    for m, rows in blocks(M):
        tile, total = loaded(x, m, rows), column(rows)
        nisa.tensor_reduce(total, nl.add, tile, axis=1)
        stored(out, m, rows, total)
    return out


@nki.jit
def col_sum(x):
    """By TensorE: a stationary column of ones sums over the partitions."""
    M, N = x.shape
    out = nl.ndarray((1, N), dtype=nl.float32, buffer=nl.shared_hbm)
    ones = nl.ndarray((P, 1), dtype=x.dtype)
    nisa.memset(ones, 1.0)
    tiles = [(loaded(x, m, rows), rows) for m, rows in blocks(M)]
    row = nl.ndarray((1, N), dtype=nl.float32)
    for n, columns in blocks(N, 512):
        total = nl.ndarray((1, columns), dtype=nl.float32, buffer=nl.psum)
        for i in range(len(tiles)):
            tile, rows = tiles[i]
            nisa.nc_matmul(total, ones[:rows], tile[:, n : n + columns], accumulate=i > 0)
        nisa.tensor_copy(row[:, n : n + columns], total)
    nisa.dma_copy(out, row)
    return out


@nki.jit
def col_sum_naive(x):
    """By GpSimdE, which reduces over the partitions slowly."""
    M, N = x.shape
    out = nl.ndarray((1, N), dtype=nl.float32, buffer=nl.shared_hbm)
    total = nl.ndarray((1, N), dtype=nl.float32)
    nisa.memset(total, 0.0)
    for m, rows in blocks(M):
        part = nl.ndarray((1, N), dtype=nl.float32)
        nisa.tensor_partition_reduce(part, nl.add, loaded(x, m, rows))
        nisa.tensor_tensor(total, total, part, nl.add)
    nisa.dma_copy(out, total)
    return out


def moments(tile, rows):
    """[rows, 2]: mean and variance of each row."""
    pieces = blocks(tile.shape[1], 512)
    stats = nl.ndarray((rows, 6 * len(pieces)), dtype=nl.float32)
    for i in range(len(pieces)):
        n, columns = pieces[i]
        nisa.bn_stats(stats[:, 6 * i : 6 * i + 6], tile[:, n : n + columns])
    both = nl.ndarray((rows, 2), dtype=nl.float32)
    nisa.bn_aggr(both, stats)
    return both


@nki.jit
def mean_var(x):
    M = x.shape[0]
    mean = nl.ndarray((M, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    var = nl.ndarray((M, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    for m, rows in blocks(M):
        both = moments(loaded(x, m, rows), rows)
        stored(mean, m, rows, both[:, 0:1])
        stored(var, m, rows, both[:, 1:2])
    return mean, var


@nki.jit
def mean_var_naive(x):
    M, N = x.shape
    mean = nl.ndarray((M, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    var = nl.ndarray((M, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    for m, rows in blocks(M):
        tile, a, v = loaded(x, m, rows), column(rows), column(rows)
        centred = nl.ndarray((rows, N), dtype=nl.float32)
        nisa.tensor_reduce(a, nl.add, tile, axis=1)
        nisa.tensor_scalar(a, a, nl.multiply, 1.0 / N)
        nisa.tensor_scalar(centred, tile, nl.subtract, a)
        nisa.tensor_tensor(centred, centred, centred, nl.multiply)
        nisa.tensor_reduce(v, nl.add, centred, axis=1)
        nisa.tensor_scalar(v, v, nl.multiply, 1.0 / N)
        stored(mean, m, rows, a)
        stored(var, m, rows, v)
    return mean, var


@nki.jit
def argmax(x):
    M = x.shape[0]
    out = nl.ndarray((M, 1), dtype=nl.uint32, buffer=nl.shared_hbm)
    for m, rows in blocks(M):
        tile = loaded(x, m, rows)
        largest = nl.ndarray((rows, 8), dtype=x.dtype)
        places = nl.ndarray((rows, 8), dtype=nl.uint32)
        nisa.max8(largest, tile)
        nisa.nc_find_index8(places, tile, largest)
        stored(out, m, rows, places[:, 0:1])
    return out


@nki.jit
def topk(x):
    M = x.shape[0]
    out = nl.ndarray((M, 8), dtype=x.dtype, buffer=nl.shared_hbm)
    for m, rows in blocks(M):
        largest = nl.ndarray((rows, 8), dtype=x.dtype)
        nisa.max8(largest, loaded(x, m, rows))
        stored(out, m, rows, largest)
    return out


@nki.jit
def topk_naive(x):
    """The largest eight times, and each time removed."""
    M, N = x.shape
    out = nl.ndarray((M, 8), dtype=x.dtype, buffer=nl.shared_hbm)
    for m, rows in blocks(M):
        tile = loaded(x, m, rows)
        found = nl.ndarray((rows, 8), dtype=x.dtype)
        for i in range(8):
            equal = nl.ndarray((rows, N), dtype=nl.float32)
            nisa.tensor_reduce(found[:, i : i + 1], nl.maximum, tile, axis=1)
            nisa.tensor_scalar(
                equal, tile, nl.equal, found[:, i : i + 1], op1=nl.multiply, operand1=-1e4
            )
            nisa.tensor_tensor(tile, tile, equal, nl.add)
        stored(out, m, rows, found)
    return out


@nki.jit
def softmax(x):
    """ScalarE sums what it exponentiates."""
    M, N = x.shape
    out = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    for m, rows in blocks(M):
        tile, least, total = loaded(x, m, rows), column(rows), column(rows)
        nisa.tensor_reduce(least, nl.maximum, tile, axis=1, negate=True)
        nisa.activation_reduce(tile, nl.exp, tile, reduce_op=nl.add, reduce_res=total, bias=least)
        nisa.reciprocal(total, total)
        nisa.tensor_scalar(tile, tile, nl.multiply, total)
        stored(out, m, rows, tile)
    return out


@nki.jit
def softmax_naive(x):
    """A pass over the row for each operation."""
    M, N = x.shape
    out = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    for m, rows in blocks(M):
        tile, most, total = loaded(x, m, rows), column(rows), column(rows)
        nisa.tensor_reduce(most, nl.maximum, tile, axis=1)
        nisa.tensor_scalar(tile, tile, nl.subtract, most)
        nisa.activation(tile, nl.exp, tile)
        nisa.tensor_reduce(total, nl.add, tile, axis=1)
        spread = nl.ndarray((rows, N), dtype=nl.float32)
        nisa.tensor_copy(spread, total.ap([[1, rows], [0, N]]))
        nisa.reciprocal(spread, spread)
        nisa.tensor_tensor(tile, tile, spread, nl.multiply)
        stored(out, m, rows, tile)
    return out


def inverse_rms(tile, rows):
    """[rows, 1]: 1 / sqrt(mean square + EPS)."""
    squares = nl.ndarray((rows, tile.shape[1]), dtype=nl.float32)
    total, eps = column(rows), column(rows)
    nisa.memset(eps, EPS)
    nisa.activation_reduce(squares, nl.square, tile, reduce_op=nl.add, reduce_res=total)
    nisa.activation(total, nl.rsqrt, total, bias=eps, scale=1.0 / tile.shape[1])
    return total


@nki.jit
def rms_norm(x, w):
    M, N = x.shape
    out = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    weight = broadcast(w)
    for m, rows in blocks(M):
        tile = loaded(x, m, rows)
        inverse = inverse_rms(tile, rows)
        nisa.scalar_tensor_tensor(tile, tile, nl.multiply, inverse, nl.multiply, weight[:rows])
        stored(out, m, rows, tile)
    return out


@nki.jit
def rms_norm_naive(x, w):
    M, N = x.shape
    out = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    for m, rows in blocks(M):
        weight, tile, total = broadcast(w), loaded(x, m, rows), column(rows)
        squares = nl.ndarray((rows, N), dtype=nl.float32)
        nisa.tensor_tensor(squares, tile, tile, nl.multiply)
        nisa.tensor_reduce(total, nl.add, squares, axis=1)
        nisa.tensor_scalar(total, total, nl.multiply, 1.0 / N, op1=nl.add, operand1=EPS)
        nisa.activation(total, nl.sqrt, total)
        nisa.reciprocal(total, total)
        nisa.tensor_scalar(squares, tile, nl.multiply, total)
        nisa.tensor_tensor(tile, squares, weight[:rows], nl.multiply)
        stored(out, m, rows, tile)
    return out


@nki.jit
def add_rms_norm(x, y, w):
    M, N = x.shape
    total = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    out = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    weight = broadcast(w)
    for m, rows in blocks(M):
        tile, other = loaded(x, m, rows), loaded(y, m, rows)
        nisa.tensor_tensor(tile, tile, other, nl.add)
        stored(total, m, rows, tile)
        inverse = inverse_rms(tile, rows)
        nisa.scalar_tensor_tensor(other, tile, nl.multiply, inverse, nl.multiply, weight[:rows])
        stored(out, m, rows, other)
    return total, out


@nki.jit
def layer_norm(x, w, b):
    M, N = x.shape
    out = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    weight, bias = broadcast(w), broadcast(b)
    for m, rows in blocks(M):
        tile, eps = loaded(x, m, rows), column(rows)
        nisa.memset(eps, EPS)
        both = moments(tile, rows)
        inverse, centred = column(rows), nl.ndarray((rows, N), dtype=nl.float32)
        nisa.activation(inverse, nl.rsqrt, both[:, 1:2], bias=eps)
        nisa.tensor_scalar(
            centred, tile, nl.subtract, both[:, 0:1], op1=nl.multiply, operand1=inverse
        )
        nisa.tensor_tensor(centred, centred, weight[:rows], nl.multiply)
        nisa.tensor_tensor(tile, centred, bias[:rows], nl.add, engine=nisa.engine.gpsimd)
        stored(out, m, rows, tile)
    return out


@nki.jit
def cumsum(x):
    M, N = x.shape
    out = nl.ndarray((M, N), dtype=nl.float32, buffer=nl.shared_hbm)
    ones = nl.ndarray((P, N), dtype=nl.float32)
    nisa.memset(ones, 1.0)
    for m, rows in blocks(M):
        tile, sums = loaded(x, m, rows), nl.ndarray((rows, N), dtype=nl.float32)
        nisa.tensor_tensor_scan(sums, ones[:rows], tile, 0.0, nl.multiply, nl.add)
        stored(out, m, rows, sums)
    return out


@nki.jit
def linear_scan(a, b):
    M, T = a.shape
    out = nl.ndarray((M, T), dtype=a.dtype, buffer=nl.shared_hbm)
    for m, rows in blocks(M):
        decay, tile = loaded(a, m, rows), loaded(b, m, rows)
        state = nl.ndarray((rows, T), dtype=nl.float32)
        nisa.tensor_tensor_scan(state, decay, tile, 0.0, nl.multiply, nl.add)
        stored(out, m, rows, state)
    return out


@nki.jit
def linear_scan_naive(a, b):
    """A step at a time."""
    M, T = a.shape
    out = nl.ndarray((M, T), dtype=a.dtype, buffer=nl.shared_hbm)
    for m, rows in blocks(M):
        decay, state = loaded(a, m, rows), loaded(b, m, rows)
        for t in range(1, T):
            now = state[:, t : t + 1]
            nisa.scalar_tensor_tensor(
                now, state[:, t - 1 : t], nl.multiply, decay[:, t : t + 1], nl.add, now
            )
        stored(out, m, rows, state)
    return out
