"""Reductions against plain statements of them on Python numbers."""

import functools
import math

import numpy as np
from draws import either, few, kinds, memories, pick, seeds, steps
from hypothesis import given
from hypothesis import strategies as st
from instruction_runs import Out, call, compute, new, refusals, refuses, zeros
from samples import BINARY, BITVEC, LOGICAL, OPERATORS, START, as_stored, rows_of, values

from neuroncore import isa as nisa
from neuroncore import language as nl

COMMAND = nisa.reduce_cmd
BITS = ["bitwise_and", "bitwise_or", "bitwise_xor"]


@few
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4), st.data(), pick([*OPERATORS, *LOGICAL]),
    kinds, kinds, either,
)  # fmt: skip
def test_tensor_reduce(shape, data, op, source, target, negate):
    kept = data.draw(st.integers(1, len(shape) - 1))
    axes = list(range(kept, len(shape)))
    x = values(data.draw(seeds), tuple(shape), source)
    if op == "multiply":
        x = x.clip(0, 2).astype(x.dtype)
    left = math.prod(shape[1:kept])

    def body(dst, src):
        axis = axes[0] if len(axes) == 1 else data.draw(pick([axes, tuple(axes)]))
        nisa.tensor_reduce(dst, getattr(nl, op), src, axis, negate=negate)

    memory, step = data.draw(memories), data.draw(steps)
    got = compute(body, (shape[0], left), target, x, memories=memory, step=step)
    groups = x.reshape(shape[0] * left, -1).astype(np.float64).tolist()
    truth = [float(bool(v)) if op in LOGICAL else v for v in (g[0] for g in groups)]
    truth = [functools.reduce(BINARY[op], g[1:], t) for g, t in zip(groups, truth, strict=True)]
    expected = np.reshape(truth, (shape[0], left)) * (-1 if negate else 1)
    np.testing.assert_array_equal(got, as_stored(expected, target))


@few
@given(seeds, pick(BITS), pick(["int32", "uint8", "int16"]))
def test_tensor_reduce_of_bits(seed, op, dtype):
    x = values(seed, (3, 5), dtype)

    def body(dst, src):
        nisa.tensor_reduce(dst, getattr(nl, op), src, axis=1, keepdims=True)

    expected = [[functools.reduce(BITVEC[op], row)] for row in x.tolist()]
    assert compute(body, (3, 1), dtype, x).tolist() == expected


@few
@given(seeds, st.integers(1, 40), pick(["add", "maximum"]), kinds, kinds)
def test_tensor_partition_reduce(seed, partitions, op, source, target):
    x = values(seed, (partitions, 2, 3), source)

    def body(dst, src):
        nisa.tensor_partition_reduce(dst, getattr(nl, op), src)

    columns = x.reshape(partitions, 6).astype(np.float64).T.tolist()
    expected = [[functools.reduce(BINARY[op], column) for column in columns]]
    np.testing.assert_array_equal(compute(body, (1, 6), target, x), as_stored(expected, target))


def test_tensor_partition_reduce_of_bits():
    x = values(0, (9, 4), "uint16")
    for op in ("bitwise_and", "bitwise_or"):

        def body(dst, src, op=op):
            nisa.tensor_partition_reduce(dst, getattr(nl, op), src)

        got = compute(body, (1, 4), "uint16", x)
        assert got.tolist() == [[functools.reduce(BITVEC[op], c) for c in x.T.tolist()]]


@few
@given(
    seeds, pick(["add", "subtract", "multiply", "maximum"]),
    pick(["add", "multiply", "maximum", "minimum"]), either, kinds, memories, steps,
)  # fmt: skip
def test_tensor_scalar_reduce(seed, op, reduce_op, tiled, dtype, memory, step):
    x, operand = values(seed, (4, 2, 3), dtype), values(seed + 1, (4, 1))

    def body(dsts, srcs):
        scalar, ops = srcs[1] if tiled else 1.5, [getattr(nl, name) for name in (op, reduce_op)]
        nisa.tensor_scalar_reduce(dsts[0], srcs[0], ops[0], scalar, ops[1], dsts[1])

    done = call(body, x, operand, outs=[Out((4, 6), dtype), Out((4, 1))], memory=memory, step=step)
    right = operand[:, 0].tolist() if tiled else [1.5] * 4
    rows = [[BINARY[op](v, y) for v in row] for row, y in zip(rows_of(x), right, strict=True)]
    np.testing.assert_array_equal(done.outputs[0], as_stored(rows, dtype))
    totals = [[functools.reduce(BINARY[reduce_op], row, START[reduce_op])] for row in rows]
    np.testing.assert_allclose(done.outputs[1], totals, rtol=1e-6)


def test_accumulators_go_on_and_start_where_told():
    x, start = values(3, (4, 5)), values(4, (4, 1))

    def body(dsts, srcs):
        def total(command, result=None, **options):
            given = (dsts[0], srcs[0], nl.abs, 0, nl.add, result)
            nisa.tensor_scalar_reduce(*given, reduce_cmd=command, **options)

        total(COMMAND.reset_reduce)
        total(COMMAND.reduce, dsts[1])
        total(COMMAND.reduce, dsts[2], reduce_res_negate=True)
        total(COMMAND.load_reduce, dsts[3], reduce_init=srcs[1])
        total(COMMAND.load_reduce, dsts[4], reduce_init=0.5)
        total(COMMAND.reset_reduce, dsts[5])

    done = call(body, x, start, outs=[Out((4, 5)), *[Out((4, 1))] * 5])
    once = np.abs(x.astype(np.float64)).sum(1, keepdims=True)
    expected = [2 * once, -3 * once, start + once, 0.5 + once, once]
    for output, want in zip(done.outputs[1:], expected, strict=True):
        np.testing.assert_array_equal(output, want)


def test_accumulators_belong_to_partitions_and_are_undefined_before_a_reset():
    x = values(5, (64, 3))

    def body(dsts, srcs):
        def add(rows, *result, **command):
            given = (dsts[0][rows], srcs[0][rows], nl.add, 0.0, nl.add)
            nisa.tensor_scalar_reduce(*given, *result, **command)

        add(slice(0, 64), dsts[2], reduce_cmd=COMMAND.reduce)
        for rows in (slice(0, 32), slice(32, 64)):
            add(rows)
        add(slice(0, 64), dsts[1], reduce_cmd=COMMAND.reduce)

    done = call(body, x, outs=[Out((64, 3)), Out((64, 1)), Out((64, 1))])
    np.testing.assert_array_equal(done.outputs[1], 2 * x.sum(1, keepdims=True))
    assert np.isnan(done.outputs[2]).all()


def reduce(axis=(1, 2), op=nl.add, dtype="float32", source=None, shape=(2, 3, 4), **options):
    source = source or ("float32" if dtype == "float32" else "int32")
    nisa.tensor_reduce(new(2, 1, dtype=dtype), op, zeros(*shape, dtype=source), axis, **options)


def partition_reduce(out=(1, 4), op=nl.add, memory=nl.sbuf):
    nisa.tensor_partition_reduce(new(*out, buffer=memory), op, zeros(3, 4, buffer=memory))


def scalar_reduce(**options):
    given = {"op0": nl.add, "operand0": 1.0, "reduce_op": nl.add, **options}
    nisa.tensor_scalar_reduce(new(2, 3), zeros(2, 3), reduce_res=new(2, 1), **given)


@refusals(
    ("axis (1,) of", lambda: reduce(1)),
    ("axis (0,) of", lambda: reduce(0)),
    ("must be the last free dimensions, one of (1, 2), (2,)", lambda: reduce((1,))),
    ("axis (0, 1, 2) of", lambda: reduce((0, 1, 2))),
    ("axis (3,) of", lambda: reduce(3)),
    ("nl.power does not reduce", lambda: reduce(2, nl.power)),
    ("dst must have 3 elements per partition", lambda: reduce(2)),
    ("takes integer tiles", lambda: reduce(op=nl.bitwise_or)),
    ("keeps the element size", lambda: reduce(op=nl.bitwise_or, dtype="int16")),
    ("negate is for arithmetic operators",
     lambda: reduce(1, nl.bitwise_or, "int32", shape=(2, 3), negate=True)),
    ("nl.minimum does not reduce; use nl.add, nl.maximum",
     lambda: partition_reduce(op=nl.minimum)),
    ("dst must have 1 partitions", lambda: partition_reduce((3, 4))),
    ("elements per partition differ", lambda: partition_reduce((1, 3))),
    ("must be in sbuf", lambda: partition_reduce(memory=nl.psum)),
    ("takes integer tiles", lambda: partition_reduce(op=nl.bitwise_or)),
    ("nl.bitwise_and is a bit operator", lambda: scalar_reduce(op0=nl.bitwise_and)),
    ("reverse0 is not supported", lambda: scalar_reduce(reverse0=True)),
    ("nl.abs is unary; operand0 must be None or 0", lambda: scalar_reduce(op0=nl.abs)),
    ("nl.add needs operand0", lambda: scalar_reduce(operand0=None)),
    ("nl.subtract does not reduce", lambda: scalar_reduce(reduce_op=nl.subtract)),
    ("reduce_cmd must be one of reduce_cmd.reset_reduce",
     lambda: scalar_reduce(reduce_cmd=COMMAND.idle)),
    ("reduce_init and reduce_cmd.load_reduce come",
     lambda: scalar_reduce(reduce_cmd=COMMAND.load_reduce)),
    ("reduce_init and reduce_cmd.load_reduce come together",
     lambda: scalar_reduce(reduce_init=1.0)),
    ("must be a number or a tile [2, 1]", lambda: scalar_reduce(operand0=zeros(2, 3))),
    ("float32", lambda: scalar_reduce(operand0=zeros(2, 1, dtype="bfloat16"))),
)  # fmt: skip
def test_what_is_refused(text, body, target):
    refuses(text, body, target=target)
