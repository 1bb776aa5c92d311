"""Searches, gathers and shuffles against plain loops."""

import numpy as np
from draws import either, few, memories, pick, seeds, steps
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import Out, call, compute, full, loaded, new, refusals, refuses, stored, zeros
from samples import as_stored, bf16, values, wide

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl

masks = st.lists(pick([*range(32), 255]), min_size=32, max_size=32)


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
    x = values(seed, (3, 2, 9), dtype) // 4
    x = x.astype(values(0, (1, 1), dtype).dtype)
    vals = np.random.default_rng(seed).permuted(x.reshape(3, 18), axis=1)[:, :8].copy()
    vals[:, 0] = 77
    return x, vals


@few
@given(seeds, pick(["float32", "bfloat16", "uint8"]), either, memories, steps)
def test_nc_find_index8(seed, dtype, wide, memory, step):
    x, vals = searched(seed, dtype)
    kind = "uint32" if wide else "uint16"
    got = compute(nisa.nc_find_index8, (3, 8), kind, x, vals, memories=memory, step=step)
    absent = 2**32 - 1 if wide else 2**16 - 1
    for row, wanted, seen in zip(x.reshape(3, 18), vals, got, strict=True):
        truth = places(row.tolist(), wanted.tolist(), list(range(8)))
        assert seen.tolist() == [absent if place < 0 else place for place in truth]


@few
@given(seeds, pick(["float32", "bfloat16"]), either, memories, steps)
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

    def body(dsts, srcs):
        nisa.nc_match_replace8(dsts[0], srcs[0], srcs[1], 0.0, dsts[1])

    done = call(body, data, vals, outs=[Out((1, 11)), Out((1, 8), "uint32")])
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


@few
@given(
    seeds, pick([16, 32, 128]), pick([1, 2, 4]), st.integers(1, 3), either,
    pick(["float32", "bfloat16", "int8"]), steps,
)  # fmt: skip
def test_local_gather(seed, partitions, count, columns, partly, dtype, step):
    x = values(seed, (partitions, 5, 2), dtype)
    rng = np.random.default_rng(seed)
    index = rng.integers(0, 10 - count + 1, (partitions, columns)).astype(np.uint16)
    valid = 16 * columns - 3 if partly else 16 * columns

    def body(dst, src, index):
        options = {"num_valid_indices": valid} if partly else {}
        nisa.local_gather(dst, src, index, count, **options)

    got = compute(body, (partitions, valid * count), dtype, x, index, step=step)
    flat = x.reshape(partitions, 10)
    for p in range(partitions):
        first = p // 16 * 16
        row = [index[first + i % 16, i // 16] for i in range(valid)]
        expected = [flat[p, int(at) + k] for at in row for k in range(count)]
        assert got[p].tolist() == [float(v) for v in expected]


@few
@given(seeds, st.integers(1, 12), pick(["float32", "bfloat16", "uint8"]), steps)
def test_nc_n_gather(seed, size, dtype, step):
    x = values(seed, (4, 3, 5), dtype)
    indices = np.random.default_rng(seed).integers(0, 15, (4, size)).astype(np.uint32)
    got = compute(nisa.nc_n_gather, (4, size), dtype, x, indices, step=step)
    np.testing.assert_array_equal(got, np.take_along_axis(x.reshape(4, 15), indices.astype(int), 1))


@few
@given(seeds, pick([1, 16, 33, 128]), pick(["float32", "int32"]), steps)
def test_nonzero_with_count(seed, partitions, dtype, step):
    x = np.random.default_rng(seed).integers(-1, 2, (partitions, 6)).astype(dtype)
    old = values(seed, (partitions, 7), "int32")

    def body(dsts, srcs):
        nisa.nonzero_with_count(dsts[0], srcs[0], index_offset=16, padding_val=-7)

    done = call(body, x, outs=[Out((partitions, 7), "int32", old)], step=step)
    for p in range(partitions):
        found = [i + 16 for i, v in enumerate(x[p]) if v != 0]
        row = [*found, *[-7] * (6 - len(found)), len(found)]
        assert done.output[p].tolist() == (old[p].tolist() if p % 16 else row)


words = pick(["float32", "int32"])


@few
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), words, words)
def test_sequence_bounds(ids, source, target):
    n = len(ids)
    got = compute(nisa.sequence_bounds, (1, 2, n), target, np.array([ids], source))
    starts, ends = [], []
    for i, segment in enumerate(ids):
        low = high = i
        while low and ids[low - 1] == segment:
            low -= 1
        while high < n and ids[high] == segment:
            high += 1
        starts.append(low if segment else n)
        ends.append(high if segment else -1)
    np.testing.assert_array_equal(got[0], as_stored([starts, ends], target))


@few
@given(
    seeds, masks, pick([32, 64, 96, 128]), pick(["float32", "bfloat16", "int32"]), either, memories,
    steps,
)  # fmt: skip
def test_nc_stream_shuffle(seed, mask, partitions, dtype, in_place, memory, step):
    x, old = values(seed, (partitions, 3), dtype), values(seed + 1, (partitions, 3), dtype)
    kept = x if in_place else old

    def body(dsts, srcs):
        nisa.nc_stream_shuffle(dsts[0], dsts[0] if in_place else srcs[0], mask)

    done = call(body, x, outs=[Out(x.shape, dtype, kept)], memory=memory, step=step)
    for p in range(partitions):
        source = mask[p % 32]
        expected = kept[p] if source == 255 else x[p // 32 * 32 + source]
        assert done.output[p].tolist() == expected.tolist()


def test_nc_stream_shuffle_repeats_a_partition_and_moves_to_another_quadrant():
    x, y = values(0, (1, 4)), values(0, (32, 4))

    def body(dst, one, quadrant):
        nisa.memset(dst, 0.0)
        nisa.nc_stream_shuffle(dst[:32], one, [0] * 32)
        nisa.nc_stream_shuffle(dst[64:96], quadrant, list(range(31, -1, -1)))

    got = compute(body, (96, 4), "float32", x, y)
    np.testing.assert_array_equal(got[:32], x.repeat(32, 0))
    np.testing.assert_array_equal(got[64:], y[::-1])


def find(data=(2, 9), vals=(2, 8), out=(2, 8), kind="uint32"):
    nisa.nc_find_index8(new(*out, dtype=kind), zeros(*data), zeros(*vals))


def replace(out=(2, 9), kind="uint32", imm=0.0):
    nisa.nc_match_replace8(new(*out), zeros(2, 9), zeros(2, 8), imm, new(2, 8, dtype=kind))


def local(p=16, kind="uint16", dtype="float32", count=1, valid=None, size=16, index=(0, 1)):
    place, columns = index
    indices = full(place, p, columns, dtype=kind)
    nisa.local_gather(new(p, size), zeros(p, 64, dtype=dtype), indices, count, valid)


def gather(kind="uint32", dtype="float32", size=3, index=0, memory=nl.sbuf):
    tiles = new(2, size, dtype=dtype, buffer=memory), zeros(2, 6, buffer=memory)
    nisa.nc_n_gather(*tiles, full(index, 2, 3, dtype=kind, buffer=memory))


def nonzero(dtype="int32", out="int32", size=7, **options):
    nisa.nonzero_with_count(new(2, size, dtype=out), zeros(2, 6, dtype=dtype), **options)


def bounds(p=1, dtype="int32", out="int32", size=8):
    nisa.sequence_bounds(new(p, size, dtype=out), zeros(p, 4, dtype=dtype))


IDENTITY = list(range(32))


def shuffle(mask=IDENTITY, rows=slice(0, 32), dtype="float32", columns=3):
    nisa.nc_stream_shuffle(new(32, columns), zeros(128, 3, dtype=dtype)[rows], mask)


@refusals(
    ("data must have 8 to 16384 elements", lambda: find(data=(2, 7))),
    ("vals must have 8 elements", lambda: find(vals=(2, 7))),
    ("dst must have 8 elements", lambda: find(out=(2, 9))),
    ("dst must be uint16, uint32", lambda: find(kind="int32")),
    ("data has at most 3 dimensions", lambda: find(data=(2, 2, 2, 2))),
    ("vals has at most 3 dimensions", lambda: find(vals=(2, 2, 2, 2))),
    ("partition counts differ", lambda: find(vals=(3, 8))),
    ("elements per partition differ", lambda: replace(out=(2, 8))),
    ("dst_idx must be uint16, uint32", lambda: replace(kind="float32")),
    ("imm must be a number", lambda: replace(imm=None)),
    ("src_buffer must have a multiple of 16 partitions", lambda: local(24)),
    ("index must be uint16", lambda: local(kind="int16")),
    ("must have one dtype", lambda: local(dtype="bfloat16")),
    ("num_elem_per_idx must be 1, 2, 4, 8, 16 or 32", lambda: local(count=3, size=48)),
    ("17 valid indices per core", lambda: local(valid=17, size=17)),
    ("0 valid indices per core", lambda: local(valid=0)),
    ("dst must have 16 elements", lambda: local(size=15)),
    ("indices run from", lambda: local(count=4, size=64, index=(61, 1))),
    ("4112 valid indices per core; each 16 partitions of index hold 4112",
     lambda: local(size=4112, index=(0, 257))),
    ("indices must be uint32", lambda: gather("int32")),
    ("must have one dtype", lambda: gather(dtype="bfloat16")),
    ("elements per partition differ", lambda: gather(size=4)),
    ("indices run from 6 to 6 and must be 0 to 5", lambda: gather(index=6)),
    ("dst must be in sbuf", lambda: gather(memory=nl.psum)),
    ("it needs NeuronCore-v3", nonzero, "trn1"),
    ("src must be float32, int32", lambda: nonzero("bfloat16")),
    ("dst must be int32", lambda: nonzero(out="float32")),
    ("dst must have 7 elements", lambda: nonzero(size=6)),
    ("padding_val must be an int", lambda: nonzero(padding_val=0.5)),
    ("segment_ids must have 1 partitions", lambda: bounds(2)),
    ("segment_ids must be float32, int32", lambda: bounds(dtype="int16")),
    ("dst must be float32, int32", lambda: bounds(out="int16")),
    ("dst must have 8 elements", lambda: bounds(size=4)),
    ("shuffle_mask is 32 numbers", lambda: shuffle(IDENTITY[:31])),
    ("shuffle_mask is 32 numbers, 0 to 31 or 255", lambda: shuffle([32] * 32)),
    ("shuffle_mask is 32 numbers", lambda: shuffle([0.0] * 32)),
    ("must have one dtype", lambda: shuffle(dtype="bfloat16")),
    ("copies partition 16, which", lambda: shuffle(rows=slice(0, 16))),
    ("starts at partition 16; 32 active partitions", lambda: shuffle(rows=slice(16, 48))),
    ("64 active partitions start at 0 or 64", lambda: shuffle(rows=slice(32, 96))),
    ("elements per partition differ", lambda: shuffle(columns=4)),
    ("of which no element was ever written", lambda: shuffle([*IDENTITY[:31], 255])),
)  # fmt: skip
def test_what_is_refused(text, body, target):
    refuses(text, body, target=target)


def largest(x: np.ndarray, n: int, k: int) -> list[tuple[list[float], list[int]]]:
    """(values, numbers), ascending, of each 16 partitions; of equal values the lowest numbers."""
    found = []
    for g in range(0, len(x), 16):
        snake = [float(x[g + i % 16, i // 16]) for i in range(n)]
        taken = sorted(range(n), key=lambda i: (-snake[i], i))[:k]
        taken.sort(key=lambda i: (snake[i], i))
        found.append(([snake[i] for i in taken], taken))
    return found


def top(x, n, k, **options):
    def kernel(x):
        p, src = x.shape[0], loaded(x)
        val, idx = new(p, k, dtype=nl.bfloat16), new(p, k, dtype=nl.uint32)
        nisa.memset(val, -1)
        nisa.memset(idx, 77)
        nisa.topk(val_dst=val, idx_dst=idx, src=src, n=n)
        return stored(val), stored(idx)

    return nc.simulate(kernel, x, target="trn2", **options)


@settings(max_examples=30)
@given(
    groups=pick([1, 2, 8]), columns=st.integers(1, 6), ties=either,
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)), seed=seeds,
)  # fmt: skip
def test_topk_in_both_readings(groups, columns, ties, shares, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((16 * groups, columns))
    x = (np.round(x) if ties else x).astype(bf16)
    n = 8 + int(shares[0] * (16 * columns - 8))
    k = 1 + int(shares[1] * (n - 1))
    expected = largest(x, n, k)
    val, idx = top(x, n, k).outputs
    for g, (found, numbers) in enumerate(expected):
        for p in range(16 * g, 16 * g + 16):
            assert wide(val[p]).tolist() == found
            assert idx[p].tolist() == numbers
    val, idx = top(x, n, k, follow="kernels").outputs
    for g, (found, numbers) in enumerate(expected):
        for j, (value, number) in enumerate(zip(found, numbers, strict=True)):
            place = 16 * g + j % 16, j // 16
            assert (float(val[place]), int(idx[place])) == (value, number)
        assert (wide(val[16 * g : 16 * g + 16]) == -1).sum() >= 15 * k - found.count(-1)
        assert (idx[16 * g : 16 * g + 16] == 77).sum() >= 15 * k


def test_the_documented_topk_and_its_cost():
    x = np.arange(48, dtype=np.float32).reshape(3, 16).T.astype(bf16)
    done = top(x, 42, 8)
    assert done.outputs[1][5].tolist() == list(range(34, 42))  # 42 of the 48 count
    records = [r[0] for r in done.profile.launch.cores[0].trace.records]
    (template,) = [r for r in records if r.opcode == "topk"]
    assert (template.engine.name, template.cycles) == ("GPSIMD", 4 * 42 + 8)


def topk(n=16, k=4, p=16, columns=2, src=nl.bfloat16, val=nl.bfloat16, idx=nl.uint32, extra=0):
    tiles = new(p, k, dtype=val), new(p, k + extra, dtype=idx), zeros(p, columns, dtype=src)
    nisa.topk(*tiles, n)


@refusals(
    ("src must be bfloat16", lambda: topk(src=nl.float32)),
    ("val_dst must be bfloat16", lambda: topk(val=nl.float32)),
    ("idx_dst must be uint32", lambda: topk(idx=nl.int32)),
    ("elements per partition differ", lambda: topk(extra=1)),
    ("partitions must be a multiple of 16", lambda: topk(p=24)),
    ("n must be 8 to 65535", lambda: topk(7)),
    ("at most the 32 values of 16 partitions", lambda: topk(33)),
    ("n must be 8 to 65535", lambda: topk(65536, columns=5000)),
    ("got 8.0", lambda: topk(8.0)),
    ("must be 1 to n=16; got 17", lambda: topk(k=17)),
)
def test_topk_refuses(text, body, target):
    refuses(text, body, target=target)
