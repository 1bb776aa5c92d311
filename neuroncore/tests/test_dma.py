"""DMA against NumPy: copies and casts, gathers and scatters, transposes, sums."""

import functools

import numpy as np
import pytest
from draws import either, few, pick, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import compute, loaded, new, refusals, refuses, run, stored, zeros
from samples import DTYPES, TARGETS, data, equal, rounded

import neuroncore.isa as nisa
import neuroncore.language as nl

skip, error = nisa.oob_mode.skip, nisa.oob_mode.error


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 128), st.integers(1, 20)), source=pick(DTYPES),
    target=pick(DTYPES), machine=pick(TARGETS), seed=seeds,
)  # fmt: skip
def test_copies_cast_through_fp32(shape, source, target, machine, seed):
    x = data(shape, source, seed, scale=100)

    expected = x if source is target else rounded(x.astype(np.float32), target)
    equal(compute(nisa.dma_copy, shape, target, x, target=machine), expected)


@few
@given(st.data())
def test_shapes_may_differ_and_sides_may_be_views(choices):
    x = data((24, 10), np.float32)
    step = choices.draw(st.integers(1, 2))
    start = choices.draw(st.integers(0, 24 - 12 * step))

    def kernel(a):
        t = loaded(a)
        out = nl.ndarray((2, 60), nl.float32, nl.shared_hbm)
        rows = t[start : start + 12 * step - step + 1 : step].permute((0, 1))
        nisa.dma_copy(out, rows)
        inside = nl.ndarray((60, 2), nl.float32)
        nisa.dma_copy(inside, rows)  # SBUF to SBUF, across partitions
        both = nl.ndarray((60, 2), nl.float32, nl.shared_hbm)
        nisa.dma_copy(both, inside)
        return out, both

    expected = x[start : start + 12 * step : step][:12]
    for got in run(kernel, x):
        equal(got, expected)


def test_hbm_to_hbm_and_bits_survive():
    bits = np.array([[0x7F800001, 0xFFC00123, 0x80000000, 1]], np.uint32)

    def kernel(x):
        out = nl.ndarray((4, 1), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, x)
        return out

    got = run(kernel, bits.view(np.float32))
    assert got.view(np.uint32).ravel().tolist() == bits.ravel().tolist()


@few
@given(
    rows=st.lists(st.integers(0, 11), min_size=1, max_size=128), dtype=pick(DTYPES),
    kind=pick([np.int32, np.uint32]), seed=seeds,
)  # fmt: skip
def test_gather(rows, dtype, kind, seed):
    table, index = data((12, 6), dtype, seed), np.array(rows, kind)[:, None]

    def kernel(x, i):
        dst = nl.ndarray((len(rows), 6), dtype)
        nisa.dma_copy(dst, x.ap([[6, len(rows)], [1, 6]], vector_offset=loaded(i)))
        return stored(dst)

    equal(run(kernel, table, index), table[rows])


@few
@given(rows=st.permutations(range(12)), count=st.integers(1, 12), cast=either)
def test_scatter(rows, count, cast):
    rows = rows[:count]
    values, index = data((count, 6), np.float32), np.array(rows, np.int32)[:, None]
    dtype = nl.bfloat16 if cast else nl.float32

    def kernel(x, i):
        out = nl.ndarray((12, 6), dtype, nl.shared_hbm)
        nisa.dma_copy(out, nl.zeros((12, 6), nl.float32))
        nisa.dma_copy(out.vector_select(0, loaded(i)), loaded(x))
        return out

    expected = np.zeros((12, 6), np.float32)
    expected[rows] = values
    equal(run(kernel, values, index), expected.astype(dtype.numpy))


@pytest.mark.parametrize("wrong", [-1, 12, 10**6])
def test_out_of_bounds_rows_are_skipped_or_refused(wrong):
    table, index = data((12, 6)), np.array([3, wrong, 0], np.int32)[:, None]

    def gather(x, i, mode):
        dst = nl.full((3, 6), 9.0, nl.float32)
        nisa.dma_copy(dst, x.vector_select(0, loaded(i)), oob_mode=mode)
        return stored(dst)

    def scatter(x, i, mode):
        out = nl.ndarray((12, 6), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, x)
        nisa.dma_copy(out.vector_select(0, loaded(i)), zeros(3, 6), oob_mode=mode)
        return out

    gathered, scattered = table[[3, 0, 0]], table.copy()
    gathered[1], scattered[[3, 0]] = 9, 0
    for kernel, expected in ((gather, gathered), (scatter, scattered)):
        equal(run(functools.partial(kernel, mode=skip), table, index), expected)
        past = functools.partial(kernel, mode=error)
        refuses("a dynamic index runs out of", past, table, index)


@pytest.mark.parametrize("place", [0, 5, 6, -1])
def test_register_offset_out_of_bounds(place):
    x = data((6, 4))

    def kernel(a, mode=skip):
        dst = nl.full((2, 2), 9.0, nl.float32)
        nisa.dma_copy(dst, a[nisa.register_alloc(place)], oob_mode=mode)
        return stored(dst)

    legal = 0 <= place < 6
    expected = x[place].reshape(2, 2) if legal else np.full((2, 2), 9, np.float32)
    equal(run(kernel, x), expected)
    if not legal:
        refuses("runs out of", lambda a: kernel(a, error), x)


hw, sw = nisa.dge_mode.hwdge, nisa.dge_mode.swdge


@few
@given(
    count=st.integers(1, 16), dtypes=st.tuples(pick(DTYPES), pick(DTYPES)), scaled=either,
    seed=seeds,
)  # fmt: skip
def test_dma_compute_sums(count, dtypes, scaled, seed):
    xs = [data((8, 6), dtypes[0], seed + i) for i in range(count)]

    def body(dst, *tiles):
        nisa.dma_compute(dst, tiles, nl.add, [1.0] * count if scaled else None)

    total = np.zeros((8, 6), np.float32)
    for x in xs:
        total = total + x.astype(np.float32)
    equal(compute(body, (8, 6), dtypes[1], *xs), rounded(total, dtypes[1]))


@few
@given(rows=st.permutations(range(12)), count=st.integers(1, 12), mode=pick([skip, error]))
def test_dma_compute_adds_into_scattered_rows(rows, count, mode):
    rows = list(rows[:count])
    if mode is skip:
        rows[-1] = 99
    table, values = data((12, 6)), data((count, 6), seed=1)

    def kernel(x, v, i):
        out = nl.ndarray((12, 6), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, x)
        view = out.ap([[6, count], [1, 6]], vector_offset=loaded(i))
        nisa.dma_compute(view, [loaded(v), view], nl.add, oob_mode=mode)
        return out

    expected = table.copy()
    for row, value in zip(rows, values, strict=True):
        if row < 12:
            expected[row] += value
    equal(run(kernel, table, values, np.array(rows, np.int32)[:, None]), expected)


def test_dma_compute_adds_gathered_rows():
    table, values, rows = data((12, 6)), data((4, 6), seed=1), [7, 0, 7, 11]

    def kernel(x, v, i):
        dst = loaded(v)
        nisa.dma_compute(dst, [dst, x.vector_select(0, loaded(i))], nl.add)
        return stored(dst)

    equal(run(kernel, table, values, np.array(rows, np.int32)[:, None]), values + table[rows])


X = data((12, 6))


def copy(dtype=nl.float32, **options):
    nisa.dma_copy(new(4, 6, dtype=dtype), zeros(4, 6), **options)


def sums(build):
    """A sum of what `build` makes of a tile and of a view of x by an index."""
    return lambda x: nisa.dma_compute(*build(zeros(3, 6), rows(x)))


def rows(x, dtype="int32", memory=nl.sbuf):
    return x.vector_select(0, zeros(3, 1, dtype=dtype, buffer=memory))


@refusals(
    ("index must be integers", lambda x: nisa.dma_copy(new(3, 6), rows(x, "float32"))),
    ("index must be in sbuf", lambda x: nisa.dma_copy(new(3, 6), rows(x, memory=nl.psum))),
    ("1 to 16 sources; got 17", sums(lambda t, v: (t, [t] * 17, nl.add))),
    ("1 to 16 sources; got 0", sums(lambda t, v: (t, [], nl.add))),
    ("scales must be 1.0", sums(lambda t, v: (t, [t, t], nl.add, [1.0, 2.0]))),
    ("scales must be 1.0", sums(lambda t, v: (t, [t, t], nl.add, [1.0]))),
    ("dst has 18 elements", sums(lambda t, v: (t, [t[:2]], nl.add))),
    ("takes two sources", sums(lambda t, v: (t, [t, t, v], nl.add))),
    ("unique_indices=True; got 2 and False", sums(lambda t, v: (t, [t, v], nl.add, None, False))),
    ("one source must be dst itself", sums(lambda t, v: (t, [zeros(3, 6), v], nl.add))),
    ("dge_mode.hwdge needs NeuronCore-v3", lambda x: copy(dge_mode=hw), "trn1"),
    ("engine is for dge_mode.hwdge only", lambda x: copy(engine=nisa.engine.sync)),
    ("engine.gpsimd does not run it", lambda x: copy(dge_mode=hw, engine=nisa.engine.gpsimd)),
    ("priority needs NeuronCore-v4", lambda x: copy(priority=0)),
    ("priority must be 0 to 3; got 4", lambda x: copy(priority=4), "trn3"),
)
def test_what_is_refused(text, body, target):
    refuses(text, body, X, target=target)


@pytest.mark.parametrize(
    "options", [{"dge_mode": hw, "engine": nisa.engine.scalar}, {"priority": 3}, {"dge_mode": sw}]
)
def test_legal_dma_options(options):
    def body(dst, src):
        nisa.dma_copy(dst, src, **options)

    equal(compute(body, (12, 6), nl.float32, X, target="trn3"), X)
