"""TensorE: matmul and transpose against NumPy in fp64."""

from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
from draws import few, pick, seeds
from hypothesis import given
from hypothesis import strategies as st
from instruction_runs import compute, loaded, new, noted, refusals, refuses, run, stored, zeros
from samples import FLOATS, TARGETS, bf16, data, equal, wide

import neuroncore.isa as nisa
import neuroncore.language as nl

double_row = nisa.matmul_perf_mode.double_row
WIDE = {nl.float32, nl.tfloat32}


def close(got, expected, terms):
    """Within what fp32 sums of that many terms may differ."""
    assert got.dtype in (np.float32, bf16)
    scale = np.abs(expected).max() + 1e-30
    tolerance = terms * 2.0**-23 + (2.0**-8 if got.dtype == bf16 else 0)
    np.testing.assert_allclose(wide(got), expected, rtol=tolerance, atol=tolerance * scale)


def product(a, b):
    return wide(a).reshape(len(a), -1).T @ wide(b).reshape(len(b), -1)


@few
@given(
    k=st.integers(1, 128), m=st.integers(1, 128), n=st.integers(1, 512),
    dtypes=st.tuples(pick(FLOATS), pick(FLOATS)), target=pick(TARGETS), seed=seeds,
)  # fmt: skip
def test_matmul(k, m, n, dtypes, target, seed):
    if (dtypes[0] in WIDE) != (dtypes[1] in WIDE):
        dtypes = (dtypes[0], dtypes[0])
    a, b = data((k, m), dtypes[0], seed), data((k, n), dtypes[1], seed + 1)
    got = compute(nisa.nc_matmul, (m, n), nl.float32, a, b, target=target, into=nl.psum)
    close(got, product(a, b), k)


@few
@given(
    tiles=st.integers(1, 4), mode=pick(["none", "flag", "mixed"]), target=pick(TARGETS), seed=seeds
)
def test_accumulation_over_tiles_of_k(tiles, mode, target, seed):
    a, b = data((tiles * 32, 16), bf16, seed), data((tiles * 32, 24), bf16, seed + 1)

    def kernel(x, y):
        acc = nl.ndarray((16, 24), nl.float32, nl.psum)
        for k in range(tiles):
            rows = nl.ds(k * 32, 32)
            flag = {"none": None, "flag": k > 0, "mixed": None if k % 2 else k > 0}[mode]
            nisa.nc_matmul(acc, loaded(x[rows]), loaded(y[rows]), accumulate=flag)
        return stored(acc)

    close(run(kernel, a, b, target=target), product(a, b), tiles * 32)


def test_accumulate_false_overwrites_and_none_goes_on_adding():
    a, b = data((8, 4), bf16), data((8, 6), bf16, 1)

    def kernel(x, y):
        x, y = loaded(x), loaded(y)
        acc = nl.ndarray((4, 6), nl.float32, nl.psum)
        outs = []
        for flag in (None, None, False, True, None):
            nisa.nc_matmul(acc, x, y, accumulate=flag)
            outs.append(stored(acc))
        return tuple(outs)

    with noted(r"accumulate=None adds to .*, whose sum line \d+ has read; give accumulate=False"):
        outputs = run(kernel, a, b)
    for got, times in zip(outputs, (1, 2, 1, 2, 3), strict=True):
        close(got, times * product(a, b), 24)


@few
@given(st.lists(st.tuples(*map(st.integers, (0, 1, 1), (20, 12, 3))), min_size=1, max_size=5))
def test_overlapping_regions_add_where_a_matmul_wrote(regions):
    a, b = data((8, 4), bf16), data((8, 12), bf16, 1)
    expected, written = np.zeros((4, 64)), np.zeros(64, bool)
    for start, count, step in regions:
        place = np.arange(start, start + count * step, step)
        expected[:, place] += product(a, b[:, :count])
        written[place] = True

    def kernel(x, y):
        x, y = loaded(x), loaded(y)
        acc = nl.ndarray((4, 64), nl.float32, nl.psum)
        for start, count, step in regions:
            nisa.nc_matmul(acc[:, start : start + count * step - step + 1 : step], x, y[:, :count])
        kept = nl.zeros((4, 64), nl.float32)
        for at in np.flatnonzero(written).tolist():
            nisa.tensor_copy(kept[:, at : at + 1], acc[:, at : at + 1])
        return stored(kept)

    close(run(kernel, a, b), expected, 40)


@pytest.mark.parametrize("again", [False, True])
def test_memset_does_not_begin_an_accumulation(again):
    a, b = data((8, 4), bf16), data((8, 6), bf16, 1)

    def body(dst, x, y):
        if again:
            nisa.nc_matmul(dst, x, y)
        nisa.memset(dst, 5.0)
        nisa.nc_matmul(dst, x, y)

    with noted(r"accumulate=None overwrites .*, which memset wrote at line \d+; .*give acc"):
        close(compute(body, (4, 6), nl.float32, a, b, into=nl.psum), product(a, b), 8)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize(
    "dtypes", [(nl.float8_e4m3, nl.float8_e5m2), (nl.float8_e5m2, nl.float8_e5m2)]
)
def test_double_row_contracts_two_rows_a_partition(target, dtypes):
    a, b = data((64, 2, 16), dtypes[0]), data((64, 2, 40), dtypes[1], 1)

    def body(dst, x, y):
        nisa.nc_matmul(dst, x, y, perf_mode=double_row)

    expected = wide(a).reshape(128, 16).T @ wide(b).reshape(128, 40)
    close(compute(body, (16, 40), nl.float32, a, b, target=target, into=nl.psum), expected, 128)


def test_column_tiles_are_four_matmuls_side_by_side():
    a, b = data((128, 128), bf16), data((128, 64), bf16, 1)

    def kernel(x, y):
        x, y = loaded(x), loaded(y)
        acc = nl.ndarray((128, 64), nl.float32, nl.psum)
        for j in range(4):
            columns = nl.ds(32 * j, 32)
            nisa.nc_matmul(
                acc[columns], x[:, columns], y, tile_position=(0, 32 * j), tile_size=(128, 32)
            )
        return stored(acc)

    close(run(kernel, a, b), product(a, b), 128)


def test_row_tiles_start_at_their_rows():
    a, b = data((128, 16), bf16), data((128, 64), bf16, 1)

    def kernel(x, y):
        x, y = loaded(x), loaded(y)
        acc = nl.ndarray((16, 64), nl.float32, nl.psum)
        for j in range(2):
            rows = nl.ds(64 * j, 64)
            nisa.nc_matmul(acc, x[rows], y[rows], tile_position=(64 * j, 0), tile_size=(64, 128))
        return stored(acc)

    close(run(kernel, a, b), product(a, b), 128)


def test_views_as_operands():
    a, b = data((64, 3, 10), bf16), data((64, 4, 6), bf16, 1)

    def body(dst, x, y):
        nisa.nc_matmul(dst, x[32:, 1, ::2], y[:32].permute((0, 2, 1))[:, 1:3])

    expected = product(a[32:, 1, ::2], b[:32].transpose(0, 2, 1)[:, 1:3])
    close(compute(body, (5, 2, 4), nl.float32, a, b, into=nl.psum).reshape(5, 8), expected, 32)


@pytest.mark.parametrize("seed", range(3))
def test_bf16_psum_on_trn3_rounds_each_addition(seed):
    a, b = data((64, 8), bf16, seed), data((64, 16), bf16, seed + 9)

    def kernel(x, y):
        x, y = loaded(x), loaded(y)
        acc = nl.ndarray((8, 16), nl.bfloat16, nl.psum)
        for k in range(2):
            nisa.nc_matmul(acc, x[nl.ds(32 * k, 32)], y[nl.ds(32 * k, 32)])
        return stored(acc)

    first = product(a[:32], b[:32]).astype(np.float32).astype(bf16)
    expected = (wide(first) + product(a[32:], b[32:])).astype(np.float32).astype(bf16)
    got = run(kernel, a, b, target="trn3")
    assert got.dtype == bf16
    np.testing.assert_allclose(wide(got), wide(expected), rtol=2.0**-7)
    assert (got == expected).mean() > 0.95


@pytest.mark.parametrize("flag", ["is_stationary_onezero", "is_moving_onezero"])
def test_onezero_is_a_hint(flag):
    a, b = (data((32, 8)) > 0).astype(np.float32), (data((32, 12), seed=1) > 0).astype(np.float32)

    def body(dst, x, y):
        nisa.nc_matmul(dst, x, y, **{flag: True})

    close(compute(body, (8, 12), nl.float32, a, b, into=nl.psum), product(a, b), 32)


@pytest.mark.parametrize("dtype", [nl.float32, nl.bfloat16, nl.float16])
@pytest.mark.parametrize("target", TARGETS)
def test_is_transpose_moves_bits_and_on_trn1_is_a_matmul(dtype, target):
    a = data((64, 32), dtype)

    def body(dst, x):
        nisa.nc_matmul(dst, x, nl.shared_identity_matrix(64, dtype), is_transpose=True)

    if target == "trn1":
        close(compute(body, (32, 64), nl.float32, a, target=target, into=nl.psum), wide(a).T, 1)
    else:
        a[3, 5], a[7, 0], a[60, 31] = np.nan, np.inf, -np.inf
        equal(compute(body, (32, 64), dtype, a, target=target, into=nl.psum), a.T)


F, B, E4, FN = nl.float32, nl.bfloat16, nl.float8_e4m3, nl.float8_e4m3fn


def mm(dst=(8, 8), a=(32, 8), b=(32, 8), out=F, left=B, right=B, into=nl.psum, **options):
    nisa.nc_matmul(
        new(*dst, dtype=out, buffer=into), zeros(*a, dtype=left), zeros(*b, dtype=right), **options
    )


def eights(**options):
    mm(a=(32, 2, 8), b=(32, 2, 8), left=E4, right=E4, perf_mode=double_row, **options)


def tiled(size, position=(0, 0), **options):
    return {"tile_size": size, "tile_position": position, **options}


@refusals(
    ("free size 129 exceeds 128", lambda: mm(a=(32, 129))),
    ("4097 exceeds 4096 on trn3", lambda: mm((8, 4096), b=(32, 4097)), "trn3"),
    ("dst must be [8, 8]", lambda: mm((8, 9))),
    ("dst must be float32 on trn1", lambda: mm(out=B), "trn1"),
    ("dst must be float32, bfloat16", lambda: mm(out=nl.float16), "trn3"),
    ("stationary must be .*is int8", lambda: mm(left=nl.int8)),
    ("float32 pairs only with float32", lambda: mm(left=F)),
    ("float8_e4m3fn needs NeuronCore-v4", lambda: mm(left=FN)),
    ("cannot be mixed", lambda: mm(left=FN, right=E4), "trn3"),
    ("dst must be in psum", lambda: mm(into=nl.sbuf)),
    ("moving must be in sbuf",
     lambda: nisa.nc_matmul(new(8, 8, buffer=nl.psum), zeros(32, 8), zeros(32, 8, buffer=nl.psum))),
    ("accumulate=True on .*no matmul wrote", lambda: mm(accumulate=True)),
    ("double_row needs NeuronCore-v3", lambda: mm(perf_mode=double_row), "trn1"),
    ("double_row stationary must be float8", lambda: mm(perf_mode=double_row)),
    ("must be of [64, 128]", lambda: mm(**tiled((32, 64))), "trn1"),
    ("exceeds tile_size", lambda: mm(a=(64, 8), b=(64, 8), **tiled((32, 32)))),
    ("one dtype", lambda: mm(is_transpose=True)),
    ("cannot be combined", lambda: eights(**tiled((128, 32)))),
    ("with is_transpose", lambda: eights(is_transpose=True)),
)  # fmt: skip
def test_what_is_refused(text, body, target):
    refuses(text, body, target=target)


@pytest.mark.parametrize("target", TARGETS)
def test_a_result_stays_in_one_psum_bank_before_trn3(target):
    def kernel():
        a, b = nl.zeros((8, 8), B), nl.zeros((8, 16), B)
        nisa.nc_matmul(nl.ndarray((8, 1024), F, nl.psum)[:, 504:520], a, b)

    if target == "trn3":
        run(kernel, target=target)
    else:
        refuses("crosses a 2048-byte PSUM bank", kernel, target=target)


@pytest.mark.parametrize("first", ["half a memset", "fresh", "other region"])
@pytest.mark.parametrize("target", TARGETS)
def test_accumulating_onto_what_nothing_wrote(first, target):
    def kernel():
        a, b = nl.zeros((8, 8), B), nl.zeros((8, 16), B)
        acc = nl.ndarray((8, 32), F, nl.psum)
        if first == "half a memset":
            nisa.memset(acc[:, 16:], 0.0)
        elif first == "other region":
            nisa.nc_matmul(acc[:, 16:], a, b)
        nisa.nc_matmul(acc[:, 8:24], a, b, accumulate=True)

    refuses("no matmul wrote", kernel, target=target)


@pytest.mark.parametrize("by_matmul", [0, 16])
@pytest.mark.parametrize("target", TARGETS)
def test_accumulating_onto_what_another_engine_wrote(target, by_matmul):
    a, b = data((8, 4), bf16), data((8, 32), bf16, 1)

    def kernel(x, y):
        x, y = loaded(x), loaded(y)
        acc = nl.full((4, 32), 3.0, nl.float32, nl.psum)
        if by_matmul:
            nisa.nc_matmul(acc[:, :by_matmul], x, y[:, :by_matmul], accumulate=False)
        nisa.nc_matmul(acc, x, y, accumulate=True)
        return stored(acc)

    undefined = noted("memset, nl.zeros.* are undefined there before NeuronCore-v4")
    with undefined if target != "trn3" else nullcontext():
        got = run(kernel, a, b, target=target)
    once = product(a, b)
    begun = np.where(np.arange(32) < by_matmul, once, 3)
    close(got, once + begun, 24)


def test_fp8_formats_differ_in_range():
    x = np.array([[240, 448, 57344, -300]], np.float32)
    for dtype, expected in (
        (nl.float8_e4m3, [240, np.inf, np.inf, -np.inf]),
        (FN, [240, 448, np.nan, -288]),
    ):
        got = compute(nisa.tensor_copy, (1, 4), dtype, x, target="trn3")
        assert got.dtype in (ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(wide(got), [expected])


@pytest.mark.parametrize("start", [0, 32, 64, 96])
@pytest.mark.parametrize("operand", ["stationary", "moving", "dst", "data", "transposed"])
def test_trn1_addresses_partitions_of_tensor_engine_from_0_or_64(operand, start):
    def kernel():
        def part(name, shape, dtype, buffer=nl.sbuf):
            at = start if name == operand else 0
            whole = nl.zeros((128, *shape[1:]), dtype, buffer)
            return whole[at : at + shape[0]]

        acc, left = part("dst", (32, 16), nl.float32, nl.psum), part("stationary", (32, 32), B)
        nisa.nc_matmul(acc, left, part("moving", (32, 16), B), accumulate=False)
        transposed = part("transposed", (16, 32), nl.float32, nl.psum)
        nisa.nc_transpose(transposed, part("data", (32, 16), nl.float32), nisa.engine.tensor)

    run(kernel, target="trn2")
    if start in (0, 64):
        run(kernel, target="trn1")
    else:
        refuses(f"starts at partition {start}; TensorE of trn1 addresses", kernel, target="trn1")


def test_trn1_vector_engine_still_transposes_in_quadrants():
    def kernel():
        tiles = nl.zeros((128, 32), nl.bfloat16), nl.zeros((128, 32), nl.bfloat16)
        nisa.nc_transpose(tiles[0][96:128], tiles[1][32:64], nisa.engine.vector)

    run(kernel, target="trn1")
