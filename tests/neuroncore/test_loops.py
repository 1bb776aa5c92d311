"""Loops that run on the device: values, and a schedule as that of the loop unrolled."""

from dataclasses import dataclass

import pytest
from harness import TARGETS
from hypothesis import given, settings
from hypothesis import strategies as st

import neuronmm_ops.neuroncore as nc
from neuronmm_ops.neuroncore import isa as nisa
from neuronmm_ops.neuroncore import language as nl
from neuronmm_ops.neuroncore.timing.steady import Iterations

T = 32
"""Rows of x that an iteration takes."""


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
    Body,
    st.lists(st.sampled_from(steps), min_size=1, max_size=9).map(tuple),
    st.integers(1, 3),
    st.sampled_from([16, 200, 512]),
    st.integers(1, 3),
    st.integers(1, 3),
)


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
        found = []
        for _ in range(self.body.sets):
            tiles = [
                nl.ndarray((T, columns), nl.bfloat16),
                nl.ndarray((T, columns), nl.float32),
                nl.ndarray((T, T), nl.bfloat16),
                nl.ndarray((T, columns), nl.float32, nl.psum),
            ]
            for tile in tiles:
                nisa.memset(tile, 1.0)
            found.append(tiles)
        return found

    def iteration(self, i, sets):
        number = 0
        for step in self.body.steps * self.body.times:
            self.step(step, i, number, sets[number % len(sets)])
            number += 1

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


def traced(work: Work, trips: int, target: str = "trn2"):
    x = nc.TensorSpec((trips * T, work.body.columns), nl.bfloat16)
    w = nc.TensorSpec((3 * T, T), nl.bfloat16)
    return nc.simulate(work.__call__, x, w, mode="trace", target=target).profile


def facts(profile):
    """What a loop and its unrolled form agree in."""
    return (
        profile.time_ms, profile.hbm_read_bytes, profile.hbm_write_bytes, profile.instructions,
        profile.opcodes, profile.engines, profile.dma_rows, profile.dma_efficiency,
    )  # fmt: skip


def columns(profile, *names):
    core = profile.schedule.cores[0]
    return {name: getattr(core, name) for name in ("start", "end", "wait", "cause", *names)}


@settings(max_examples=60, deadline=None)
@given(bodies, st.integers(1, 40), st.sampled_from(["trn2", "trn3"]))
def test_a_loop_takes_as_long_as_unrolled(body, trips, target):
    loop = traced(Work(body, on_device=True), trips, target)
    unrolled = traced(Work(body, on_device=False), trips, target)
    assert facts(loop) == facts(unrolled)
    assert columns(loop) == columns(unrolled)


@settings(max_examples=40, deadline=None)
@given(bodies, st.integers(2, 60), st.sampled_from(TARGETS), st.booleans())
def test_a_steady_state_is_what_placing_each_iteration_gives(body, trips, target, own_tiles):
    work = Work(body, True, own_tiles, target)
    work.ends = True
    fast = traced(work, trips, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Iterations, "skip", lambda self, at: self._forget() or 0)
        slow = traced(work, trips, target)
    assert columns(fast, "dma_busy_ns", "queue") == columns(slow, "dma_busy_ns", "queue")
    for memory, occupied in fast.schedule.cores[0].occupied.items():
        assert sorted(occupied) == sorted(slow.schedule.cores[0].occupied[memory])
