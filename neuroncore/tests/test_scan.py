"""Scans, statistics and exponentials against plain statements of them on Python numbers."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import OPERATORS, START, Out, as_stored, call, refused, rows_of, values

from neuroncore import isa as nisa
from neuroncore import language as nl

COMMAND = nisa.reduce_cmd

seeds = st.integers(0, 2**32 - 1)
memories = st.sampled_from([nl.sbuf, nl.psum])
steps = st.sampled_from([1, 2, 3])
dtypes = st.sampled_from(["float32", "bfloat16", "float16", "float8_e5m2", "int32", "uint8"])
few = settings(max_examples=20)


@few
@given(
    seeds,
    st.sampled_from(["add", "multiply", "maximum"]),
    st.sampled_from(list(OPERATORS)),
    st.sampled_from(["reset_reduce", "load_reduce", "reduce"]),
    st.booleans(),
    st.sampled_from(["float32", "bfloat16", "int16", "uint8"]),
    memories,
    steps,
)
def test_tensor_scalar_cumulative(seed, op0, op1, command, tiled, dtype, memory, step):
    x, start = values(seed, (3, 5), dtype), values(seed + 1, (3, 1))

    def body(dsts, srcs):
        options: dict[str, Any] = {"reduce_cmd": getattr(COMMAND, command)}
        if command == "load_reduce":
            options["imm1"] = srcs[1] if tiled else 2.0
        immediate = srcs[1] if tiled else 0.5
        arguments = (dsts[0], srcs[0], getattr(nl, op0), getattr(nl, op1), immediate)
        if command == "reduce":
            nisa.tensor_scalar_cumulative(*arguments)
        nisa.tensor_scalar_cumulative(*arguments, **options)

    done = call(body, x, start, outs=[Out((3, 5), dtype)], memory=memory, step=step)
    expected = []
    for row, first in zip(rows_of(x), start[:, 0].tolist(), strict=True):
        immediate = first if tiled else 0.5
        register = (first if tiled else 2.0) if command == "load_reduce" else START[op1]
        line: list[float] = []
        for _ in range(2 if command == "reduce" else 1):
            line = []
            for v in row:
                register = float(np.float32(OPERATORS[op1](OPERATORS[op0](v, immediate), register)))
                line.append(register)
        expected.append(line)
    np.testing.assert_array_equal(done.output, as_stored(expected, dtype))


@pytest.mark.parametrize(
    ("dtype", "options", "text"),
    [
        ("int32", {}, "src must be"),
        ("float32", {"op1": nl.logical_or}, "nl.logical_or does not reduce"),
        ("float32", {"op0": nl.bitwise_or}, "is a bit operator"),
        ("float32", {"imm1": 1.0}, "imm1 and reduce_cmd.load_reduce come together"),
        ("float32", {"reduce_cmd": COMMAND.reset}, "reduce_cmd must be one of"),
    ],
)
def test_tensor_scalar_cumulative_refuses(dtype, options, text):
    given = {"op0": nl.add, "op1": nl.add, "imm0": 1.0, **options}
    with refused(text):
        call(
            lambda d, s: nisa.tensor_scalar_cumulative(d[0], s[0], **given),
            values(0, (2, 3), dtype),
            outs=[Out((2, 3))],
        )


@few
@given(
    seeds,
    st.sampled_from(list(OPERATORS)),
    st.sampled_from(list(OPERATORS)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["float32", "bfloat16", "int16"]),
    steps,
)
def test_tensor_tensor_scan(seed, op0, op1, reverse0, reverse1, tiled, dtype, step):
    a, b = values(seed, (3, 5), dtype), values(seed + 1, (3, 5), "bfloat16")
    start = values(seed + 2, (3, 1))

    def body(dsts, srcs):
        initial = srcs[2] if tiled else 1.5
        nisa.tensor_tensor_scan(
            dsts[0],
            srcs[0],
            srcs[1],
            initial,
            getattr(nl, op0),
            getattr(nl, op1),
            reverse0,
            reverse1,
        )

    done = call(body, a, b, start, outs=[Out((3, 5))], step=step)
    expected = []
    for x, y, first in zip(rows_of(a), rows_of(b), start[:, 0].tolist(), strict=True):
        last, line = (first if tiled else 1.5), []
        for v, w in zip(x, y, strict=True):
            pair = (last, v) if reverse0 else (v, last)
            inner = float(np.float32(OPERATORS[op0](*pair)))
            last = float(np.float32(OPERATORS[op1](*((w, inner) if reverse1 else (inner, w)))))
            line.append(last)
        expected.append(line)
    np.testing.assert_array_equal(done.output, np.array(expected, np.float32))


@pytest.mark.parametrize(
    ("op0", "op1", "memory", "text"),
    [
        (nl.bitwise_or, nl.add, nl.sbuf, "op0 must be a binary arithmetic operator"),
        (nl.add, nl.square, nl.sbuf, "op1 must be a binary arithmetic operator"),
        (nl.add, nl.add, nl.psum, "both inputs are in PSUM"),
    ],
)
def test_tensor_tensor_scan_refuses(op0, op1, memory, text):
    with refused(text):
        call(
            lambda d, s: nisa.tensor_tensor_scan(d[0], s[0], s[0], 0.0, op0, op1),
            values(0, (2, 3)),
            outs=[Out((2, 3))],
            memory=memory,
        )


@few
@given(seeds, st.integers(1, 3), st.integers(1, 30), dtypes, memories, steps)
def test_bn_stats_and_bn_aggr(seed, tiles, size, dtype, memory, step):
    x = values(seed, (4, tiles, size), dtype)

    def body(dsts, srcs):
        for i in range(tiles):
            nisa.bn_stats(dsts[0][:, i], srcs[0][:, i])
        nisa.bn_aggr(dsts[1], dsts[0])

    outs = [Out((4, tiles, 6)), Out((4, 2))]
    done = call(body, x, outs=outs, memory=memory, step=step)
    wide = x.astype(np.float64)
    for tile in range(tiles):
        for at in (0, 1):
            half = wide[:, tile, at::2]
            n = half.shape[1]
            mean = half.mean(1) if n else np.zeros(4)
            spread = half.var(1) * n if n else np.zeros(4)
            expected = np.stack([np.full(4, n), mean, spread], 1)
            seen = done.outputs[0][:, tile, 3 * at : 3 * at + 3]
            np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-5)
    flat = wide.reshape(4, -1)
    expected = np.stack([flat.mean(1), flat.var(1)], 1)
    np.testing.assert_allclose(done.outputs[1], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "out", "text"),
    [(513, 6, "data must have 1 to 512 elements"), (8, 5, "dst must have 6 elements")],
)
def test_bn_stats_refuses(size, out, text):
    with refused(text):
        call(lambda d, s: nisa.bn_stats(d[0], s[0]), values(0, (2, size)), outs=[Out((2, out))])


@pytest.mark.parametrize(
    ("size", "out", "text"),
    [(7, 2, "data must have a multiple of 3 elements"), (6, 3, "dst must have 2 elements")],
)
def test_bn_aggr_refuses(size, out, text):
    with refused(text):
        call(lambda d, s: nisa.bn_aggr(d[0], s[0]), values(0, (2, size)), outs=[Out((2, out))])


@few
@given(seeds, st.integers(4, 20), dtypes, dtypes, memories, steps)
def test_max8(seed, half, source, target, memory, step):
    x = values(seed, (3, 2, half), source)
    done = call(
        lambda d, s: nisa.max8(d[0], s[0]), x, outs=[Out((3, 8), target)], memory=memory, step=step
    )
    expected = [sorted(row, reverse=True)[:8] for row in rows_of(x)]
    np.testing.assert_array_equal(done.output, as_stored(expected, target))


@pytest.mark.parametrize(
    ("shape", "out", "text"),
    [
        ((2, 7), (2, 8), "src must have 8 to 16384 elements"),
        ((1, 16385), (1, 8), "src must have 8 to 16384 elements"),
        ((2, 9), (2, 9), "dst must have 8 elements"),
        ((2, 9), (2, 2, 4), "dst has at most 2 dimensions"),
        ((2, 3, 2, 2), (2, 8), "src has at most 3 dimensions"),
        ((3, 9), (2, 8), "partition counts differ"),
    ],
)
def test_max8_refuses(shape, out, text):
    with refused(text):
        call(lambda d, s: nisa.max8(d[0], s[0]), values(0, shape), outs=[Out(out)])


@few
@given(seeds, st.booleans(), st.sampled_from(["float32", "bfloat16"]), memories, steps)
def test_exponential(seed, tiled, dtype, memory, step):
    x, top = values(seed, (3, 6), dtype), values(seed + 1, (3, 1))

    def body(dsts, srcs):
        largest = srcs[1] if tiled else 1.0
        nisa.exponential(dsts[0], srcs[0], largest, reduce_cmd=COMMAND.load_reduce, reduce_init=2.0)
        nisa.exponential(dsts[0], srcs[0], largest, dsts[1], COMMAND.reduce)

    outs = [Out((3, 6)), Out((3, 1))]
    done = call(body, x, top, outs=outs, memory=memory, step=step, target="trn3")
    truth = np.exp(x.astype(np.float64) - (top if tiled else 1.0))
    np.testing.assert_allclose(done.outputs[0], truth, rtol=1e-6)
    np.testing.assert_allclose(done.outputs[1], 2 * truth.sum(1, keepdims=True) + 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("target", "options", "text"),
    [
        ("trn2", {}, "exponential: it needs NeuronCore-v4"),
        ("trn3", {"reduce_cmd": COMMAND.reset}, "reduce_cmd must be one of"),
        ("trn3", {"reduce_init": 1.0}, "reduce_init and reduce_cmd.load_reduce come together"),
        ("trn3", {"reduce_res": 0}, "reduce_res with reduce_cmd.idle is undefined"),
    ],
)
def test_exponential_refuses(target, options, text):
    def body(dsts, srcs):
        given = {name: dsts[1] if name == "reduce_res" else v for name, v in options.items()}
        nisa.exponential(dsts[0], srcs[0], **given)

    with refused(text):
        call(body, values(0, (2, 3)), outs=[Out((2, 3)), Out((2, 1))], target=target)
