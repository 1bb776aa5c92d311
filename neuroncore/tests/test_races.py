"""Two cores that use one part of a tensor without a barrier in between."""

import warnings

import pytest
from instruction_runs import data, equal, loaded, noted

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl


def launched(body, *arrays):
    return nc.simulate(nc.jit(body)[2], *arrays, target="trn2").outputs


def test_cores_that_write_one_tensor_or_read_without_a_barrier():
    def kernel(x, rows, waits):
        me = nl.program_id(0)
        shared, out = (nl.ndarray((4, 6), nl.float32, nl.shared_hbm) for _ in range(2))
        tile = loaded(x)
        nisa.dma_copy(shared[rows[me]], tile[: rows[me].stop - rows[me].start])
        if waits:
            nisa.core_barrier(shared, (0, 1))
        read = slice(2 - 2 * me, 4 - 2 * me)
        nisa.dma_copy(out[2 * me : 2 * me + 2], loaded(shared[read]))
        return out

    x, apart, over = data((4, 6)), (slice(0, 2), slice(2, 4)), (slice(0, 3), slice(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launched(kernel, x, apart, True)
    with noted("core 0 writes .* where core 1 writes it at line .* without core_barrier"):
        launched(kernel, x, over, True)
    with pytest.warns(nc.NkiWarning) as caught:
        nc.simulate(nc.jit(kernel)[2], x, apart, False, target="trn2", uninitialised="warn")
    assert any("core 0 writes" in str(w.message) and "core 1 reads" in str(w.message)
               for w in caught)  # fmt: skip


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
