"""What is live at once, and what does not fit."""

import itertools
import re

import pytest
from instruction_runs import full, new

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.hardware import MACHINES
from neuroncore.memory.storage import MemoryRegion
from neuroncore.profile.places import places

X = nc.TensorSpec((128, 64), nl.float32)


def run(kernel, target="trn2"):
    return nc.simulate(kernel, X, target=target, mode="trace").profile


@pytest.mark.parametrize("target", MACHINES)
def test_sbuf_is_full_to_the_last_byte_and_no_further(target):
    limit = MACHINES[target].usable_sbuf_bytes

    def two_tiles(more):
        def kernel(x):
            a = nl.ndarray((128, 1000), dtype=nl.uint8, name="small")
            b = nl.ndarray((128, limit - 1000 + more), dtype=nl.uint8, name="large")
            nisa.memset(a[:, :1], 0)
            nisa.memset(b[:, :1], 0)
            nisa.tensor_copy(a[:, 0:1], b[:, 0:1])

        return kernel

    run(two_tiles(0), target)
    with pytest.raises(
        nc.NkiValidationError, match=f"{limit + 1} bytes.*has {limit}.*large.*small"
    ):
        run(two_tiles(1), target)


def test_a_tile_is_live_from_first_write_to_last_use_only():
    def kernel(x):
        for _ in range(10):
            tile = nl.ndarray((128, 100_000), dtype=nl.uint8)
            nisa.memset(tile[:, :1], 0)
        never = nl.ndarray((128, 200_000), dtype=nl.uint8)
        assert never.shape == (128, 200_000)

    (core,) = run(kernel).launch.cores
    from neuroncore.memory.liveness import peak

    assert peak(core.trace, MemoryRegion.sbuf, core.machine).used == 100_000


@pytest.mark.parametrize(
    ("count", "memory", "shape", "text"),
    [
        (9, nl.psum, (128, 8), "psum does not fit: 9 banks"),
        (9, nl.psum, (8, 512), "psum does not fit: 9 banks"),
        (5, nl.psum, (8, 1024), "psum does not fit: 10 banks"),
        (2, nl.sbuf, (128, 30_000), "sbuf does not fit"),
    ],
)
def test_live_tiles_fit_or_are_refused(count, memory, shape, text):
    def tiles(count, times=1):
        def kernel(x):
            for _ in range(times):
                live = [full(0.0, *shape, buffer=memory) for _ in range(count)]
                for tile in live:  # on the engine of the memsets, so that none goes before them
                    nisa.tensor_copy(new(shape[0], 1), tile[:, :1], engine=nisa.vector_engine)

        return kernel

    run(tiles(count - 1, 3))
    with pytest.raises(nc.NkiValidationError, match=text):
        run(tiles(count))


def addressed(first, second, reuse):
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


def by_turns(addresses, size, live):
    """Tensors with addresses, then one without; they are used afterwards where they stay live."""

    def kernel(x):
        given = [nl.ndarray((128, size), nl.uint8, address=(0, at)) for at in addresses]
        for tile in given:
            nisa.memset(tile[:, :1], 0)
        free = nl.ndarray((128, 150_000), nl.uint8, name="free")
        nisa.memset(free[:, :2], 0, engine=nisa.gpsimd_engine)
        for tile in given if live else ():
            nisa.tensor_copy(free[:, :1], tile[:, :1])

    return kernel


def test_an_address_is_held_from_first_write_to_last_use_only():
    profile = run(by_turns((0, 100_000), 90_000, live=False))
    core = profile.schedule.cores[0]
    assert core.start[2] >= core.end[0]  # two of 90,000 and one of 150,000 are never live at once
    found = places(core, MemoryRegion.sbuf)
    assert {p.storage.name: p.byte for p in found}["free"] == 0
    for a, b in itertools.combinations(found, 2):
        assert a.end <= b.start or b.end <= a.start or a.byte_end <= b.byte or b.byte_end <= a.byte
    with pytest.raises(
        nc.NkiValidationError, match=r"330000 bytes.* live at once.* free.* 2 x 90000"
    ):
        run(by_turns((0, 100_000), 90_000, live=True))
    # they share 40,000 bytes, so that 60,000 are left, whose place nothing else needs
    shared = by_turns((0, 10_000), 50_000, live=False)
    assert run(shared).sbuf_peak_bytes == 150_000


def test_a_tensor_that_an_instruction_writes_twice_takes_room_once():
    def kernel(x):
        for _ in range(8):
            both = nl.ndarray((128, 12_000), nl.float32)
            one = full(1.0, 128, 64)
            nisa.tensor_scalar_reduce(
                both[:, :64], one, nl.multiply, 2.0, nl.add, reduce_res=both[:, 64:65]
            )

    assert run(kernel).sbuf_peak_bytes < 60_000  # the schedule had no room left at the fifth


@pytest.mark.parametrize(("partitions", "above"), [(32, 4), (33, 2), (64, 2), (65, 1), (128, 1)])
def test_tiles_of_few_partitions_lie_above_one_another(partitions, above):
    limit = MACHINES["trn2"].usable_sbuf_bytes

    def tiles(count):
        def kernel(x):
            live = [nl.ndarray((partitions, limit), dtype=nl.uint8) for _ in range(count)]
            for tile in live:
                nisa.memset(tile[:, :2], 0)
            for tile in live:
                nisa.tensor_copy(tile[:, :1], tile[:, 1:2])

        return kernel

    run(tiles(above))
    with pytest.raises(nc.NkiValidationError, match="sbuf does not fit"):
        run(tiles(above + 1))


def too_large(x):
    tiles = [nl.ndarray((128, 8192), dtype=nl.uint8) for _ in range(32)]
    tiles.append(nl.ndarray((128, 16), dtype=nl.uint8, name="last"))
    for tile in tiles:
        nisa.memset(tile, 0)
    for tile in tiles:
        nisa.tensor_copy(tile[:, :1], tile[:, 1:2])


def test_tiles_of_one_line_are_told_together():
    line = too_large.__code__.co_firstlineno + 1
    with pytest.raises(nc.NkiValidationError) as raised:
        run(too_large)
    told = (
        rf"; free or shrink the largest: 32 x 8192 sbuf\d+ \[128, 8192\] uint8 at line {line}; 16 "
    )
    assert re.search(told + "last", str(raised.value))


def test_what_does_not_fit_may_be_explored():
    with pytest.warns(nc.NkiWarning, match="sbuf does not fit: 262160 bytes .* as if it did"):
        found = nc.simulate(too_large, X, mode="trace", target="trn2", capacity="warn").profile
    assert found.time_ms > 0
    with pytest.raises(ValueError, match="capacity must be one of"):
        nc.simulate(too_large, X, mode="trace", capacity="ignore")
