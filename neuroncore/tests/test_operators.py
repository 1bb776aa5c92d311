"""Each operator against a plain statement of it on Python numbers, and who may pass as a token."""

import builtins
import itertools
import math
import operator

import numpy as np
import pytest
import torch
from samples import BINARY, BITVEC, FUNCTIONS, tanh_argument

from neuroncore.nl.operators import ACTIVATION, ALU, activation, alu, reduce

NAN, INF = math.nan, math.inf

UNARY = {
    "abs": abs,
    "square": lambda x: x * x,
    "relu": lambda x: max(x, 0.0),
    "logical_not": lambda x: x == 0,
}
REDUCIBLE = {
    "bitwise_and", "bitwise_or", "bitwise_xor", "add", "subtract", "multiply", "maximum",
    "minimum", "logical_and", "logical_or", "logical_xor",
}  # fmt: skip
# Small multiples of 1/8: sums, products and comparisons are exact in float32, ties are common.
EIGHTHS = [n / 8 for n in range(-64, 65)]
PAIRS = list(itertools.product(EIGHTHS[::3], EIGHTHS))


def f32(values):
    return np.array(values, np.float32)


def token(name):
    def function():
        raise AssertionError("a token is not called")

    function.__name__ = name
    return function


def test_the_tables_are_those_of_the_documentation():
    assert {name for name, op in ALU.items() if op.reducible} == REDUCIBLE
    bitvec = {name for name, op in ALU.items() if op.kind == "bitvec"}
    assert bitvec == {*BITVEC, "invert"}
    unary = {name for name, op in ALU.items() if op.arity == 1}
    assert unary == {*UNARY, "rsqrt", "reciprocal", "invert"}
    assert {*ALU} == {*BINARY, *UNARY, *BITVEC, "power", "rsqrt", "reciprocal", "invert"}
    assert all(op.name == name for table in (ALU, ACTIVATION) for name, op in table.items())
    assert {name for name, op in ACTIVATION.items() if op.valid} == {
        "log", "sin", "arctan", "sqrt", "rsqrt", "reciprocal",
    }  # fmt: skip


@pytest.mark.parametrize("name", [*BINARY, *UNARY])
def test_arithmetic_operators(name):
    function, given = (
        (BINARY[name], PAIRS) if name in BINARY else (UNARY[name], [(x,) for x in EIGHTHS])
    )
    got = ALU[name].apply(*f32(given).T)
    assert got.dtype == np.float32
    assert got.tolist() == [float(function(*values)) for values in given]


def test_reciprocal_and_rsqrt_round_correctly():
    x = np.exp2(np.random.default_rng(0).uniform(-100, 100, 3000)).astype(np.float32)
    for name, function in (("reciprocal", lambda v: 1 / v), ("rsqrt", lambda v: 1 / math.sqrt(v))):
        np.testing.assert_array_equal(
            ALU[name].apply(x), f32(list(map(function, x.tolist()))), strict=True
        )


@pytest.mark.parametrize("name", ["add", "maximum", "minimum", "abs_max", "abs_min"])
def test_a_nan_on_either_side_stays_visible(name):
    assert np.isnan(ALU[name].apply(f32([NAN, 1, NAN]), f32([1, NAN, NAN]))).all()
    assert np.isnan(ALU["relu"].apply(f32([NAN]))).all()


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("sign", ["int", "uint"])
@pytest.mark.parametrize("name", [*BITVEC, "invert"])
def test_bitvec_operators_see_bit_patterns(name, sign, bits):
    size, op = 1 << bits, ALU[name]
    edges = [0, 1, size // 2 - 1, size // 2, size - 1]
    first = [*edges, *np.random.default_rng(bits).integers(0, size, 100).tolist()]
    second = range(bits + 3) if "shift" in name else first[:20]
    xy = list(itertools.product(first, second))
    x, y = np.array(xy, f"uint{bits}").T.view(f"{sign}{bits}")
    got = op.apply(x, y) if op.arity == 2 else op.apply(x)
    want = [BITVEC[name](a, b) & size - 1 if op.arity == 2 else size - 1 - a for a, b in xy]
    assert got.dtype == x.dtype
    assert got.view(f"uint{bits}").tolist() == want


@pytest.mark.parametrize("axes", [(2,), (1, 2), (2, 1), (-1,), (1,), (0, 2)])
@pytest.mark.parametrize("name", sorted(REDUCIBLE))
def test_reduce_is_the_operator_from_left_to_right(name, axes):
    op = ALU[name]
    rng = np.random.default_rng(len(name))
    x = rng.integers(-3, 4, (3, 2, 4)).astype(np.float32 if op.kind == "arithmetic" else np.int16)
    got = reduce(op, x, axes)
    assert got.dtype == x.dtype
    reduced = {axis % 3 for axis in axes}
    assert got.shape == tuple(size for n, size in enumerate(x.shape) if n not in reduced)
    python = {**BINARY, **BITVEC}[name]
    kept = [range(1) if n in reduced else range(x.shape[n]) for n in range(3)]
    inner = [range(x.shape[n]) if n in reduced else range(1) for n in range(3)]
    want = []
    for base in np.ndindex(*map(len, kept)):
        items = [x[tuple(np.add(base, i))].item() for i in np.ndindex(*map(len, inner))]
        total = items[0]
        for item in items[1:]:
            total = python(total, item)
        want.append(total)
    assert got.ravel().tolist() == want


def test_sums_accumulate_in_float32():
    x = np.ones((2, 3), np.float32)
    x[:, 0] = 2.0**25
    assert reduce(ALU["add"], x, (1,)).tolist() == [2.0**25] * 2


# Where a derivative crosses zero its terms cancel: there the error is that of the terms.
CROSSING = {"gelu_dx": 1e-9, "gelu_apprx_sigmoid_dx": 1e-12, "silu_dx": 1e-12}


def assert_within_two_ulp(name, x):
    got = ACTIVATION[name].apply(x)
    assert got.dtype == np.float32
    assert got.shape == x.shape
    with np.errstate(over="ignore", invalid="ignore"):
        want = f32([FUNCTIONS[name](float(v)) for v in x])
        same = got == want
        error = np.abs(got.astype(np.float64) - want)
        ulp = np.spacing(np.abs(want)).astype(np.float64)
    good = same | (error <= 2 * ulp + CROSSING.get(name, 0.0))
    assert good.all(), (x[~good], got[~good], want[~good])


@pytest.mark.parametrize("name", ACTIVATION)
def test_activations_are_within_two_ulp_over_their_range(name):
    low, high = ACTIVATION[name].valid or (-30.0, 30.0)
    if name in ("log", "sqrt", "rsqrt", "reciprocal"):
        x = np.exp2(np.linspace(math.log2(low), math.log2(high), 2001)).astype(np.float32)
    else:
        x = np.linspace(low, high, 4001).astype(np.float32)
    if name == "reciprocal":
        x = np.concatenate([x, -x])
    assert_within_two_ulp(name, x)
    if ACTIVATION[name].valid is None:
        small = np.exp2(np.linspace(-120, 0, 601)).astype(np.float32)
        assert_within_two_ulp(name, np.concatenate([small, -small]))


@pytest.mark.parametrize("name", [name for name, op in ACTIVATION.items() if op.valid is None])
def test_activations_are_within_two_ulp_anywhere(name):
    rng = np.random.default_rng(0)
    small = np.exp2(rng.uniform(-149, 7, 500)) * rng.choice([-1, 1], 500)
    assert_within_two_ulp(name, f32([*rng.uniform(-150, 150, 1000), *small, 0.0, -0.0]))


def test_gelu_by_tanh_is_the_published_formula():
    x = np.linspace(-6, 6, 1001).astype(np.float32)
    want = [0.5 * v * (1 + math.tanh(tanh_argument(v))) for v in x.astype(float)]
    np.testing.assert_allclose(ACTIVATION["gelu_apprx_tanh"].apply(x), want, atol=1e-6)


LIMITS = {  # at -inf and at inf
    "copy": (-INF, INF), "square": (INF, INF), "sigmoid": (0, 1), "relu": (0, INF),
    "prelu": (-INF, INF), "gelu": (0, INF), "gelu_dx": (0, 1), "gelu_apprx_tanh": (0, INF),
    "gelu_apprx_sigmoid": (0, INF), "gelu_apprx_sigmoid_dx": (0, 1), "silu": (0, INF),
    "silu_dx": (0, 1), "tanh": (-1, 1), "softplus": (0, INF), "mish": (0, INF), "erf": (-1, 1),
    "erf_dx": (0, 0), "exp": (0, INF), "sign": (-1, 1), "abs": (INF, INF),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_infinities_reach_the_limit_and_nan_stays(name):
    big = float(np.finfo(np.float32).max)
    got = ACTIVATION[name].apply(f32([-INF, INF, NAN, -big, big]))
    assert got[:2].tolist() == list(LIMITS[name])
    assert np.isnan(got[2])
    assert not np.isnan(got[3:]).any()


@pytest.mark.parametrize("name", [name for name, op in ACTIVATION.items() if op.valid])
def test_outside_the_valid_range_the_result_is_nan(name):
    low, high = f32(ACTIVATION[name].valid)
    x = f32([low, high, np.nextafter(low, f32(-INF)), np.nextafter(high, f32(INF)), INF, NAN])
    got = ACTIVATION[name].apply(x)
    assert np.isfinite(got[:2]).all()
    assert np.isnan(got[2:]).all()


def test_reciprocal_s_range_is_of_the_magnitude():
    got = ACTIVATION["reciprocal"].apply(f32([-4, -(2.0**43), -(2.0**-43), 0]))
    assert got[0] == -0.25
    assert np.isnan(got[1:]).all()


def test_activations_take_any_shape_and_leave_their_input():
    x = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-2]
    before = x.copy()
    for op in ACTIVATION.values():
        assert op.apply(x).shape == (2, 3)
    np.testing.assert_array_equal(x, before)


def test_tokens_are_known_by_name():
    for name in ALU:
        assert alu(token(name)) is ALU[name]
    for name in ACTIVATION:
        assert activation(token(name)) is ACTIVATION[name]


@pytest.mark.parametrize(
    ("lookup", "op", "remedy"),
    [
        (alu, np.add, "use nl.add$"), (alu, operator.add, "use nl.add$"),
        (alu, torch.add, "use nl.add$"), (alu, "add", "use nl.add$"),
        (alu, "nl.add", "use nl.add$"), (alu, np.max, "use nl.maximum$"),
        (alu, builtins.abs, "use nl.abs$"), (alu, np.abs, "use nl.abs$"),
        (alu, np.divide, "use nisa.reciprocal, then nl.multiply$"),
        (alu, token("divide"), "no divide: use nisa.reciprocal, then nl.multiply$"),
        (alu, token("mod"), "no modulo"), (alu, token("fmod"), "no modulo"),
        (alu, token("exp"), "is an activation, not an ALU operator: use nisa.activation$"),
        (alu, token("foo"), "'foo' is not supported: use one of nl.add, nl.subtract, "),
        (alu, None, "None is not a function of nl: use one of nl.add, "),
        (activation, torch.nn.functional.silu, "use nl.silu$"), (activation, np.exp, "use nl.exp$"),
        (activation, math.erf, "use nl.erf$"),
        (activation, token("add"), "is an ALU operator, not an activation: use nisa.tensor_tensor"),
        (activation, token("foo"), "'foo' is not supported: use one of nl.copy, nl.square, "),
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_a_remedy(lookup, op, remedy):
    with pytest.raises(TypeError, match=remedy) as error:
        lookup(op)
    assert "\n" not in str(error.value)
