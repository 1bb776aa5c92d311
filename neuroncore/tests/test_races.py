"""Two cores that use one part of a tensor without a barrier in between."""

import re
import warnings
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
from instruction_runs import loaded, noted
from samples import data, equal

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl


def launched(body, *arrays, **options):
    return nc.simulate(nc.jit(body)[2], *arrays, target="trn2", **options).outputs


@contextmanager
def a_read_races():
    with pytest.warns(nc.NkiWarning) as caught:
        yield
    assert any(re.search("core 0 writes .* core 1 reads", str(w.message)) for w in caught)


@pytest.mark.parametrize("between", ["nothing", "sendrecv", "another barrier", "barrier"])
def test_only_a_barrier_on_the_tensor_orders_what_uses_it(between):
    def kernel(x):
        me, tile = nl.program_id(0), loaded(x)
        shared, other, out = (nl.ndarray((4, 6), nl.float32, nl.shared_hbm) for _ in range(3))
        nisa.dma_copy(shared[2 * me : 2 * me + 2], tile[:2])
        if between == "sendrecv":
            nisa.sendrecv(tile, nl.ndarray((4, 6), nl.float32), 1 - me, 1 - me, 0)
        elif between != "nothing":
            nisa.core_barrier(shared if between == "barrier" else other, (0, 1))
        nisa.dma_copy(out[2 * me : 2 * me + 2], loaded(shared[2 - 2 * me : 4 - 2 * me]))
        return out

    with nullcontext() if between == "barrier" else a_read_races():
        launched(kernel, data((4, 6)), uninitialised="warn")


@pytest.mark.parametrize("how", ["vector", "register", "loop"])
@pytest.mark.parametrize("first", [2, 1])
def test_rows_that_indices_choose_are_those_that_race(how, first):
    """Core 0 writes rows 0 and 1, core 1 two rows from `first` on."""

    def kernel(x, index):
        start = first * nl.program_id(0)
        out = nl.ndarray((4, 6), nl.float32, nl.shared_hbm)
        tile, rows = loaded(x), loaded(index[start : start + 2])
        if how == "vector":
            nisa.dma_copy(out.vector_select(0, rows), tile[:2])
        elif how == "register":
            for i in range(2):
                nisa.dma_copy(out[nl.ds(nisa.register_alloc(start + i), 1)], tile[:1])
        else:
            for i in nl.dynamic_range(start, start + 2):
                nisa.dma_copy(out[nl.ds(i, 1)], tile[:1])
        return x

    arrays = data((4, 6)), np.arange(4, dtype=np.int32)[:, None]
    race = noted("core 0 writes .* at line .* where core 1 writes it at line .* without core_b")
    with nullcontext() if first == 2 else race:
        launched(kernel, *arrays)


def test_interleaved_columns_of_two_cores_do_not_meet():
    def kernel(x):
        out, me = nl.ndarray((4, 6), nl.float32, nl.shared_hbm), nl.program_id(0)
        nisa.dma_copy(out[:, me::2], loaded(x)[:, me::2])
        return out

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        equal(launched(kernel, data((4, 6))), data((4, 6)))


def test_a_barrier_on_a_tile_is_noted():
    def kernel(x):
        me, out = nl.program_id(0), nl.ndarray((4, 6), nl.float32, nl.shared_hbm)
        tile = loaded(x)
        nisa.core_barrier(tile, (0, 1))
        nisa.dma_copy(out[2 * me : 2 * me + 2], tile[:2])
        return out

    with noted("core_barrier: data must be in shared_hbm"):
        launched(kernel, data((4, 6)))
