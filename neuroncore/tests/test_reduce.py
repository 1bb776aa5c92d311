"""Reductions, scans and statistics against plain statements of them on Python numbers."""

import functools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import OPERATORS, START, Out, as_stored, call, refused, rows_of, values

from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.hardware import Engine

LOGICAL: dict[str, Any] = {
    "logical_and": lambda x, y: float(bool(x) and bool(y)),
    "logical_or": lambda x, y: float(bool(x) or bool(y)),
    "logical_xor": lambda x, y: float(bool(x) != bool(y)),
}
BITS: dict[str, Any] = {
    "bitwise_and": lambda x, y: x & y,
    "bitwise_or": lambda x, y: x | y,
    "bitwise_xor": lambda x, y: x ^ y,
}
seeds = st.integers(0, 2**32 - 1)
memories = st.sampled_from([nl.sbuf, nl.psum])
steps = st.sampled_from([1, 2, 3])
dtypes = st.sampled_from(["float32", "bfloat16", "float16", "float8_e5m2", "int32", "uint8"])
few = settings(max_examples=20)


@few
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.data(),
    st.sampled_from([*OPERATORS, *LOGICAL]),
    dtypes,
    dtypes,
    st.booleans(),
)
def test_tensor_reduce(shape, data, op, source, target, negate):
    kept = data.draw(st.integers(1, len(shape) - 1))
    axes = list(range(kept, len(shape)))
    x = values(data.draw(seeds), tuple(shape), source)
    if op == "multiply":
        x = x.clip(0, 2).astype(x.dtype)
    left = math.prod(shape[1:kept])
    sign = -1 if negate else 1

    def body(dsts, srcs):
        axis = axes[0] if len(axes) == 1 else data.draw(st.sampled_from([axes, tuple(axes)]))
        nisa.tensor_reduce(dsts[0], getattr(nl, op), srcs[0], axis, negate=negate)

    done = call(
        body,
        x,
        outs=[Out((shape[0], left), target)],
        memory=data.draw(memories),
        step=data.draw(steps),
    )
    function = OPERATORS.get(op) or LOGICAL[op]
    groups = x.reshape(shape[0] * left, -1).astype(np.float64).tolist()
    truth = [float(bool(v)) if op in LOGICAL else v for v in (g[0] for g in groups)]
    truth = [functools.reduce(function, g[1:], t) for g, t in zip(groups, truth, strict=True)]
    expected = as_stored(np.reshape(truth, (shape[0], left)) * sign, target)
    np.testing.assert_array_equal(done.output, expected)


@few
@given(seeds, st.sampled_from(list(BITS)), st.sampled_from(["int32", "uint8", "int16"]))
def test_tensor_reduce_of_bits(seed, op, dtype):
    x = values(seed, (3, 5), dtype)

    def body(dsts, srcs):
        nisa.tensor_reduce(dsts[0], getattr(nl, op), srcs[0], axis=1, keepdims=True)

    done = call(body, x, outs=[Out((3, 1), dtype)])
    expected = [[functools.reduce(BITS[op], row)] for row in x.tolist()]
    assert done.output.tolist() == expected


@pytest.mark.parametrize(
    ("axis", "op", "dtype", "text"),
    [
        (1, "add", "float32", "axis (1,) of"),
        (0, "add", "float32", "axis (0,) of"),
        ((1,), "add", "float32", "must be the last free dimensions, one of (1, 2), (2,)"),
        ((0, 1, 2), "add", "float32", "axis (0, 1, 2) of"),
        (3, "add", "float32", "axis (3,) of"),
        (2, "power", "float32", "nl.power does not reduce"),
        (2, "add", "float32", "dst must have 3 elements per partition"),
        ((1, 2), "bitwise_or", "float32", "takes integer tiles"),
        ((1, 2), "bitwise_or", "int16", "keeps the element size"),
    ],
)
def test_tensor_reduce_refuses(axis, op, dtype, text):
    outs = [Out((2, 1), dtype)]
    with refused(text):
        call(
            lambda d, s: nisa.tensor_reduce(d[0], getattr(nl, op), s[0], axis),
            values(0, (2, 3, 4), "float32" if dtype == "float32" else "int32"),
            outs=outs,
        )


def test_tensor_reduce_negates_numbers_only():
    with refused("negate is for arithmetic operators"):
        call(
            lambda d, s: nisa.tensor_reduce(d[0], nl.bitwise_or, s[0], 1, negate=True),
            values(0, (2, 3), "int32"),
            outs=[Out((2, 1), "int32")],
        )


@few
@given(seeds, st.integers(1, 40), st.sampled_from(["add", "maximum"]), dtypes, dtypes)
def test_tensor_partition_reduce(seed, partitions, op, source, target):
    x = values(seed, (partitions, 2, 3), source)
    done = call(
        lambda d, s: nisa.tensor_partition_reduce(d[0], getattr(nl, op), s[0]),
        x,
        outs=[Out((1, 6), target)],
    )
    columns = x.reshape(partitions, 6).astype(np.float64).T.tolist()
    expected = [[functools.reduce(OPERATORS[op], column) for column in columns]]
    np.testing.assert_array_equal(done.output, as_stored(expected, target))


def test_tensor_partition_reduce_of_bits():
    x = values(0, (9, 4), "uint16")
    for op in ("bitwise_and", "bitwise_or"):
        done = call(
            lambda d, s, op=op: nisa.tensor_partition_reduce(d[0], getattr(nl, op), s[0]),
            x,
            outs=[Out((1, 4), "uint16")],
        )
        assert done.output.tolist() == [[functools.reduce(BITS[op], c) for c in x.T.tolist()]]


@pytest.mark.parametrize(
    ("out", "op", "memory", "text"),
    [
        (Out((1, 4)), "minimum", nl.sbuf, "nl.minimum does not reduce; use nl.add, nl.maximum"),
        (Out((3, 4)), "add", nl.sbuf, "dst must have 1 partitions"),
        (Out((1, 3)), "add", nl.sbuf, "elements per partition differ"),
        (Out((1, 4)), "add", nl.psum, "must be in sbuf"),
        (Out((1, 4)), "bitwise_or", nl.sbuf, "takes integer tiles"),
    ],
)
def test_tensor_partition_reduce_refuses(out, op, memory, text):
    with refused(text):
        call(
            lambda d, s: nisa.tensor_partition_reduce(d[0], getattr(nl, op), s[0]),
            values(0, (3, 4)),
            outs=[out],
            memory=memory,
        )


@few
@given(
    seeds,
    st.sampled_from(["add", "subtract", "multiply", "maximum"]),
    st.sampled_from(["add", "multiply", "maximum", "minimum"]),
    st.booleans(),
    dtypes,
    memories,
    steps,
)
def test_tensor_scalar_reduce(seed, op, reduce_op, tiled, dtype, memory, step):
    x, operand = values(seed, (4, 2, 3), dtype), values(seed + 1, (4, 1))

    def body(dsts, srcs):
        scalar = srcs[1] if tiled else 1.5
        nisa.tensor_scalar_reduce(
            dsts[0], srcs[0], getattr(nl, op), scalar, getattr(nl, reduce_op), dsts[1]
        )

    done = call(body, x, operand, outs=[Out((4, 6), dtype), Out((4, 1))], memory=memory, step=step)
    right = operand[:, 0].tolist() if tiled else [1.5] * 4
    rows = [[OPERATORS[op](v, y) for v in row] for row, y in zip(rows_of(x), right, strict=True)]
    np.testing.assert_array_equal(done.outputs[0], as_stored(rows, dtype))
    totals = [[functools.reduce(OPERATORS[reduce_op], row, START[reduce_op])] for row in rows]
    np.testing.assert_allclose(done.outputs[1], totals, rtol=1e-6)


def test_accumulators_go_on_and_start_where_told():
    x = values(3, (4, 5))

    def body(dsts, srcs):
        def total(command, result=None, **options):
            nisa.tensor_scalar_reduce(
                dsts[0], srcs[0], nl.abs, 0, nl.add, result, reduce_cmd=command, **options
            )

        command = nisa.reduce_cmd
        total(command.reset_reduce)
        total(command.reduce, dsts[1])
        total(command.reduce, dsts[2], reduce_res_negate=True)
        total(command.load_reduce, dsts[3], reduce_init=srcs[1])
        total(command.load_reduce, dsts[4], reduce_init=0.5)
        total(command.reset_reduce, dsts[5])

    start = values(4, (4, 1))
    done = call(body, x, start, outs=[Out((4, 5)), *[Out((4, 1))] * 5])
    once = np.abs(x.astype(np.float64)).sum(1, keepdims=True)
    expected = [2 * once, -3 * once, start + once, 0.5 + once, once]
    for output, want in zip(done.outputs[1:], expected, strict=True):
        np.testing.assert_array_equal(output, want)


def test_accumulators_belong_to_partitions():
    x = values(5, (64, 3))

    def body(dsts, srcs):
        for rows in (slice(0, 32), slice(32, 64)):
            nisa.tensor_scalar_reduce(dsts[0][rows], srcs[0][rows], nl.add, 0.0, nl.add)
        nisa.tensor_scalar_reduce(
            dsts[0], srcs[0], nl.add, 0.0, nl.add, dsts[1], reduce_cmd=nisa.reduce_cmd.reduce
        )

    done = call(body, x, outs=[Out((64, 3)), Out((64, 1))])
    np.testing.assert_array_equal(done.outputs[1], 2 * x.sum(1, keepdims=True))


def test_accumulators_nobody_reset_are_undefined():
    done = call(
        lambda d, s: nisa.tensor_scalar_reduce(
            d[0], s[0], nl.add, 1.0, nl.add, d[1], reduce_cmd=nisa.reduce_cmd.reduce
        ),
        values(0, (2, 3)),
        outs=[Out((2, 3)), Out((2, 1))],
    )
    assert np.isnan(done.outputs[1]).all()


COMMAND = nisa.reduce_cmd


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"op0": nl.bitwise_and}, "nl.bitwise_and is a bit operator"),
        ({"reverse0": True}, "reverse0 is not supported"),
        ({"op0": nl.abs}, "nl.abs is unary; operand0 must be None or 0"),
        ({"operand0": None}, "nl.add needs operand0"),
        ({"reduce_op": nl.subtract}, "nl.subtract does not reduce"),
        ({"reduce_cmd": COMMAND.idle}, "reduce_cmd must be one of reduce_cmd.reset_reduce"),
        ({"reduce_cmd": COMMAND.load_reduce}, "reduce_init and reduce_cmd.load_reduce come"),
        ({"reduce_init": 1.0}, "reduce_init and reduce_cmd.load_reduce come together"),
    ],
)
def test_tensor_scalar_reduce_refuses(options, text):
    given = {"op0": nl.add, "operand0": 1.0, "reduce_op": nl.add, **options}
    with refused(text):
        call(
            lambda d, s: nisa.tensor_scalar_reduce(d[0], s[0], reduce_res=d[1], **given),
            values(0, (2, 3)),
            outs=[Out((2, 3)), Out((2, 1))],
        )


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [((2, 3), "float32", "must be a number or a tile [2, 1]"), ((2, 1), "bfloat16", "float32")],
)
def test_scalar_tiles_are_checked(shape, dtype, text):
    with refused(text):
        call(
            lambda d, s: nisa.tensor_scalar_reduce(d[0], s[0], nl.add, s[1], nl.add),
            values(0, (2, 3)),
            values(0, shape, dtype),
            outs=[Out((2, 3))],
        )


SIZE = 256
COSTS: list[tuple[str, Any, str, list[Out], Engine, float]] = [
    ("sum", lambda d, s: nisa.tensor_reduce(d[0], nl.add, s[0], 1), "float32", [Out((2, 1))],
     Engine.VECTOR, SIZE),
    ("bf16 sum", lambda d, s: nisa.tensor_reduce(d[0], nl.add, s[0], 1), "bfloat16",
     [Out((2, 1), "bfloat16")], Engine.VECTOR, SIZE / 2),
    ("bf16 product", lambda d, s: nisa.tensor_reduce(d[0], nl.multiply, s[0], 1), "bfloat16",
     [Out((2, 1), "bfloat16")], Engine.VECTOR, SIZE),
    ("partitions", lambda d, s: nisa.tensor_partition_reduce(d[0], nl.add, s[0]), "float32",
     [Out((1, SIZE))], Engine.GPSIMD, SIZE),
    ("scan", lambda d, s: nisa.tensor_tensor_scan(d[0], s[0], s[0], 0.0, nl.add, nl.add),
     "float32", [Out((2, SIZE))], Engine.VECTOR, 2 * SIZE),
    ("bn_stats", lambda d, s: nisa.bn_stats(d[0], s[0]), "float32", [Out((2, 6))],
     Engine.VECTOR, SIZE),
    ("max8", lambda d, s: nisa.max8(d[0], s[0]), "float32", [Out((2, 8))], Engine.VECTOR, SIZE),
    ("scalar", lambda d, s: nisa.tensor_scalar_reduce(d[0], s[0], nl.add, 1.0, nl.add), "float32",
     [Out((2, SIZE))], Engine.VECTOR, SIZE + 64),
    ("cumulative", lambda d, s: nisa.tensor_scalar_cumulative(d[0], s[0], nl.add, nl.add, 1.0),
     "float32", [Out((2, SIZE))], Engine.VECTOR, SIZE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "dtype", "outs", "engine", "cycles"),
    [case[1:] for case in COSTS],
    ids=[case[0] for case in COSTS],
)
def test_engines_and_costs_in_trace_mode(body, dtype, outs, engine, cycles):
    done = call(body, values(0, (2, SIZE), dtype), outs=outs, mode="trace")
    assert [(f.engine, f.cycles) for f in done.templates] == [(engine, cycles)]
    assert [(o.shape, o.dtype) for o in done.outputs] == [(o.shape, o.dtype) for o in outs]
