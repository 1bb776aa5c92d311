"""Views of NkiTensor against NumPy's views, and what a view may not be."""

import itertools
import math

import numpy as np
import pytest
from draws import either, pick
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import compute, loaded, refused, run
from samples import data, equal

import neuroncore as nc
import neuroncore.isa as nisa
import neuroncore.language as nl
from neuroncore.isa.values import raw

SHAPES = [(4, 12), (8, 2, 6), (3, 4, 1, 5), (16, 1), (2, 3, 2, 2, 2)]


def element(count):
    return st.integers(-count, count - 1)


@st.composite
def cuts(draw, count):
    start = draw(st.integers(0, count - 1))
    stop = draw(st.integers(start + 1, count))
    return slice(start, stop, draw(st.integers(1, 3)))


@st.composite
def steps(draw, view, on_chip):
    """One operation that is legal on the view: on the tensor, and on the NumPy array."""
    shape, first = view.shape, int(on_chip)
    dim = draw(st.integers(first, len(shape) - 1))
    names = ["slice", "index", "permute", "expand"]
    names += ["select"] * (len(shape) > 2) + ["squeeze", "broadcast"] * (shape[dim] == 1)
    names += ["split"] * (shape[dim] > 1) + ["reshape"] + ["flatten"] * (len(shape) > first + 1)
    match draw(pick(names)):
        case "slice":
            dim = draw(st.integers(0, len(shape) - 1))
            cut = draw(cuts(shape[dim]))
            at = (*[slice(None)] * dim, cut)
            return lambda t: t.slice(dim, cut.start, cut.stop, cut.step), lambda a: a[at]
        case "index":
            keys = [draw(st.one_of(st.just(slice(None)), cuts(n), element(n))) for n in shape]
            if on_chip or all(isinstance(k, int) for k in keys):  # partitions stay, 1-D stays
                k = keys[0]
                at = slice(k % shape[0], k % shape[0] + 1) if isinstance(k, int) else k
                kept = [at, *keys[1:]]
                if on_chip and all(isinstance(k, int) for k in keys[1:]):
                    kept[-1] = slice(keys[-1] % shape[-1], keys[-1] % shape[-1] + 1)
            else:
                kept = keys
            return lambda t: t[tuple(keys)], lambda a: a[tuple(kept)]
        case "permute":
            order = [*range(first), *draw(st.permutations(range(first, len(shape))))]
            return lambda t: t.permute(tuple(order)), lambda a: a.transpose(order)
        case "expand":
            at = draw(st.integers(first, len(shape)))
            return lambda t: t.expand_dim(at), lambda a: np.expand_dims(a, at)
        case "select":
            k = draw(st.integers(0, shape[dim] - 1))
            return lambda t: t.select(dim, k), lambda a: a[(*[slice(None)] * dim, k)]
        case "squeeze":
            if len(shape) <= first + 1:
                return lambda t: t, lambda a: a
            return lambda t: t.squeeze_dim(dim), lambda a: a.squeeze(dim)
        case "broadcast":
            size = draw(st.integers(1, 3))
            target = (*shape[:dim], size, *shape[dim + 1 :])
            return lambda t: t.broadcast(dim, size), lambda a: np.broadcast_to(a, target)
        case "split":
            outer = draw(pick([n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0]))
            sizes = (*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])
            return lambda t: t.reshape_dim(dim, (outer, -1)), lambda a: a.reshape(sizes)
        case "flatten":
            end = draw(st.integers(dim, len(shape) - 1))
            sizes = (*shape[:dim], math.prod(shape[dim : end + 1]), *shape[end + 1 :])
            return lambda t: t.flatten_dims(dim, end), lambda a: a.reshape(sizes)
        case _:
            sizes = (*shape[:first], -1) if draw(either) else (*shape[:first], 1, -1)
            return lambda t: t.reshape(sizes), lambda a: a.reshape(sizes)


def numbered(shape):
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


@settings(max_examples=150)
@given(choices=st.data(), on_chip=either, shape=pick(SHAPES))
def test_chains_of_views_are_numpys(choices, on_chip, shape):
    def kernel(x):
        view, array = (loaded(x), numbered(shape)) if on_chip else (x, numbered(shape))
        for _ in range(choices.draw(st.integers(1, 4))):
            on_tensor, on_array = choices.draw(steps(array, on_chip))
            try:
                view = on_tensor(view)
            except nc.NkiValidationError:  # only where NumPy too would have to copy
                assert not np.may_share_memory(on_array(array), array)
                break
            array = on_array(array)
            np.testing.assert_array_equal(raw(view), array)
            pattern = [list(p) for p in zip(view.strides, view.shape, strict=True)]
            assert view.get_pattern() == pattern
            assert view.size == array.size
        touched = np.zeros(math.prod(shape), bool)
        touched[array.ravel()] = True
        g = view.geometry
        mask = g.layout.mask([g.region])
        assert (mask.reshape(-1, 4).any(1) == touched).all()  # the region is exactly what is seen

    run(kernel, numbered(shape))


@given(choices=st.data(), on_chip=either, shape=pick(SHAPES))
def test_writes_through_views_reach_the_storage(choices, on_chip, shape):
    expected = numbered(shape)

    def kernel(x):
        out = nl.ndarray(shape, nl.int32, nl.shared_hbm)
        nisa.dma_copy(out, x)
        storage = loaded(x) if on_chip else out
        view, array = storage, expected
        for _ in range(choices.draw(st.integers(1, 3))):
            on_tensor, on_array = choices.draw(steps(array, on_chip))
            seen = on_array(array)
            if not np.may_share_memory(seen, expected) or not seen.flags.writeable:
                break
            view, array = on_tensor(view), seen
        constant = nl.ndarray((1, array.size), nl.int32)
        nisa.memset(constant, -7)
        nisa.dma_copy(view, constant)
        array[...] = -7
        if on_chip:
            nisa.dma_copy(out, storage)
        return out

    equal(run(kernel, numbered(shape)), expected)


# keys of a tile [8, 2, 6]; where the tile keeps its partitions or one free place, those of NumPy
at = np.s_
KEYS = [
    (at[0:4],), (at[..., 0],), (at[5], at[5:6]), (at[:, 1],), (at[:, 0, 1], at[:, 0, 1:2]),
    (at[2, 0, 1], at[2:3, 0, 1:2]), (at[..., -1:],), (at[-1], at[7:8]), (np.int64(3), at[3:4]),
    (at[nl.ds(2, 3), :, nl.ds(1, 2)], at[2:5, :, 1:3]), (at[1, ..., 2], at[1:2, ..., 2]),
    (at[-3:, -1, 1:6:2],),
]  # fmt: skip
HBM_KEYS = [(at[0],), (at[0, 1],), (at[0, 1, 2], at[0, 1, 2:3]), (at[-2:, :, 1:6:2],)]


@pytest.mark.parametrize("on_chip", [True, False])
def test_indices(on_chip):
    x = numbered((8, 2, 6))

    def kernel(a):
        t = loaded(a) if on_chip else a
        for key, *plain in KEYS if on_chip else HBM_KEYS:
            np.testing.assert_array_equal(raw(t[key]), x[plain[0] if plain else key], strict=True)

    run(kernel, x)


@pytest.mark.parametrize("key", [0, -1, at[1:3], at[..., 2], at[:, 1, 0:4:3]])
def test_a_view_made_twice_is_one_geometry(key):
    def kernel(x):
        assert x[key].geometry is x[key].geometry

    run(kernel, numbered((4, 3, 5)))


def test_two_slices_are_not_six_indices():
    def kernel(x):
        assert x[0, 1, 1, 0, 1, 1].shape == (1,)
        assert x[0:1:1, 0:1:1].shape == (1, 1, 2, 2, 2, 2)
        assert x[0:1:1, 0:1:1].shape != x[0, 1, 1, 0, 1, 1].shape

    run(kernel, numbered((2,) * 6))


BHW = ("b", ("h", "w"))


@pytest.mark.parametrize(
    ("source", "target", "sizes", "reference"),
    [
        (BHW, ("b", "w", "h"), {"h": 4}, lambda a: a.reshape(8, 4, 6).transpose(0, 2, 1)),
        (BHW, ("b", "h", "w"), {"w": 3}, lambda a: a.reshape(8, 8, 3)),
        (BHW, BHW, {"h": 4}, lambda a: a),
        (("b", "c"), ("b", "c"), None, lambda a: a),
    ],
)
def test_rearrange(source, target, sizes, reference):
    x = numbered((8, 24))

    def kernel(a):
        got = raw(loaded(a).rearrange(source, target, sizes))
        np.testing.assert_array_equal(got, reference(x))

    run(kernel, x)


def test_view_reinterprets_bytes():
    x = data((4, 6), np.float32)

    def kernel(a):
        t = loaded(a)
        for view, expected in (
            (t.view(nl.int32), x.view(np.int32)),
            (t.view(nl.uint8), x.view(np.uint8)),
            (t[1:3, 2:4].view(nl.uint16), x[1:3, 2:4].copy().view(np.uint16)),
            (t.view(nl.uint8).view(nl.float32), x),
            # sizes of 1 that a reshape adds have strides of whole wider elements too
            (t.view(nl.uint8).reshape((4, 1, 24)).view(nl.float32), x[:, None]),
            # the upper halves of fp32: bf16 by truncation
            (t.view(nl.uint16)[:, 1::2], x.view(np.uint16)[:, 1::2]),
            (t.reinterpret_cast(nl.int16), x.view(np.int16)),
        ):
            np.testing.assert_array_equal(raw(view), expected)

    run(kernel, x)


def test_conversion_follows_the_dtype_seen_not_the_stored_one():
    def body(dst, x):
        nisa.tensor_copy(dst.view(nl.int32), x)

    got = compute(body, (4, 8), nl.float32, data((4, 8), scale=3))
    equal(got.view(np.int32), np.rint(data((4, 8), scale=3)).astype(np.int32))


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    strides=st.lists(st.integers(-3, 7), min_size=4, max_size=4), offset=st.integers(0, 40),
)  # fmt: skip
def test_ap_is_as_strided(counts, strides, offset):
    steps = list(zip(strides, counts, strict=False))
    places = [offset + sum(s * i for (s, _), i in zip(steps, at, strict=True))
              for at in itertools.product(*[range(c) for c in counts])]  # fmt: skip

    def kernel(x):
        pattern = [list(pair) for pair in steps]
        view = x.ap(pattern, offset=offset)
        if min(places) < 0 or max(places) >= 60:
            with refused("reaches elements"):
                nisa.dma_copy(nl.ndarray(view.shape, x.dtype, nl.hbm), view)
            return
        assert raw(view).ravel().tolist() == places
        g = view.geometry
        touched = set(np.flatnonzero(g.layout.mask([g.region]).reshape(-1, 4).any(1)).tolist())
        assert touched == set(places)

    run(kernel, numbered((5, 12)))


def test_ap_on_chip_and_with_a_dtype():
    x = numbered((8, 12))

    def kernel(a):
        t = loaded(a)
        for view, expected in (
            (t.ap([[12, 4], [3, 2], [1, 3]], offset=24), x[2:6, :6].reshape(4, 2, 3)),
            (t.ap([[24, 8], [1, 6]], dtype=nl.int16), x.view(np.int16)[:, :6]),
            (t.ap([[12, 8], [0, 3], [1, 2]])[:, 1], x[:, :2]),
            (t[2:].ap([[12, 2], [1, 12]], offset=12), x[3:5]),
        ):
            np.testing.assert_array_equal(raw(view), expected)
        nisa.memset(t.ap([[12, 8], [1, 12]]), 3)
        assert (raw(t) == 3).all()

    run(kernel, x)


def from_hbm(view):
    out = nl.ndarray(view.shape, nl.int32, nl.shared_hbm)
    nisa.dma_copy(out, view)
    return out


def test_registers_and_tiles_as_indices():
    x = numbered((6, 4, 5))

    def kernel(a):
        t, tile = loaded(a), nl.ndarray((1, 1), nl.int32)
        reg = nisa.register_alloc(3)
        nisa.memset(tile, 2)
        views = [  # each [1, n] of what NumPy has at register 3, tile 2
            (a[reg], x[3]),
            (a.select(0, tile), x[2]),
            (a[1:, reg], x[1:, 3]),
            (a[:, tile, 1:4], x[:, 2, 1:4]),
            (a[nl.ds(reg, 2)], x[3:5]),
            (a[:, :, nl.ds(reg, 1)], x[:, :, 3:4]),
            (a[..., reg], x[..., 3]),
            (a.ap([[20, 2], [1, 5]], offset=5, scalar_offset=reg, indirect_dim=0), x[3:5, 1]),
            (a.ap([[20, 6], [1, 2]], scalar_offset=tile, indirect_dim=1), x[:, 2, :2]),
            (t[:, reg], x[:, 3]),
            (t[:, tile, -1], x[:, 2, 4:]),
            (t[-2, reg], x[4:5, 3]),
            (t[:, nl.ds(reg, 1), ::2], x[:, 3:4, ::2]),
            (a[nl.ds(reg, 2)][:, 1:, 2], x[3:5, 1:, 2]),
        ]
        for view, values in views:
            assert view.is_indirect()
            assert view.shape == values.shape
            expected.append(values)
        return tuple([from_hbm(view) for view, _ in views])

    expected = []
    for got, wanted in zip(run(kernel, x), expected, strict=True):
        equal(got, wanted)


def test_vector_select_and_views_after_it():
    x = numbered((9, 4, 5))
    rows = np.array([[8], [0], [3], [3]], np.int32)

    def kernel(a, indices):
        index = loaded(indices)
        view = a.vector_select(0, index)
        views = [view, view[:, 1:3], view.select(1, 2), view.permute((0, 2, 1)), view.expand_dim(1),
                 view.reshape((4, 20)), view.flatten_dims(1, 2), view.reshape_dim(1, (2, 2)),
                 a.ap([[20, 4], [1, 20]], vector_offset=index)]  # fmt: skip
        assert all(v.is_indirect() for v in views)
        return tuple([from_hbm(v) for v in views])

    got = run(kernel, x, rows)
    e = x[rows[:, 0]]
    flat = e.reshape(4, 20)
    expected = [e, e[:, 1:3], e[:, 2], e.transpose(0, 2, 1), e[:, None], flat, flat,
                e.reshape(4, 2, 2, 5), flat]  # fmt: skip
    for g, want in zip(got, expected, strict=True):
        equal(g, want)
