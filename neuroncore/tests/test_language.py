"""The computing functions of `nl` against NumPy; each is also an operator by its name."""

import numpy as np
import pytest
import torch
from draws import pick, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import compute, loaded, new, noted, refused, run, stored
from samples import ARITHMETIC, FUNCTIONS, bf16, data, equal, f32, rounded, wide
from tolerances import assert_close_to_oracle

import neuroncore as nc
import neuroncore.isa as nisa
import neuroncore.language as nl
from neuroncore.nl import operators

UNARY = {
    **{name: np.vectorize(f, otypes=[float]) for name, f in FUNCTIONS.items()},
    "negative": np.negative, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "cos": np.cos,
    "tan": np.tan,
}  # fmt: skip
POSITIVE, TURNING = ("log", "sqrt", "rsqrt"), ("sin", "cos", "tan")


def of(function, shape, dtype, *arrays, target="trn2"):
    """The result, a tile of that shape and dtype, of a function of tiles."""

    def kernel(*inputs):
        result = function(*[loaded(x) for x in inputs])
        assert (result.shape, result.dtype) == (shape, dtype)
        return stored(result)

    return run(kernel, *arrays, target=target)


@given(
    name=pick(sorted(ARITHMETIC)), form=pick(["tiles", "right", "left"]),
    dtype=pick([None, nl.float32, nl.bfloat16, nl.uint8]), seed=st.integers(0, 99),
)  # fmt: skip
def test_functions_of_two(name, form, dtype, seed):
    x, y = data((8, 5), bf16, seed), data((8, 5), f32, seed + 1)
    x[:, 0] = y[:, 0] = 0.5
    function, result = getattr(nl, name), dtype or nl.bfloat16
    if form == "tiles":
        got = of(lambda a, b: function(a, b, dtype), (8, 5), result, x, y)
        expected = ARITHMETIC[name](x.astype(f32), y)
    elif form == "right":
        got = of(lambda a: function(a, 0.5, dtype=dtype), (8, 5), result, x)
        expected = ARITHMETIC[name](x.astype(f32), f32(0.5))
    else:
        got = of(lambda a: function(0.5, a, dtype), (8, 5), result, x)
        expected = ARITHMETIC[name](f32(0.5), x.astype(f32))
    equal(got, rounded(expected.astype(f32), result))


@pytest.mark.parametrize("name", sorted(set(UNARY) - {"prelu", "arctan"}))
@pytest.mark.parametrize("dtype", [nl.float32, nl.bfloat16])
def test_functions_of_one(name, dtype):
    x = data((16, 40), f32, 3, scale=30 if name in TURNING else 3)
    x = np.abs(x) + 0.1 if name in POSITIVE else x
    expected = UNARY[name](wide(x))
    got = of(lambda t: getattr(nl, name)(t, dtype), (16, 40), dtype, x)
    near = 1e-3 if name == "tan" else 2e-5
    tolerance = near if dtype is nl.float32 else 2.0**-7
    tame = np.full(x.shape, True) if name != "tan" else np.abs(expected) < 100  # not at a pole
    np.testing.assert_allclose(wide(got)[tame], expected[tame], rtol=tolerance, atol=near)


def test_arctan_in_its_range_and_sin_far_out():
    x = np.linspace(-1.5, 1.5, 32, dtype=f32)[None]
    np.testing.assert_allclose(of(nl.arctan, (1, 32), nl.float32, x), np.arctan(wide(x)), rtol=1e-5)
    far = np.array([[9.0, -9.0, 1000.0, 3.1415927, 12345.0]], f32)
    np.testing.assert_allclose(of(nl.sin, (1, 5), nl.float32, far), np.sin(wide(far)), atol=1e-3)
    activated = compute(lambda d, t: nisa.activation(d, nl.sin, t), (1, 5), nl.float32, far)
    assert np.isnan(activated).any()


def test_integers():
    x, y = np.array([[6, -1, 100]], np.int32), np.array([[3, 1, 2]], np.int32)
    for name, expected in (
        ("bitwise_and", x & y),
        ("bitwise_or", x | y),
        ("bitwise_xor", x ^ y),
        ("left_shift", x << y),
        ("right_shift", (x.view(np.uint32) >> y.view(np.uint32)).view(np.int32)),
    ):
        equal(of(getattr(nl, name), (1, 3), nl.int32, x, y), expected)
    equal(of(lambda a: nl.bitwise_and(a, 4), (1, 3), nl.int32, x), x & 4)
    equal(of(nl.invert, (1, 3), nl.int32, x), ~x)
    flags = np.array([[0, 1, 1]], np.uint8)
    equal(of(nl.logical_not, (1, 3), nl.uint8, flags), 1 - flags)
    big = np.array([[2**24 + 1, -(2**30) - 1, 7]], np.int32)
    equal(of(nl.add, (1, 3), nl.int32, big, y), big + y)


@pytest.mark.parametrize("name", ["add", "subtract", "maximum", "greater"])
def test_a_column_is_taken_for_all_columns(name):
    x, y = data((16, 40), f32), data((16, 1), f32, 1)
    function = getattr(nl, name)
    for arrays in (x, y), (y, x):
        with noted(rf"nl\.{name}: .*\[16, 1\].* is taken for all columns of .*\[16, 40\]"):
            got = of(function, (16, 40), nl.float32, *arrays)
        equal(got, ARITHMETIC[name](*arrays).astype(f32))
    both = of(function, (16, 1), nl.float32, y, y)
    equal(both, ARITHMETIC[name](y, y).astype(f32))


def test_abs_max_and_power():
    x, y = np.array([[-5, 1, 2]], f32), np.array([[3]], f32)
    equal(of(nl.abs_max, (1, 3), nl.float32, x, y, target="trn3"), np.array([[-5, 3, 3]], f32))
    equal(of(nl.abs_min, (1, 3), nl.float32, x, y, target="trn3"), np.array([[3, 1, 2]], f32))
    got = of(nl.power, (1, 3), nl.float32, abs(x), x)
    np.testing.assert_allclose(got, wide(abs(x)) ** wide(x), rtol=1e-6)


@settings(max_examples=30)
@given(
    name=pick(["divide", "mod", "fmod"]), sides=pick(["tiles", "number right", "number left"]),
    dtype=pick([None, nl.bfloat16]), seed=seeds,
)  # fmt: skip
def test_quotients_and_remainders(name, sides, dtype, seed):
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(-4000, 4000, (4, 30)) / f for f in (8, 64))
    y[y == 0] = 3  # eighths over 64ths: many quotients are whole, and all products are exact
    if sides != "tiles":
        (x if sides == "number left" else y)[:] = rng.integers(1, 500) * rng.choice([-1, 1]) / 8
    a, b = x.astype(f32), y.astype(f32)
    expected = getattr(np, name)(x, y)

    def body(s, t):
        given = (float(x[0, 0]) if sides == "number left" else s,
                 float(y[0, 0]) if sides == "number right" else t)  # fmt: skip
        return getattr(nl, name)(*given, dtype)

    with noted(f"nl.{name}: works in simulation and does not compile"):
        got = wide(of(body, (4, 30), dtype or nl.float32, a, b))
    if name == "divide" or dtype:
        np.testing.assert_allclose(got, expected, rtol=2.0**-7 if dtype else 2e-7, atol=1e-30)
    else:
        np.testing.assert_array_equal(got, expected)


def test_what_the_engines_lack_is_no_operator():
    for name in ("divide", "mod", "fmod"):
        with pytest.raises(TypeError, match=r"the engines have no|modulo"):
            operators.alu(getattr(nl, name))
        with refused(f"nl.{name}: one input must be a tile"):
            of(lambda t, n=name: getattr(nl, n)(1.0, 2.0), (1, 3), nl.float32, np.ones((1, 3), f32))


def test_division_by_zero_is_numpys():
    x = np.array([[1, -1, 0]], f32)
    with noted("does not compile"):
        got = of(lambda t: nl.divide(t, 0.0), (1, 3), nl.float32, x)
    np.testing.assert_array_equal(got, np.array([[np.inf, -np.inf, np.nan]], f32))


def test_every_operator_has_its_token():
    for table in (operators.ALU, operators.ACTIVATION):
        for name in table:
            token = getattr(nl, name)
            assert token.__name__ == token.__qualname__ == name
            assert token.__doc__
    for name in ("bypass", "prelu", "average"):
        with pytest.raises(TypeError, match="cannot be called"):
            getattr(nl, name)(None)


REDUCTIONS = {
    "sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min, "mean": np.mean,
    "var": lambda x, axis, keepdims: np.var(x, axis=axis, keepdims=True),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REDUCTIONS))
@pytest.mark.parametrize("axis", [2, -1, (1, 2), [2]])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("dtype", [None, nl.bfloat16])
def test_reductions(name, axis, keepdims, dtype):
    x = data((8, 3, 6), f32)
    axes = tuple(axis) if isinstance(axis, list) else axis
    expected = REDUCTIONS[name](wide(x), axis=axes, keepdims=keepdims)
    shape = expected.shape if expected.ndim > 1 else (8, 1)
    got = of(lambda t: getattr(nl, name)(t, axis, dtype, keepdims), shape, dtype or nl.float32, x)
    tolerance = 1e-5 if dtype is None else 2.0**-7
    np.testing.assert_allclose(wide(got), expected.reshape(shape), rtol=tolerance, atol=1e-5)


def test_all():
    x = (data((8, 3)) > -1).astype(f32)
    equal(of(lambda t: nl.all(t, 1), (8, 1), nl.float32, x), x.all(1, keepdims=True).astype(f32))


@pytest.mark.parametrize("shape", [(8, 12), (4, 3, 5)])
@pytest.mark.parametrize("dtype", [None, nl.bfloat16])
def test_softmax_and_rms_norm(shape, dtype):
    x, w = data(shape, f32, scale=4), data(shape, f32, 1)
    n = shape[-1]
    e = np.exp(wide(x) - wide(x).max(-1, keepdims=True))
    tolerance = 1e-5 if dtype is None else 2.0**-7
    got = of(lambda t: nl.softmax(t, dtype=dtype), shape, dtype or nl.float32, x)
    np.testing.assert_allclose(wide(got), e / e.sum(-1, keepdims=True), rtol=tolerance)
    norm = wide(x) / np.sqrt((wide(x) ** 2).sum(-1, keepdims=True) / n + 1e-3) * wide(w)
    got = of(lambda t, u: nl.rms_norm(t, u, -1, n, 1e-3, dtype), shape, dtype or nl.float32, x, w)
    np.testing.assert_allclose(wide(got), norm, rtol=tolerance, atol=1e-6)


def test_where():
    c, x, y = (data((8, 5)) > 0).astype(f32), data((8, 5), seed=1), data((8, 5), bf16, seed=2)
    equal(of(nl.where, (8, 5), nl.float32, c, x, y), np.where(c > 0, x, y.astype(f32)))
    got = of(lambda a, b: nl.where(a, b, 7.0), (8, 5), nl.float32, c, x)
    equal(got, np.where(c > 0, x, f32(7)))
    got = of(lambda a, b: nl.where(a, 7.0, b), (8, 5), nl.bfloat16, c, y)
    equal(got, np.where(c > 0, bf16(7), y))


def test_loads_stores_and_transposes():
    x = data((16, 10), bf16)
    equal(of(lambda t: nl.transpose(t), (10, 16), nl.bfloat16, x), x.T)
    equal(of(lambda t: nl.transpose(t, nl.float32), (10, 16), nl.float32, x), x.T.astype(f32))

    def kernel(a):
        out, same = (new(*shape, buffer=nl.shared_hbm) for shape in ((10, 16), (16, 10)))
        nl.store(out, nl.load_transpose2d(a, nl.float32))
        nl.store(same, nl.load(a, dtype=nl.float32))
        return out, same

    got, same = run(kernel, x)
    equal(got, x.T.astype(f32))
    equal(same, x.astype(f32))


def test_matmul_is_in_psum():
    x, y = data((32, 8), bf16), data((32, 12), bf16, 1)

    def function(a, b):
        result = nl.matmul(a, b, transpose_x=True)
        assert result.buffer is nl.psum
        return nl.copy(result)

    got = of(function, (8, 12), nl.float32, x, y)
    plain = x.T.astype(f32) @ y.astype(f32)
    assert_close_to_oracle(*map(torch.from_numpy, (got, wide(x).T @ wide(y), plain)))


def test_shapes():
    x, y = data((1, 6), f32), data((8, 1, 3), f32)
    for array, shape, dtype in (
        (x, (64, 6), None),
        (x, (64, 6), nl.bfloat16),
        (y, (8, 4, 3), None),
    ):

        def wider(t, shape=shape, dtype=dtype):
            return nl.broadcast_to(t, shape, dtype)

        got = of(wider, shape, dtype or nl.float32, array)
        equal(got, np.broadcast_to(array, shape).astype(got.dtype))
    assert of(lambda t: nl.expand_dims(t, -1), (8, 1, 3, 1), nl.float32, y).shape == (8, 1, 3, 1)

    def unchanged(t):
        assert nl.broadcast_to(t, t.shape) is t
        return t

    of(unchanged, (8, 1, 3), nl.float32, y)


def test_gather_flattened():
    x, index = data((8, 3, 4), f32), np.random.default_rng(0).integers(0, 12, (8, 5), np.uint32)
    expected = np.take_along_axis(x.reshape(8, 12), index.astype(int), 1)
    equal(of(nl.gather_flattened, (8, 5), nl.float32, x, index), expected)


def test_random_numbers():
    def kernel(x):
        seed = nl.full((1, 1), 42, nl.int32)
        nl.random_seed(seed)
        first = nl.rand((128, 64), nl.float32)
        nl.random_seed(seed)
        again, later = nl.rand((128, 64), nl.float32), nl.rand((128, 64), nl.float32)
        return stored(first), stored(again), stored(later)

    first, again, later = run(kernel, data((1, 1)))
    equal(first, again)
    assert (first != later).mean() > 0.99
    assert first.min() >= 0
    assert first.max() < 1
    assert abs(first.mean() - 0.5) < 0.02


@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_dropout(rate):
    x = np.abs(data((128, 64))) + 0.1
    got = of(lambda t: nl.dropout(t, rate), (128, 64), nl.float32, x)
    kept = got != 0
    assert abs((1 - kept.mean()) - rate) < 0.03
    np.testing.assert_array_equal(got[kept], x[kept])


def test_filled_tensors():
    def kernel(x):
        t = loaded(x)
        tiles = [
            nl.zeros((4, 2), nl.int32),
            nl.ones((4, 2), nl.bfloat16),
            nl.full((4, 2), 2.5, nl.float32),
            nl.zeros_like(t),
            nl.zeros_like(x, nl.int8),
            nl.copy(nl.zeros((4, 2), nl.float32, nl.psum)),
        ]
        assert nl.empty_like(x).buffer is nl.shared_hbm
        assert nl.empty_like(t, nl.int8, nl.psum).dtype is nl.int8
        assert nl.zeros_like(x).buffer is nl.sbuf
        return tuple(stored(t) for t in tiles)

    got = run(kernel, data((4, 2)))
    for g, value in zip(got, [0, 1, 2.5, 0, 0, 0], strict=True):
        assert (wide(g) == value).all()


def test_no_reorder_and_buffer_questions():
    def kernel(x):
        with nl.no_reorder():
            t = loaded(x)
        assert nl.is_sbuf(t.buffer)
        assert nl.is_on_chip(nl.psum)
        assert nl.is_psum(nl.psum)
        assert nl.is_hbm(x.buffer)
        assert nl.ndarray((1, 1), nl.int8, nl.hbm).buffer is nl.private_hbm
        # An argument, by AWS's guide to its simulator and by nki-library.
        assert x.buffer == nl.hbm == nl.private_hbm
        assert x.buffer == nl.shared_hbm != nl.private_hbm
        assert nl.sbuf != nl.hbm != t.buffer
        assert t.buffer not in (nl.hbm, nl.shared_hbm, "sbuf")
        return x

    assert isinstance(run(kernel, data((4, 2))), np.ndarray)
    assert nc.language is nl


def test_a_binary_function_takes_one_tile_twice():
    def squares(x):
        tile = nl.load(x)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.multiply(tile, tile))
        return out

    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert (nc.simulate(squares, x, target="trn2").outputs == x * x).all()
