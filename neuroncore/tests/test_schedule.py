"""Start times against times worked out by hand from the documented costs."""

import pytest
from profiled import psum

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.hardware import DMA_DONE_NS, MACHINES, TRN1, TRN2, Engine
from neuroncore.timing.resources import Capacity
from neuroncore.timing.schedule import schedule
from neuroncore.timing.times import Wait

X = nc.TensorSpec((128, 2048), nl.bfloat16)


def placed(kernel, *arguments, target="trn2", model="calibrated"):
    """The schedule of core 0 at TensorE's full rate, with the opcode of each instruction."""
    options = {"target": target, "model": model, "mode": "trace"}
    run = nc.simulate(kernel, *arguments, assume="throttling", **options)
    (core,) = run.profile.schedule.cores
    core.opcodes = [record[0].opcode for record in core.trace.records]
    return core


def sbuf(columns=512, dtype=nl.float32):
    return nl.ndarray((128, columns), dtype=dtype)


def filled(columns=512, dtype=nl.float32):
    tile = sbuf(columns, dtype)
    nisa.memset(tile, 0.0)
    return tile


def load(x):
    nisa.dma_copy(sbuf(x.shape[1], nl.bfloat16), x)


def vector_ns(cycles, machine=TRN2):
    return machine.ns(Engine.VECTOR, cycles)


def test_a_dma_takes_its_latency_and_its_rows():
    for target, machine in MACHINES.items():
        core = placed(load, X, target=target)
        rows = 8 * 4096 / machine.dma_engine_gbps  # 8 partitions an engine, 4 KiB each
        assert core.start[0] == pytest.approx(1300)
        assert core.end[0] == pytest.approx(1300 + rows)


@pytest.mark.parametrize(("row_bytes", "share"), [(256, 0.108), (1024, 0.423), (4096, 0.964)])
def test_loads_of_one_queue_reach_what_the_published_curve_says(row_bytes, share):
    def loads(x):
        for t in range(64):
            load(x[t])

    core = placed(loads, nc.TensorSpec((64, 128, row_bytes // 2), nl.bfloat16))
    bytes_per_ns = 64 * 128 * row_bytes / (core.end[-1] - 1300)
    assert bytes_per_ns / 368 == pytest.approx(share, rel=0.04)


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_a_queue_starts_one_transfer_an_interval_and_queues_do_not_wait_for_each_other(target):
    def loads(x, y):
        for t in range(3):
            load(x[:, 64 * t : 64 * t + 64])
            load(y[:, 64 * t : 64 * t + 64])

    interval = MACHINES[target].dma.interval_ns
    assert interval > 0
    core = placed(loads, X, X, target=target)
    starts = [1300 + interval * n for n in range(3)]
    assert [core.start[i] for i in (0, 2, 4)] == pytest.approx(starts)
    run_ns = 8 * MACHINES[target].dma_run_ns(128)
    assert [core.start[i] for i in (1, 3, 5)] == pytest.approx([s + run_ns for s in starts])


def test_under_rows_a_queue_has_no_interval_and_short_runs_move_slowly():
    def loads(x):
        for t in range(3):
            load(x[:, 128 * t : 128 * t + 128])

    launch = nc.simulate(loads, X, target="trn1", mode="trace", dma_model="rows").profile
    (core,) = launch.schedule.cores
    # the tutorial's tiled step takes 288 ns more than the hoisted one for such a load
    assert [b - a for a, b in zip(core.end, core.end[1:], strict=False)] == pytest.approx(
        [288, 288], rel=0.1
    )
    assert launch.times_ms["rows"] == launch.time_ms == launch.time_low_ms
    assert launch.times_ms["transfers"] == launch.time_high_ms > launch.time_ms


def test_hbm_is_shared_by_the_cores_that_are_busy():
    def end_ns(target, cores):
        run = nc.simulate(load, X, target=target, mode="trace", cores_busy=cores)
        return run.profile.schedule.time_ns - 1300

    assert end_ns("trn2", 8) / end_ns("trn2", 1) == pytest.approx(368 / 362.5)
    assert end_ns("trn1", 2) == end_ns("trn1", 1)
    with pytest.raises(ValueError, match="cores_busy must be 1 to 2 on trn1; got 3"):
        end_ns("trn1", 3)
    with pytest.raises(ValueError, match="dma_model must be one of transfers, rows; got 'row'"):
        nc.simulate(lambda x: x, X, dma_model="row")


def test_four_partitions_use_one_dma_engine():
    def load(x):
        nisa.dma_copy(nl.ndarray((4, 4096), dtype=nl.bfloat16), x)

    core = placed(load, nc.TensorSpec((4, 4096), nl.bfloat16))
    assert [busy > 0 for busy in core.dma_busy_ns] == [True] + [False] * 15
    # the DMA overview measured 1416 ns for these 32 KiB on trn2
    assert core.end[0] - core.start[0] == pytest.approx(1416, rel=0.03)


def test_an_engine_runs_in_order_and_results_take_their_latency():
    def chain(x):
        tile, other = filled(), filled()
        nisa.tensor_scalar(tile, tile, nl.add, 1.0)
        nisa.tensor_scalar(other, other, nl.add, 1.0)

    core = placed(chain, X)
    one = vector_ns(512)
    # the first tensor_scalar waits for a result 100 cycles after its end, hidden by the memset
    assert core.start == pytest.approx([0, one, 2 * one, max(3 * one, 2 * one + vector_ns(100))])
    assert core.wait[2] == Wait.ENGINE


def test_a_dependent_chain_pays_the_latency_each_time():
    def chain(x):
        tile = filled(1)
        for _ in range(4):
            nisa.activation(tile, nl.exp, tile)

    core = placed(chain, X, target="trn1")
    first, *steps = [b - a for a, b in zip(core.start[1:], core.start[2:], strict=False)]
    # 264 cycles, as published, and before the first the function's table
    assert steps == pytest.approx([TRN1.ns(Engine.SCALAR, 264)] * 2, rel=1e-3)
    assert first == pytest.approx(steps[0] + 1300)


def test_a_table_is_loaded_where_the_function_changes_and_never_for_a_copy():
    def functions(x, order):
        tile = filled(64)
        for op in order:
            nisa.activation(tile, op, filled(64))

    def loads(*order):
        core = placed(functions, X, order)
        spans = zip(core.opcodes, core.start, core.end, strict=True)
        return [end - start > 1300 for name, start, end in spans if name == "activation"]

    assert loads(nl.exp, nl.exp, nl.copy, nl.exp) == [True, False, False, False]
    assert loads(nl.exp, nl.silu, nl.relu, nl.exp) == [True, True, False, True]


def test_reads_of_what_is_written_elsewhere_do_not_wait():
    def halves(x):
        tile = sbuf(2048, nl.bfloat16)
        nisa.dma_copy(tile[:, 0:1024], x[:, 0:1024])
        nisa.dma_copy(tile[:, 1024:2048], x[:, 1024:2048])
        out = sbuf(1024, nl.bfloat16)
        nisa.tensor_copy(out, tile[:, 0:1024])
        nisa.tensor_copy(out, tile[:, 1024:2048])

    core = placed(halves, X)
    assert core.start[2] == pytest.approx(core.end[0] + DMA_DONE_NS)
    assert core.start[3] == pytest.approx(core.end[1] + DMA_DONE_NS)
    assert core.cause[2:] == [0, 1]


def test_an_overwrite_waits_for_the_readers():
    def hoisted(x):
        tile, out = sbuf(2048, nl.bfloat16), sbuf(2048, nl.bfloat16)
        for _ in range(2):
            nisa.dma_copy(tile, x)
            nisa.activation(out, nl.copy, tile)

    core = placed(hoisted, X)
    assert core.start[2] >= core.end[1] + 1300
    assert (core.cause[2], core.wait[2]) == (1, Wait.DATA)


def streamed(bytes_per_partition):
    """Load and use eight tiles of a size, each allocated in the loop."""

    def stream(x):
        out = sbuf(64, nl.bfloat16)
        for _ in range(8):
            tile = sbuf(bytes_per_partition // 2, nl.bfloat16)
            nisa.dma_copy(tile, x)
            for _ in range(1500):
                nisa.activation(out, nl.copy, tile[:, 0:64])

    return placed(stream, nc.TensorSpec((128, bytes_per_partition // 2), nl.bfloat16))


def test_tiles_made_in_a_loop_are_loaded_ahead_as_far_as_there_is_room():
    two_fit = streamed(TRN2.usable_sbuf_bytes // 5 * 2)
    loads = [i for i, opcode in enumerate(two_fit.opcodes) if opcode == "dma_copy"]
    last_use = [i - 1 for i in loads[1:]]
    assert two_fit.start[loads[1]] < two_fit.start[last_use[0]]  # the second is loaded meanwhile
    assert two_fit.start[loads[2]] >= two_fit.end[last_use[0]]  # the third waits for the first
    assert (two_fit.wait[loads[2]], two_fit.cause[loads[2]]) == (Wait.CAPACITY, last_use[0])
    all_fit = streamed(4096)
    assert Wait.CAPACITY not in all_fit.wait


def test_loads_ahead_leave_the_reserve_of_plans():
    two_need_it = streamed((TRN2.usable_sbuf_bytes - 128) // 2)
    loads = [i for i, opcode in enumerate(two_need_it.opcodes) if opcode == "dma_copy"]
    assert two_need_it.wait[loads[1]] == Wait.CAPACITY


def test_matmuls_take_their_columns_and_the_fitted_overhead():
    def matmuls(x):
        a, b, acc = filled(128, nl.bfloat16), filled(512, nl.bfloat16), psum()
        for _ in range(3):
            nisa.nc_matmul(acc, a, b)

    for model, overhead in (("documented", 0), ("calibrated", TRN2.matmul_overhead_cycles)):
        core = placed(matmuls, X, model=model)
        each = TRN2.ns(Engine.TENSOR, 512 + overhead)
        assert core.end[-1] - core.start[2] == pytest.approx(3 * each)


def test_with_stationary_reuse_only_a_new_stationary_operand_pays_the_overhead():
    def matmuls(x):
        a, b = filled(128, nl.bfloat16), filled(512, nl.bfloat16)
        first, second = psum(), psum()
        nisa.nc_matmul(first, a, b)
        nisa.nc_matmul(second, a, b)  # the same operand
        nisa.nc_matmul(first, a[:64], b[:64])  # a part of it
        nisa.memset(a, 2.0)
        nisa.nc_matmul(second, a[:64], b[:64])  # written in between

    core = placed(matmuls, X, model="stationary_reuse")
    times = [core.end[i] - core.start[i] for i in (2, 3, 4, 6)]
    without = TRN2.ns(Engine.TENSOR, 512)
    assert times == pytest.approx([without + n * TRN2.matmul_overhead_ns for n in (1, 0, 1, 1)])


def test_the_overhead_is_what_the_two_kernels_were_measured_at():
    each = TRN1.ns(Engine.TENSOR, 512) + TRN1.matmul_overhead_ns
    assert each * 32768 == pytest.approx(6.97e6)
    assert TRN2.matmul_overhead_cycles == 9.7
    each = TRN2.ns(Engine.TENSOR, 512 + TRN2.other_overhead_cycles)
    assert 2 * 2048**3 / (each * 1024) / 1e3 == pytest.approx(0.9092 * TRN2.pe_peak_tflops)
    assert MACHINES["trn3"].matmul_overhead_cycles == TRN2.matmul_overhead_cycles


def test_tiled_matmuls_run_beside_each_other():
    def columns(x, tiled):
        a, b = filled(32, nl.bfloat16), filled(512, nl.bfloat16)
        acc = psum()
        for j in range(4):
            part = acc[32 * j : 32 * j + 32, :]
            if tiled:
                nisa.nc_matmul(part, a, b, tile_position=(0, 32 * j), tile_size=(128, 32))
            else:
                nisa.nc_matmul(part, a, b)

    def span(tiled):
        core = placed(columns, X, tiled)
        return core.end[-1] - core.start[2]

    assert span(True) < span(False) / 1.4


def test_gen2_excludes_vector_and_gpsimd_from_each_other():
    def both(x):
        nisa.memset(sbuf(), 1.0, engine=nisa.engine.vector)
        nisa.memset(sbuf(), 1.0, engine=nisa.engine.gpsimd)

    alone, shared = placed(both, X, target="trn2"), placed(both, X, target="trn1")
    assert alone.start == [0, 0]
    assert shared.start[1] == pytest.approx(shared.end[0])
    assert shared.wait[1] == Wait.PORT


def test_gen2_excludes_vector_and_scalar_on_psum_only():
    def evict(x):
        a, b = filled(128, nl.bfloat16), filled(512, nl.bfloat16)
        for engine in ("vector", "scalar"):
            acc = psum()
            nisa.nc_matmul(acc, a, b)
            if engine == "vector":
                nisa.tensor_copy(sbuf(), acc)
            else:
                nisa.activation(sbuf(), nl.copy, acc)

    shared, alone = placed(evict, X, target="trn1"), placed(evict, X, target="trn2")
    assert shared.start[5] >= shared.end[3]
    assert alone.start[5] < alone.end[3]


def test_depends_on_makes_an_instruction_wait():
    def ordered(x, wait):
        first = nisa.memset(sbuf(), 1.0, engine=nisa.engine.vector)
        second = nisa.memset(sbuf(), 1.0, engine=nisa.engine.gpsimd)
        if wait:
            second.depends_on(first)

    assert placed(ordered, X, False).start[1] == 0
    core = placed(ordered, X, True)
    assert core.start[1] == pytest.approx(core.end[0] + TRN2.result_ns[Engine.VECTOR])


def test_hardware_descriptors_cost_600_ns_and_two_are_made_at_once():
    def loads(x):
        for i in range(4):
            part, mode = x[:, 64 * i : 64 * i + 64], nisa.dge_mode.hwdge
            nisa.dma_copy(sbuf(64, nl.bfloat16), part, dge_mode=mode)

    core = placed(loads, X)
    row = 8 * TRN2.dma_run_ns(128)
    assert core.end[0] == pytest.approx(600 + 1300 + row)
    assert core.end[3] == pytest.approx(3 * TRN2.dma.interval_ns + 600 + 1300 + row)


def test_a_second_model_needs_no_second_run():
    def one(x):
        a, b = filled(128, nl.bfloat16), filled(512, nl.bfloat16)
        nisa.nc_matmul(psum(), a, b)

    profile = nc.simulate(one, X, target="trn2", mode="trace").profile
    again = schedule(profile.launch, "calibrated")
    assert again.cores[0].end == profile.schedule.cores[0].end
    documented = schedule(profile.launch, "documented")
    assert documented.time_ns < again.time_ns


def test_room_is_never_handed_out_twice():
    capacity = Capacity(100)
    assert capacity.take(100) == (0.0, -1)
    capacity.release(50.0, 100, 7)
    assert capacity.take(60) == (50.0, 7)
    assert capacity.take(40) == (50.0, 7)  # what was left over is free from the same time on


def test_the_schedule_holds_no_more_than_there_is():
    def sizes(x):
        out = sbuf(64, nl.bfloat16)
        for i in range(40):
            tile = sbuf(20_000 + 1_000 * (i % 7), nl.bfloat16)
            nisa.dma_copy(tile[:, 0:64], x[:, 0:64])
            for _ in range(1 + 50 * (i % 3)):
                nisa.activation(out, nl.copy, tile[:, 0:64])

    for target in MACHINES:
        use = nc.simulate(sizes, X, target=target, mode="trace").profile.sbuf
        assert use.scheduled <= use.limit


def test_a_tensor_that_its_last_instruction_names_twice_frees_its_room_once():
    def in_place(x):
        for _ in range(4):
            tile = sbuf(95_000, nl.bfloat16)  # most of SBUF
            nisa.dma_copy(tile, x)
            nisa.tensor_scalar(tile[:, :512], tile[:, :512], nl.multiply, 2.0)
        return x

    core = placed(in_place, nc.TensorSpec((128, 95_000), nl.bfloat16))
    for load in (2, 4, 6):
        assert core.start[load] > core.end[load - 1]
