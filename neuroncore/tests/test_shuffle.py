"""Shuffles within 32 partitions, partition by partition."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import Out, call, refused, values

from neuroncore import isa as nisa
from neuroncore import language as nl

masks = st.lists(st.sampled_from([*range(32), 255]), min_size=32, max_size=32)


@settings(max_examples=20)
@given(
    st.integers(0, 2**32 - 1),
    masks,
    st.sampled_from([32, 64, 96, 128]),
    st.sampled_from(["float32", "bfloat16", "int32"]),
    st.booleans(),
    st.sampled_from([nl.sbuf, nl.psum]),
    st.sampled_from([1, 2, 3]),
)
def test_nc_stream_shuffle(seed, mask, partitions, dtype, in_place, memory, step):
    x, old = values(seed, (partitions, 3), dtype), values(seed + 1, (partitions, 3), dtype)
    kept = x if in_place else old

    def body(dsts, srcs):
        nisa.nc_stream_shuffle(dsts[0], dsts[0] if in_place else srcs[0], mask)

    outs = [Out(x.shape, dtype, kept)]
    done = call(body, x, outs=outs, memory=memory, step=step)
    for p in range(partitions):
        source = mask[p % 32]
        expected = kept[p] if source == 255 else x[p // 32 * 32 + source]
        assert done.output[p].tolist() == expected.tolist()


def test_nc_stream_shuffle_repeats_one_partition():
    x = values(0, (1, 4))
    done = call(lambda d, s: nisa.nc_stream_shuffle(d[0], s[0], [0] * 32), x, outs=[Out((32, 4))])
    np.testing.assert_array_equal(done.output, x.repeat(32, 0))


def test_nc_stream_shuffle_moves_to_another_quadrant():
    x = values(0, (32, 4))
    mask = [31 - i for i in range(32)]

    def body(dsts, srcs):
        nisa.memset(dsts[0], 0.0)
        nisa.nc_stream_shuffle(dsts[0][64:96], srcs[0], mask)

    done = call(body, x, outs=[Out((96, 4))])
    np.testing.assert_array_equal(done.output[64:], x[::-1])


IDENTITY = list(range(32))
SHUFFLES: list[tuple[list[Any], Any, str, str]] = [
    (IDENTITY[:31], slice(0, 32), "float32", "shuffle_mask is 32 numbers"),
    ([32] * 32, slice(0, 32), "float32", "shuffle_mask is 32 numbers, 0 to 31 or 255"),
    ([0.0] * 32, slice(0, 32), "float32", "shuffle_mask is 32 numbers"),
    (IDENTITY, slice(0, 32), "bfloat16", "must have one dtype"),
    (IDENTITY, slice(0, 16), "float32", "copies partition 16, which"),
    (IDENTITY, slice(16, 48), "float32", "starts at partition 16; 32 active partitions"),
    (IDENTITY, slice(32, 96), "float32", "64 active partitions start at 0 or 64"),
]


@pytest.mark.parametrize(("mask", "rows", "dtype", "text"), SHUFFLES)
def test_nc_stream_shuffle_refuses(mask, rows, dtype, text):
    with refused(text):
        call(
            lambda d, s: nisa.nc_stream_shuffle(d[0], s[0][rows], mask),
            values(0, (128, 3), dtype),
            outs=[Out((32, 3))],
        )


def test_nc_stream_shuffle_keeps_the_free_size():
    with refused("elements per partition differ"):
        call(
            lambda d, s: nisa.nc_stream_shuffle(d[0], s[0], IDENTITY),
            values(0, (32, 3)),
            outs=[Out((32, 4))],
        )


def test_nc_stream_shuffle_keeps_what_must_exist():
    with refused("of which no element was ever written"):
        call(
            lambda d, s: nisa.nc_stream_shuffle(d[0], s[0], [*IDENTITY[:31], 255]),
            values(0, (32, 3)),
            outs=[Out((32, 3))],
        )
