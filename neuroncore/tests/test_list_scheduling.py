"""The order that list scheduling gives instructions: what it may change, and what it gains."""

from draws import pick
from hypothesis import given
from hypothesis import strategies as st
from profiled import profile_of, psum, tile

import neuroncore as nc
import neuroncore.isa as nisa
import neuroncore.language as nl
from neuroncore.hardware import PSUM_BANKS, TRN2
from neuroncore.memory import liveness
from neuroncore.memory.storage import MemoryRegion
from neuroncore.timing.list_scheduling import WINDOWS, list_scheduled

ENGINES = [nisa.vector_engine, nisa.scalar_engine]


def chains(x, count, steps):
    """Chains of activations of [128, 1], one after the other: each waits for the one before."""
    for _ in range(count):
        a = tile(x, 1)
        nisa.memset(a, 1.0)
        for _ in range(steps):
            nisa.activation(a, nl.copy, a)


def reordered_ms(profile):
    return profile.time_assuming("instruction-order")


def in_other_orders(profile):
    """The traces of each core in each other order."""
    return [[core.trace for core in each.cores] for each in list_scheduled(profile.launch, TRN2)]


def test_chains_that_wait_are_interleaved():
    one, four = (profile_of(lambda x, n=n: chains(x, n, 20), (128, 1)) for n in (1, 4))
    assert four.time_ms > 3.5 * one.time_ms
    assert reordered_ms(four) < 1.5 * one.time_ms
    assert reordered_ms(one) == one.time_ms
    assert min(four.uncertainties, key=lambda end: end.time_ms).name == "instruction-order"
    assert four.time_range_ms[0] <= reordered_ms(four)
    assert four.time_ms > 3.5 * one.time_ms  # the profile is as it was


def test_a_long_way_to_the_end_comes_first():
    def late(x):
        for _ in range(8):  # nothing waits for them
            a = tile(x)
            nisa.memset(a, 1.0, engine=nisa.vector_engine)
        chains(x, 1, 40)

    profile = profile_of(late, (128, 1))
    (core,) = profile.schedule.cores
    ahead = sum(core.end[i] - core.start[i] for i in range(8)) / 1e6
    assert reordered_ms(profile) < profile.time_ms - 0.7 * ahead


def test_loops_of_the_device_keep_their_order():
    def loop(x):
        nl.fori_loop(0, 4, lambda i: chains(x, 4, 4))

    profile = profile_of(loop, (128, 1))
    assert reordered_ms(profile) == profile.time_ms
    assert not in_other_orders(profile)


def test_banks_are_not_overbooked():
    def sums(x, w):
        a, b = tile(x, 128), tile(w)
        nisa.dma_copy(a, x)
        nisa.dma_copy(b, w)
        for _ in range(3 * PSUM_BANKS):
            total, out = psum(), tile(x)
            nisa.nc_matmul(total, a, b)
            nisa.tensor_copy(out, total)
            for _ in range(4):
                nisa.activation(out, nl.copy, out)

    profile = profile_of(sums, (128, 128), (128, 512))
    (core,) = profile.schedule.cores
    ((ordered,), *_) = in_other_orders(profile)
    assert liveness.peak(ordered, MemoryRegion.psum, TRN2).used <= PSUM_BANKS
    assert [t for t, *_ in ordered.records] != [t for t, *_ in core.trace.records]


def test_loads_that_would_fill_sbuf_stay_within_a_window():
    columns = 7 * TRN2.planned_sbuf_bytes // 25 // 2

    def scaled(x):
        for i in range(4):
            a, b, scale = tile(x, columns), tile(x, columns), nl.ndarray((128, 1), nl.float32)
            nisa.dma_copy(a, x[i])
            nisa.memset(scale, 1.0)
            for _ in range(300):  # longer than three loads
                nisa.activation(scale, nl.copy, scale)
            nisa.tensor_scalar(b, a, nl.multiply, scale, engine=nisa.vector_engine)

    profile = profile_of(scaled, (4, 128, columns))
    orders = in_other_orders(profile)
    assert len(orders) == len(WINDOWS) - 1  # else three loads, and no room for a result
    for (ordered,) in orders:
        peak = liveness.peak(ordered, MemoryRegion.sbuf, TRN2)
        assert peak.used <= TRN2.planned_sbuf_bytes
    assert reordered_ms(profile) < 0.8 * profile.time_ms


def test_banks_with_an_address_are_free_before_and_after():
    def sums(x, w):
        a, b = tile(x, 128), tile(w)
        nisa.dma_copy(a, x)
        nisa.dma_copy(b, w)
        places = [(0, 2048 * bank) for bank in range(PSUM_BANKS)]
        for place in [*places, *[None] * PSUM_BANKS]:
            total = nl.ndarray((128, 512), nl.float32, buffer=nl.psum, address=place)
            nisa.nc_matmul(total, a, b)
            nisa.tensor_copy(tile(x), total)

    profile = profile_of(sums, (128, 128), (128, 512))
    ((ordered,),) = in_other_orders(profile)
    assert liveness.peak(ordered, MemoryRegion.psum, TRN2).used <= PSUM_BANKS


@given(st.data())
def test_what_touches_what_another_writes_stays_behind_it(data):
    places = st.integers(0, 3)
    steps = data.draw(st.lists(st.tuples(places, places, pick(ENGINES)), min_size=2, max_size=30))

    def program(x):
        tiles = [tile(x, 64) for _ in range(3)]
        tiles.append(nl.ndarray((128, 64), x.dtype, address=(0, 0)))
        for i, t in enumerate(tiles):
            nisa.memset(t, 0.0, name=f"fill {i}")
        for i, (to, of, engine) in enumerate(steps):
            if i == len(steps) // 2:  # half of it where the last one was
                tiles[3] = nl.ndarray((128, 64), x.dtype, address=(0, 64))
                nisa.memset(tiles[3], 0.0, name="fill 4")
            nisa.tensor_scalar(tiles[to], tiles[of], nl.add, 1.0, engine=engine, name=f"step {i}")

    profile = profile_of(program, (128, 64))
    before = profile.schedule.cores[0].trace
    first = [(s.first, s.last) for s in before.storages]
    ((after,),) = in_other_orders(profile)
    assert [(s.first, s.last) for s in before.storages] == first
    half = len(steps) // 2
    touched = [({i}, set()) for i in range(4)] + [({to}, {of}) for to, of, _ in steps]
    touched.insert(4 + half, ({3}, set()))
    assert sorted(n for (n,) in after.names.values()) == list(range(len(touched)))
    place = {number: after.names[name][0] for name, (number,) in before.names.items()}
    for j, (writes, reads) in enumerate(touched):
        for i, (written, read) in enumerate(touched[:j]):
            if written & (writes | reads) or read & writes:
                assert place[i] < place[j]


def test_cores_meet_in_the_same_order():
    def meeting(x):
        core = nl.program_id(0)
        for i in range(3):
            chains(x, 2, 6)
            mine, theirs = tile(x, 8), tile(x, 8)
            nisa.memset(mine, float(i))
            nisa.sendrecv(mine, theirs, 1 - core, 1 - core, 0)

    profile = profile_of(nc.jit(meeting)[2], (128, 1))
    assert reordered_ms(profile) < profile.time_ms
    for traces in in_other_orders(profile):
        for core, ordered in zip(profile.schedule.cores, traces, strict=True):
            assert list(ordered.barriers.values()) == list(core.trace.barriers.values())
