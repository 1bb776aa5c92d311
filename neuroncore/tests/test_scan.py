"""Scans, statistics and exponentials against plain statements of them on Python numbers."""

from typing import Any

import numpy as np
from draws import either, few, kinds, memories, pick, seeds, steps
from hypothesis import given
from hypothesis import strategies as st
from instruction_runs import Out, call, compute, new, refusals, refuses, zeros
from samples import BINARY, OPERATORS, START, as_stored, rows_of, values

from neuroncore import isa as nisa
from neuroncore import language as nl

COMMAND = nisa.reduce_cmd
operators = pick(OPERATORS)


@few
@given(
    seeds, pick(["add", "multiply", "maximum"]), operators,
    pick(["reset_reduce", "load_reduce", "reduce"]), either,
    pick(["float32", "bfloat16", "int16", "uint8"]), memories, steps,
)  # fmt: skip
def test_tensor_scalar_cumulative(seed, op0, op1, command, tiled, dtype, memory, step):
    x, start = values(seed, (3, 5), dtype), values(seed + 1, (3, 1))

    def body(dst, src, column):
        options: dict[str, Any] = {"reduce_cmd": getattr(COMMAND, command)}
        if command == "load_reduce":
            options["imm1"] = column if tiled else 2.0
        arguments = (dst, src, getattr(nl, op0), getattr(nl, op1), column if tiled else 0.5)
        if command == "reduce":
            nisa.tensor_scalar_cumulative(*arguments)
        nisa.tensor_scalar_cumulative(*arguments, **options)

    got = compute(body, (3, 5), dtype, x, start, memories=memory, step=step)
    expected = []
    for row, first in zip(rows_of(x), start[:, 0].tolist(), strict=True):
        immediate = first if tiled else 0.5
        register = (first if tiled else 2.0) if command == "load_reduce" else START[op1]
        line: list[float] = []
        for _ in range(2 if command == "reduce" else 1):
            line = []
            for v in row:
                register = float(np.float32(BINARY[op1](BINARY[op0](v, immediate), register)))
                line.append(register)
        expected.append(line)
    np.testing.assert_array_equal(got, as_stored(expected, dtype))


@few
@given(
    seeds, operators, operators, either, either, either, pick(["float32", "bfloat16", "int16"]),
    steps,
)  # fmt: skip
def test_tensor_tensor_scan(seed, op0, op1, reverse0, reverse1, tiled, dtype, step):
    a, b = values(seed, (3, 5), dtype), values(seed + 1, (3, 5), "bfloat16")
    start = values(seed + 2, (3, 1))

    def body(dst, x, y, column):
        ops = getattr(nl, op0), getattr(nl, op1)
        nisa.tensor_tensor_scan(dst, x, y, column if tiled else 1.5, *ops, reverse0, reverse1)

    got = compute(body, (3, 5), "float32", a, b, start, step=step)
    expected = []
    for x, y, first in zip(rows_of(a), rows_of(b), start[:, 0].tolist(), strict=True):
        last, line = (first if tiled else 1.5), []
        for v, w in zip(x, y, strict=True):
            pair = (last, v) if reverse0 else (v, last)
            inner = float(np.float32(BINARY[op0](*pair)))
            last = float(np.float32(BINARY[op1](*((w, inner) if reverse1 else (inner, w)))))
            line.append(last)
        expected.append(line)
    np.testing.assert_array_equal(got, np.array(expected, np.float32))


@few
@given(seeds, st.integers(1, 3), st.integers(1, 30), kinds, memories, steps)
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
            mean, spread = (half.mean(1), half.var(1) * n) if n else (np.zeros(4), np.zeros(4))
            expected = np.stack([np.full(4, n), mean, spread], 1)
            seen = done.outputs[0][:, tile, 3 * at : 3 * at + 3]
            np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-5)
    flat = wide.reshape(4, -1)
    expected = np.stack([flat.mean(1), flat.var(1)], 1)
    np.testing.assert_allclose(done.outputs[1], expected, rtol=1e-5, atol=1e-4)


@few
@given(seeds, st.integers(4, 20), kinds, kinds, memories, steps)
def test_max8(seed, half, source, target, memory, step):
    x = values(seed, (3, 2, half), source)
    got = compute(nisa.max8, (3, 8), target, x, memories=memory, step=step)
    expected = [sorted(row, reverse=True)[:8] for row in rows_of(x)]
    np.testing.assert_array_equal(got, as_stored(expected, target))


@few
@given(seeds, either, pick(["float32", "bfloat16"]), memories, steps)
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


def cumulative(dtype="float32", **options):
    given = {"op0": nl.add, "op1": nl.add, "imm0": 1.0, **options}
    nisa.tensor_scalar_cumulative(new(2, 3), zeros(2, 3, dtype=dtype), **given)


def scan(op0=nl.add, op1=nl.add, memory=nl.sbuf):
    x = zeros(2, 3, buffer=memory)
    nisa.tensor_tensor_scan(new(2, 3, buffer=memory), x, x, 0.0, op0, op1)


def exponential(**options):
    nisa.exponential(new(2, 3), zeros(2, 3), **options)


@refusals(
    ("src must be", lambda: cumulative("int32")),
    ("nl.logical_or does not reduce", lambda: cumulative(op1=nl.logical_or)),
    ("is a bit operator", lambda: cumulative(op0=nl.bitwise_or)),
    ("imm1 and reduce_cmd.load_reduce come together", lambda: cumulative(imm1=1.0)),
    ("reduce_cmd must be one of", lambda: cumulative(reduce_cmd=COMMAND.reset)),
    ("op0 must be a binary arithmetic operator", lambda: scan(nl.bitwise_or)),
    ("op1 must be a binary arithmetic operator", lambda: scan(op1=nl.square)),
    ("both inputs are in PSUM", lambda: scan(memory=nl.psum)),
    ("data must have 1 to 512 elements", lambda: nisa.bn_stats(new(2, 6), zeros(2, 513))),
    ("dst must have 6 elements", lambda: nisa.bn_stats(new(2, 5), zeros(2, 8))),
    ("data must have a multiple of 3 elements", lambda: nisa.bn_aggr(new(2, 2), zeros(2, 7))),
    ("dst must have 2 elements", lambda: nisa.bn_aggr(new(2, 3), zeros(2, 6))),
    ("src must have 8 to 16384 elements", lambda: nisa.max8(new(2, 8), zeros(2, 7))),
    ("src must have 8 to 16384 elements", lambda: nisa.max8(new(1, 8), zeros(1, 16385))),
    ("dst must have 8 elements", lambda: nisa.max8(new(2, 9), zeros(2, 9))),
    ("dst has at most 2 dimensions", lambda: nisa.max8(new(2, 2, 4), zeros(2, 9))),
    ("src has at most 3 dimensions", lambda: nisa.max8(new(2, 8), zeros(2, 3, 2, 2))),
    ("partition counts differ", lambda: nisa.max8(new(2, 8), zeros(3, 9))),
    ("exponential: it needs NeuronCore-v4", exponential),
    ("reduce_cmd must be one of", lambda: exponential(reduce_cmd=COMMAND.reset), "trn3"),
    ("reduce_init and reduce_cmd.load_reduce come together",
     lambda: exponential(reduce_init=1.0), "trn3"),
    ("reduce_res with reduce_cmd.idle is undefined",
     lambda: exponential(reduce_res=new(2, 1)), "trn3"),
)  # fmt: skip
def test_what_is_refused(text, body, target):
    refuses(text, body, target=target)
