"""Loops that run on the device: values, and a schedule as that of the loop unrolled."""

import inspect
import itertools
import re
from dataclasses import dataclass

import numpy as np
import pytest
from draws import either, pick
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import run
from samples import TARGETS, bf16, data, equal

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.timing.placer import Placer
from neuroncore.timing.steady import Iterations

T = 32
"""Rows of x that an iteration takes."""

# bodies are drawn at random, and need not store all of what the kernel returns
pytestmark = pytest.mark.filterwarnings("ignore::neuroncore.NkiWarning")


@dataclass(frozen=True)
class Body:
    """What an iteration does, `times` over, on sets of tiles that take turns."""

    steps: tuple[str, ...]
    sets: int
    columns: int
    weights: int
    times: int


steps = ("load", "weight", "matmul", "scalar", "vector", "gpsimd", "store", "copy")
bodies = st.builds(
    Body, st.lists(pick(steps), min_size=1, max_size=9).map(tuple), st.integers(1, 3),
    pick([16, 200, 512]), st.integers(1, 3), st.integers(1, 3),
)  # fmt: skip


class Work:
    """A kernel: x [M, columns], w [96, 32] -> out [M, columns], a body for each block of rows."""

    def __init__(self, body: Body, on_device: bool, own_tiles: bool = False, target: str = "trn2"):
        self.body, self.on_device, self.own_tiles, self.ends = body, on_device, own_tiles, False
        self.mode = nisa.dge_mode.hwdge if target != "trn1" else nisa.dge_mode.unknown

    def __call__(self, x, w):
        self.x, self.w = x, w
        self.out = nl.ndarray(x.shape, nl.bfloat16, nl.shared_hbm)
        sets = [] if self.own_tiles else self.tiles()
        if self.on_device:
            nl.fori_loop(0, x.shape[0], lambda i: self.iteration(i, sets or self.tiles()), step=T)
        else:
            for i in range(0, x.shape[0], T):
                self.iteration(i, sets or self.tiles())
        if self.ends:  # with what may come as early as the rest allows
            for tiles in sets or [self.tiles()[0]]:
                nisa.tensor_tensor(tiles[1], tiles[1], tiles[3], nl.add)
                nisa.dma_copy(self.out[:T, :], tiles[0])
        return self.out

    def tiles(self):
        columns = self.body.columns
        found = [
            [
                *(nl.ndarray((T, columns), dtype) for dtype in (nl.bfloat16, nl.float32)),
                nl.ndarray((T, T), nl.bfloat16),
                nl.ndarray((T, columns), nl.float32, nl.psum),
            ]
            for _ in range(self.body.sets)
        ]
        for tile in itertools.chain(*found):
            nisa.memset(tile, 1.0)
        return found

    def iteration(self, i, sets):
        for number, step in enumerate(self.body.steps * self.body.times):
            self.step(step, i, number, sets[number % len(sets)])

    def step(self, name, i, number, tiles):
        x_sb, y_sb, w_sb, y_psum = tiles
        rows, half = nl.ds(i, T), self.body.columns // 2
        if name == "load":
            nisa.dma_copy(x_sb, self.x[rows, :], dge_mode=self.mode)
        elif name == "weight":
            own = nl.ds(number % self.body.weights * T, T)
            nisa.dma_copy(w_sb, self.w[own, :], dge_mode=self.mode)
        elif name == "matmul":
            nisa.nc_matmul(y_psum, w_sb, x_sb, accumulate=False)
        elif name == "scalar":
            nisa.activation(y_sb, nl.exp, y_psum)
        elif name == "vector":
            nisa.tensor_tensor(y_sb, y_sb, y_psum, nl.add)
        elif name == "gpsimd":
            nisa.tensor_copy(x_sb, y_sb, engine=nisa.gpsimd_engine)
        elif name == "store":
            nisa.dma_copy(self.out[rows, :], x_sb, dge_mode=self.mode)
        else:
            nisa.tensor_copy(y_sb[:, :half], x_sb[:, half:])


ASSUMED = pick([(), ("throttling",), ("column-groups", "matmul-issue", "dma")])


def traced(work: Work, trips: int, target: str = "trn2", assume: tuple[str, ...] = ()):
    x = nc.TensorSpec((trips * T, work.body.columns), nl.bfloat16)
    w = nc.TensorSpec((3 * T, T), nl.bfloat16)
    options = {"mode": "trace", "target": target, "uninitialised": "warn", "assume": assume}
    return nc.simulate(work.__call__, x, w, **options).profile


def facts(profile):
    """What a loop and its unrolled form agree in."""
    return (
        profile.time_ms, profile.hbm_read_bytes, profile.hbm_write_bytes, profile.instructions,
        profile.opcodes, profile.engines, profile.dma_rows, profile.dma_efficiency,
    )  # fmt: skip


def hbm(shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype, nl.shared_hbm)


def repeat(on_device, trips, body):
    """A loop of the device, or the same unrolled."""
    if on_device:
        nl.fori_loop(0, trips, body)
    else:
        for i in range(trips):
            body(i)


def lives(profile):
    """From, to and size of each tensor of each memory, in time."""
    (core,) = profile.schedule.cores
    return {
        memory: sorted((begin, end, s.layout.size) for begin, end, s in occupied)
        for memory, occupied in core.occupied.items()
    }


def columns(profile, *names):
    core = profile.schedule.cores[0]
    return {name: getattr(core, name) for name in ("start", "end", "wait", "cause", *names)}


@given(bodies, st.integers(1, 40), pick(["trn2", "trn3"]), ASSUMED)
def test_a_loop_takes_as_long_as_unrolled(body, trips, target, assume):
    loop = traced(Work(body, on_device=True), trips, target, assume)
    unrolled = traced(Work(body, on_device=False), trips, target, assume)
    assert facts(loop) == facts(unrolled)
    assert columns(loop) == columns(unrolled)


@settings(max_examples=40)
@given(bodies, st.integers(2, 60), pick(TARGETS), either, ASSUMED)
def test_a_steady_state_is_what_placing_each_iteration_gives(
    body, trips, target, own_tiles, assume
):
    work = Work(body, True, own_tiles, target)
    work.ends = True
    fast = traced(work, trips, target, assume)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Iterations, "skip", lambda self, at: self._forget() or 0)
        slow = traced(work, trips, target, assume)
    assert columns(fast, "dma_busy_ns", "queue") == columns(slow, "dma_busy_ns", "queue")
    assert lives(fast) == lives(slow)


# values, and what a body may do


def test_a_body_carries_state_and_indexes_by_its_variable():
    x, w = data((6 * 8, 20), bf16, 1), data((5, 8, 20), seed=2)

    def kernel(a, b):
        out, last = hbm(a.shape), hbm(a.shape)
        total = nl.zeros((8, 20), nl.float32)

        def body(i):
            x_sb, w_sb = nl.ndarray((8, 20), nl.bfloat16), nl.ndarray((8, 20), nl.float32)
            nisa.dma_copy(x_sb, a.ap([[20, 8], [1, 20]], scalar_offset=i, indirect_dim=0))
            nisa.dma_copy(w_sb, b[3])
            nisa.tensor_tensor(total, total, x_sb, nl.add)
            nisa.tensor_tensor(w_sb, w_sb, total, nl.multiply)
            nisa.dma_copy(out[nl.ds(i, 8), :], w_sb)

        nl.fori_loop(8, 40, body, step=8)
        nisa.dma_copy(last[:8, :], total)
        return out, last

    out, last = run(kernel, x, w)
    sums = x[8:40].astype(np.float32).reshape(4, 8, 20).cumsum(0)
    equal(out[8:40], (sums * w[3]).reshape(32, 20))
    equal(last[:8], sums[-1])


def test_a_trace_knows_what_a_loop_wrote():
    def kernel(a, form):
        out = hbm((64, 16))
        step, rows, columns = {"rows": (8, 8, 16), "columns": (4, 64, 4), "gaps": (8, 7, 16)}[form]

        def body(i):
            tile = nl.zeros((rows, columns), nl.float32)
            place = out[:, nl.ds(i, 4)] if form == "columns" else out[nl.ds(i, rows), :]
            nisa.dma_copy(place, tile)

        nl.fori_loop(0, 16 if form == "columns" else 64, body, step=step)
        nisa.dma_copy(nl.ndarray((64, 16), nl.float32), out)
        return out

    for mode in ("trace", "execute"):
        x = nc.TensorSpec((1, 1), nl.float32) if mode == "trace" else data((1, 1))
        for form in ("rows", "columns"):
            nc.simulate(kernel, x, form, mode=mode, target="trn2")
        with pytest.raises(nc.NkiValidationError, match="some elements were never written"):
            nc.simulate(kernel, x, "gaps", mode=mode, target="trn2", uninitialised="raise")


def test_a_condition_is_data():
    def kernel(x):
        nl.while_loop(nisa.register_alloc(1), lambda r: r)

    with pytest.raises(nc.NkiValidationError, match='which mode="trace" does not compute'):
        nc.simulate(kernel, nc.TensorSpec((1, 1), nl.float32), mode="trace", target="trn2")


@pytest.mark.parametrize("form", ["fori", "dynamic_range", "while"])
def test_a_trace_holds_the_body_once(form):
    def kernel(a):
        out = hbm((4, 16))
        tile = nl.zeros((4, 16), nl.float32)

        def body(i):
            nisa.tensor_scalar(tile, tile, nl.add, 1.0)
            nisa.dma_copy(out, tile)

        def counted(r):
            body(r)
            nisa.tensor_scalar(left, left, nl.subtract, 1)
            nisa.register_load(r, left)
            return r

        if form == "fori":
            nl.fori_loop(2, 12, body, step=2)
        elif form == "dynamic_range":
            for i in nl.dynamic_range(5):
                body(i)
        else:
            left = nl.full((1, 1), 5, nl.int32)
            register = nisa.register_alloc()
            nisa.register_load(register, left)
            nl.while_loop(register, counted)
        return out

    done = nc.simulate(kernel, data((1, 1)), target="trn2")
    assert (done.outputs == 5).all()
    profile = done.profile
    assert profile.opcodes["dma_copy"] == 5
    more = 2 if form == "while" else 0
    assert profile.stream_instructions == 1 + 2 + 2 * more
    assert profile.instructions == 1 + more + 5 * (2 + more)
    assert profile.to_json()["stream_instructions"] == profile.stream_instructions
    assert f"{profile.stream_instructions} as compiled" in str(profile)


def test_execute_and_trace_schedule_alike():
    body = Body(("load", "matmul", "scalar", "gpsimd", "store"), 1, 200, 1, 2)
    traces = traced(Work(body, True, own_tiles=True), 7)
    x, w = data((7 * T, 200), bf16), data((3 * T, T), bf16)
    executed = nc.simulate(Work(body, True, own_tiles=True).__call__, x, w, target="trn2")
    assert lives(executed.profile) == lives(traces)
    assert facts(executed.profile) == facts(traces)


@settings(max_examples=15)
@given(st.integers(1, 5), st.integers(1, 30), either)
def test_loops_in_loops(outer, inner, moves_outer):
    x = data((150, 32), seed=3)

    def kernel(a, on_device):
        out = hbm((150, 32))
        tile = nl.ndarray((1, 32), nl.float32)
        tail = nl.zeros((1, 32), nl.float32)

        def step(i, j):
            row = i if moves_outer else j
            nisa.dma_copy(tile, a[nl.ds(row, 1), :], dge_mode=nisa.dge_mode.hwdge)
            nisa.activation(tile, nl.copy, tile, scale=2.0)
            nisa.dma_copy(out[nl.ds(row, 1), :], tile, dge_mode=nisa.dge_mode.hwdge)

        def rows(i):
            repeat(on_device, inner, lambda j: step(i, j))
            nisa.tensor_scalar(tail, tile, nl.add, 1.0)

        repeat(on_device, outer, rows)
        return out

    looped, unrolled = [nc.simulate(kernel, x, on, target="trn2") for on in (True, False)]
    number = outer if moves_outer else inner
    equal(looped.outputs[:number], 2 * x[:number])
    assert columns(looped.profile) == columns(unrolled.profile)
    assert looped.profile.stream_instructions == 1 + 3 + 1
    assert looped.profile.instructions == 1 + outer * (1 + 3 * inner)
    spec = nc.TensorSpec(x.shape, nl.float32)
    traces = nc.simulate(kernel, spec, True, mode="trace", target="trn2")
    assert columns(traces.profile) == columns(looped.profile)


def test_every_engine_reads_and_writes_where_the_variable_says():
    x = data((16, 8 * 32), bf16, 4)

    def kernel(a):
        out = hbm((8, 32, 16), nl.bfloat16)
        copied = hbm((16, 8 * 32), nl.bfloat16)
        tile, doubled = [nl.ndarray((16, 8 * 32), nl.bfloat16) for _ in range(2)]
        nisa.dma_copy(tile, a)

        def body(i):
            part = nl.ndarray((32, 16), nl.bfloat16)
            nisa.dma_transpose(part, a.reshape((16, 8, 32))[:, i, :])
            nisa.dma_copy(out.select(0, i), part)
            source = tile.reshape((16, 8, 32))[:, i, :]
            nisa.tensor_scalar(doubled.reshape((16, 8, 32))[:, i, :], source, nl.multiply, 2.0)

        nl.fori_loop(0, 8, body)
        nisa.dma_copy(copied, doubled)
        return out, copied

    out, copied = run(kernel, x)
    equal(out, x.reshape(16, 8, 32).transpose(1, 2, 0))
    equal(copied, 2 * x)


def test_two_cores_meet_in_every_iteration():
    def kernel(x):
        out = hbm((2, 8, 16))
        mine, other = [nl.zeros((8, 16), nl.float32) for _ in range(2)]
        nisa.dma_copy(mine, x[nl.program_id()])

        def body(i):
            rank = 1 - nl.program_id()
            nisa.sendrecv(mine, other, rank, rank, 0)
            nisa.tensor_tensor(mine, mine, other, nl.add)

        nl.fori_loop(0, 3, body)
        nisa.dma_copy(out[nl.program_id()], mine)
        return out

    x = data((2, 8, 16))
    done = nc.simulate(nc.jit(kernel)[2], x, target="trn2")
    a, b = x[0], x[1]
    for _ in range(3):
        a, b = a + b, b + a
    equal(done.outputs, np.stack([a, b]))
    assert len(done.profile.schedule.cores[0].barriers) == 3
    assert done.profile.critical_path


def test_a_tile_of_the_body_has_one_place():
    def kernel(x, on_device):
        def body(i):
            tile = nl.ndarray((128, 512), nl.float32)
            nisa.dma_copy(tile, x, dge_mode=nisa.dge_mode.hwdge)
            nisa.tensor_scalar(total, total, nl.add, tile[:, :1])

        total = nl.zeros((128, 1), nl.float32)
        repeat(on_device, 20, body)

    spec = nc.TensorSpec((128, 512), nl.float32)
    looped, unrolled = [
        nc.simulate(kernel, spec, on, mode="trace", target="trn2").profile for on in (True, False)
    ]
    assert looped.sbuf.scheduled == 512 * 4 + 4  # the next load waits for the last use
    assert unrolled.sbuf.scheduled > looped.sbuf.scheduled
    assert looped.time_ms > 2 * unrolled.time_ms
    assert looped.sbuf_peak_bytes == unrolled.sbuf_peak_bytes


def test_all_that_a_schedule_depends_on_is_compared():
    launch = traced(Work(Body(steps, 1, 16, 1, 1), True), 3).launch
    compared = "".join(
        inspect.getsource(part) for part in (Iterations._mark, Iterations._use, Iterations._loaded)
    )
    state = set(re.findall(r"placer\.(\w+)", compared))
    placer = Placer(launch.cores[0].trace, launch, launch.machine, "calibrated")
    assert set(vars(placer)) - state == {
        *("trace", "machine", "interval_ns", "overhead_ns", "issue_ns", "after_ns"),
        *("reuses", "dma_ns"),
        *("shares", "loops", "barrier", "barrier_end", "steps", "iterations"),
        *("floor", "producers"),  # of loops around this one, and within an iteration
    }


def test_a_steady_state_is_recognised():
    body = Body(("load", "weight", "matmul", "scalar", "gpsimd", "store"), 1, 512, 1, 1)
    for target in ("trn2", "trn3"):
        placed: list[int] = []

        def skip(self, at, placed=placed, found=Iterations.skip):
            placed.append(at)
            return found(self, at)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Iterations, "skip", skip)
            profile = traced(Work(body, True, own_tiles=True, target=target), 5000, target)
        assert len(placed) < 40
        assert profile.instructions == 5000 * profile.stream_instructions
