"""What would help: each resource freed in kernels small enough to work the time out by hand."""

import dataclasses

import pytest
from draws import pick
from hypothesis import given
from hypothesis import strategies as st
from profiled import documented, halves, idle, matmuls, profile_of, psum, tile
from samples import TARGETS

import neuroncore as nc
import neuroncore.isa as nisa
import neuroncore.language as nl
from neuroncore.hardware import DMA_ENGINES, TRN2
from neuroncore.profile.what_if import WhatIf, summary

long_rows = pytest.mark.filterwarnings("ignore:.* elements per partition:neuroncore.NkiWarning")


def by_name(profile: nc.Profile) -> dict[str, WhatIf]:
    return {entry.resource: entry for entry in profile.what_if}


def multiply(x, w):
    """One matmul, evicted by VectorE and scaled by ScalarE."""
    y = nl.ndarray((128, 512), x.dtype, buffer=nl.shared_hbm)
    a, b, scaled = tile(x, 128), tile(w), tile(x)
    total, out = psum(), nl.ndarray((128, 512), nl.float32)
    nisa.dma_copy(a, x)
    nisa.dma_copy(b, w)
    nisa.nc_matmul(total, a, b)
    nisa.tensor_copy(out, total, engine=nisa.vector_engine)
    nisa.activation(scaled, nl.copy, out)
    nisa.dma_copy(y, scaled)
    return y


def stream(x):
    """Loads that wait for room: a tile fills most of SBUF."""
    for i in range(6):
        a = tile(x, x.shape[1])
        nisa.dma_copy(a, x[128 * i : 128 * (i + 1), :])
        nisa.tensor_scalar(a, a, nl.multiply, 2.0)
    return x


def chain(profile: nc.Profile, *left_out: str) -> float:
    """ns of the instructions, one after another, without those of some opcodes, from the start."""
    (core,) = profile.schedule.cores
    gone = 0.0
    for i, (template, *_) in enumerate(core.trace.records):
        if template.opcode in left_out:
            gone += core.end[i] - core.start[i] + template.result_ns
    return profile.schedule.time_ns - gone


def test_an_engine_without_time_leaves_the_rest_of_the_chain():
    profile = documented(multiply, (128, 128), (128, 512))
    found = by_name(profile)
    assert not {"GpSimdE", "SBUF", "PSUM", "DMA descriptors"} & set(found)
    for resource, opcode in (
        ("TensorE", "nc_matmul"),
        ("VectorE", "tensor_copy"),
        ("PSUM eviction", "tensor_copy"),
        ("ScalarE", "activation"),
    ):
        assert found[resource].time_ms * 1e6 == pytest.approx(chain(profile, opcode)), resource
        speedup = profile.time_ms / found[resource].time_ms
        assert found[resource].speedup == pytest.approx(speedup)


def test_free_dma_leaves_its_start_and_its_best_shape_the_bytes_at_the_peak():
    profile = documented(multiply, (128, 128), (128, 512))
    found = by_name(profile)
    (core,) = profile.schedule.cores
    carried = sum(t.dma.bytes for t, *_ in core.trace.records if t.dma is not None)
    # both loads share the engines, and the store follows
    free = profile.schedule.time_ns - core.dma_busy_ns[0]
    assert found["DMA rate"].time_ms * 1e6 == pytest.approx(free)
    best = carried / (DMA_ENGINES * TRN2.dma_engine_gbps)
    assert found["DMA shape"].time_ms * 1e6 == pytest.approx(free + best)


def test_issue_overhead_is_tensor_engines():
    profile = profile_of(matmuls, (128, 512))
    (core,) = profile.schedule.cores
    assert by_name(profile)["TensorE"].time_ms * 1e6 == pytest.approx(core.start[1])
    assert profile.what_would_help.startswith("TensorE binds: ")


@long_rows
def test_unlimited_memory_lets_the_next_loads_begin():
    limit = TRN2.usable_sbuf_bytes
    columns = int(limit * 0.9) // 2  # one tile at a time
    profile = documented(stream, (6 * 128, columns))
    found = by_name(profile)
    assert "PSUM" not in found
    assert found["SBUF"].time_ms < profile.time_ms
    # one load after another at the DMA engines' pace, then the last tile's work
    (core,) = profile.schedule.cores
    last = core.end[-1] - core.end[-2]
    expected = core.start[0] + core.dma_busy_ns[0] + last
    assert found["SBUF"].time_ms * 1e6 == pytest.approx(expected)
    assert profile.sbuf.scheduled <= limit


def test_memory_with_room_for_all_is_not_tried():
    assert "SBUF" not in by_name(documented(stream, (6 * 128, 512)))


@long_rows
def test_tensors_at_addresses_wait_for_their_place_and_are_freed_too():
    def placed(x):
        for i in range(4):
            a = nl.ndarray((128, 8192), x.dtype, address=(0, 0))
            nisa.dma_copy(a, x[128 * i : 128 * (i + 1), :])
            nisa.tensor_scalar(a, a, nl.multiply, 2.0)
        big = tile(x, 90_000)
        nisa.memset(big, 0.0)
        return x

    profile = documented(placed, (4 * 128, 8192))
    assert by_name(profile)["SBUF"].time_ms < profile.time_ms


def test_what_has_no_part_of_the_path_is_not_tried():
    def loads(x):
        for i in range(64):
            a = tile(x, 2048)
            nisa.dma_copy(a, x)
            if i == 0:
                nisa.tensor_scalar(a[:, 0:64], a[:, 0:64], nl.multiply, 2.0)
        last = tile(x, 4)
        nisa.tensor_copy(last, a[:, 0:4], engine=nisa.vector_engine)
        return x

    profile = documented(loads, (128, 2048))
    path = {entry.opcode for entry in profile.critical_path}
    assert "tensor_copy" in path
    assert "VectorE" not in by_name(profile)


@long_rows
def test_freeing_leaves_the_launch_as_it_was():
    profile = documented(stream, (6 * 128, 45_000))
    traces = [
        dataclasses.replace(c.trace, records=list(c.trace.records)) for c in profile.launch.cores
    ]
    time = profile.time_ms
    assert profile.what_if
    again = documented(stream, (6 * 128, 45_000))
    assert (profile.time_ms, again.time_ms) == (time, time)
    assert [c.trace.records for c in profile.launch.cores] == [t.records for t in traces]
    assert profile.launch.machine.clocks_ghz == TRN2.clocks_ghz


def test_descriptors_by_hardware_can_bind():
    def small(tensors):  # each on a queue of its own
        for _ in range(4):
            for x in tensors:
                a = tile(x, 64, 1)
                nisa.dma_copy(a, x, dge_mode=nisa.dge_mode.hwdge)

    tensors = (nc.TensorSpec((1, 64), nl.bfloat16),) * 16
    profile = nc.simulate(small, tensors, target="trn2", mode="trace").profile
    found = by_name(profile)
    assert found["DMA descriptors"].time_ms < profile.time_ms / 2
    assert profile.what_if[0].resource == "DMA descriptors"
    assert profile.what_would_help.startswith("DMA descriptors binds: ")


def test_two_cores_and_a_barrier():
    profile = documented(halves[2], (128, 1024))
    best = profile.what_if[0]
    assert best.resource == "VectorE"  # of one core, which the other waits for
    assert best.time_ms < profile.time_ms


# no stores: freed, one may come before a load that is waited for, and share its DMA engines
STEPS = ("load", "vector", "scalar", "matmul")


@given(
    st.lists(st.tuples(pick(STEPS), st.integers(0, 3), st.integers(0, 3)), max_size=40),
    pick(TARGETS),
)
def test_a_free_resource_never_makes_it_slower(steps, target):
    def kernel(x):
        tiles = [tile(x) for _ in range(4)]
        for a in tiles:
            nisa.memset(a, 0.0)
        for step, i, j in steps:
            if step == "load":
                tiles[i] = tile(x)
                nisa.dma_copy(tiles[i], x)
            elif step == "vector":
                nisa.tensor_scalar(tiles[i], tiles[j], nl.multiply, 2.0)
            elif step == "scalar":
                nisa.activation(tiles[i], nl.exp, tiles[j])
            else:
                total = psum()
                nisa.nc_matmul(total, tiles[i][:, 0:128], tiles[j])
                nisa.tensor_copy(tiles[i], total, engine=nisa.vector_engine)
        return x

    profile = documented(kernel, (128, 512), target=target)
    for entry in profile.what_if:
        assert entry.time_ms <= profile.time_ms * (1 + 1e-9), entry


def test_nothing_ran():
    assert documented(idle, (4, 4)).what_if == ()
    assert documented(idle, (4, 4)).what_would_help == "Nothing ran."


def test_what_helps_little_does_not_bind():
    little = WhatIf("VectorE", "VectorE took no time", 0.985, 1 / 0.985, "move work")
    assert summary((little,), 1.0, 0.0).startswith("No single resource binds: ")
    much = dataclasses.replace(little, time_ms=0.975, speedup=1 / 0.975)
    assert summary((much, little), 1.0, 0.2) == (
        "VectorE binds: 1.03x as fast (modelled) if VectorE took no time; move work."
    )
    other = dataclasses.replace(much, resource="SBUF", freed="SBUF were unlimited", advice="less")
    assert summary((much, other, little), 1.0, 0.0).endswith(
        " Next is SBUF: 1.03x as fast (modelled) if SBUF were unlimited; less."
    )


def test_latency_is_worth_a_sentence_where_it_is_much():
    said = summary((), 1.0, 0.4)
    assert said.startswith("No single resource binds: ")
    assert "Nothing runs in 40% of the critical path: " in said

    def load(x):
        a = tile(x, 2, 1)
        nisa.dma_copy(a, x)
        return x

    profile = documented(load, (1, 2))
    share = profile.critical_path[0].latency_ms / profile.time_ms
    assert share > 0.5
    assert f"{share:.0%} of the critical path" in profile.what_would_help


def test_engines_alone_can_leave_no_time():
    def fill(x):
        a = tile(x)
        nisa.memset(a, 0.0, engine=nisa.vector_engine)
        return x

    profile = documented(fill, (4, 4))
    (entry,) = profile.what_if
    assert (entry.resource, entry.time_ms, entry.speedup) == ("VectorE", 0.0, None)
    assert "done at once (modelled) if VectorE took no time" in profile.what_would_help
