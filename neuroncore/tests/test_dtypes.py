"""Conversions against the nearest of all representable values, and the names kernels may use."""

import copy
import pickle
from bisect import bisect_left
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch

from neuroncore import dtypes
from neuroncore.dtypes import DTYPES, dtype_of, fresh, from_fp32, from_numpy, to_fp32

# Exponent and mantissa bits, bias, and whether the top exponent is infinities and NaN (IEEE).
FORMATS = {
    "float16": (5, 10, 15, True),
    "bfloat16": (8, 7, 127, True),
    "float8_e4m3": (4, 3, 7, True),
    "float8_e5m2": (5, 2, 15, True),
    "float8_e4m3fn": (4, 3, 7, False),
}
INTEGERS = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]
VALUES = [name for name, dtype in DTYPES.items() if dtype.kind != "packed"]
PACKED = [name for name, dtype in DTYPES.items() if dtype.kind == "packed"]


def decode(name, pattern):
    """The value of a non-negative pattern, from the definition of the format."""
    exponent_bits, mantissa_bits, bias, ieee = FORMATS[name]
    exponent, mantissa = divmod(pattern, 1 << mantissa_bits)
    if exponent == (1 << exponent_bits) - 1:
        if ieee:
            return np.nan if mantissa else np.inf
        if mantissa == (1 << mantissa_bits) - 1:
            return np.nan
    if exponent == 0:
        return mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


@cache
def finite_values(name):
    """Non-negative finite values in order, so that an index is its bit pattern."""
    bits = 8 * DTYPES[name].itemsize - 1
    values = [decode(name, n) for n in range(1 << bits)]
    return [value for value in values if np.isfinite(value)]


@cache
def grid_of(name):
    """The same with one more step after the largest."""
    values = finite_values(name)
    return [*values, 2 * values[-1] - values[-2]]


def nearest(name, x):
    """Round to nearest, ties to the even pattern."""
    grid = grid_of(name)
    overflow = np.inf if FORMATS[name][3] else np.nan
    a = abs(float(x))
    if np.isnan(a) or a > grid[-1]:
        return np.copysign(a if np.isnan(a) else overflow, x)
    high = bisect_left(grid, a)
    low = max(0, high - 1)
    below, above = a - grid[low], grid[high] - a
    best = low if below < above or (below == above and low % 2 == 0) else high
    return np.copysign(overflow if best == len(grid) - 1 else grid[best], x)


def both_signs(*parts):
    """Of these values, zero, infinity, NaN and any other float32."""
    patterns = np.random.default_rng(1).integers(0, 2**32, 3000, np.uint32).view(np.float32)
    x = np.concatenate([np.array(part, np.float32) for part in (*parts, [0, np.inf, np.nan])])
    x = np.concatenate([x, patterns[~np.isnan(patterns)]])
    return np.concatenate([x, -x])


@pytest.mark.parametrize("name", FORMATS)
def test_floats_round_to_the_nearest_representable_value(name):
    """Those near the format's range, and exact ties between neighbours."""
    rng, values = np.random.default_rng(0), np.array(finite_values(name))
    near = rng.uniform(0, min(2 * values[-1], 3e38), 3000)
    ties = rng.permuted((values[:-1] + values[1:]) / 2)[:3000]
    x = both_signs(near, ties)
    rounded = from_fp32(x, DTYPES[name])
    assert rounded.dtype == DTYPES[name].numpy
    want = np.array([nearest(name, v) for v in x])
    got = rounded.astype(np.float64)
    np.testing.assert_array_equal(got, want)
    kept = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[kept]), np.signbit(want[kept]))


@pytest.mark.parametrize("name", FORMATS)
def test_largest_values_and_what_lies_beyond(name):
    top = finite_values(name)[-1]
    step = top - finite_values(name)[-2]
    tie = np.float32(top + step / 2)
    x = np.array([top, np.nextafter(tie, np.float32(0)), tie, np.inf, -np.inf], np.float32)
    inf = np.inf if FORMATS[name][3] else np.nan
    got = to_fp32(from_fp32(x, DTYPES[name]), DTYPES[name])
    beyond = top if finite_values(name).index(top) % 2 == 0 else inf
    np.testing.assert_array_equal(got, np.float32([top, top, beyond, inf, -inf]))


@pytest.mark.parametrize("name", FORMATS)
def test_every_pattern_is_read_by_definition_and_written_back(name):
    dtype = DTYPES[name]
    half = 1 << (8 * dtype.itemsize - 1)
    patterns = np.arange(2 * half, dtype=f"u{dtype.itemsize}")
    values = to_fp32(patterns.view(dtype.numpy), dtype)
    positive = np.array([decode(name, n) for n in range(half)])
    np.testing.assert_array_equal(values, np.concatenate([positive, -positive]).astype(np.float32))
    numbers = ~np.isnan(values)
    again = from_fp32(values, dtype).view(patterns.dtype)
    np.testing.assert_array_equal(again[numbers], patterns[numbers])


def test_e8m0_holds_powers_of_two_and_nan():
    dtype = dtypes.float8_e8m0fnu
    patterns = np.arange(255, dtype=np.uint8)
    values = to_fp32(patterns.view(dtype.numpy), dtype)
    np.testing.assert_array_equal(values, np.exp2(np.arange(255) - 127.0).astype(np.float32))
    np.testing.assert_array_equal(from_fp32(values, dtype).view(np.uint8), patterns)
    x = np.float32([np.nan, 0, -1, np.inf, 3.1, 2.9])
    np.testing.assert_array_equal(
        to_fp32(from_fp32(x, dtype), dtype), np.float32([np.nan] * 4 + [4, 2])
    )


def test_tfloat32_keeps_ten_mantissa_bits():
    edges = [2.0**-149, 1 + 2.0**-11, 1 + 3 * 2.0**-11, np.finfo(np.float32).max]
    x = both_signs(edges)
    got = from_fp32(x, dtypes.tfloat32)
    finite = np.isfinite(x)
    exponent = np.maximum(np.frexp(x.astype(np.float64))[1] - 1, -126)[finite]
    step = np.exp2(exponent - 10.0)
    with np.errstate(over="ignore"):
        want = (np.rint(x[finite] / step) * step).astype(np.float32)
    np.testing.assert_array_equal(got[finite], want)
    np.testing.assert_array_equal(got[~finite], x[~finite])


def test_tfloat32_keeps_every_nan_and_leaves_its_input():
    x = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x3F801FFF], np.uint32).view(np.float32)
    before = x.copy()
    got = from_fp32(x, dtypes.tfloat32)
    assert np.isnan(got[:3]).all()
    assert got[3] == 1 + 2.0**-10
    np.testing.assert_array_equal(x.view(np.uint32), before.view(np.uint32))


def as_integer(x, bounds):
    if np.isnan(x):
        return 0
    if np.isinf(x):
        return bounds.max if x > 0 else bounds.min
    return min(max(round(float(x)), bounds.min), bounds.max)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_round_ties_to_even_then_saturate(name):
    bounds = np.iinfo(name)
    near = np.random.default_rng(0).uniform(2.0 * bounds.min - 2, 2.0 * bounds.max, 2000)
    x = both_signs(near, np.arange(40) + 0.5)
    got = from_fp32(x, DTYPES[name])
    assert got.dtype == name
    assert got.tolist() == [as_integer(v, bounds) for v in x]


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_read_to_the_nearest_float32(name):
    bounds = np.iinfo(name)
    drawn = np.random.default_rng(0).integers(bounds.min, bounds.max, 3000, endpoint=True)
    x = np.array([*drawn, bounds.min, bounds.max], name)
    got = to_fp32(x, DTYPES[name])
    # An integer of 32 bits is exact in float64, so this rounds once.
    np.testing.assert_array_equal(got, x.astype(np.float64).astype(np.float32), strict=True)


def test_bool_is_one_for_whatever_is_not_zero():
    got = from_fp32(np.float32([0, -0.0, 0.25, -3, np.inf]), dtypes.bool_)
    assert got.dtype == np.uint8
    assert got.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("name", VALUES)
def test_strided_arrays_convert_like_contiguous_ones(name):
    dtype = DTYPES[name]
    x = np.random.default_rng(0).uniform(1, 60, (6, 10)).astype(np.float32)
    stored = from_fp32(x, dtype)
    for view in (np.s_[::2, 1::3], np.s_[:, ::-1], np.s_[:, None, 3]):
        np.testing.assert_array_equal(
            from_fp32(x[view], dtype), from_fp32(x[view].copy(), dtype), strict=True
        )
        np.testing.assert_array_equal(
            to_fp32(stored[view], dtype), to_fp32(stored, dtype)[view], strict=True
        )
    np.testing.assert_array_equal(to_fp32(stored.T, dtype), to_fp32(stored, dtype).T, strict=True)


@pytest.mark.parametrize("name", [name for name in VALUES if DTYPES[name].is_float])
def test_floats_that_are_kept_wide_are_read_as_they_are(name):
    x = np.float32([[1 + 2.0**-20, 3.3]])
    assert to_fp32(x, DTYPES[name]) is x


@pytest.mark.parametrize("name", VALUES)
def test_fresh_memory_is_nan_or_four(name):
    for shape in (3, (2, 5)):
        array = fresh(shape, DTYPES[name])
        assert array.dtype == DTYPES[name].numpy
        assert array.shape == (shape if isinstance(shape, tuple) else (shape,))
        values = to_fp32(array, DTYPES[name])
        assert np.isnan(values).all() if DTYPES[name].is_float else (values == 4).all()
    assert (fresh(3, dtypes.float8_e8m0fnu).view(np.uint8) == 0xFF).all()


@pytest.mark.parametrize("name", PACKED)
def test_packed_types_have_a_size_and_no_conversion(name):
    dtype = DTYPES[name]
    assert dtype.itemsize == (2 if name.startswith("float4") else 4)
    assert (fresh((2, 2), dtype) == 4).all()
    for refused in (
        lambda: from_fp32(np.ones(1, np.float32), dtype),
        lambda: to_fp32(np.ones(1, dtype.numpy), dtype),
    ):
        with pytest.raises(TypeError, match=r"packs four .* nisa\.nc_matmul_mx"):
            refused()


def test_a_dtype_is_its_name():
    for name, dtype in DTYPES.items():
        assert getattr(dtypes, name) is dtype
        assert dtype == name
        assert hash(dtype) == hash(name)
        assert f"{dtype} {dtype!r}" == f"{name} {name}"
        assert dtype_of(name) is dtype
        assert dtype_of(dtype) is dtype
        assert copy.deepcopy(dtype) is dtype
        assert pickle.loads(pickle.dumps(dtype)) is dtype  # noqa: S301
        assert dtype.itemsize == dtype.numpy.itemsize


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (np.float32, "nl.float32"), (np.dtype("float64"), "nl.float32"),
        (np.dtype(bool), "nl.bool_"), (ml_dtypes.bfloat16, "nl.bfloat16"),
        (torch.bfloat16, "nl.bfloat16"), (torch.long, "nl.int32"), ("float64", "nl.float32"),
        ("nl.int8", "nl.int8"), (float, "nl.float32"), (3, "nl.float32"), (None, "nl.float32"),
    ],
)  # fmt: skip
def test_dtypes_of_other_libraries_are_refused_with_a_remedy(value, remedy):
    with pytest.raises(TypeError, match=rf"use {remedy}\b") as error:
        dtype_of(value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [n for n in VALUES if n not in ("bool_", "tfloat32")])
def test_arrays_enter_with_the_dtype_of_the_same_name(name):
    assert from_numpy(DTYPES[name].numpy) is DTYPES[name]
    assert from_numpy(np.dtype(bool)) is dtypes.bool_


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [("f8", "float32"), ("i8", "int32"), ("u8", "uint32"), ("c8", "float32"), ("U3", "float32")],
)
def test_arrays_that_no_neuroncore_holds_are_refused(dtype, remedy):
    with pytest.raises(TypeError, match=rf"\.astype\(np\.{remedy}\)") as error:
        from_numpy(np.dtype(dtype))
    assert "\n" not in str(error.value)
