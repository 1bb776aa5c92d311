"""Two cores: barriers order what they write, exchanges swap tiles, and both must take part."""

from typing import Any

import numpy as np
import pytest
from instruction_runs import loaded, refused
from samples import values

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl

X = values(0, (64, 8))


def half(x: nl.NkiTensor, core: int) -> nl.NkiTensor:
    rows = x.shape[0] // 2
    return x[core * rows : (core + 1) * rows]


def hbm(x: nl.NkiTensor) -> nl.NkiTensor:
    return nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)


@nc.jit
def swap_through_hbm(x):
    shared, out, me = hbm(x), hbm(x), nl.program_id(0)
    nisa.dma_copy(half(shared, me), loaded(half(x, me)))
    nisa.core_barrier(shared, cores=(0, 1))
    nisa.dma_copy(half(out, me), loaded(half(shared, 1 - me)))
    return out


@nc.jit
def swap_tiles(x, rounds, path):
    out, me = hbm(x), nl.program_id(0)
    mine, other = loaded(half(x, me)), nl.ndarray((x.shape[0] // 2, x.shape[1]), x.dtype)
    for i in range(rounds):
        nisa.sendrecv(mine, other, 1 - me, 1 - me, pipe_id=i % 2, dma_engine=path)
        nisa.tensor_tensor(mine, mine, other, nl.add)
        nisa.tensor_scalar(mine, mine, nl.multiply, float(me + 1))
    nisa.dma_copy(half(out, me), mine)
    return out


def test_a_barrier_shows_what_the_other_core_wrote():
    done = nc.simulate(swap_through_hbm[2], X, target="trn2")
    np.testing.assert_array_equal(done.outputs, np.concatenate([X[32:], X[:32]]))


@pytest.mark.parametrize("path", list(nisa.dma_engine))
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_sendrecv(rounds, path):
    done = nc.simulate(swap_tiles[2], X, rounds, path, target="trn2")
    first, second = X[:32], X[32:]
    for _ in range(rounds):
        first, second = first + second, (first + second) * 2
    np.testing.assert_array_equal(done.outputs, np.concatenate([first, second]))


def test_a_core_may_send_to_itself():
    @nc.jit
    def kernel(x):
        out, me = hbm(x), nl.program_id(0)
        other = nl.ndarray((32, 8), x.dtype)
        nisa.sendrecv(loaded(half(x, me)), other, me, me, 0)
        nisa.dma_copy(half(out, me), other)
        return out

    np.testing.assert_array_equal(nc.simulate(kernel[2], X, target="trn2").outputs, X)


@pytest.mark.parametrize(
    "kernel", [swap_through_hbm, lambda x: swap_tiles.func(x, 2, nisa.dma_engine.dma)]
)
def test_trace_mode_meets_too(kernel):
    kernel = kernel if isinstance(kernel, nc.Kernel) else nc.jit(kernel)
    spec = nc.TensorSpec(X.shape, nl.float32)
    done = nc.simulate(kernel[2], spec, target="trn2", mode="trace")
    assert done.outputs == spec
    ran = nc.simulate(kernel[2], X, target="trn2")
    assert done.profile.schedule.time_ns == ran.profile.schedule.time_ns


@pytest.mark.parametrize("slow", [0, 1])
def test_both_cores_leave_a_meeting_when_the_later_one_comes(slow):
    @nc.jit
    def kernel(x):
        out, me = hbm(x), nl.program_id(0)
        mine = loaded(half(x, me))
        tile = nl.ndarray(mine.shape, x.dtype)
        if me == slow:
            for _ in range(40):
                nisa.tensor_scalar(mine, mine, nl.add, 1.0)
        nisa.sendrecv(mine, tile, 1 - me, 1 - me, 0)
        nisa.dma_copy(half(out, me), tile)
        nisa.core_barrier(out, (0, 1))
        return out

    cores = nc.simulate(kernel[2], X, target="trn2").profile.schedule.cores
    for opcode in ("sendrecv", "core_barrier"):
        ends = [
            next(e for e, r in zip(c.end, c.trace.records, strict=True) if r[0].opcode == opcode)
            for c in cores
        ]
        assert ends[0] == ends[1] > 0
    work = [e for c in cores for e, r in zip(c.end, c.trace.records, strict=True)
            if r[0].opcode == "tensor_scalar"]  # fmt: skip
    assert ends[0] > max(work)


def test_a_barrier_reads_no_element_of_what_it_covers():
    def kernel():
        nisa.core_barrier(nl.ndarray((4, 32_768), nl.float8_e4m3fn, nl.shared_hbm), (0, 1))

    nc.simulate(nc.jit(kernel)[2], target="trn2")()


def test_what_a_barrier_covers_is_not_thereby_written():
    @nc.jit
    def kernel(x):
        shared = hbm(x)
        if nl.program_id(0) == 0:
            nisa.dma_copy(half(shared, 0), loaded(half(x, 0)))
        nisa.core_barrier(shared, (0, 1))
        loaded(half(shared, 1))

    with refused("of which no element was ever written"):
        nc.simulate(kernel[2], X, target="trn2")


def other(x: nl.NkiTensor, me: int) -> nl.NkiTensor:
    return nl.ndarray((x.shape[0] // 2, *x.shape[1:]), x.dtype)


def swap(x: nl.NkiTensor, me: int, **options: Any) -> None:
    given = {"send_to_rank": 1 - me, "recv_from_rank": 1 - me, "pipe_id": 0, **options}
    nisa.sendrecv(loaded(half(x, me)), other(x, me), **given)


def barrier(x: nl.NkiTensor, me: int, **options: Any) -> None:
    nisa.core_barrier(**{"data": x, "cores": (0, 1), **options})


def into(make: Any) -> Any:
    return lambda x, me: nisa.sendrecv(loaded(half(x, me)), make(x), 1 - me, 1 - me, 0)


REFUSED: list[tuple[str, int, Any, str]] = [
    ("trn1", 2, barrier, "core_barrier: it needs NeuronCore-v3"),
    ("trn1", 2, swap, "sendrecv: it needs NeuronCore-v3"),
    ("trn2", 1, barrier, "core_barrier: needs two cores and the launch has 1; call kernel[2]"),
    ("trn2", 1, swap, "sendrecv: needs two cores and the launch has 1"),
    ("trn2", 2, lambda x, me: barrier(x, me, cores=(0,)), "cores must be (0, 1); got (0,)"),
    ("trn2", 2, lambda x, me: barrier(x, me, data=X), "data must be a tensor in shared_hbm"),
    ("trn2", 2, lambda x, me: barrier(x, me, engine=nisa.engine.dma), "engine.dma does not run it"),
    ("trn2", 2, lambda x, me: swap(x, me, send_to_rank=2), "ranks must be 0 or 1; got send_to 2"),
    ("trn2", 2, lambda x, me: swap(x, me, recv_from_rank=-1), "ranks must be 0 or 1"),
    ("trn2", 2, lambda x, me: swap(x, me, send_to_rank=me), "ranks must match"),
    ("trn2", 2, lambda x, me: swap(x, me, pipe_id=me), "must issue the same exchanges"),
    ("trn2", 2, lambda x, me: (swap, barrier)[me](x, me), "must issue the same exchanges"),
    ("trn2", 2, lambda x, me: None if me else swap(x, me), "core 0 waits but core 1 has ended"),
    ("trn2", 2, lambda x, me: swap(x, me) if me else None, "core 1 waits but core 0 has ended"),
    ("trn2", 2, lambda x, me: None if me else barrier(x, me), "core 0 waits but core 1 has ended"),
    ("trn2", 2, lambda x, me: barrier(x, me) if me else None, "core 1 waits but core 0 has ended"),
    ("trn2", 2, into(lambda x: x), "dst must be in sbuf"),
    ("trn2", 2, into(lambda x: nl.ndarray((32, 8), nl.bfloat16)), "must have one dtype"),
    ("trn2", 2, into(lambda x: nl.ndarray((32, 2, 4), x.dtype)), "must have one shape"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "cores", "body", "text"), REFUSED)
def test_exchanges_refuse(target, cores, body, text):
    @nc.jit
    def kernel(x):
        out = hbm(x)
        body(x, nl.program_id(0))
        nisa.dma_copy(out, loaded(x))
        return out

    with refused(text):
        nc.simulate(kernel[cores], X, target=target)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 256), ("bfloat16", 256), ("uint8", 256)])
def test_gpsimd_dma_moves_little(dtype, most):
    def kernel(x):
        out, me = hbm(x), nl.program_id(0)
        swap(x, me, dma_engine=nisa.dma_engine.gpsimd_dma)
        nisa.dma_copy(half(out, me), loaded(half(x, me)))
        return out

    nc.simulate(nc.jit(kernel)[2], values(0, (2, 256), dtype), target="trn2")
    with refused("dma_engine.gpsimd_dma moves"):
        nc.simulate(nc.jit(kernel)[2], values(0, (2, 257), dtype), target="trn2")
