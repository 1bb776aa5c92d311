"""Memory that the compiler does not see as one, rows in no order, and engines in one bank."""

import warnings

import numpy as np
import pytest
from instruction_runs import loaded, noted
from samples import data

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.checks.hazards import check_banks


def launched(body, *arrays):
    return nc.simulate(nc.jit(body), *arrays, target="trn2")


def quiet(body, *arrays):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return launched(body, *arrays)


def written(x, y):
    """Loads x, stores to y, without a dependency between."""
    tile, other = loaded(x), nl.ndarray(y.shape, y.dtype)
    nisa.memset(other, 0.0)
    nisa.dma_copy(y, other)
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(out, tile)
    return out


def updated(x, y):
    """Stores to y what comes from x: the store waits for the load."""
    tile = loaded(x)
    nisa.tensor_scalar(tile, tile, nl.add, 1.0)
    nisa.dma_copy(y, tile)
    return y


def test_two_arguments_in_one_memory():
    x = data((8, 6))
    quiet(written, x, data((8, 6)))
    with noted("two arguments in one memory, which nothing orders; pass one"):
        launched(written, x, x)
    with noted("writes y .* while line .* reads x"):
        launched(written, x[:6], x[2:])
    quiet(written, x[:4], x[4:])
    quiet(updated, x, x)
    quiet(lambda x, y: written(x, nl.ndarray(y.shape, y.dtype, nl.private_hbm)), x, x)


def test_a_declared_dependency_orders_them():
    def ordered(x, y):
        tile, other = nl.ndarray(x.shape, x.dtype), nl.ndarray(y.shape, y.dtype)
        load = nisa.dma_copy(tile, x)
        nisa.memset(other, 0.0)
        nisa.dma_copy(y, other).depends_on(load)
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(out, tile)
        return out

    x = data((8, 6))
    quiet(ordered, x, x)


@pytest.mark.parametrize(("first", "overlap"), [(1, True), (3, True), (4, False), (0, False)])
def test_a_dma_that_reads_where_it_writes(first, overlap):
    def moved(x):
        nisa.dma_copy(x[first : first + 4], x[0:4])
        return x

    if overlap:
        with noted("dma_copy: reads x .* its rows are moved in no order; copy through another"):
            launched(moved, data((8, 6)))
    else:
        quiet(moved, data((8, 6)))


@pytest.mark.parametrize(
    ("rows", "values", "raced"),
    [([0, 1, 1, 3], 4, True), ([0, 1, 2, 3], 4, False), ([0, 1, 1, 1], 1, False)],
)
def test_a_scatter_with_an_index_twice(rows, values, raced):
    """Of equal rows it does not matter which stays."""

    def scattered(x, index):
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        tile = loaded(x)
        nisa.dma_copy(out, tile)
        nisa.dma_copy(out.vector_select(0, loaded(index)), tile)
        return out

    x = np.repeat(data((4, 6))[:values], 4 // values, axis=0)
    arrays = x, np.array(rows, np.int32)[:, None]
    if raced:
        with noted("dma_copy: an index of .* occurs twice .* make indices unique"):
            launched(scattered, *arrays)
    else:
        quiet(scattered, *arrays)


@pytest.mark.parametrize("apart", [0, 512])
def test_engines_in_one_bank(apart):
    """Two columns of one tensor in PSUM, in one bank or in two."""

    def both(x):
        tile = loaded(x)
        acc = nl.ndarray((128, 1024), nl.float32, nl.psum)
        nisa.nc_matmul(acc[:, 0:128], tile, tile)
        second = acc[:, apart + 128 * (apart == 0) :][:, 0:128]
        nisa.nc_matmul(second, tile, tile)
        results = [nl.ndarray((128, 128), nl.float32) for _ in range(2)]
        for _ in range(4):
            nisa.tensor_copy(results[0], acc[:, 0:128], engine=nisa.engine.vector)
            nisa.activation(results[1], nl.exp, second)
        out = nl.ndarray((128, 128), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, results[0])
        nisa.dma_copy(out, results[1])
        return out

    (times,) = quiet(both, data((128, 128)) / 100).profile.schedule.cores
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_banks(times)
    assert bool(caught) == (apart == 0)
    assert all("shares a bank of psum" in str(each.message) for each in caught)
