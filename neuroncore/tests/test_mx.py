"""Microscaling: quantisation and matmul against the formula, element by element, and the rules."""

import math

import ml_dtypes
import numpy as np
import pytest
from draws import either, few, pick, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import loaded, new, refusals, refuses, run, stored, zeros
from samples import bf16, data

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.dtypes import array_dtype

FORMATS = {
    "float8_e4m3fn_x4": (ml_dtypes.float8_e4m3fn, 8, 448.0),
    "float8_e5m2_x4": (ml_dtypes.float8_e5m2, 15, 57344.0),
}


def reference(x: np.ndarray, dtype: str, reserve: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Values [P, F] and biased exponents [P/8, F/4], a group at a time, in Python's floats."""
    kind, top, most = FORMATS[dtype]
    p, f = x.shape
    values = np.zeros((p, f), kind)
    scales = np.zeros((p // 8, f // 4), np.uint8)
    for i in range(p // 8):
        for j in range(f // 4):
            block = x[8 * i : 8 * i + 8, 4 * j : 4 * j + 4].astype(np.float64)
            largest = float(np.abs(block).max())
            e = -127 if largest == 0 else math.floor(math.log2(largest)) - (top - reserve)
            e = max(-127, min(127, e))
            scales[i, j] = e + 127
            scaled = np.clip(block / 2.0**e, -most, most)
            values[8 * i : 8 * i + 8, 4 * j : 4 * j + 4] = scaled.astype(kind)
    return values, scales


def packed(values: np.ndarray) -> np.ndarray:
    """[P, F] of 8-bit floats as [P, F / 4] words, the first value lowest."""
    b = values.view(np.uint8).astype(np.uint32).reshape(len(values), -1, 4)
    return b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16 | b[..., 3] << 24


def spread(scales: np.ndarray) -> np.ndarray:
    """[P/8, F] scales as they lie in the quadrants of [P, F], zeros elsewhere."""
    tile = np.zeros((len(scales) * 8, scales.shape[1]), np.uint8)
    for i, row in enumerate(scales):
        tile[i // 4 * 32 + i % 4] = row
    return tile


def quantized(x, dtype, scale_dtype="uint8", follow="documentation"):
    """(packed words, scale bits [P/8, F/4]) by the simulated instruction."""

    def kernel(x):
        p, f = x.shape
        dst, scale = new(p, f // 4, dtype=dtype), new(p, f // 4, dtype=scale_dtype)
        nisa.memset(scale.view(nl.uint8), 0)
        nisa.quantize_mx(dst, loaded(x), scale)
        return stored(dst.view(nl.uint32)), stored(scale.view(nl.uint8))

    words, bits = nc.simulate(kernel, x, target="trn3", follow=follow).outputs
    rows = [q * 32 + r for q in range(len(x) // 32) for r in range(4)]
    np.testing.assert_array_equal(np.delete(bits, rows, 0), 0)
    return words, bits[rows]


@settings(max_examples=25)
@given(
    dtype=pick(sorted(FORMATS)), quadrants=st.integers(1, 4), columns=st.integers(1, 6),
    exponent=st.integers(-130, 120), half=either, follow=pick(["documentation", "kernels"]),
    scale_dtype=pick(["uint8", "float8_e8m0fnu"]), seed=seeds,
)  # fmt: skip
def test_quantize_is_the_documented_formula(
    dtype, quadrants, columns, exponent, half, follow, scale_dtype, seed
):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((32 * quadrants, 4 * columns)) * 2.0 ** rng.integers(-8, 8, (1, 1))
    x = (x * 2.0 ** (exponent / (9 if half else 1))).astype(np.float16 if half else bf16)
    x[:8, :4] = 0  # a group of zeros
    values, scales = reference(x, dtype, 1 if follow == "documentation" else 0)
    words, bits = quantized(x, dtype, scale_dtype, follow)
    np.testing.assert_array_equal(bits, scales)
    np.testing.assert_array_equal(words, packed(values))


def test_the_documented_scale_leaves_room_that_the_ocp_sample_does_not():
    x = np.full((32, 4), 480.0, bf16)  # 1.875 * 2^8; the largest e4m3fn is 448
    words, bits = quantized(x, "float8_e4m3fn_x4")
    assert bits[0, 0] - 127 == 1
    assert words.view(ml_dtypes.float8_e4m3fn).astype(float).max() * 2 == 480
    words, bits = quantized(x, "float8_e4m3fn_x4", follow="kernels")
    assert bits[0, 0] - 127 == 0
    assert words.view(ml_dtypes.float8_e4m3fn).astype(float).max() == 448


def test_groups_with_an_infinity_have_a_scale_that_is_none():
    x = np.ones((32, 8), bf16)
    x[3, 5] = np.inf
    words, bits = quantized(x, "float8_e5m2_x4")
    assert bits[0].tolist() == [127 - 14, 255]
    assert np.isnan(words.view(ml_dtypes.float8_e5m2).reshape(32, 2, 4)[:8, 1].astype(float)).all()


def operand(dtype: str, k: int, f: int, seed: int):
    """Random words [k, f] of a packed dtype, scales [k/8, f] and what they stand for [4k, f]."""
    rng = np.random.default_rng(seed)
    four = dtype == "float4_e2m1fn_x4"
    kind = ml_dtypes.float4_e2m1fn if four else FORMATS[dtype][0]
    codes = rng.integers(0, 16 if four else 256, (k, f, 4)).astype(np.uint8)
    values = codes.view(kind).astype(np.float64)
    codes = np.where(np.isfinite(values), codes, 0).astype(np.uint64)
    values = np.where(np.isfinite(values), values, 0)
    shift = 4 if four else 8
    words = sum(codes[..., i] << np.uint64(shift * i) for i in range(4))
    scales = rng.integers(110, 130, (k // 8, f)).astype(np.uint8)
    factors = np.repeat(2.0 ** (scales.astype(float) - 127), 8, 0)[:, :, None]
    meant = (values * factors).transpose(0, 2, 1).reshape(4 * k, f)
    return words.astype(np.uint16 if four else np.uint32), scales, meant


def matmul_mx(stationary, moving, dtypes, out=nl.float32, accumulate=None, times=1, **options):
    """dst of nc_matmul_mx on words and scales [K/8, F] each."""

    def kernel(a, a_scale, b, b_scale):
        tiles = []
        for words, scales, dtype in ((a, a_scale, dtypes[0]), (b, b_scale, dtypes[1])):
            tiles.append((loaded(words.view(dtype)), loaded(scales).view(nl.float8_e8m0fnu)))
        (a, a_scale), (b, b_scale) = tiles
        dst = nl.ndarray((a.shape[1], b.shape[1]), out, buffer=nl.psum)
        for _ in range(times):
            nisa.nc_matmul_mx(dst, a, b, a_scale, b_scale, accumulate=accumulate, **options)
        return stored(dst)

    (a, a_scale), (b, b_scale) = stationary, moving
    return nc.simulate(kernel, a, spread(a_scale), b, spread(b_scale), target="trn3")


@few
@given(
    dtypes=st.tuples(*[pick([*FORMATS, "float4_e2m1fn_x4"])] * 2), k=pick([32, 64, 96, 128]),
    m=pick([2, 6, 128]), n=pick([1, 5, 130]), seed=seeds,
)  # fmt: skip
def test_matmul_is_the_product_of_what_the_operands_stand_for(dtypes, k, m, n, seed):
    a, a_scale, left = operand(dtypes[0], k, m, seed)
    b, b_scale, right = operand(dtypes[1], k, n, seed + 1)
    kinds = tuple(getattr(nl, d) for d in dtypes)
    done = matmul_mx((a, a_scale), (b, b_scale), kinds)
    exact = left.T @ right
    bound = 4e-6 * (np.abs(left).T @ np.abs(right))
    assert (np.abs(done.outputs - exact) <= bound).all()


def test_matmul_adds_overwrites_and_rounds():
    (a, a_scale, left), (b, b_scale, right) = (
        operand("float8_e4m3fn_x4", 32, f, s) for f, s in ((4, 0), (8, 1))
    )
    kind = nl.float8_e4m3fn_x4
    sides, kinds, once = ((a, a_scale), (b, b_scale)), (kind, kind), left.T @ right
    for accumulate, factor in ((None, 3), (False, 1)):
        got = matmul_mx(*sides, kinds, accumulate=accumulate, times=3).outputs
        np.testing.assert_allclose(got, factor * once, rtol=1e-5, atol=1e-4)
    rounded = matmul_mx(*sides, kinds, out=nl.bfloat16).outputs
    np.testing.assert_array_equal(rounded, once.astype(np.float32).astype(bf16))
    tiled = matmul_mx(*sides, kinds, tile_position=(0, 0), tile_size=(32, 128)).outputs
    np.testing.assert_allclose(tiled, once, rtol=1e-6, atol=1e-4)


def test_quantized_operands_multiply_as_what_they_came_from():
    """The MXFP guide's flow, scales packed side by side in one tile, values exact in e4m3."""
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-8, 8, (128, 4 * f)).astype(bf16) for f in (16, 32))

    def kernel(x, w):
        scales = nl.ndarray((128, 32), nl.float8_e8m0fnu)
        tiles = []
        for i, source in enumerate((x, w)):
            tile = nl.ndarray((128, source.shape[1] // 4), nl.float8_e4m3fn_x4)
            scale = scales[4 * i :, : tile.shape[1]]
            nisa.quantize_mx(tile, loaded(source), scale)
            tiles += [tile, scale]
        dst = nl.ndarray((16, 32), nl.float32, buffer=nl.psum)
        nisa.nc_matmul_mx(dst, tiles[0], tiles[2], tiles[1], tiles[3])
        return stored(dst)

    left, right = (v.astype(float).reshape(128, -1, 4).transpose(0, 2, 1) for v in (x, w))
    exact = left.reshape(512, 16).T @ right.reshape(512, 32)
    np.testing.assert_array_equal(run(kernel, x, w, target="trn3"), exact)


@pytest.mark.parametrize("name", ["float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4"])
def test_arrays_of_a_packed_dtype_enter_as_it_and_are_written_to(name):
    dtype = getattr(nl, name)
    words = np.random.default_rng(0).integers(0, 1 << 15, (64, 4)).astype(dtype.numpy)
    x = words.view(array_dtype(dtype))
    assert x.dtype.names == (name,)
    assert x.nbytes == words.nbytes
    y = np.asfortranarray(np.zeros_like(x))

    def kernel(x, y):
        assert x.dtype == y.dtype == dtype
        tile = loaded(x)
        nisa.dma_copy(y, tile)
        return stored(tile)

    np.testing.assert_array_equal(run(kernel, x, y, target="trn3"), words)
    np.testing.assert_array_equal(y, x)


def test_narrow_floats_kept_wide_give_the_same_bits(monkeypatch):
    x = data((64, 16), bf16)
    expected = quantized(x, "float8_e5m2_x4", "float8_e8m0fnu")
    monkeypatch.setenv("NKI_PRECISE_FP", "0")

    def kernel(x):
        dst = new(64, 4, dtype="float8_e5m2_x4")
        nisa.quantize_mx(dst, loaded(x), new(64, 4, dtype="float8_e8m0fnu"))
        return stored(dst.view(nl.uint32))

    np.testing.assert_array_equal(run(kernel, x, target="trn3"), expected[0])


def test_the_cost_of_a_matmul():
    kind = "float8_e4m3fn_x4"
    sides = (operand(kind, 128, f, seed)[:2] for seed, f in enumerate((128, 512)))
    (core,) = matmul_mx(*sides, (getattr(nl, kind),) * 2).profile.launch.cores
    (matmul,) = [r[0] for r in core.trace.records if r[0].opcode == "nc_matmul_mx"]
    assert matmul.cycles == 512
    assert matmul.flops == 2 * 512 * 128 * 512


def tiles(p=64, f=8, dst="float8_e5m2_x4", src="bfloat16", scale="uint8", rows=None):
    """dst, src and dst_scale of a quantisation."""
    return new(p, f, dtype=dst), zeros(p, 4 * f, dtype=src), new(rows or p, f, dtype=scale)


def quantize(cut=lambda *made: made, **options):
    nisa.quantize_mx(*cut(*tiles(**options)))


def matmul(k=64, m=4, n=8, **options):
    (a, _, a_scale), (b, _, b_scale) = (tiles(k, f, rows=128) for f in (m, n))
    dst = new(min(m, 128), min(n, 4096), buffer=nl.psum)
    nisa.nc_matmul_mx(dst, a, b, a_scale, b_scale, **options)


def tiled(size, position):
    return {"tile_size": size, "tile_position": position}


@refusals(
    ("it needs NeuronCore-v4; trn2 is v3", quantize, "trn2"),
    ("dst_scale must be a tile; got None", lambda: quantize(lambda d, s, _: (d, s, None))),
    ("have 32, 64, 96 or 128 partitions", lambda: quantize(p=48)),
    ("src must be bfloat16, float16", lambda: quantize(src="float32")),
    ("dst must be float8_e5m2_x4, float8_e4m3fn_x4", lambda: quantize(dst="float4_e2m1fn_x4")),
    ("dst_scale must be float8_e8m0fnu, uint8", lambda: quantize(scale="int8")),
    ("36 partitions or more for 64 of data", lambda: quantize(rows=32)),
    ("one scale per packed element", lambda: quantize(lambda d, s, c: (d[:, :4], s, c))),
    ("a quarter of src's elements", lambda: quantize(lambda d, s, c: (d, s[:, :16], c))),
    ("takes every 2-th partition", lambda: quantize(lambda d, s, c: (d, s, c[::2]), rows=128)),
    ("must start 0, 4, 8 or 12", lambda: quantize(lambda d, s, c: (d, s, c[6:]), rows=128)),
    ("must start 0, 4, 8 or 12", lambda: quantize(lambda d, s, c: (d, s, c[32:]), rows=128)),
    ("stationary free size must be even", lambda: matmul(m=3)),
    ("stationary free size must be even, 128 at most", lambda: matmul(m=130)),
    ("have 32, 64, 96 or 128 partitions", lambda: matmul(48)),
    ("moving free size 4097 exceeds 4096", lambda: matmul(n=4097)),
    ("set tile_position and tile_size both", lambda: matmul(tile_size=(64, 128))),
    ("row tiles only", lambda: matmul(**tiled((64, 64), (0, 0)))),
    ("multiples of", lambda: matmul(**tiled((64, 128), (32, 0)))),
    ("multiples of", lambda: matmul(**tiled((64, 128), (0, 64)))),
    ("rows 64 to 127 reach", lambda: matmul(**tiled((64, 128), (64, 0)))),
    ("exceeds tile_size", lambda: matmul(**tiled((32, 128), (0, 0)))),
    ("nc_matmul_mx: accumulate=True on", lambda: matmul(accumulate=True)),
    target="trn3",
)  # fmt: skip
def test_what_is_refused(text, body, target):
    refuses(text, body, target=target)


def test_a_whole_scale_tile_may_be_moved_but_no_further_quadrant():
    def kernel(rows):
        dst, src, scale = tiles(64, rows=128)
        nisa.quantize_mx(dst, src, scale)
        nisa.tensor_copy(nl.ndarray((rows, 8), nl.uint8), scale[:rows])

    run(lambda: kernel(64), target="trn3")
    with pytest.warns(nc.NkiWarning, match="of which some elements were never written"):
        run(lambda: kernel(128), target="trn3")


def test_matmul_reads_scales_that_were_written():
    def kernel():
        (a, _, a_scale), (b, _, b_scale) = (tiles(64, f) for f in (4, 8))
        for t in (a, b):
            nisa.memset(t.view(nl.uint32), 0)
        nisa.memset(a_scale, 127)
        nisa.memset(b_scale[:4], 127)  # the first quadrant only
        dst = nl.ndarray((4, 8), nl.float32, buffer=nl.psum)
        nisa.nc_matmul_mx(dst, a, b, a_scale, b_scale)

    with pytest.warns(nc.NkiWarning, match="of which some elements were never written"):
        run(kernel, target="trn3")
