"""Four ranks, each on a core of its own."""

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

P = 128
BANK = 512


def blocks(size, step=P):
    return [(i, min(step, size - i)) for i in range(0, size, step)]


def group():
    return ncc.ReplicaGroup([[0, 1, 2, 3]])


@nki.jit
def all_reduce(x):
    """In SBUF: no copy through HBM before or after."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile, total = nl.ndarray(x.shape, dtype=x.dtype), nl.ndarray(x.shape, dtype=x.dtype)
    nisa.dma_copy(tile, x)
    ncc.all_reduce([tile], [total], replica_group=group(), op=nl.add)
    nisa.dma_copy(out, total)
    return out


@nki.jit
def all_reduce_naive(x):
    """All tiles to everybody, then a sum on each core."""
    M, N = x.shape
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    own = nl.ndarray((M, N), dtype=x.dtype)
    every = nl.ndarray((M, 4 * N), dtype=x.dtype)
    nisa.dma_copy(own, x)
    ncc.all_gather([own], [every], replica_group=group(), collective_dim=1)
    for i in range(1, 4):
        nisa.tensor_tensor(
            own if i > 1 else every[:, :N],
            own if i > 1 else every[:, :N],
            every[:, i * N : (i + 1) * N],
            nl.add,
        )
        if i == 1:
            nisa.tensor_copy(own, every[:, :N])
    nisa.dma_copy(out, own)
    return out


def partial_product(xt, w):
    K, M = xt.shape
    N = w.shape[1]
    part = nl.ndarray((M, N), dtype=nl.float32)
    a, b = [], []
    for k, depth in blocks(K):
        x_tile = nl.ndarray((depth, M), dtype=xt.dtype)
        w_tile = nl.ndarray((depth, N), dtype=w.dtype)
        nisa.dma_copy(x_tile, xt[k : k + depth])
        nisa.dma_copy(w_tile, w[k : k + depth])
        a.append(x_tile)
        b.append(w_tile)
    for i, (n, columns) in enumerate(blocks(N, BANK)):
        sums = nl.ndarray((M, columns), dtype=nl.float32, buffer=nl.psum)
        for k in range(len(a)):
            nisa.nc_matmul(sums, a[k], b[k][:, n : n + columns], accumulate=k > 0)
        if i % 2:
            nisa.activation(part[:, n : n + columns], nl.copy, sums)
        else:
            nisa.tensor_copy(part[:, n : n + columns], sums, engine=nisa.engine.vector)
    return part


@nki.jit
def row_parallel(xt, w):
    part = partial_product(xt, w)
    out = nl.ndarray(part.shape, dtype=xt.dtype, buffer=nl.shared_hbm)
    total = nl.ndarray(part.shape, dtype=nl.float32)
    ncc.all_reduce([part], [total], replica_group=group(), op=nl.add)
    y = nl.ndarray(part.shape, dtype=xt.dtype)
    nisa.tensor_copy(y, total)
    nisa.dma_copy(out, y)
    return out


@nki.jit
def row_parallel_naive(xt, w):
    """Exchanges through HBM."""
    part = partial_product(xt, w)
    out = nl.ndarray(part.shape, dtype=xt.dtype, buffer=nl.shared_hbm)
    here = nl.ndarray(part.shape, dtype=nl.float32, buffer=nl.private_hbm)
    there = nl.ndarray(part.shape, dtype=nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(here, part)
    ncc.all_reduce([here], [there], replica_group=group(), op=nl.add)
    y = nl.ndarray(part.shape, dtype=xt.dtype)
    nisa.dma_copy(y, there)
    nisa.dma_copy(out, y)
    return out
