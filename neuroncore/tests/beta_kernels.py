"""Kernels in the Beta dialect, which no public source has, one for each way to rewrite."""

KERNELS = '''\
"""Kernels of the Beta dialect."""
import numpy as np
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import neuronxcc.nki.typing as nt
from neuronxcc.nki.language import par_dim
from neuronxcc.nki import baremetal

place = nki.compiler.sbuf.mod_alloc


@nki.jit(mode="trace", platform_target="trn2")
def halved(tile):
    return nl.multiply(tile, 0.5)


@nki.jit(mode="baremetal", platform_target="trn2")
def edges(a: nt.tensor[300, 150], b: nt.mutable_tensor, factor):
    """factor * a + b, at any shape."""
    rows, columns = a.shape
    out = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
    for r in nl.affine_range((rows + 127) // 128):
        for c in nl.affine_range((columns + 63) // 64):
            i_p, i_f = nl.mgrid[0:128, 0:64]  # a tile
            i_p = r * 128 + i_p
            i_f = c * 64 + i_f
            inside = (i_p < rows) & (i_f < columns)
            x = nl.load(a[i_p, i_f], mask=inside)
            y = nl.load(b[i_p, i_f], mask=inside)
            z = nl.add(
                nl.multiply(x, factor, mask=inside),  # keep me
                y,
                mask=inside,
            )
            nl.store(out[i_p, i_f], value=z, mask=inside)
    return out


@nki.jit
def softmax(x):
    rows, columns = x.shape
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    i_p = nl.arange(rows)[:, None]
    i_f = nl.arange(columns)[None, :]
    tile = nl.load(x[i_p, i_f])
    top = nl.max(tile, axis=1)
    raised = nl.exp(tile - top)
    total = nisa.tensor_reduce(np.add, raised, axis=(1,), dtype=np.float32)
    share = raised / total
    nl.store(out[i_p, i_f], value=share)
    return out


@nki.jit
def blocks(x):
    """The sum of 2 x over blocks of rows, by block dimensions; x is [n * 32, F]."""
    rows, columns = x.shape
    n = rows // 32
    out = nl.ndarray((n, 32, columns), dtype=nl.float32, buffer=nl.shared_hbm)
    kept = nl.zeros((n, par_dim(32), columns), dtype=nl.float32, buffer=place(base_addr=0))
    for i in nl.affine_range(n):
        for _ in nl.sequential_range(2):
            tile = nl.load(x[i * 32 : (i + 1) * 32, 0:columns])
            kept[i, 0:32, 0:columns] += tile
    for i in nl.static_range(n):
        nl.store(out[i], value=kept[i])
    return out


@nki.jit
def product(at, b):
    """at.T @ b of [K, M] and [K, N], K in blocks of two tiles."""
    K, M = at.shape
    _, N = b.shape
    out = nl.ndarray((M, N), dtype=nl.float32, buffer=nl.shared_hbm)
    kept = nl.zeros((nl.par_dim(M), N), dtype=nl.float32)
    for outer in nl.affine_range(K // 64):
        acc = nl.zeros((M, N), dtype=nl.float32, buffer=nl.psum)
        for inner in nl.affine_range(2):
            start = outer * 64 + inner * 32
            i_k, i_m = nl.mgrid[0:32, 0:M]
            left = nl.load(at[start + i_k, i_m])
            right = nl.load(b[nl.ds(start, 32), :])
            acc += nisa.nc_matmul(left, right)
        kept[...] = nl.loop_reduce(acc, op=np.add, loop_indices=[outer])
    nl.store(out, value=kept)
    return out


@nki.jit
def turned(x, rows, columns):
    """Each row, a matrix [rows, columns], transposed."""
    partitions, size = x.shape
    out = nl.ndarray((partitions, size), dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    i_p = nl.arange(partitions)[:, None, None]
    i_r = nl.arange(rows)[None, :, None]
    i_c = nl.arange(columns)[None, None, :]
    new = nl.ndarray((partitions, size), dtype=x.dtype)
    new[i_p, i_c * rows + i_r] = nl.copy(tile[i_p, i_r * columns + i_c])
    nl.store(out, value=new)
    return out


@nki.jit
def pooled(x, k):
    """Means of k x k windows."""
    channels, height, width = x.shape
    out = nl.ndarray((channels, height // k, width // k), dtype=x.dtype, buffer=nl.shared_hbm)
    i, y, dy, z, dz = nl.mgrid[0:channels, 0 : height // k, 0:k, 0 : width // k, 0:k]
    tile = nl.load(x)
    mean = nl.sum(tile[i, k * y + dy, k * z + dz], axis=[2, 4]) / (k * k)
    nl.store(out, value=mean)
    return out


@nki.jit
def doubled(x):
    """Linear interpolation between neighbours, which needs a loop over the side."""
    partitions, size = x.shape
    out = nl.ndarray((partitions, 2 * size - 2), dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    new = nl.ndarray((partitions, 2 * size - 2), dtype=x.dtype)
    i, side, j = nl.mgrid[0:partitions, 0:2, 0 : size - 1]
    new[i, 2 * j + side] = 0.75 * tile[i, j + side] + 0.25 * tile[i, j + (-1 * side + 1)]
    nl.store(out, value=new)
    return out


@nki.jit
def programs(a, b):
    """a - b, one tile a program."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    row, column = nl.program_id(0) * 32, nl.program_id(1) * 16
    i_p = row + nl.arange(32)[:, None]
    i_f = column + nl.arange(16)[None, :]
    x = nl.load(a[i_p, i_f])
    y = nl.load(b[i_p, i_f])
    nl.store(out[i_p, i_f], value=halved(x - y))
    return out


def launched(a, b):
    return programs[a.shape[0] // 32, a.shape[1] // 16](a, b)


@nki.jit
def scanned(x, weights):
    """A running sum of exp(weight * x), times the first row."""
    rows, columns = x.shape
    out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    scale = nl.load(weights[0:rows, 0])
    first = nl.load(x[0:1, 0:columns])
    raised = nisa.activation(op=np.exp, data=tile, scale=scale, bias=None)
    ones = nl.ones((rows, columns), dtype=x.dtype)
    sums = nisa.tensor_tensor_scan(ones, raised, initial=0, op0=np.multiply, op1=np.add)
    wide = first.broadcast_to((rows, columns))
    result = nisa.tensor_tensor(sums, wide, op=np.multiply, dtype=x.dtype)
    nl.store(out, value=result)
    return out


@nki.jit
def causal(x, fill):
    """x where row >= column, else fill; plus the column."""
    rows, columns = x.shape
    out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    i_p, i_f = nl.mgrid[0:rows, 0:columns]
    tile = nl.load(x)
    kept = nisa.affine_select(pred=(i_p >= i_f), on_true_tile=tile, on_false_value=fill)
    column = nisa.iota(0 * i_p + i_f, dtype=nl.float32)
    kept += column
    kept *= 2.0
    nl.store(out, value=-kept)
    return out


@nki.jit
def attended(q, k, v):
    """(q.T @ k) @ v, with transposes."""
    q, k, v = nl.load(q), nl.load(k), nl.load(v)
    scores = nl.matmul(q, k, transpose_x=True)
    scores = nl.copy(scores)
    result = nl.matmul(scores, v)
    out = nl.ndarray(result.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(out, value=result)
    return out


def plain(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    tile[...] = nisa.tensor_scalar(tile, np.add, 1.0, op1=np.multiply, operand1=2.0)
    nl.store(out, value=nl.minimum(tile, nisa.memset(x.shape, 3.0, x.dtype)))
    return out


@nki.jit
def begun(a, b):
    """a.T @ b + 1 and 2 a.T @ b: sums that do not begin with a matmul, and one that does."""
    out = nl.ndarray((2, a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    left, right = nl.load(a), nl.load(b)
    acc = nl.full((a.shape[1], b.shape[1]), 1.0, dtype=nl.float32, buffer=nl.psum)
    acc += nisa.nc_matmul(left, right)
    twice = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.psum)
    for _ in nl.affine_range(1):
        twice[...] = nisa.nc_matmul(left, right)
        twice += nisa.nc_matmul(left, right)
    nl.store(out[0], value=acc)
    nl.store(out[1], value=twice)
    return out


def bare(x):
    return baremetal(artifacts_dir="debug")(plain)(x)


@nki.jit
def shifted(x):
    fp32 = np.float32
    out = nl.ndarray(x.shape, dtype=fp32, buffer=nl.shared_hbm)
    half = np.dtype(fp32).type(0.5)
    zeros = nisa.memset(x.shape, value=np.dtype(np.uint16).type(0), dtype=fp32)
    tile = nl.add(nl.multiply(nl.load(x), half), zeros)
    kept = nl.ndarray(x.shape, dtype=fp32, buffer=nl.hbm)
    nl.store(kept, nl.add(tile, np.dtype(np.int32).type(2)))
    nl.store(out, nl.load(kept))
    return out
'''
"""A module of them."""

HEADER = """\
import numpy as np
from neuronxcc import nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl


@nki.jit
def kernel(x, out):
    rows, columns = x.shape
    i_p, i_f = nl.mgrid[0:rows, 0:columns]
    tile = nl.load(x)
"""
"""The beginning of a kernel, to which a line is added."""
