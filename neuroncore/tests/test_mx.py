"""Microscaling: quantisation and matmul against the formula, element by element, and the rules."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import Out, bf16, call, data, refused, run, seeds

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl

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

    @nc.jit
    def kernel(x):
        p, f = x.shape
        src, dst = nl.ndarray(x.shape, x.dtype), nl.ndarray((p, f // 4), getattr(nl, dtype))
        scale = nl.ndarray((p, f // 4), getattr(nl, scale_dtype))
        nisa.memset(scale.view(nl.uint8), 0)
        nisa.dma_copy(src, x)
        nisa.quantize_mx(dst, src, scale)
        words = nl.ndarray((p, f // 4), nl.uint32, buffer=nl.shared_hbm)
        bits = nl.ndarray((p, f // 4), nl.uint8, buffer=nl.shared_hbm)
        nisa.dma_copy(words, dst.view(nl.uint32))
        nisa.dma_copy(bits, scale.view(nl.uint8))
        return words, bits

    words, bits = nc.simulate(kernel, x, target="trn3", follow=follow).outputs
    rows = [q * 32 + r for q in range(len(x) // 32) for r in range(4)]
    np.testing.assert_array_equal(np.delete(bits, rows, 0), 0)
    return words, bits[rows]


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(sorted(FORMATS)),
    quadrants=st.integers(1, 4),
    columns=st.integers(1, 6),
    exponent=st.integers(-130, 120),
    half=st.booleans(),
    follow=st.sampled_from(["documentation", "kernels"]),
    scale_dtype=st.sampled_from(["uint8", "float8_e8m0fnu"]),
    seed=seeds,
)
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

    @nc.jit
    def kernel(a, a_scale, b, b_scale):
        tiles = []
        for words, scales, dtype in ((a, a_scale, dtypes[0]), (b, b_scale, dtypes[1])):
            tile, scale = nl.ndarray(words.shape, dtype), nl.ndarray(scales.shape, nl.uint8)
            nisa.dma_copy(tile, words.view(dtype))
            nisa.dma_copy(scale, scales)
            tiles.append((tile, scale.view(nl.float8_e8m0fnu)))
        (a, a_scale), (b, b_scale) = tiles
        dst = nl.ndarray((a.shape[1], b.shape[1]), out, buffer=nl.psum)
        for _ in range(times):
            nisa.nc_matmul_mx(dst, a, b, a_scale, b_scale, accumulate=accumulate, **options)
        done = nl.ndarray(dst.shape, out)
        nisa.tensor_copy(done, dst)
        result = nl.ndarray(dst.shape, out, buffer=nl.shared_hbm)
        nisa.dma_copy(result, done)
        return result

    (a, a_scale), (b, b_scale) = stationary, moving
    return nc.simulate(kernel, a, spread(a_scale), b, spread(b_scale), target="trn3")


@settings(max_examples=20, deadline=None)
@given(
    dtypes=st.tuples(*[st.sampled_from([*FORMATS, "float4_e2m1fn_x4"])] * 2),
    k=st.sampled_from([32, 64, 96, 128]),
    m=st.sampled_from([2, 6, 128]),
    n=st.sampled_from([1, 5, 130]),
    seed=seeds,
)
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
            src = nl.ndarray(source.shape, source.dtype)
            nisa.dma_copy(src, source)
            tile = nl.ndarray((128, source.shape[1] // 4), nl.float8_e4m3fn_x4)
            scale = scales[4 * i :, : tile.shape[1]]
            nisa.quantize_mx(tile, src, scale)
            tiles += [tile, scale]
        dst = nl.ndarray((16, 32), nl.float32, buffer=nl.psum)
        nisa.nc_matmul_mx(dst, tiles[0], tiles[2], tiles[1], tiles[3])
        done = nl.ndarray(dst.shape, dst.dtype)
        nisa.tensor_copy(done, dst)
        out = nl.ndarray(dst.shape, dst.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, done)
        return out

    left, right = (v.astype(float).reshape(128, -1, 4).transpose(0, 2, 1) for v in (x, w))
    exact = left.reshape(512, 16).T @ right.reshape(512, 32)
    np.testing.assert_array_equal(run(kernel, x, w, target="trn3"), exact)


def test_narrow_floats_kept_wide_give_the_same_bits(monkeypatch):
    x = data((64, 16), bf16)
    expected = quantized(x, "float8_e5m2_x4", "float8_e8m0fnu")
    monkeypatch.setenv("NKI_PRECISE_FP", "0")

    def kernel(x):
        src, dst = nl.ndarray(x.shape, x.dtype), nl.ndarray((64, 4), nl.float8_e5m2_x4)
        scale = nl.ndarray((64, 4), nl.float8_e8m0fnu)
        nisa.dma_copy(src, x)
        nisa.quantize_mx(dst, src, scale)
        out = nl.ndarray((64, 4), nl.uint32, buffer=nl.shared_hbm)
        nisa.dma_copy(out, dst.view(nl.uint32))
        return out

    np.testing.assert_array_equal(run(kernel, x, target="trn3"), expected[0])


def test_costs():
    def quantize(dsts, srcs):
        nisa.quantize_mx(dsts[0].view(nl.float8_e5m2_x4), srcs[0], dsts[1])

    outs = [Out((128, 512), "uint32"), Out((128, 512), "uint8")]
    (template,) = call(quantize, data((128, 2048), bf16), outs=outs, target="trn3").templates
    assert template.cycles == 512  # 2048 values a partition, 4 a cycle

    kind = (nl.float8_e4m3fn_x4,) * 2
    profile = matmul_mx(
        operand("float8_e4m3fn_x4", 128, 128, 0)[:2],
        operand("float8_e4m3fn_x4", 128, 512, 1)[:2],
        kind,
    ).profile
    (matmul,) = [
        r[0] for r in profile.launch.cores[0].trace.records if r[0].opcode == "nc_matmul_mx"
    ]
    assert matmul.cycles == 512
    assert matmul.flops == 2 * 512 * 128 * 512


def tiles(p=64, f=8, dst="float8_e5m2_x4", src="bfloat16", scale="uint8", rows=None):
    made = nl.ndarray((p, 4 * f), getattr(nl, src))
    nisa.memset(made, 0)
    return (
        nl.ndarray((p, f), getattr(nl, dst)),
        made,
        nl.ndarray((rows or p, f), getattr(nl, scale)),
    )


QUANTIZE_REFUSED = [
    ("trn2", lambda: tiles(), "it needs NeuronCore-v4; trn2 is v3"),
    ("trn3", lambda: (*tiles()[:2], None), "dst_scale must be a tile; got None"),
    ("trn3", lambda: tiles(p=48), "have 32, 64, 96 or 128 partitions"),
    ("trn3", lambda: tiles(src="float32"), "src must be bfloat16, float16"),
    ("trn3", lambda: tiles(dst="float4_e2m1fn_x4"), "dst must be float8_e5m2_x4, float8_e4m3fn_x4"),
    ("trn3", lambda: tiles(scale="int8"), "dst_scale must be float8_e8m0fnu, uint8"),
    ("trn3", lambda: tiles(rows=32), "36 partitions or more for 64 of data"),
    ("trn3", lambda: (tiles()[0][:, :4], *tiles()[1:]), "one scale per packed element"),
    ("trn3", lambda: (tiles()[0], tiles()[1][:, :16], tiles()[2]), "a quarter of src's elements"),
    ("trn3", lambda: (*tiles()[:2], tiles(rows=128)[2][::2]), "takes every 2-th partition"),
    ("trn3", lambda: (*tiles()[:2], tiles(rows=128)[2][6:]), "must start 0, 4, 8 or 12"),
    ("trn3", lambda: (*tiles()[:2], tiles(rows=128)[2][32:]), "must start 0, 4, 8 or 12"),
]


@pytest.mark.parametrize(("target", "make", "text"), QUANTIZE_REFUSED)
def test_quantize_refuses(target, make, text):
    def kernel():
        dst, src, scale = make()
        nisa.quantize_mx(dst, src, scale)

    with refused(text):
        run(kernel, target=target)


@pytest.mark.parametrize(
    ("k", "m", "n", "options", "text"),
    [
        (64, 3, 8, {}, "stationary free size must be even"),
        (64, 130, 8, {}, "stationary free size must be even, 128 at most"),
        (48, 4, 8, {}, "have 32, 64, 96 or 128 partitions"),
        (64, 4, 4097, {}, "moving free size 4097 exceeds 4096"),
        (64, 4, 8, {"tile_size": (64, 128)}, "set tile_position and tile_size both"),
        (64, 4, 8, {"tile_size": (64, 64), "tile_position": (0, 0)}, "row tiles only"),
        (64, 4, 8, {"tile_size": (64, 128), "tile_position": (32, 0)}, "multiples of"),
        (64, 4, 8, {"tile_size": (64, 128), "tile_position": (0, 64)}, "multiples of"),
        (64, 4, 8, {"tile_size": (64, 128), "tile_position": (64, 0)}, "rows 64 to 127 reach"),
        (64, 4, 8, {"tile_size": (32, 128), "tile_position": (0, 0)}, "exceeds tile_size"),
        (64, 4, 8, {"accumulate": True}, "nc_matmul_mx: accumulate=True on"),
    ],
)
def test_matmul_refuses(k, m, n, options, text):
    def kernel():
        (a, _, a_scale), (b, _, b_scale) = (tiles(k, f, rows=128) for f in (m, n))
        dst = nl.ndarray((min(m, 128), min(n, 4096)), nl.float32, buffer=nl.psum)
        nisa.nc_matmul_mx(dst, a, b, a_scale, b_scale, **options)

    with refused(text):
        run(kernel, target="trn3")


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
