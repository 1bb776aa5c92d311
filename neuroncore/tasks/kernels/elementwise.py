"""Elementwise tasks. NAME is our best; NAME_naive moves a tile of 128 columns at a time."""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128
WIDE = 1024


def cut(size, step):
    """(start, length) of pieces of at most a step, of nearly one length."""
    count = -(-size // step)
    return [(i * size // count, (i + 1) * size // count - i * size // count) for i in range(count)]


def result(x, dtype=None):
    return nl.ndarray(x.shape, dtype=dtype or x.dtype, buffer=nl.shared_hbm)


def loaded(x, m, rows, n, columns):
    tile = nl.ndarray((rows, columns), dtype=x.dtype)
    nisa.dma_copy(tile, x[m : m + rows, n : n + columns])
    return tile


def broadcast(w, columns):
    """[1, N] in HBM as [128, N]: a row for each partition."""
    tile = nl.ndarray((P, columns), dtype=w.dtype)
    nisa.dma_copy(tile, w.ap([[0, P], [1, columns]]))
    return tile


def each_tile(x, width):
    return [(m, rows, n, c) for m, rows in cut(x.shape[0], P) for n, c in cut(x.shape[1], width)]


def scaled(x, width):
    out = result(x)
    for m, rows, n, columns in each_tile(x, width):
        tile = loaded(x, m, rows, n, columns)
        nisa.tensor_scalar(tile, tile, nl.multiply, 2.5)
        nisa.dma_copy(out[m : m + rows, n : n + columns], tile)
    return out


@nki.jit
def scale(x):
    return scaled(x, WIDE)


@nki.jit
def scale_naive(x):
    return scaled(x, P)


def added(x, y, width):
    out = result(x)
    for m, rows, n, columns in each_tile(x, width):
        a, b = loaded(x, m, rows, n, columns), loaded(y, m, rows, n, columns)
        nisa.tensor_tensor(a, a, b, nl.add)
        nisa.dma_copy(out[m : m + rows, n : n + columns], a)
    return out


@nki.jit
def add(x, y):
    return added(x, y, WIDE)


@nki.jit
def add_naive(x, y):
    return added(x, y, P)


@nki.jit
def add_tiled(x, y):
    return added(x, y, x.shape[1])


def gated(x, y, width):
    out = result(x)
    for m, rows, n, columns in each_tile(x, width):
        a, b = loaded(x, m, rows, n, columns), loaded(y, m, rows, n, columns)
        gate = nl.ndarray((rows, columns), dtype=x.dtype)
        nisa.activation(gate, nl.silu, a)
        nisa.tensor_tensor(gate, gate, b, nl.multiply)
        nisa.dma_copy(out[m : m + rows, n : n + columns], gate)
    return out


@nki.jit
def silu_mul(x, y):
    return gated(x, y, WIDE)


@nki.jit
def silu_mul_naive(x, y):
    return gated(x, y, P)


def clipped(x, width):
    out = result(x, nl.bfloat16)
    for m, rows, n, columns in each_tile(x, width):
        tile = loaded(x, m, rows, n, columns)
        short = nl.ndarray((rows, columns), dtype=nl.bfloat16)
        nisa.tensor_scalar(short, tile, nl.minimum, 1.0, op1=nl.maximum, operand1=-1.0)
        nisa.dma_copy(out[m : m + rows, n : n + columns], short)
    return out


@nki.jit
def clip_cast(x):
    return clipped(x, WIDE)


@nki.jit
def clip_cast_naive(x):
    return clipped(x, P)


def biased(x, b, width):
    out = result(x)
    bias = broadcast(b, x.shape[1])
    for m, rows, n, columns in each_tile(x, width):
        tile = loaded(x, m, rows, n, columns)
        total = nl.ndarray((rows, columns), dtype=nl.float32)
        nisa.tensor_tensor(total, tile, bias[:rows, n : n + columns], nl.add)
        nisa.activation(tile, nl.tanh, total)
        nisa.dma_copy(out[m : m + rows, n : n + columns], tile)
    return out


@nki.jit
def bias_tanh(x, b):
    return biased(x, b, WIDE)


@nki.jit
def bias_tanh_naive(x, b):
    return biased(x, b, P)


def silu_of_half(x, width):
    """Each core takes every second tile of rows."""
    out = result(x)
    for m in range(P * nl.program_id(0), x.shape[0], 2 * P):
        for n, columns in cut(x.shape[1], width):
            tile = loaded(x, m, P, n, columns)
            nisa.activation(tile, nl.silu, tile)
            nisa.dma_copy(out[m : m + P, n : n + columns], tile)
    return out


@nki.jit
def two_cores_silu(x):
    return silu_of_half(x, WIDE)


@nki.jit
def two_cores_silu_naive(x):
    return silu_of_half(x, P)
