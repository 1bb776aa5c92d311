"""Searches, gathers and shuffles against plain loops."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import Out, as_stored, call, refused, values

from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.hardware import Engine

seeds = st.integers(0, 2**32 - 1)
steps = st.sampled_from([1, 2, 3])
memories = st.sampled_from([nl.sbuf, nl.psum])
few = settings(max_examples=20)


def places(row: list[float], wanted: list[float], order: list[int]) -> list[int]:
    """Where each value is, in this order of the values, each place taken once; -1 if nowhere."""
    free, found = list(range(len(row))), [-1] * len(wanted)
    for column in order:
        for place in free:
            if row[place] == wanted[column]:
                found[column] = place
                free.remove(place)
                break
    return found


def searched(seed: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Data with many ties, and values of which some occur in it."""
    x = (values(seed, (3, 2, 9), dtype) // 4).astype(np.dtype(values(0, (1, 1), dtype).dtype))
    vals = np.random.default_rng(seed).permuted(x.reshape(3, 18), axis=1)[:, :8].copy()
    vals[:, 0] = 77
    return x, vals


@few
@given(seeds, st.sampled_from(["float32", "bfloat16", "uint8"]), st.booleans(), memories, steps)
def test_nc_find_index8(seed, dtype, wide, memory, step):
    x, vals = searched(seed, dtype)
    kind = "uint32" if wide else "uint16"
    done = call(
        lambda d, s: nisa.nc_find_index8(d[0], s[0], s[1]),
        x,
        vals,
        outs=[Out((3, 8), kind)],
        memory=memory,
        step=step,
    )
    absent = 2**32 - 1 if wide else 2**16 - 1
    for row, wanted, seen in zip(x.reshape(3, 18), vals, done.output, strict=True):
        truth = places(row.tolist(), wanted.tolist(), list(range(8)))
        assert seen.tolist() == [absent if place < 0 else place for place in truth]


@few
@given(seeds, st.sampled_from(["float32", "bfloat16"]), st.booleans(), memories, steps)
def test_nc_match_replace8(seed, dtype, indices, memory, step):
    x, vals = searched(seed, dtype)

    def body(dsts, srcs):
        nisa.nc_match_replace8(dsts[0], srcs[0], srcs[1], -9.0, *dsts[1:])

    outs = [Out((3, 18), dtype), *[Out((3, 8), "uint32")] * indices]
    done = call(body, x, vals, outs=outs, memory=memory, step=step)
    for p, (row, wanted) in enumerate(zip(x.reshape(3, 18).tolist(), vals.tolist(), strict=True)):
        truth = places(row, wanted, list(range(7, -1, -1)))
        expected = [-9.0 if i in truth else v for i, v in enumerate(row)]
        assert done.outputs[0][p].tolist() == expected
        if indices:
            assert done.outputs[1][p].tolist() == [place % 2**32 for place in truth]


def test_nc_match_replace8_pairs_duplicates_as_documented():
    data = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    vals = np.array([[3, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    done = call(
        lambda d, s: nisa.nc_match_replace8(d[0], s[0], s[1], 0.0, d[1]),
        data,
        vals,
        outs=[Out((1, 11)), Out((1, 8), "uint32")],
    )
    assert done.outputs[0].tolist() == [[1, 2, 0, 4, *[0] * 7]]
    assert done.outputs[1].tolist() == [[2, 10, 9, 8, 7, 6, 5, 4]]


def test_the_largest_16_in_two_rounds():
    x = np.random.default_rng(0).permutation(40).astype(np.float32).reshape(1, 40)

    def body(dsts, srcs):
        for i in range(2):
            top = dsts[0][:, 8 * i : 8 * i + 8]
            nisa.max8(top, srcs[0])
            nisa.nc_match_replace8(srcs[0], srcs[0], top, -1.0, dsts[1][:, 8 * i : 8 * i + 8])

    done = call(body, x, outs=[Out((1, 16)), Out((1, 16), "uint32")])
    assert done.outputs[0].tolist() == [list(range(39, 23, -1))]
    assert x[0, done.outputs[1][0]].tolist() == list(range(39, 23, -1))


@pytest.mark.parametrize(
    ("data", "vals", "out", "kind", "text"),
    [
        ((2, 7), (2, 8), (2, 8), "uint32", "data must have 8 to 16384 elements"),
        ((2, 9), (2, 7), (2, 8), "uint32", "vals must have 8 elements"),
        ((2, 9), (2, 8), (2, 9), "uint32", "dst must have 8 elements"),
        ((2, 9), (2, 8), (2, 8), "int32", "dst must be uint16, uint32"),
        ((2, 2, 2, 2), (2, 8), (2, 8), "uint32", "data has at most 3 dimensions"),
        ((2, 9), (2, 2, 2, 2), (2, 8), "uint32", "vals has at most 3 dimensions"),
        ((2, 9), (3, 8), (2, 8), "uint32", "partition counts differ"),
    ],
)
def test_nc_find_index8_refuses(data, vals, out, kind, text):
    with refused(text):
        call(
            lambda d, s: nisa.nc_find_index8(d[0], s[0], s[1]),
            values(0, data),
            values(0, vals),
            outs=[Out(out, kind)],
        )


@pytest.mark.parametrize(
    ("out", "kind", "imm", "text"),
    [
        ((2, 8), "uint32", 0.0, "elements per partition differ"),
        ((2, 9), "float32", 0.0, "dst_idx must be uint16, uint32"),
        ((2, 9), "uint32", None, "imm must be a number"),
    ],
)
def test_nc_match_replace8_refuses(out, kind, imm, text):
    with refused(text):
        call(
            lambda d, s: nisa.nc_match_replace8(d[0], s[0], s[1], imm, d[1]),
            values(0, (2, 9)),
            values(0, (2, 8)),
            outs=[Out(out), Out((2, 8), kind)],
        )


@few
@given(
    seeds,
    st.sampled_from([16, 32, 128]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(["float32", "bfloat16", "int8"]),
    steps,
)
def test_local_gather(seed, partitions, count, columns, partly, dtype, step):
    x = values(seed, (partitions, 5, 2), dtype)
    rng = np.random.default_rng(seed)
    index = rng.integers(0, 10 - count + 1, (partitions, columns)).astype(np.uint16)
    valid = 16 * columns - 3 if partly else 16 * columns

    def body(dsts, srcs):
        options = {"num_valid_indices": valid} if partly else {}
        nisa.local_gather(dsts[0], srcs[0], srcs[1], count, **options)

    done = call(body, x, index, outs=[Out((partitions, valid * count), dtype)], step=step)
    flat = x.reshape(partitions, 10)
    for p in range(partitions):
        first = p // 16 * 16
        row = [index[first + i % 16, i // 16] for i in range(valid)]
        expected = [flat[p, int(at) + k] for at in row for k in range(count)]
        assert done.output[p].tolist() == [float(v) for v in expected]


GATHERS: list[tuple[Any, ...]] = [
    (24, "uint16", "float32", 1, None, 16, "src_buffer must have a multiple of 16 partitions"),
    (16, "int16", "float32", 1, None, 16, "index must be uint16"),
    (16, "uint16", "bfloat16", 1, None, 16, "must have one dtype"),
    (16, "uint16", "float32", 3, None, 48, "num_elem_per_idx must be 1, 2, 4, 8, 16 or 32"),
    (16, "uint16", "float32", 1, 17, 17, "17 valid indices per core"),
    (16, "uint16", "float32", 1, 0, 16, "0 valid indices per core"),
    (16, "uint16", "float32", 1, None, 15, "dst must have 16 elements"),
    (16, "uint16", "float32", 4, None, 64, "indices run from"),
]


@pytest.mark.parametrize(("p", "kind", "dtype", "count", "valid", "size", "text"), GATHERS)
def test_local_gather_refuses(p, kind, dtype, count, valid, size, text):
    with refused(text):
        call(
            lambda d, s: nisa.local_gather(d[0], s[0], s[1], count, valid),
            values(0, (p, 64), dtype),
            (61 + np.arange(p)[:, None] % 2).astype(kind),
            outs=[Out((p, size))],
        )


def test_local_gather_takes_4096_indices_a_core():
    with refused("4112 valid indices per core; each 16 partitions of index hold 4112"):
        call(
            lambda d, s: nisa.local_gather(d[0], s[0], s[1]),
            values(0, (16, 4)),
            np.zeros((16, 257), np.uint16),
            outs=[Out((16, 4112))],
        )


@few
@given(seeds, st.integers(1, 12), st.sampled_from(["float32", "bfloat16", "uint8"]), steps)
def test_nc_n_gather(seed, size, dtype, step):
    x = values(seed, (4, 3, 5), dtype)
    indices = np.random.default_rng(seed).integers(0, 15, (4, size)).astype(np.uint32)
    done = call(
        lambda d, s: nisa.nc_n_gather(d[0], s[0], s[1]),
        x,
        indices,
        outs=[Out((4, size), dtype)],
        step=step,
    )
    for p in range(4):
        row = x[p].reshape(-1)
        assert done.output[p].tolist() == [row[i] for i in indices[p]]


@pytest.mark.parametrize(
    ("kind", "dtype", "size", "index", "memory", "text"),
    [
        ("int32", "float32", 3, 0, nl.sbuf, "indices must be uint32"),
        ("uint32", "bfloat16", 3, 0, nl.sbuf, "must have one dtype"),
        ("uint32", "float32", 4, 0, nl.sbuf, "elements per partition differ"),
        ("uint32", "float32", 3, 6, nl.sbuf, "indices run from 6 to 6 and must be 0 to 5"),
        ("uint32", "float32", 3, 0, nl.psum, "dst must be in sbuf"),
    ],
)
def test_nc_n_gather_refuses(kind, dtype, size, index, memory, text):
    with refused(text):
        call(
            lambda d, s: nisa.nc_n_gather(d[0], s[0], s[1]),
            values(0, (2, 6)),
            np.full((2, 3), index, kind),
            outs=[Out((2, size), dtype)],
            memory=memory,
        )


@few
@given(seeds, st.sampled_from([1, 16, 33, 128]), st.sampled_from(["float32", "int32"]), steps)
def test_nonzero_with_count(seed, partitions, dtype, step):
    x = np.random.default_rng(seed).integers(-1, 2, (partitions, 6)).astype(dtype)
    old = values(seed, (partitions, 7), "int32")
    done = call(
        lambda d, s: nisa.nonzero_with_count(d[0], s[0], index_offset=16, padding_val=-7),
        x,
        outs=[Out((partitions, 7), "int32", old)],
        step=step,
    )
    for p in range(partitions):
        found = [i + 16 for i, v in enumerate(x[p]) if v != 0]
        row = [*found, *[-7] * (6 - len(found)), len(found)]
        assert done.output[p].tolist() == (old[p].tolist() if p % 16 else row)


@pytest.mark.parametrize(
    ("target", "dtype", "out", "options", "text"),
    [
        ("trn1", "int32", Out((2, 7), "int32"), {}, "it needs NeuronCore-v3"),
        ("trn2", "bfloat16", Out((2, 7), "int32"), {}, "src must be float32, int32"),
        ("trn2", "int32", Out((2, 7)), {}, "dst must be int32"),
        ("trn2", "int32", Out((2, 6), "int32"), {}, "dst must have 7 elements"),
        ("trn2", "int32", Out((2, 7), "int32"), {"padding_val": 0.5}, "padding_val must be an int"),
    ],
)
def test_nonzero_with_count_refuses(target, dtype, out, options, text):
    with refused(text):
        call(
            lambda d, s: nisa.nonzero_with_count(d[0], s[0], **options),
            values(0, (2, 6), dtype),
            outs=[out],
            target=target,
        )


@few
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.sampled_from(["float32", "int32"]),
    st.sampled_from(["float32", "int32"]),
)
def test_sequence_bounds(ids, source, target):
    n = len(ids)
    done = call(
        lambda d, s: nisa.sequence_bounds(d[0], s[0]),
        np.array([ids], source),
        outs=[Out((1, 2, n), target)],
    )
    starts, ends = [], []
    for i, segment in enumerate(ids):
        low = high = i
        while low and ids[low - 1] == segment:
            low -= 1
        while high < n and ids[high] == segment:
            high += 1
        starts.append(low if segment else n)
        ends.append(high if segment else -1)
    np.testing.assert_array_equal(done.output[0], as_stored([starts, ends], target))


@pytest.mark.parametrize(
    ("shape", "dtype", "out", "text"),
    [
        ((2, 4), "int32", Out((2, 8), "int32"), "segment_ids must have 1 partitions"),
        ((1, 4), "int16", Out((1, 8), "int32"), "segment_ids must be float32, int32"),
        ((1, 4), "int32", Out((1, 8), "int16"), "dst must be float32, int32"),
        ((1, 4), "int32", Out((1, 4), "int32"), "dst must have 8 elements"),
    ],
)
def test_sequence_bounds_refuses(shape, dtype, out, text):
    with refused(text):
        call(lambda d, s: nisa.sequence_bounds(d[0], s[0]), values(0, shape, dtype), outs=[out])


SIZE = 256
INDEX = "uint32"
COSTS: list[tuple[str, Any, tuple[int, ...], str, Engine]] = [
    ("find", lambda d, s: nisa.nc_find_index8(d[0], s[0], s[0][:, :8]), (16, 8), INDEX,
     Engine.VECTOR),
    ("replace", lambda d, s: nisa.nc_match_replace8(d[0], s[0], s[0][:, :8], 0.0), (16, SIZE),
     "float32", Engine.VECTOR),
    ("shuffle", lambda d, s: nisa.nc_stream_shuffle(d[0], s[0], [0] * 32), (16, SIZE), "float32",
     Engine.VECTOR),
    ("local", lambda d, s: nisa.local_gather(d[0], s[0], s[2]), (16, SIZE), "float32",
     Engine.GPSIMD),
    ("gather", lambda d, s: nisa.nc_n_gather(d[0], s[0], s[1]), (16, SIZE), "float32",
     Engine.GPSIMD),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "shape", "dtype", "engine"), [c[1:] for c in COSTS], ids=[c[0] for c in COSTS]
)
def test_engines_and_costs_in_trace_mode(body, shape, dtype, engine):
    done = call(
        body,
        values(0, (16, SIZE)),
        values(0, (16, SIZE), "uint32"),
        values(0, (16, SIZE // 16), "uint16"),
        outs=[Out(shape, dtype)],
        mode="trace",
    )
    assert [(f.engine, f.cycles) for f in done.templates] == [(engine, SIZE)]
    assert (done.output.shape, done.output.dtype) == (shape, dtype)
