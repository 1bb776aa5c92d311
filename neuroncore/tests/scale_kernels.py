"""Kernels that scale a tensor, and their references."""

KERNELS = """\
import functools

import nki
import nki.isa as nisa
import nki.language as nl

BLOCK: int = 128
WIDTH = 4 * BLOCK
TWICE = 1
TWICE = 2
A = B = 3

@nki.jit
def scale(x, by=2.0, extra=None):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    for n in range(0, x.shape[1], WIDTH):
        assert x.shape[1] % WIDTH == 0
        tile = nl.ndarray((x.shape[0], WIDTH), x.dtype)
        nisa.dma_copy(tile, x[:, n : n + WIDTH])
        nisa.tensor_scalar(tile, tile, nl.multiply, by)
        nisa.dma_copy(out[:, n : n + WIDTH], tile)
    return out

@nki.jit
def both(x):
    return scale(x), scale(x, 3.0)

@nki.jit
def nothing(x):
    scale(x)

@nki.jit
def in_place(x):
    tile = nl.ndarray(x.shape, x.dtype)
    nisa.dma_copy(tile, x)
    nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
    nisa.dma_copy(x, tile)
    return x

@nki.jit
def anything(x, **options):
    return scale(x, options.get("by", 2.0))

def any_reference(x, **options): return x * options.get("by", 2.0)
def reference(x, by=2.0): return x * by
def wrong(x, by=2.0): return x * by * 1.25
def wide(x): return x[None] * 2.0
def two(x): return x * 2.0, x * 3.0
def other_name(y): return y * 2.0
def nan(x): return x * float("nan")
def raises(x): return x.no_such_thing

def wrapped(function):
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))

@wrapped
def decorated(x):
    return x * 2.0
"""
X = ("--arg", "x=f32[128,1024]", "--target", "trn2")
