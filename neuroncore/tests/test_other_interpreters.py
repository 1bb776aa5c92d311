"""What other interpreters of NKI accept, or compute differently, although hardware does not."""

import numpy as np
import pytest
import torch
from instruction_runs import bf16, compute, data, equal, loaded, refuses, run, stored
from tolerances import assert_close_to_oracle

import neuroncore as nc
import neuroncore.isa as nisa
import neuroncore.language as nl


def test_more_memory_than_there_is():
    refuses("256 partitions exceed 128", lambda x: nl.ndarray((256, 8), nl.float32), data((1, 1)))
    for memory, size in ((nl.sbuf, 60_000), (nl.psum, 4097)):
        refuses(
            "bytes per partition exceed",
            lambda x, m=memory, s=size: nl.ndarray((8, s), nl.float32, m),
            data((1, 1)),
        )


def matmul(
    dst_dtype=nl.float32, dtype=nl.bfloat16, first=None, columns=slice(0, 16), accumulate=None
):
    def kernel(x):
        acc = nl.ndarray((8, 1024), dst_dtype, nl.psum)
        if first is not None:
            nisa.memset(acc, first)
        a, b = nl.zeros((8, 8), dtype), nl.zeros((8, 16), dtype)
        nisa.nc_matmul(acc[:, columns], a, b, accumulate=accumulate)

    return kernel


@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_matmuls_that_the_hardware_refuses(target):
    for match, kernel in (
        ("crosses a 2048-byte PSUM bank", matmul(columns=slice(504, 520))),
        ("dst must be float32", matmul(nl.bfloat16)),
        ("stationary must be", matmul(dtype=nl.int8)),
        ("no matmul wrote", matmul(first=0.0, accumulate=True)),
    ):
        refuses(match, kernel, data((1, 1)), target=target)
    run(matmul(), data((1, 1)), target=target)


def test_out_of_range_slices_and_start_partitions():
    refuses("slices are not clamped", lambda x: x[:9], data((8, 4)))
    refuses(
        "starts at partition 5",
        lambda x: nisa.memset(nl.ndarray((8, 4), nl.float32)[5:], 0),
        data((8, 4)),
    )


def _live(count, memory, shape):
    def kernel(x):
        tiles = [nl.ndarray(shape, nl.float32, memory) for _ in range(count)]
        for t in tiles:
            nisa.memset(t, 0)
        for t in tiles:
            nl.copy(t[:, :1])

    return kernel


@pytest.mark.parametrize(
    ("count", "memory", "shape"),
    [(9, nl.psum, (8, 512)), (5, nl.psum, (8, 1024)), (2, nl.sbuf, (128, 30000))],
)
def test_live_tiles_fit_or_are_refused(count, memory, shape):
    refuses("does not fit", _live(count, memory, shape), data((1, 1)), placed=False)
    run(
        lambda x: [None for _ in range(3) if _live(count - 1, memory, shape)(x)] or None,
        data((1, 1)),
    )


def test_half_written_tiles():
    def kernel(parts):
        def body(x):
            t = nl.ndarray((64, 8), nl.float32)
            for part in parts:
                nisa.memset(t[part], 0)
            return stored(t)

        return body

    a, b, everything = slice(0, 32), slice(32, 64), slice(None)
    odd, even = slice(1, 8, 2), slice(0, 8, 2)
    for legal in ([(a, everything), (b, everything)], [(everything, odd), (everything, even)],
                  [(a, odd), (a, even), (b, slice(0, 5)), (b, slice(4, 8))]):  # fmt: skip
        run(kernel(legal), data((1, 1)))
    for illegal in (
        [(a, everything)],
        [(everything, odd)],
        [(everything, slice(0, 8, 7)), (everything, odd)],
        [(a, everything), (b, slice(0, 7))],
    ):
        with pytest.warns(nc.NkiWarning, match="some elements were never written"):
            run(kernel(illegal), data((1, 1)))


def test_strided_writes_do_not_count_for_their_gaps():
    def kernel(read):
        def body(x):
            t = nl.ndarray((4, 9), nl.float32)
            nisa.memset(t[:, ::4], 0)
            nl.copy(t[:, ::4])
            nl.copy(t[:, read])

        return body

    run(kernel(slice(0, 9, 8)), data((1, 1)))
    with pytest.warns(nc.NkiWarning, match="some elements were never written"):
        run(kernel(slice(0, 9, 2)), data((1, 1)))  # the same first and last byte


def test_k_tiles_accumulate():
    a, b = data((64, 8), bf16), data((64, 16), bf16, 1)

    def kernel(x, y):
        acc = nl.ndarray((8, 16), nl.float32, nl.psum)
        for k in range(2):
            nisa.nc_matmul(acc, loaded(x[k * 32 : k * 32 + 32]), loaded(y[k * 32 : k * 32 + 32]))
        return stored(acc)

    oracle, plain = (a.astype(t).T @ b.astype(t) for t in (np.float64, np.float32))
    assert_close_to_oracle(*map(torch.from_numpy, (run(kernel, a, b), oracle, plain)))


def test_writes_through_ap_are_kept():
    equal(
        compute(lambda t: nisa.memset(t.ap([[6, 4], [1, 6]]), 3.0), (4, 6), nl.float32),
        np.full((4, 6), 3, np.float32),
    )


def test_float_to_int_conversions():
    x = np.array([[0.5, 1.5, 2.7, -2.7, 300.0, -300.0]], np.float32)
    equal(
        compute(nisa.tensor_copy, (1, 6), nl.int32, x),
        np.array([[0, 2, 3, -3, 300, -300]], np.int32),
    )
    equal(
        compute(nisa.tensor_copy, (1, 6), nl.int8, x), np.array([[0, 2, 3, -3, 127, -128]], np.int8)
    )


@pytest.mark.parametrize("axis", [(2,), (1, 2), 2])
def test_tensor_reduce_over_trailing_axes_is_legal(axis):
    x = data((4, 3, 5))
    kept = (4, 3) if axis in (2, (2,)) else (4, 1)
    got = compute(lambda d, t: nisa.tensor_reduce(d, nl.maximum, t, axis), kept, nl.float32, x)
    equal(got, x.max(axis).reshape(kept))
