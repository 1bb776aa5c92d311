"""Tensor indirection: instructions on views through an index are the same on gathered tiles."""

import numpy as np
import pytest
from draws import either, pick, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import loaded, new, refused, refuses, run, stored, zeros
from samples import bf16, values

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl


def snake(offsets: np.ndarray, p: int, group: int = 16) -> np.ndarray:
    """Offsets as an index tile [p, K] holds them, in each group of partitions."""
    table = np.zeros((p, -(-len(offsets) // group)), np.int32)
    for i, offset in enumerate(offsets):
        table[i % group :: group, i // group] = offset
    return table


def offsets_of(seed: int, count: int, columns: int, distinct: bool = False) -> np.ndarray:
    return np.random.default_rng(seed).choice(columns, count, replace=not distinct)


def exp(x):
    return np.exp(x.astype(np.float64)).astype(np.float32)


UNARY = {
    "tensor_copy": (lambda d, s: nisa.tensor_copy(d, s), lambda x: x),
    "tensor_scalar": (
        lambda d, s: nisa.tensor_scalar(d, s, nl.multiply, 2.0, op1=nl.add, operand1=1.0),
        lambda x: 2 * x + 1,
    ),
    "activation": (lambda d, s: nisa.activation(d, nl.exp, s), exp),
    "activate2": (
        lambda d, s: nisa.activate2(d, nl.relu, s, 0.5, 0.0, nl.add, nl.bypass),
        lambda x: np.maximum(x + np.float32(0.5), 0),
    ),
    "exponential": (lambda d, s: nisa.exponential(d, s), exp),
    "tensor_scalar_cumulative": (
        lambda d, s: nisa.tensor_scalar_cumulative(d, s, nl.add, nl.add, 0.0),
        lambda x: np.cumsum(x, 1, dtype=np.float32),
    ),
}


@settings(max_examples=40)
@given(
    name=pick(sorted(UNARY)), p=pick([16, 32, 128]), count=st.integers(1, 40),
    columns=st.integers(40, 64), gathers=either, scatters=either, seed=seeds,
)  # fmt: skip
def test_one_input(name, p, count, columns, gathers, scatters, seed):
    issue, expected = UNARY[name]
    x, old = values(seed, (p, columns if gathers else count)), values(seed + 1, (p, columns))
    source, target = (offsets_of(seed + s, count, columns, distinct=s == 3) for s in (2, 3))

    def kernel(x, old, source, target):
        data, dst = loaded(x), loaded(old)
        view = data.indirect(loaded(source), count) if gathers else data
        if scatters:
            issue(dst.indirect(loaded(target), count), view)
            return stored(dst)
        dst = nl.ndarray((p, count), nl.float32)
        issue(dst, view)
        return stored(dst)

    got = run(kernel, x, old, snake(source, p), snake(target, p), target="trn3")
    result = expected(x[:, source] if gathers else x)
    wanted = old.copy() if scatters else result
    if scatters:
        wanted[:, target] = result
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_two_inputs_reductions_and_predicates():
    x, y, z = (values(s, (32, 24)) for s in range(3))
    chosen = np.array([3, 20, 3, 7])

    def kernel(x, y, z, index):
        a, b, c, i = (loaded(t) for t in (x, y, z, index))
        view, four = a.indirect(i, 4), b[:, :4]
        total, scaled, kept = new(32, 4), new(32, 4), zeros(32, 4)
        least, most = new(32, 1), new(32, 1)
        nisa.tensor_tensor(total, view, four, nl.subtract)
        nisa.tensor_reduce(least, nl.minimum, view, axis=1)
        nisa.tensor_scalar_reduce(scaled, view, nl.multiply, 2.0, nl.maximum, most)
        flags = new(32, 24, dtype="uint8")
        nisa.tensor_scalar(flags, c, nl.greater, 0.0)
        nisa.tensor_copy_predicated(kept, four, flags.indirect(i, 4))
        return tuple([stored(t) for t in (total, least, scaled, most, kept)])

    outputs = run(kernel, x, y, z, snake(chosen, 32), target="trn3")
    picked, four = x[:, chosen], y[:, :4]
    least, most = (m(picked, 1, keepdims=True) for m in (np.min, np.max))
    expected = picked - four, least, picked * 2, most * 2, np.where(z[:, chosen] > 0, four, 0)
    for got, want in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("accumulate", [True, False])
def test_matmul_gathers_both_sides_and_scatters(accumulate):
    x, w = (values(s, (64, 40)).astype(bf16) for s in range(2))
    left, right = np.arange(0, 32)[::-1], np.array([5, 39, 0])
    out = np.array([2, 9, 4])

    def kernel(x, w, i, j, k):
        a, b = loaded(x), loaded(w)
        acc = nl.ndarray((32, 16), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(acc, a[:, :32], b[:, :16], accumulate=False)
        nisa.nc_matmul(
            acc.indirect(loaded(k), 3), a.indirect(loaded(i), 32), b.indirect(loaded(j), 3),
            accumulate=accumulate,
        )  # fmt: skip
        return stored(acc)

    index = [snake(left, 64, 32), snake(right, 64, 32), snake(out, 32, 32)]
    got = run(kernel, x, w, *index, target="trn3")
    a, b = x.astype(np.float32), w.astype(np.float32)
    wanted = a[:, :32].T @ b[:, :16]
    product = a[:, left].T @ b[:, right]
    wanted[:, out] = wanted[:, out] + product if accumulate else product
    np.testing.assert_array_equal(got, wanted)


def test_mx_matmul_takes_data_and_scale_through_one_index():
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-8, 8, (32, 4 * f)).astype(bf16) for f in (8, 20))
    chosen = np.array([19, 0, 7, 7])

    def kernel(x, w, index):
        tiles = []
        for source in (x, w):
            f = source.shape[1] // 4
            data = nl.ndarray((32, f), nl.float8_e4m3fn_x4)
            scale = nl.ndarray((32, f), nl.float8_e8m0fnu)
            nisa.quantize_mx(data, loaded(source), scale)
            tiles.append((data, scale))
        (a, a_scale), (b, b_scale) = tiles
        i = loaded(index)
        acc = nl.ndarray((8, 4), nl.float32, buffer=nl.psum)
        nisa.nc_matmul_mx(acc, a, b.indirect(i, 4), a_scale, b_scale.indirect(i, 4))
        return stored(acc)

    got = run(kernel, x, w, snake(chosen, 32, 32), target="trn3")
    a, b = (v.astype(np.float32).reshape(32, -1, 4) for v in (x, w))
    np.testing.assert_array_equal(got, np.einsum("kiq,kjq->ij", a, b[:, chosen]))


def test_one_instruction_is_recorded_that_depends_on_the_index():
    x, index = values(0, (128, 512)), snake(np.arange(64), 128)

    def kernel(x, index):
        data, i = loaded(x), nl.ndarray(index.shape, nl.int32)
        nisa.dma_copy(i, index, name="index")
        dst = nl.ndarray((128, 64), nl.float32)
        nisa.tensor_copy(dst, data.indirect(i, 64), name="gather")
        return stored(dst)

    profile = nc.simulate(kernel, x, index, target="trn3").profile
    assert profile.opcodes == {"dma_copy": 3, "tensor_copy": 1}
    (core,) = profile.schedule.cores
    (gather,), (load,) = core.trace.names["gather"], core.trace.names["index"]
    assert core.start[gather] >= core.end[load]
    template, storages, _, _ = core.trace.records[gather]
    assert template.cycles == 64  # as a copy of 64 columns; the index costs nothing documented
    assert [s.layout.shape for s in storages] == [(128, 64), (128, 512), (128, 4)]
    spec = nc.TensorSpec(x.shape, nl.float32), nc.TensorSpec(index.shape, nl.int32)
    traced = nc.simulate(kernel, *spec, target="trn3", mode="trace").profile
    assert traced.time_ms == profile.time_ms


X = values(0, (32, 24))
I4 = snake(np.array([1, 2, 3, 4]), 32)


def used(body, index=I4, x=X, count=4):
    """body(dst, view) on a view of x through index."""

    def kernel(x, index):
        view = loaded(x).indirect(loaded(index), count)
        body(nl.ndarray((x.shape[0], view.shape[1]), nl.float32), view)

    return kernel, x, index


def copy(d, v):
    nisa.tensor_copy(d, v)


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        ("the index must be [32, K], a row a partition", used(copy, I4[:16])),
        ("is a tile of integers in SBUF", used(copy, I4.astype(np.float32))),
        ("num_elem must be 1 to 32", used(copy, count=33)),
        ("the view takes 32, give num_elem", used(copy, count=None)),
        ("indices run from 22 to 25 and must be 0 to 23", used(copy, I4 + 21)),
        ("hold other offsets than the first 16",
         used(copy, I4 + np.arange(32, dtype=np.int32)[:, None] // 16)),
        ("data2.*is a tensor indirection, only dst and data1 may be",
         used(lambda d, v: nisa.tensor_tensor(d, d, v, nl.add))),
        ("is a tensor indirection, it takes none", used(lambda d, v: nisa.reciprocal(d, v))),
        ("dma_copy.*is a tensor indirection, which it does not take",
         used(lambda d, v: nisa.dma_copy(d, v))),
        ("is a tensor indirection, which it does not take",
         used(lambda d, v: nisa.tensor_copy(d, v.permute((0, 1))))),
        ("is a tile of integers; got 3", used(lambda d, v: d.indirect(3))),
        ("not yet indirect", used(lambda d, v: v.indirect(v.index, 1))),
        ("needs engine.vector or engine.scalar",
         used(lambda d, v: nisa.tensor_copy(d, v, engine=nisa.engine.gpsimd))),
        ("an indirect stationary must be float16", used(lambda d, v: nisa.nc_matmul(d, v, v))),
    ],
)  # fmt: skip
def test_indirection_refuses(text, kernel):
    refuses(text, *kernel, target="trn3")


def test_indirection_needs_trn3():
    refuses("tensor indirection needs NeuronCore-v4", *used(copy))


def test_indirection_refuses_by_place():
    def kernel(x, index):
        i, tall, far = loaded(index), zeros(128, 8), zeros(128, 1, dtype="int32")
        dst, psum = new(32, 4), zeros(32, 8, buffer=nl.psum)
        with refused("data starts at partition 32 and its index at 0"):
            nisa.activation(dst, nl.exp, tall[32:64].indirect(i, 4))
        with refused("the index of dst starts at partition 64 and data at 32"):
            nisa.activation(dst.indirect(far[64:96], 1), nl.exp, tall[32:64, :1])
        with refused("ScalarE does not scatter to PSUM"):
            nisa.activation(psum.indirect(i, 4), nl.exp, tall[:32, :4])
        with refused("contiguous in each partition"):
            tall[:32, ::2].indirect(i, 4)
        return stored(tall)

    run(kernel, X, I4, target="trn3")


def test_matmul_refuses():
    def kernel(x, index):
        a, i = loaded(x), loaded(index)
        psum = nl.ndarray((8, 24), nl.float32, buffer=nl.psum)
        eight = i[:8]
        with refused("an indirect dst needs accumulate=True or False"):
            nisa.nc_matmul(psum.indirect(eight, 4), a[:, :8], a[:, :4])
        with refused("goes with tile_position (0, 0) only"):
            nisa.nc_matmul(psum, a.indirect(i, 8), a, tile_position=(32, 0), tile_size=(32, 32))
        with refused("moving cannot be indirect with is_transpose=True"):
            nisa.nc_matmul(psum, a, a.indirect(i, 4), is_transpose=True)
        return stored(a)

    run(kernel, X.astype(bf16), I4, target="trn3")
