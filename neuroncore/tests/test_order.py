"""Kernels whose tensors fit in another order of their instructions than the program's."""

import numpy as np
import pytest
from instruction_runs import noted, refused
from samples import values

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.hardware import Engine
from neuroncore.memory.liveness import peak
from neuroncore.memory.storage import MemoryRegion

X, W = values(0, (16, 8)), values(1, (16, 512))
EXACT = X.T @ W


def matmuls(x, w, count, engine=nisa.engine.vector, meanwhile=lambda: None, address=None):
    """All matmuls of the program before the first eviction: `count` PSUM banks at once."""
    a, b = nl.load(x), nl.load(w)
    out = nl.ndarray((count, 8, 512), nl.float32, nl.shared_hbm)
    sums = []
    for _ in range(count):
        acc = nl.ndarray((8, 512), nl.float32, nl.psum)
        nisa.nc_matmul(acc, a, b)
        sums.append(acc)
    meanwhile()
    for i in range(count):
        tile = nl.ndarray((8, 512), nl.float32, address=address)
        nisa.tensor_scalar(tile, sums[i], nl.multiply, float(i), engine=engine)
        nisa.dma_copy(out[i], tile)
    return out


def numbers(trace, engine):
    """In which order an engine writes the tensors, by the order in which they were made."""
    made = {s: i for i, s in enumerate(trace.storages)}
    return [made[storages[0]] for t, storages, _, _ in trace.records if t.engine is engine]


@pytest.mark.parametrize("address", [None, (0, 0)])
def test_evictions_at_the_end_of_the_program(address):
    done = nc.simulate(matmuls, X, W, 48, address=address, target="trn2")
    for i in range(48):
        np.testing.assert_array_equal(done.outputs[i], EXACT * i)
    (core,) = done.profile.launch.cores
    assert peak(core.trace, MemoryRegion.psum, core.machine).used == 8
    for engine in (Engine.TENSOR, Engine.VECTOR):
        order = numbers(core.trace, engine)
        assert order == sorted(order)
        assert len(order) == 48
    first_eviction = [r[0].opcode for r in core.trace.records].index("tensor_scalar")
    assert first_eviction < [s.first for s in core.trace.storages if s.memory is nl.psum][8]


def test_program_order_stays_where_it_fits():
    traces = [nc.simulate(matmuls, X, W, n, target="trn2").profile.launch.cores[0].trace
              for n in (8, 9)]  # fmt: skip
    orders = [[r[0].opcode for r in t.records] for t in traces]
    assert orders[0][2:11] == ["nc_matmul"] * 8 + ["tensor_scalar"]
    assert orders[1][2:11] == ["nc_matmul"] * 8 + ["tensor_scalar"]
    assert orders[1].count("nc_matmul") == 9


def test_what_fits_in_no_order_is_refused():
    def on_one_engine(x):
        tiles = [nl.ndarray((8, 512), nl.float32, nl.psum) for _ in range(9)]
        for tile in tiles:
            nisa.memset(tile, 0.0, engine=nisa.vector_engine)
        for tile in tiles:
            nisa.tensor_copy(nl.ndarray((8, 512), nl.float32), tile, engine=nisa.vector_engine)

    with refused("psum does not fit: 9 banks", placed=False):
        nc.simulate(on_one_engine, X)
    with noted("psum does not fit: 9 banks .* as if it did"):
        nc.simulate(on_one_engine, X, capacity="warn")


def test_a_barrier_keeps_its_place():
    def kernel(x, w, halves):
        def meet():
            if halves:
                nisa.core_barrier(x, (0, 1))

        return matmuls(x, w, 12, meanwhile=meet)

    def launch(halves):
        return nc.simulate(nc.jit(kernel)[2], X, W, halves, target="trn2")

    with noted("core 0 writes .* where core 1 writes it"):  # both cores write all of it
        done = launch(False)
    np.testing.assert_array_equal(done.outputs[11], EXACT * 11)
    with refused("psum does not fit: 12 banks", placed=False), noted("core 0 writes"):
        launch(True)


def test_dependencies_are_kept_by_instruction():
    def kernel(x, w):
        made = []

        def meanwhile():
            late = nl.ndarray((8, 8), nl.float32, name="late")
            made.append(nisa.memset(late, 0.0, engine=nisa.gpsimd_engine))
            made.append(nisa.memset(nl.ndarray((8, 8), nl.float32, name="waits"), 0.0,
                                    engine=nisa.gpsimd_engine).depends_on(made[0]))  # fmt: skip

        return matmuls(x, w, 12, meanwhile=meanwhile)

    trace = nc.simulate(kernel, X, W, target="trn2").profile.launch.cores[0].trace
    ((consumer, producers),) = trace.edges.items()
    assert trace.records[consumer][1][0].name == "waits"
    assert [trace.records[p][1][0].name for p in producers] == ["late"]


def test_modelled_time_of_an_order_that_fits_is_that_of_evicting_early():
    def early(x, w, count):
        a, b = nl.load(x), nl.load(w)
        out = nl.ndarray((count, 8, 512), nl.float32, nl.shared_hbm)
        for i in range(count):
            acc, tile = nl.ndarray((8, 512), nl.float32, nl.psum), nl.ndarray((8, 512), nl.float32)
            nisa.nc_matmul(acc, a, b)
            nisa.tensor_scalar(tile, acc, nl.multiply, float(i), engine=nisa.engine.vector)
            nisa.dma_copy(out[i], tile)
        return out

    times = [nc.simulate(k, X, W, 32, target="trn2").profile.time_ms for k in (early, matmuls)]
    assert times[1] == pytest.approx(times[0], rel=0.02)
