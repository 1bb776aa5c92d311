"""Selections against plain statements of them, element by element."""

import itertools
import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import Out, as_stored, call, refused, values

from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.hardware import Engine

COMPARE: dict[str, Any] = {
    "equal": operator.eq,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
}
COMMAND = nisa.reduce_cmd
LOWEST = float(np.finfo(np.float32).min)

seeds = st.integers(0, 2**32 - 1)
steps = st.sampled_from([1, 2, 3])
memories = st.sampled_from([nl.sbuf, nl.psum])
dtypes = st.sampled_from(["float32", "bfloat16", "int32", "uint8"])
few = settings(max_examples=20)


@few
@given(
    seeds,
    dtypes,
    st.sampled_from(["uint8", "uint16", "uint32"]),
    st.booleans(),
    st.booleans(),
    steps,
)
def test_tensor_copy_predicated(seed, dtype, kind, reverse, tiled, step):
    old, new = values(seed, (3, 2, 4), dtype), values(seed + 1, (3, 2, 4), dtype)
    predicate = np.random.default_rng(seed).integers(0, 3, (3, 8)).astype(kind)

    def body(dsts, srcs):
        nisa.tensor_copy_predicated(dsts[0], srcs[0] if tiled else 3, srcs[1], reverse)

    done = call(body, new, predicate, outs=[Out(old.shape, dtype, old)], step=step)
    for place in itertools.product(range(3), range(2), range(4)):
        p, i, j = place
        chosen = bool(predicate[p, 4 * i + j]) != reverse
        expected = (new[place] if tiled else 3) if chosen else old[place]
        assert done.output[place] == expected


def test_tensor_copy_predicated_is_bit_exact():
    odd = np.array([[2**31 - 1, -(2**31) + 1, 2**24 + 1, 5]], np.int32)
    ones, old = np.ones((1, 4), np.uint8), Out((1, 4), "int32", np.zeros_like(odd))
    done = call(lambda d, s: nisa.tensor_copy_predicated(d[0], s[0], s[1]), odd, ones, outs=[old])
    assert done.output.tolist() == odd.tolist()


PREDICATED: list[tuple[Any, ...]] = [
    ("float32", "int8", (2, 3), nl.sbuf, "predicate must be uint8, uint16, uint32"),
    ("bfloat16", "uint8", (2, 3), nl.sbuf, "must have one dtype"),
    ("float32", "uint8", (2, 4), nl.sbuf, "elements per partition differ"),
    ("float32", "uint8", (3, 3), nl.sbuf, "partition counts differ"),
    ("float32", "uint8", (2, 3), nl.psum, "both inputs are in PSUM"),
]


@pytest.mark.parametrize(("dtype", "kind", "shape", "memory", "text"), PREDICATED)
def test_tensor_copy_predicated_refuses(dtype, kind, shape, memory, text):
    with refused(text):
        call(
            lambda d, s: nisa.tensor_copy_predicated(d[0], s[0], s[1]),
            values(0, (2, 3), dtype),
            values(0, shape, kind),
            outs=[Out((2, 3), "float32", values(1, (2, 3)))],
            memory=memory,
        )


def test_tensor_copy_predicated_keeps_what_must_exist():
    with refused("of which no element was ever written"):
        call(
            lambda d, s: nisa.tensor_copy_predicated(d[0], 1.0, s[0]),
            values(0, (2, 3), "uint8"),
            outs=[Out((2, 3))],
        )


patterns = st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 4)), min_size=1, max_size=4)


def affine(pattern, offset: int, channel: int, partitions: int) -> list[list[int]]:
    """The documented loops."""
    counts = [range(count) for _, count in pattern]
    return [
        [
            offset + p * channel + sum(i * s for i, (s, _) in zip(at, pattern, strict=True))
            for at in itertools.product(*counts)
        ]
        for p in range(partitions)
    ]


@few
@given(patterns, st.integers(-99, 99), st.integers(-9, 9), dtypes, steps)
def test_iota(pattern, offset, channel, dtype, step):
    expected = affine(pattern, offset, channel, 5)
    size = len(expected[0])
    done = call(
        lambda d, s: nisa.iota(d[0], [list(p) for p in pattern], offset, channel),
        outs=[Out((5, size), dtype)],
        step=step,
    )
    np.testing.assert_array_equal(done.output, as_stored(expected, dtype))


def test_iota_computes_in_int32_and_saturates():
    done = call(lambda d, s: nisa.iota(d[0], [[150, 3]], -1), outs=[Out((1, 3), "uint8")])
    assert done.output.tolist() == [[0, 149, 255]]

    def body(dsts, srcs):
        nisa.iota(dsts[0], [[2**24 + 1, 3]], offset=2**31 - 1)

    expected = [2**31 - 1, 2**24 - 2**31, 2**25 + 1 - 2**31]
    assert call(body, outs=[Out((1, 3), "int32")]).output.tolist() == [expected]


@pytest.mark.parametrize(
    ("pattern", "options", "memory", "text"),
    [
        ([[1, 4]], {}, nl.sbuf, "has 4 elements and dst 6 per partition"),
        ([], {}, nl.sbuf, "pattern is one to four [step, count] pairs"),
        ([[1, 1]] * 4 + [[1, 6]], {}, nl.sbuf, "pattern is one to four [step, count] pairs"),
        ([[1, 6]], {"offset": 2**31}, nl.sbuf, "offset must be an int32"),
        ([[1, 6]], {"channel_multiplier": 0.5}, nl.sbuf, "channel_multiplier must be an int32"),
        ([[1, 6]], {}, nl.psum, "dst must be in sbuf"),
    ],
)
def test_iota_refuses(pattern, options, memory, text):
    with refused(text):
        call(lambda d, s: nisa.iota(d[0], pattern, **options), outs=[Out((2, 6))], memory=memory)


@few
@given(
    patterns,
    st.integers(-9, 9),
    st.integers(-4, 4),
    st.sampled_from([*COMPARE, "not_equal"]),
    dtypes,
    dtypes,
    steps,
)
def test_affine_select(pattern, offset, channel, compare, source, target, step):
    places = affine(pattern, offset, channel, 3)
    x = values(offset + 9, (3, len(places[0])), source)

    def body(dsts, srcs):
        op = getattr(nl, compare)
        nisa.affine_select(dsts[0], pattern, channel, srcs[0], -2.5, cmp_op=op, offset=offset)

    done = call(body, x, outs=[Out(x.shape, target)], step=step)
    test = {**COMPARE, "not_equal": operator.ne}[compare]
    expected = [
        [v if test(a, 0) else -2.5 for v, a in zip(row, line, strict=True)]
        for row, line in zip(x.astype(np.float64).tolist(), places, strict=True)
    ]
    np.testing.assert_array_equal(done.output, as_stored(expected, target))


def test_affine_select_makes_a_causal_mask():
    x = values(0, (6, 6))

    def body(dsts, srcs):
        nisa.affine_select(dsts[0], [[-1, 6]], 1, srcs[0], -9999.0, cmp_op=nl.greater_equal)

    expected = np.where(np.tri(6) != 0, x, np.float32(-9999))
    np.testing.assert_array_equal(call(body, x, outs=[Out((6, 6))]).output, expected)


@pytest.mark.parametrize(
    ("options", "memory", "text"),
    [
        ({"cmp_op": nl.add}, nl.sbuf, "cmp_op must be one of nl.equal"),
        ({"pattern": [[1, 5]]}, nl.sbuf, "has 5 elements and dst 6 per partition"),
        ({"on_false_value": None}, nl.sbuf, "on_false_value must be a number"),
        ({"offset": 1.5}, nl.sbuf, "offset must be an int32"),
        ({}, nl.psum, "dst must be in sbuf"),
    ],
)
def test_affine_select_refuses(options, memory, text):
    given = {"pattern": [[1, 6]], "channel_multiplier": 1, "on_false_value": 0.0, **options}
    with refused(text):
        call(
            lambda d, s: nisa.affine_select(d[0], on_true_tile=s[0], **given),
            values(0, (2, 6)),
            outs=[Out((2, 6))],
            memory=memory,
        )


@few
@given(
    seeds,
    st.sampled_from(list(COMPARE)),
    st.sampled_from(list(COMPARE)),
    st.integers(-5, 5),
    st.sampled_from(["float32", "bfloat16"]),
    memories,
    steps,
)
def test_range_select(seed, op0, op1, start, dtype, memory, step):
    x = values(seed, (3, 2, 4), dtype)
    bounds = np.random.default_rng(seed).integers(-6, 12, (2, 3, 1)).astype(np.float32)

    def body(dsts, srcs):
        ops = getattr(nl, op0), getattr(nl, op1)
        nisa.range_select(
            dsts[0], srcs[0], *ops, srcs[1], srcs[2], reduce_res=dsts[1], range_start=start
        )

    outs = [Out((3, 8), dtype), Out((3, 1))]
    done = call(body, x, bounds[0], bounds[1], outs=outs, memory=memory, step=step)
    rows = [
        [
            v if COMPARE[op0](start + i, low) and COMPARE[op1](start + i, high) else LOWEST
            for i, v in enumerate(row)
        ]
        for row, low, high in zip(
            x.reshape(3, 8).astype(np.float64).tolist(),
            *[b[:, 0].tolist() for b in bounds],
            strict=True,
        )
    ]
    np.testing.assert_array_equal(done.outputs[0], as_stored(rows, dtype))
    np.testing.assert_array_equal(done.outputs[1], [[max(row)] for row in rows])


def test_range_select_goes_on_with_the_maximum():
    x = values(1, (2, 8))
    bounds = np.zeros((2, 1), np.float32), np.full((2, 1), 8, np.float32)

    def body(dsts, srcs):
        inside = (nl.greater_equal, nl.less, srcs[1], srcs[2])
        nisa.range_select(dsts[0], srcs[0][:, :4], *inside)
        nisa.range_select(dsts[0], srcs[0][:, 4:], *inside, COMMAND.reduce, dsts[1])

    done = call(body, x, *bounds, outs=[Out((2, 4)), Out((2, 1))])
    np.testing.assert_array_equal(done.outputs[1], x.max(1, keepdims=True))


RANGES: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("trn1", {}, "float32", "float32", "range_select: it needs NeuronCore-v3"),
    ("trn2", {"comp_op0": nl.not_equal}, "float32", "float32", "comp_op0 must be one of nl.equal"),
    ("trn2", {"comp_op1": nl.maximum}, "float32", "float32", "comp_op1 must be one of nl.equal"),
    ("trn2", {"reduce_op": nl.add}, "float32", "float32", "nl.add does not reduce; use nl.maximum"),
    ("trn2", {"on_false_value": 0.0}, "float32", "float32", "on_false_value must be -3.40282346"),
    ("trn2", {"range_start": 2**24}, "float32", "float32", "must be ints within 2**24"),
    ("trn2", {"range_start": 0.5}, "float32", "float32", "must be ints within 2**24"),
    ("trn2", {"reduce_cmd": COMMAND.load_reduce}, "float32", "float32", "reduce_cmd must be one"),
    ("trn2", {"reduce_cmd": COMMAND.idle}, "float32", "float32", "reduce_cmd.idle is undefined"),
    ("trn2", {}, "int32", "float32", "on_true_tile must be of a float type"),
    ("trn2", {}, "float32", "bfloat16", "a scalar operand must be float32"),
]


@pytest.mark.parametrize(("target", "options", "dtype", "bound", "text"), RANGES)
def test_range_select_refuses(target, options, dtype, bound, text):
    given = {"comp_op0": nl.less, "comp_op1": nl.less, **options}
    with refused(text):
        call(
            lambda d, s: nisa.range_select(
                d[0], s[0], bound0=s[1], bound1=s[1], reduce_res=d[1], **given
            ),
            values(0, (2, 3), dtype),
            values(0, (2, 1), bound),
            outs=[Out((2, 3)), Out((2, 1))],
            target=target,
        )


@few
@given(
    seeds,
    st.sampled_from(["float32", "bfloat16", "int16"]),
    st.sampled_from(["int8", "uint8", "int16", "uint16"]),
    st.booleans(),
    st.booleans(),
    steps,
)
def test_select_reduce(seed, dtype, kind, reverse, tiled, step):
    x, other = values(seed, (3, 5), dtype), values(seed + 1, (3, 1))
    predicate = np.random.default_rng(seed).integers(0, 3, (3, 5)).astype(kind)

    def body(dsts, srcs):
        nisa.select_reduce(
            dsts[0],
            srcs[1],
            srcs[0],
            srcs[2] if tiled else -1.5,
            dsts[1],
            COMMAND.reset_reduce,
            reverse_pred=reverse,
        )

    done = call(body, x, predicate, other, outs=[Out((3, 5)), Out((3, 1))], step=step)
    rows = [
        [
            float(x[p, i])
            if bool(predicate[p, i]) != reverse
            else float(other[p, 0] if tiled else -1.5)
            for i in range(5)
        ]
        for p in range(3)
    ]
    assert done.outputs[0].tolist() == rows
    assert done.outputs[1].tolist() == [[max(row)] for row in rows]


def test_idle_leaves_the_accumulators_undefined():
    def body(dsts, srcs):
        operands = (dsts[0], srcs[0], srcs[0], 0.0)
        nisa.select_reduce(*operands, reduce_cmd=COMMAND.reset_reduce)
        nisa.select_reduce(*operands)
        nisa.select_reduce(*operands, dsts[1], COMMAND.reduce)

    done = call(body, values(0, (2, 3), "uint8"), outs=[Out((2, 3)), Out((2, 1))])
    assert np.isnan(done.outputs[1]).all()


SELECTS: list[tuple[str, dict[str, Any], str, str, Any, str]] = [
    ("trn1", {}, "float32", "uint8", nl.sbuf, "select_reduce: it needs NeuronCore-v3"),
    ("trn2", {"reduce_op": nl.add}, "float32", "uint8", nl.sbuf, "nl.add does not reduce"),
    ("trn2", {"reduce_cmd": COMMAND.reset}, "float32", "uint8", nl.sbuf, "reduce_cmd must be one"),
    ("trn2", {"on_false": None}, "float32", "uint8", nl.sbuf, "on_false must be a number"),
    ("trn2", {}, "int32", "uint8", nl.sbuf, "on_true must not be tfloat32, int32, uint32"),
    ("trn2", {}, "float32", "uint32", nl.sbuf, "predicate must be int8, uint8, int16, uint16"),
    ("trn2", {}, "float32", "uint8", nl.psum, "both inputs are in PSUM"),
    ("trn2", {"reduce_res": "idle"}, "float32", "uint8", nl.sbuf, "reduce_cmd.idle is undefined"),
    ("trn2", {"reduce_res": "int"}, "float32", "uint8", nl.sbuf, "reduce_res must be of a float"),
]


@pytest.mark.parametrize(("target", "options", "dtype", "kind", "memory", "text"), SELECTS)
def test_select_reduce_refuses(target, options, dtype, kind, memory, text):
    def body(dsts, srcs):
        given = {"on_false": 0.0, **options}
        if given.get("reduce_res") == "int":
            given |= {"reduce_res": dsts[2], "reduce_cmd": COMMAND.reset_reduce}
        elif "reduce_res" in given:
            given["reduce_res"] = dsts[1]
        nisa.select_reduce(dsts[0], srcs[1], srcs[0], **given)

    outs = [Out((2, 3)), Out((2, 1)), Out((2, 1), "int32")]
    with refused(text):
        call(
            body,
            values(0, (2, 3), dtype),
            values(0, (2, 3), kind),
            outs=outs,
            target=target,
            memory=memory,
        )


SIZE = 256
COSTS: list[tuple[str, Any, Any, Engine, float]] = [
    ("copy", lambda d, s: nisa.tensor_copy_predicated(d[0], 0, s[1]), nl.sbuf, Engine.VECTOR, 512),
    ("psum", lambda d, s: nisa.tensor_copy_predicated(d[0], 0, s[1]), nl.psum, Engine.VECTOR, 256),
    ("iota", lambda d, s: nisa.iota(d[0], [[1, SIZE]]), nl.sbuf, Engine.GPSIMD, 150 + SIZE),
    ("affine", lambda d, s: nisa.affine_select(d[0], [[1, SIZE]], 1, s[0], 0.0), nl.sbuf,
     Engine.GPSIMD, 150 + SIZE),
    ("range", lambda d, s: nisa.range_select(d[0], s[0], nl.less, nl.less, s[2], s[2]), nl.sbuf,
     Engine.VECTOR, SIZE),
    ("sel", lambda d, s: nisa.select_reduce(d[0], s[1], s[0], 0.0), nl.sbuf, Engine.VECTOR, SIZE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "memory", "engine", "cycles"), [c[1:] for c in COSTS], ids=[c[0] for c in COSTS]
)
def test_engines_and_costs_in_trace_mode(body, memory, engine, cycles):
    x = values(0, (2, SIZE))
    done = call(
        body,
        x,
        values(0, x.shape, "uint8"),
        values(0, (2, 1)),
        outs=[Out(x.shape, "float32", x)],
        memory=memory,
        mode="trace",
    )
    assert [(f.engine, f.cycles) for f in done.templates] == [(engine, cycles)]
    assert done.output.shape == x.shape
