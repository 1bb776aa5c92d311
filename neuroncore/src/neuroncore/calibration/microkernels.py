"""NKI kernels that each repeat one thing: its cost is the slope of their times.

Whatever they compute ends in a result, so that no compiler may leave it out. On an instance they
are the installed NKI's; without one, the simulator's.
"""

from __future__ import annotations

from neuroncore.calibration.shim import NkiTensor, jit, nisa, nl


def _loaded(x: NkiTensor) -> NkiTensor:
    x_sb = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x_sb, src=x)
    return x_sb


def _firsts(tiles_sb: NkiTensor) -> NkiTensor:
    """The first columns [128, T, 1] of tiles [128, T, N], stored."""
    P, T, _N = tiles_sb.shape
    firsts_sb = nl.ndarray((P, T, 1), dtype=tiles_sb.dtype, buffer=nl.sbuf)
    out_hbm = nl.ndarray((P, T, 1), dtype=tiles_sb.dtype, buffer=nl.shared_hbm)
    nisa.tensor_copy(dst=firsts_sb, src=tiles_sb[:, :, 0:1])
    nisa.dma_copy(dst=out_hbm, src=firsts_sb)
    return out_hbm


@jit
def loads(x: NkiTensor, width: int) -> NkiTensor:
    """x [T, 128, runs, pitch]: T loads of 128 x `runs` rows of `width`, and their firsts."""
    T, P, runs, _pitch = x.shape
    tiles_sb = nl.ndarray((P, T, runs, width), dtype=x.dtype, buffer=nl.sbuf)
    firsts_sb = nl.ndarray((P, T, 1, 1), dtype=x.dtype, buffer=nl.sbuf)
    out_hbm = nl.ndarray((P, T, 1, 1), dtype=x.dtype, buffer=nl.shared_hbm)
    for t in range(T):
        nisa.dma_copy(dst=tiles_sb[:, t, :, :], src=x[t, :, :, 0:width])
    nisa.tensor_copy(dst=firsts_sb, src=tiles_sb[:, :, 0:1, 0:1])
    nisa.dma_copy(dst=out_hbm, src=firsts_sb)
    return out_hbm


@jit
def loads_in_turn(a: NkiTensor, b: NkiTensor, c: NkiTensor, d: NkiTensor) -> NkiTensor:
    """Four tensors [T, 128, N]: T loads of [128, N] of each in turn, and their firsts."""
    T, P, N = a.shape
    tiles_sb = nl.ndarray((P, 4 * T, N), dtype=a.dtype, buffer=nl.sbuf)
    for t in range(T):
        nisa.dma_copy(dst=tiles_sb[:, 4 * t, :], src=a[t, :, :])
        nisa.dma_copy(dst=tiles_sb[:, 4 * t + 1, :], src=b[t, :, :])
        nisa.dma_copy(dst=tiles_sb[:, 4 * t + 2, :], src=c[t, :, :])
        nisa.dma_copy(dst=tiles_sb[:, 4 * t + 3, :], src=d[t, :, :])
    return _firsts(tiles_sb)


@jit
def loads_of_half_sbuf(x: NkiTensor, columns: int) -> NkiTensor:
    """x [T, 128, N]: T loads of [128, N]; VectorE doubles the first columns of each.

    A load goes on during the work before it where SBUF holds two.
    """
    T, P, N = x.shape
    firsts_sb = nl.ndarray((P, T, 1), dtype=x.dtype, buffer=nl.sbuf)
    out_hbm = nl.ndarray((P, T, 1), dtype=x.dtype, buffer=nl.shared_hbm)
    for t in range(T):
        tile_sb = nl.ndarray((P, N), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile_sb, src=x[t, :, :])
        nisa.tensor_scalar(
            dst=tile_sb[:, 0:columns],
            data=tile_sb[:, 0:columns],
            op0=nl.multiply,
            operand0=2.0,
            engine=nisa.vector_engine,
        )
        nisa.tensor_copy(dst=firsts_sb[:, t, :], src=tile_sb[:, 0:1], engine=nisa.vector_engine)
    nisa.dma_copy(dst=out_hbm, src=firsts_sb)
    return out_hbm


@jit
def transposed_loads(x: NkiTensor) -> NkiTensor:
    """x [T, N, 128]: T DMA transposes to [128, N], and their firsts."""
    T, N, P = x.shape
    tiles_sb = nl.ndarray((P, T, N), dtype=x.dtype, buffer=nl.sbuf)
    for t in range(T):
        nisa.dma_transpose(dst=tiles_sb[:, t, :], src=x[t, :, :])
    return _firsts(tiles_sb)


@jit
def round_trips(x: NkiTensor, count: int, by_hardware: bool) -> NkiTensor:
    """x [128, N]: stored and loaded again `count` times, each after the one before.

    The descriptors of the DMAs are made by the hardware, or before the kernel runs.
    """
    mode = nisa.dge_mode.hwdge if by_hardware else nisa.dge_mode.none
    tile_sb = _loaded(x)
    out_hbm = nl.ndarray((count, x.shape[0], x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in range(count):
        nisa.dma_copy(dst=out_hbm[i, :, :], src=tile_sb, dge_mode=mode)
        nisa.dma_copy(dst=tile_sb, src=out_hbm[i, :, :], dge_mode=mode)
    return out_hbm


@jit
def overwrites(x: NkiTensor, count: int) -> NkiTensor:
    """x [128, N]: doubled `count` times, each time when it has been stored; no load waits."""
    tile_sb = _loaded(x)
    out_hbm = nl.ndarray((count, x.shape[0], x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in range(count):
        nisa.tensor_tensor(
            dst=tile_sb, data1=tile_sb, data2=tile_sb, op=nl.add, engine=nisa.vector_engine
        )
        nisa.dma_copy(dst=out_hbm[i, :, :], src=tile_sb)
    return out_hbm


@jit
def matmuls(x: NkiTensor, y: NkiTensor, count: int) -> NkiTensor:
    """x [128, 128], y [128, N]: the sum of `count` products x.T @ y, back to back."""
    M, N = x.shape[1], y.shape[1]
    x_sb = _loaded(x)
    y_sb = _loaded(y)
    sum_sb = nl.ndarray((M, N), dtype=nl.float32, buffer=nl.sbuf)
    sum_psum = nl.ndarray((M, N), dtype=nl.float32, buffer=nl.psum)
    out_hbm = nl.ndarray((M, N), dtype=nl.float32, buffer=nl.shared_hbm)
    for i in range(count):
        nisa.nc_matmul(dst=sum_psum, stationary=x_sb, moving=y_sb, accumulate=i > 0)
    nisa.tensor_copy(dst=sum_sb, src=sum_psum)
    nisa.dma_copy(dst=out_hbm, src=sum_sb)
    return out_hbm


@jit
def matmuls_on_columns(x: NkiTensor, y: NkiTensor, count: int, size: int) -> NkiTensor:
    """x [128, 128], y [128, N]: as `matmuls`, in turn on each group of `size` PE columns."""
    (P, M), N = x.shape, y.shape[1]
    x_sb = _loaded(x)
    y_sb = _loaded(y)
    sum_sb = nl.ndarray((M, N), dtype=nl.float32, buffer=nl.sbuf)
    sum_psum = nl.ndarray((M, N), dtype=nl.float32, buffer=nl.psum)
    out_hbm = nl.ndarray((M, N), dtype=nl.float32, buffer=nl.shared_hbm)
    for i in range(count):
        for column in range(0, M, size):
            nisa.nc_matmul(
                dst=sum_psum[column : column + size, :],
                stationary=x_sb[:, column : column + size],
                moving=y_sb,
                accumulate=i > 0,
                tile_position=(0, column),
                tile_size=(P, size),
            )
    nisa.tensor_copy(dst=sum_sb, src=sum_psum)
    nisa.dma_copy(dst=out_hbm, src=sum_sb)
    return out_hbm


@jit
def matmuls_in_a_chain(x: NkiTensor, y: NkiTensor, count: int) -> NkiTensor:
    """x [128, 128], y [128, N]: y = x.T @ y `count` times; VectorE copies each out of PSUM."""
    (P, M), N = x.shape, y.shape[1]
    x_sb = _loaded(x)
    y_sb = _loaded(y)
    y_psum = nl.ndarray((M, N), dtype=nl.float32, buffer=nl.psum)
    out_hbm = nl.ndarray((P, N), dtype=y.dtype, buffer=nl.shared_hbm)
    for _i in range(count):
        nisa.nc_matmul(dst=y_psum, stationary=x_sb, moving=y_sb, accumulate=False)
        nisa.tensor_copy(dst=y_sb, src=y_psum, engine=nisa.vector_engine)
    nisa.dma_copy(dst=out_hbm, src=y_sb)
    return out_hbm


@jit
def bursts(x: NkiTensor, y: NkiTensor, count: int, matmuls: int, columns: int) -> NkiTensor:
    """x [128, 128], y [128, N] fp32: `count` bursts of so many x.T @ y; VectorE works between them.

    It copies a burst's result out of PSUM, then `columns` <= N columns, which the next burst reads.
    """
    (P, M), N = x.shape, y.shape[1]
    x_sb = _loaded(x)
    y_sb = _loaded(y)
    moving_sb = nl.ndarray((P, N), dtype=x.dtype, buffer=nl.sbuf)
    y_psum = nl.ndarray((M, M), dtype=nl.float32, buffer=nl.psum)
    out_hbm = nl.ndarray((M, M), dtype=y.dtype, buffer=nl.shared_hbm)
    nisa.tensor_copy(dst=moving_sb, src=y_sb, engine=nisa.vector_engine)
    for _i in range(count):
        for k in range(matmuls):
            nisa.nc_matmul(dst=y_psum, stationary=x_sb, moving=moving_sb[:, 0:M], accumulate=k > 0)
        nisa.tensor_copy(dst=y_sb[:, 0:M], src=y_psum, engine=nisa.vector_engine)
        nisa.tensor_copy(
            dst=moving_sb[:, 0:columns], src=y_sb[:, 0:columns], engine=nisa.vector_engine
        )
    nisa.dma_copy(dst=out_hbm, src=y_sb[:, 0:M])
    return out_hbm


@jit
def vector_chain(x: NkiTensor, count: int, through_psum: bool) -> NkiTensor:
    """x [128, N] fp32: VectorE halves it `2 * count` times, each time into the other tile."""
    other = nl.psum if through_psum else nl.sbuf
    x_sb = _loaded(x)
    half = nl.ndarray(x.shape, dtype=x.dtype, buffer=other)
    out_hbm = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for _i in range(count):
        nisa.tensor_scalar(
            dst=half, data=x_sb, op0=nl.multiply, operand0=0.5, engine=nisa.vector_engine
        )
        nisa.tensor_scalar(
            dst=x_sb, data=half, op0=nl.multiply, operand0=0.5, engine=nisa.vector_engine
        )
    nisa.dma_copy(dst=out_hbm, src=x_sb)
    return out_hbm


@jit
def products(x: NkiTensor, count: int) -> NkiTensor:
    """x [128, N]: the firsts of `count` products of VectorE with numbers, none of another."""
    P, N = x.shape
    x_sb = _loaded(x)
    products_sb = nl.ndarray((P, count, N), dtype=x.dtype, buffer=nl.sbuf)
    for i in range(count):
        nisa.tensor_scalar(
            dst=products_sb[:, i, :],
            data=x_sb,
            op0=nl.multiply,
            operand0=float(i),
            engine=nisa.vector_engine,
        )
    return _firsts(products_sb)


@jit
def gpsimd_chain(x: NkiTensor, count: int) -> NkiTensor:
    """x [128, N] fp32: GpSimdE squares it `2 * count` times, each time into the other tile."""
    x_sb = _loaded(x)
    other_sb = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    out_hbm = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for _i in range(count):
        nisa.tensor_tensor(
            dst=other_sb, data1=x_sb, data2=x_sb, op=nl.multiply, engine=nisa.gpsimd_engine
        )
        nisa.tensor_tensor(
            dst=x_sb, data1=other_sb, data2=other_sb, op=nl.multiply, engine=nisa.gpsimd_engine
        )
    nisa.dma_copy(dst=out_hbm, src=x_sb)
    return out_hbm


@jit
def scalar_chain(x: NkiTensor, count: int, with_tables: bool) -> NkiTensor:
    """x [128, N] fp32: ScalarE computes two functions in turn, `count` times, each of the last.

    Copies, or with tables exp and square roots, whose tables it loads each time.
    """
    first = nl.exp if with_tables else nl.copy
    second = nl.sqrt if with_tables else nl.copy
    x_sb = _loaded(x)
    other_sb = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    out_hbm = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for _i in range(count):
        nisa.activation(dst=other_sb, op=first, data=x_sb, scale=-1.0)  # stays finite
        nisa.activation(dst=x_sb, op=second, data=other_sb)
    nisa.dma_copy(dst=out_hbm, src=x_sb)
    return out_hbm


@jit
def scalar_chains(x: NkiTensor, count: int, steps: int) -> NkiTensor:
    """x [128, N]: the firsts of `count` tiles, each negated `steps` times before the next is.

    ScalarE waits for each result, unless a compiler has other tiles between.
    """
    P, N = x.shape
    x_sb = _loaded(x)
    tiles_sb = nl.ndarray((P, count, N), dtype=x.dtype, buffer=nl.sbuf)
    for i in range(count):
        nisa.activation(dst=tiles_sb[:, i, :], op=nl.copy, data=x_sb, scale=-1.0)
        for _step in range(1, steps):
            nisa.activation(dst=tiles_sb[:, i, :], op=nl.copy, data=tiles_sb[:, i, :], scale=-1.0)
    return _firsts(tiles_sb)


@jit
def exchanges(x: NkiTensor, count: int) -> NkiTensor:
    """x [128, N], two cores: they swap a tile `count` times, each time the one received last."""
    rank = nl.program_id(0)
    one_sb = _loaded(x)
    two_sb = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    out_hbm = nl.ndarray((2, x.shape[0], x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in range(count):
        mine_sb = one_sb if i % 2 == 0 else two_sb
        other_sb = two_sb if i % 2 == 0 else one_sb
        nisa.sendrecv(
            src=mine_sb, dst=other_sb, send_to_rank=1 - rank, recv_from_rank=1 - rank, pipe_id=0
        )
    nisa.dma_copy(dst=out_hbm[rank, :, :], src=one_sb if count % 2 == 0 else two_sb)
    return out_hbm


@jit
def barriers(x: NkiTensor, count: int) -> NkiTensor:
    """x [128, N], two cores: each stores it, then they wait for each other `count` times."""
    rank = nl.program_id(0)
    x_sb = _loaded(x)
    out_hbm = nl.ndarray((2, x.shape[0], x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out_hbm[rank, :, :], src=x_sb)
    for _i in range(count):
        nisa.core_barrier(data=out_hbm, cores=(0, 1))
    return out_hbm
