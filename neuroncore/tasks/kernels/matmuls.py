"""Matmuls: TensorE contracts 128 partitions of 128 stationary and 512 moving columns."""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128
BANK = 512


def blocks(size, step=P):
    return [(i, min(step, size - i)) for i in range(0, size, step)]


def chunks(x, dtype=None):
    """[K, N] as tiles [128, N]: all of N a DMA, so that its rows are long."""
    tiles = []
    for k, depth in blocks(x.shape[0]):
        tile = nl.ndarray((depth, x.shape[1]), dtype=dtype or x.dtype)
        nisa.dma_copy(tile, x[k : k + depth])
        tiles.append(tile)
    return tiles


def evict(dst, src, turn):
    """VectorE and ScalarE take turns to empty PSUM."""
    if turn % 2:
        nisa.activation(dst, nl.copy, src)
    else:
        nisa.tensor_copy(dst, src, engine=nisa.engine.vector)


def product(out, a, b, m, rows):
    """out[m : m + rows] = the rows of the stationary tiles a, times the moving tiles b."""
    N = b[0].shape[1]
    y = nl.ndarray((rows, N), dtype=out.dtype)
    for i, (n, columns) in enumerate(blocks(N, BANK)):
        sums = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.psum)
        for k in range(len(a)):
            nisa.nc_matmul(sums, a[k][:, m : m + rows], b[k][:, n : n + columns], accumulate=k > 0)
        evict(y[:, n : n + columns], sums, i)
    nisa.dma_copy(out[m : m + rows], y)


def output(M, N, dtype):
    return nl.ndarray((M, N), dtype=dtype, buffer=nl.shared_hbm)


@nki.jit
def matmul_t(xt, w):
    out = output(xt.shape[1], w.shape[1], xt.dtype)
    a, b = chunks(xt), chunks(w)
    for m, rows in blocks(xt.shape[1]):
        product(out, a, b, m, rows)
    return out


def tile_by_tile(xt, w):
    """Every tile of the result loads its operands."""
    out = output(xt.shape[1], w.shape[1], xt.dtype)
    for m, rows in blocks(xt.shape[1]):
        for n, columns in blocks(w.shape[1], BANK):
            sums = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.psum)
            for k, depth in blocks(xt.shape[0]):
                a = nl.ndarray((depth, rows), dtype=xt.dtype)
                b = nl.ndarray((depth, columns), dtype=w.dtype)
                nisa.dma_copy(a, xt[k : k + depth, m : m + rows])
                nisa.dma_copy(b, w[k : k + depth, n : n + columns])
                nisa.nc_matmul(sums, a, b, accumulate=k > 0)
            y = nl.ndarray((rows, columns), dtype=xt.dtype)
            nisa.tensor_copy(y, sums)
            nisa.dma_copy(out[m : m + rows, n : n + columns], y)
    return out


@nki.jit
def matmul_t_naive(xt, w):
    return tile_by_tile(xt, w)


@nki.jit
def matmul_large_naive(xt, w):
    return tile_by_tile(xt, w)


@nki.jit
def matmul_large_tiled(xt, w):
    out = output(xt.shape[1], w.shape[1], xt.dtype)
    a, b = chunks(xt), chunks(w)
    for m, rows in blocks(xt.shape[1]):
        product(out, a, b, m, rows)
    return out


@nki.jit
def matmul_large(xt, w):
    """Blocks of two rows of tiles: all eight banks add up while the operands still arrive."""
    M, N = xt.shape[1], w.shape[1]
    out = output(M, N, xt.dtype)
    a, b = chunks(xt), chunks(w)
    per_row = -(-N // BANK)
    tall = max(1, 8 // per_row) * P
    for m0, height in blocks(M, tall):
        tiles = [(m0 + m, rows, n, c) for m, rows in blocks(height) for n, c in blocks(N, BANK)]
        sums = [nl.ndarray((r, c), dtype=nl.float32, buffer=nl.psum) for _, r, _, c in tiles]
        first = m0 == 0
        order = [(k, i) for k in range(len(a)) for i in range(len(tiles))]
        if not first:
            order = [(k, i) for i in range(len(tiles)) for k in range(len(a))]
        for k, i in order:
            m, rows, n, c = tiles[i]
            nisa.nc_matmul(sums[i], a[k][:, m : m + rows], b[k][:, n : n + c], accumulate=k > 0)
        for m, rows in blocks(height):
            y = nl.ndarray((rows, N), dtype=out.dtype)
            for i in range(len(tiles)):
                if tiles[i][0] == m0 + m:
                    n, c = tiles[i][2:]
                    evict(y[:, n : n + c], sums[i], i)
            nisa.dma_copy(out[m0 + m : m0 + m + rows], y)
    return out


@nki.jit
def matmul(x, w):
    """x is transposed by the DMA where it has two bytes, and by TensorE where it has four."""
    M, K = x.shape
    out = output(M, w.shape[1], x.dtype)
    b = chunks(w)
    for m, rows in blocks(M):
        a = []
        if x.dtype == nl.float32:
            tile = nl.ndarray((rows, K), dtype=x.dtype)
            nisa.dma_copy(tile, x[m : m + rows])
        for k, depth in blocks(K):
            turned = nl.ndarray((depth, rows), dtype=x.dtype)
            if x.dtype == nl.float32:
                flipped = nl.ndarray((depth, rows), dtype=x.dtype, buffer=nl.psum)
                nisa.nc_transpose(flipped, tile[:, k : k + depth])
                evict(turned, flipped, k // P)
            else:
                nisa.dma_transpose(turned, x[m : m + rows, k : k + depth])
            a.append(turned)
        N = w.shape[1]
        y = nl.ndarray((rows, N), dtype=x.dtype)
        for i, (n, columns) in enumerate(blocks(N, BANK)):
            sums = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.psum)
            for k in range(len(a)):
                nisa.nc_matmul(sums, a[k], b[k][:, n : n + columns], accumulate=k > 0)
            evict(y[:, n : n + columns], sums, i)
        nisa.dma_copy(out[m : m + rows], y)
    return out


@nki.jit
def matmul_naive(x, w):
    """Reads x column by column: a run of one element."""
    M, K = x.shape
    out = output(M, w.shape[1], x.dtype)
    for m, rows in blocks(M):
        for n, columns in blocks(w.shape[1], BANK):
            sums = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.psum)
            for k, depth in blocks(K):
                a = nl.ndarray((depth, rows), dtype=x.dtype)
                b = nl.ndarray((depth, columns), dtype=w.dtype)
                nisa.dma_copy(a, x[m : m + rows, k : k + depth].permute((1, 0)))
                nisa.dma_copy(b, w[k : k + depth, n : n + columns])
                nisa.nc_matmul(sums, a, b, accumulate=k > 0)
            y = nl.ndarray((rows, columns), dtype=x.dtype)
            nisa.tensor_copy(y, sums)
            nisa.dma_copy(out[m : m + rows, n : n + columns], y)
    return out


@nki.jit
def matvec(xt, w):
    """Weights stream once, in wide rows; each bank adds up over K."""
    K, M = xt.shape
    N = w.shape[1]
    out = output(M, N, xt.dtype)
    a = nl.ndarray((P, K // P, M), dtype=xt.dtype)
    nisa.dma_copy(a, xt.reshape_dim(0, (K // P, P)).permute((1, 0, 2)))
    sums = [nl.ndarray((M, c), dtype=nl.float32, buffer=nl.psum) for _, c in blocks(N, BANK)]
    for k in range(K // P):
        b = nl.ndarray((P, N), dtype=w.dtype)
        nisa.dma_copy(b, w[k * P : (k + 1) * P])
        for i, (n, columns) in enumerate(blocks(N, BANK)):
            nisa.nc_matmul(sums[i], a[:, k, :], b[:, n : n + columns], accumulate=k > 0)
    y = nl.ndarray((M, N), dtype=xt.dtype)
    for i, (n, columns) in enumerate(blocks(N, BANK)):
        evict(y[:, n : n + columns], sums[i], i)
    nisa.dma_copy(out, y)
    return out


@nki.jit
def matvec_naive(xt, w):
    return tile_by_tile(xt, w)


@nki.jit
def two_cores_matmul(xt, w):
    """Each core computes one half of the columns."""
    N = w.shape[1] // 2
    first = N * nl.program_id(0)
    out = output(xt.shape[1], w.shape[1], xt.dtype)
    a, b = chunks(xt), chunks(w[:, first : first + N])
    for m, rows in blocks(xt.shape[1]):
        product(out[:, first : first + N], a, b, m, rows)
    return out


@nki.jit
def two_cores_matmul_naive(xt, w):
    """The second core idles."""
    out = output(xt.shape[1], w.shape[1], xt.dtype)
    if nl.program_id(0) == 0:
        a, b = chunks(xt), chunks(w)
        for m, rows in blocks(xt.shape[1]):
            product(out, a, b, m, rows)
    return out


def scaled_product(xt, w, s, cast):
    K, M = xt.shape
    N = w.shape[1]
    out = output(M, N, xt.dtype)
    a = chunks(xt)
    scales = nl.ndarray((M, N), dtype=nl.float32)
    nisa.dma_copy(scales, s.ap([[0, M], [1, N]]))
    sums = [nl.ndarray((M, c), dtype=nl.float32, buffer=nl.psum) for _, c in blocks(N, BANK)]
    for k in range(K // P):
        b = nl.ndarray((P, N), dtype=w.dtype)
        nisa.dma_copy(b, w[k * P : (k + 1) * P])
        b = cast(b, k)
        for i, (n, columns) in enumerate(blocks(N, BANK)):
            nisa.nc_matmul(sums[i], a[k], b[:, n : n + columns], accumulate=k > 0)
    y = nl.ndarray((M, N), dtype=xt.dtype)
    for i, (n, columns) in enumerate(blocks(N, BANK)):
        nisa.tensor_tensor(y[:, n : n + columns], sums[i], scales[:, n : n + columns], nl.multiply)
    nisa.dma_copy(out, y)
    return out


def kept(tile, k):
    return tile


def cast_by_turns(tile, k):
    """int8 as bf16, which holds it exactly: TensorE multiplies no int8."""
    wide = nl.ndarray(tile.shape, dtype=nl.bfloat16)
    third = tile.shape[1] // 3
    nisa.tensor_copy(wide[:, :third], tile[:, :third], engine=nisa.engine.vector)
    nisa.activation(wide[:, third : 2 * third], nl.copy, tile[:, third : 2 * third])
    nisa.tensor_copy(wide[:, 2 * third :], tile[:, 2 * third :], engine=nisa.engine.gpsimd)
    return wide


def cast_by_vector(tile, k):
    wide = nl.ndarray(tile.shape, dtype=nl.bfloat16)
    nisa.tensor_copy(wide, tile, engine=nisa.engine.vector)
    return wide


@nki.jit
def matmul_int8(xt, w, s):
    return scaled_product(xt, w, s, cast_by_turns)


@nki.jit
def matmul_int8_naive(xt, w, s):
    return scaled_product(xt, w, s, cast_by_vector)


@nki.jit
def matmul_fp8(xt, w, s):
    return scaled_product(xt, w, s, kept)


@nki.jit
def matmul_fp8_naive(xt, w, s):
    return scaled_product(xt, w, s, cast_by_vector)
