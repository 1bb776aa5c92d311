"""What is live at once, and what does not fit."""

import pytest

from neuronmm_ops import neuroncore as nc
from neuronmm_ops.hardware import MACHINES
from neuronmm_ops.neuroncore import isa as nisa
from neuronmm_ops.neuroncore import language as nl
from neuronmm_ops.neuroncore.memory.storage import MemoryRegion

X = nc.TensorSpec((128, 64), nl.float32)


def run(kernel, target="trn2"):
    return nc.simulate(kernel, X, target=target, mode="trace").profile


@pytest.mark.parametrize("target", MACHINES)
def test_sbuf_is_full_to_the_last_byte_and_no_further(target):
    limit = MACHINES[target].usable_sbuf_bytes

    def two_tiles(more):
        @nc.jit
        def kernel(x):
            a = nl.ndarray((128, 1000), dtype=nl.uint8, name="small")
            b = nl.ndarray((128, limit - 1000 + more), dtype=nl.uint8, name="large")
            nisa.memset(a, 0)
            nisa.memset(b, 0)
            nisa.tensor_copy(a[:, 0:1], b[:, 0:1])

        return kernel

    run(two_tiles(0), target)
    with pytest.raises(
        nc.NkiValidationError, match=f"{limit + 1} bytes.*has {limit}.*large.*small"
    ):
        run(two_tiles(1), target)


def test_a_tile_is_live_from_first_write_to_last_use_only():
    @nc.jit
    def kernel(x):
        for _ in range(10):
            tile = nl.ndarray((128, 100_000), dtype=nl.uint8)
            nisa.memset(tile, 0)
        never = nl.ndarray((128, 200_000), dtype=nl.uint8)
        assert never.shape == (128, 200_000)

    (core,) = run(kernel).launch.cores
    from neuronmm_ops.neuroncore.memory.liveness import peak

    assert peak(core.trace, MemoryRegion.sbuf, core.machine).used == 100_000


def test_nine_psum_tiles_do_not_fit():
    def tiles(count):
        @nc.jit
        def kernel(x):
            live = []
            for _ in range(count):
                tile = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.psum)
                nisa.memset(tile, 0.0)
                live.append(tile)
            for tile in live:
                nisa.activation(nl.ndarray((128, 8), dtype=nl.float32), nl.copy, tile)

        return kernel

    run(tiles(8))
    with pytest.raises(nc.NkiValidationError, match="psum does not fit: 9 banks"):
        run(tiles(9))


def addressed(first, second, reuse):
    @nc.jit
    def kernel(x):
        a = nl.ndarray((128, 64), dtype=nl.float32, address=first)
        b = nl.ndarray((128, 64), dtype=nl.float32, address=second)
        nisa.memset(a, 0.0)
        nisa.memset(b, 0.0)
        if reuse:
            nisa.tensor_copy(b, a)

    return kernel


def test_live_tensors_must_not_overlap_by_address():
    with pytest.raises(nc.NkiValidationError, match=r"overlap.*\(0, 0\).*\(0, 128\)"):
        run(addressed((0, 0), (0, 128), reuse=True))
    run(addressed((0, 0), (0, 256), reuse=True))
    profile = run(addressed((0, 0), (0, 128), reuse=False))  # a is dead when b is written
    core = profile.schedule.cores[0]
    assert core.start[1] >= core.end[0]
