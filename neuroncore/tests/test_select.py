"""Selections against plain statements of them, element by element."""

import itertools

import numpy as np
from draws import either, few, memories, pick, seeds, steps
from hypothesis import given
from hypothesis import strategies as st
from instruction_runs import Out, call, compute, new, refusals, refuses, zeros
from samples import BINARY, as_stored, rows_of, values

from neuroncore import isa as nisa
from neuroncore import language as nl

COMPARE = ["equal", "less", "less_equal", "greater", "greater_equal"]
COMMAND = nisa.reduce_cmd
LOWEST = float(np.finfo(np.float32).min)

dtypes = pick(["float32", "bfloat16", "int32", "uint8"])
patterns = st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 4)), min_size=1, max_size=4)


@few
@given(seeds, dtypes, pick(["uint8", "uint16", "uint32"]), either, either, steps)
def test_tensor_copy_predicated(seed, dtype, kind, reverse, tiled, step):
    old, fresh = values(seed, (3, 2, 4), dtype), values(seed + 1, (3, 2, 4), dtype)
    predicate = np.random.default_rng(seed).integers(0, 3, (3, 8)).astype(kind)

    def body(dsts, srcs):
        nisa.tensor_copy_predicated(dsts[0], srcs[0] if tiled else 3, srcs[1], reverse)

    done = call(body, fresh, predicate, outs=[Out(old.shape, dtype, old)], step=step)
    for place in itertools.product(range(3), range(2), range(4)):
        p, i, j = place
        chosen = bool(predicate[p, 4 * i + j]) != reverse
        expected = (fresh[place] if tiled else 3) if chosen else old[place]
        assert done.output[place] == expected


def test_tensor_copy_predicated_is_bit_exact():
    odd = np.array([[2**31 - 1, -(2**31) + 1, 2**24 + 1, 5]], np.int32)
    ones, old = np.ones((1, 4), np.uint8), Out((1, 4), "int32", np.zeros_like(odd))
    done = call(lambda d, s: nisa.tensor_copy_predicated(d[0], s[0], s[1]), odd, ones, outs=[old])
    assert done.output.tolist() == odd.tolist()


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

    def body(dst):
        nisa.iota(dst, [list(p) for p in pattern], offset, channel)

    got = compute(body, (5, len(expected[0])), dtype, step=step)
    np.testing.assert_array_equal(got, as_stored(expected, dtype))


def test_iota_computes_in_int32_and_saturates():
    assert compute(lambda d: nisa.iota(d, [[150, 3]], -1), (1, 3), "uint8").tolist() == [
        [0, 149, 255]
    ]
    got = compute(lambda d: nisa.iota(d, [[2**24 + 1, 3]], offset=2**31 - 1), (1, 3), "int32")
    assert got.tolist() == [[2**31 - 1, 2**24 - 2**31, 2**25 + 1 - 2**31]]


@few
@given(
    patterns, st.integers(-9, 9), st.integers(-4, 4), pick([*COMPARE, "not_equal"]), dtypes, dtypes,
    steps,
)  # fmt: skip
def test_affine_select(pattern, offset, channel, compare, source, target, step):
    places = affine(pattern, offset, channel, 3)
    x = values(offset + 9, (3, len(places[0])), source)

    def body(dst, src):
        op = getattr(nl, compare)
        nisa.affine_select(dst, pattern, channel, src, -2.5, cmp_op=op, offset=offset)

    got = compute(body, x.shape, target, x, step=step)
    expected = np.where(BINARY[compare](np.array(places), 0), x.astype(np.float64), -2.5)
    np.testing.assert_array_equal(got, as_stored(expected, target))


def ranges(start, bounds, op0, op1):
    """Where `start` plus the place, of 8, is within the bounds [2][P, 1]."""
    places = start + np.arange(8)[None]
    return BINARY[op0](places, bounds[0]) & BINARY[op1](places, bounds[1])


@few
@given(
    seeds, pick(COMPARE), pick(COMPARE), st.integers(-5, 5),
    pick(["float32", "bfloat16"]), memories, steps,
)  # fmt: skip
def test_range_select(seed, op0, op1, start, dtype, memory, step):
    x = values(seed, (3, 2, 4), dtype)
    bounds = np.random.default_rng(seed).integers(-6, 12, (2, 3, 1)).astype(np.float32)

    def body(dsts, srcs):
        ops = getattr(nl, op0), getattr(nl, op1)
        nisa.range_select(
            dsts[0], srcs[0], *ops, srcs[1], srcs[2], reduce_res=dsts[1], range_start=start
        )

    outs = [Out((3, 8), dtype), Out((3, 1))]
    done = call(body, x, *bounds, outs=outs, memory=memory, step=step)
    rows = np.where(ranges(start, bounds, op0, op1), np.array(rows_of(x)), LOWEST)
    np.testing.assert_array_equal(done.outputs[0], as_stored(rows, dtype))
    np.testing.assert_array_equal(done.outputs[1], rows.max(1, keepdims=True))


def test_range_select_goes_on_with_the_maximum():
    x = values(1, (2, 8))
    bounds = np.zeros((2, 1), np.float32), np.full((2, 1), 8, np.float32)

    def body(dsts, srcs):
        inside = (nl.greater_equal, nl.less, srcs[1], srcs[2])
        nisa.range_select(dsts[0], srcs[0][:, :4], *inside)
        nisa.range_select(dsts[0], srcs[0][:, 4:], *inside, COMMAND.reduce, dsts[1])

    done = call(body, x, *bounds, outs=[Out((2, 4)), Out((2, 1))])
    np.testing.assert_array_equal(done.outputs[1], x.max(1, keepdims=True))


@few
@given(
    seeds, pick(["float32", "bfloat16", "int16"]), pick(["int8", "uint8", "int16", "uint16"]),
    either, either, steps,
)  # fmt: skip
def test_select_reduce(seed, dtype, kind, reverse, tiled, step):
    x, other = values(seed, (3, 5), dtype), values(seed + 1, (3, 1))
    predicate = np.random.default_rng(seed).integers(0, 3, (3, 5)).astype(kind)

    def body(dsts, srcs):
        where = (dsts[0], srcs[1], srcs[0], srcs[2] if tiled else -1.5)
        nisa.select_reduce(*where, dsts[1], COMMAND.reset_reduce, reverse_pred=reverse)

    done = call(body, x, predicate, other, outs=[Out((3, 5)), Out((3, 1))], step=step)
    rows = np.where((predicate != 0) != reverse, x.astype(np.float32), other if tiled else -1.5)
    assert done.outputs[0].tolist() == rows.tolist()
    assert done.outputs[1].tolist() == rows.max(1, keepdims=True).tolist()


def test_idle_leaves_the_accumulators_undefined():
    def body(dsts, srcs):
        operands = (dsts[0], srcs[0], srcs[0], 0.0)
        nisa.select_reduce(*operands, reduce_cmd=COMMAND.reset_reduce)
        nisa.select_reduce(*operands)
        nisa.select_reduce(*operands, dsts[1], COMMAND.reduce)

    done = call(body, values(0, (2, 3), "uint8"), outs=[Out((2, 3)), Out((2, 1))])
    assert np.isnan(done.outputs[1]).all()


def predicated(dtype="float32", kind="uint8", shape=(2, 3), memory=nl.sbuf):
    tiles = zeros(2, 3, buffer=memory), zeros(2, 3, dtype=dtype, buffer=memory)
    nisa.tensor_copy_predicated(*tiles, zeros(*shape, dtype=kind, buffer=memory))


def iota(pattern=((1, 6),), memory=nl.sbuf, **options):
    nisa.iota(new(2, 6, buffer=memory), [list(p) for p in pattern], **options)


def affine_select(memory=nl.sbuf, pattern=((1, 6),), **options):
    tiles = {"dst": new(2, 6, buffer=memory), "on_true_tile": zeros(2, 6, buffer=memory)}
    given = {"channel_multiplier": 1, "on_false_value": 0.0, **options}
    nisa.affine_select(**tiles, pattern=[list(p) for p in pattern], **given)


def range_select(dtype="float32", bound="float32", **options):
    given = {"comp_op0": nl.less, "comp_op1": nl.less, **options}
    bounds = {name: zeros(2, 1, dtype=bound) for name in ("bound0", "bound1")}
    tiles = new(2, 3), zeros(2, 3, dtype=dtype)
    nisa.range_select(*tiles, **bounds, reduce_res=new(2, 1), **given)


def select_reduce(dtype="float32", kind="uint8", memory=nl.sbuf, result=None, **options):
    if result:
        options["reduce_res"] = new(2, 1, dtype=result)
    x, predicate = (zeros(2, 3, dtype=d, buffer=memory) for d in (dtype, kind))
    nisa.select_reduce(new(2, 3, buffer=memory), predicate, x, **{"on_false": 0.0, **options})


@refusals(
    ("predicate must be uint8, uint16, uint32", lambda: predicated(kind="int8")),
    ("must have one dtype", lambda: predicated("bfloat16")),
    ("elements per partition differ", lambda: predicated(shape=(2, 4))),
    ("partition counts differ", lambda: predicated(shape=(3, 3))),
    ("both inputs are in PSUM", lambda: predicated(memory=nl.psum)),
    ("of which no element was ever written",
     lambda: nisa.tensor_copy_predicated(new(2, 3), 1.0, zeros(2, 3, dtype="uint8"))),
    ("has 4 elements and dst 6 per partition", lambda: iota([(1, 4)])),
    ("pattern is one to four [step, count] pairs", lambda: iota([])),
    ("pattern is one to four [step, count] pairs", lambda: iota([(1, 1)] * 4 + [(1, 6)])),
    ("offset must be an int32", lambda: iota(offset=2**31)),
    ("channel_multiplier must be an int32", lambda: iota(channel_multiplier=0.5)),
    ("iota: dst must be in sbuf", lambda: iota(memory=nl.psum)),
    ("cmp_op must be one of nl.equal", lambda: affine_select(cmp_op=nl.add)),
    ("has 5 elements and dst 6 per partition", lambda: affine_select(pattern=[(1, 5)])),
    ("on_false_value must be a number", lambda: affine_select(on_false_value=None)),
    ("offset must be an int32", lambda: affine_select(offset=1.5)),
    ("affine_select: dst must be in sbuf", lambda: affine_select(nl.psum)),
    ("range_select: it needs NeuronCore-v3", range_select, "trn1"),
    ("comp_op0 must be one of nl.equal", lambda: range_select(comp_op0=nl.not_equal)),
    ("comp_op1 must be one of nl.equal", lambda: range_select(comp_op1=nl.maximum)),
    ("nl.add does not reduce; use nl.maximum", lambda: range_select(reduce_op=nl.add)),
    ("on_false_value must be -3.40282346", lambda: range_select(on_false_value=0.0)),
    ("must be ints within 2**24", lambda: range_select(range_start=2**24)),
    ("must be ints within 2**24", lambda: range_select(range_start=0.5)),
    ("reduce_cmd must be one", lambda: range_select(reduce_cmd=COMMAND.load_reduce)),
    ("reduce_cmd.idle is undefined", lambda: range_select(reduce_cmd=COMMAND.idle)),
    ("on_true_tile must be of a float type", lambda: range_select("int32")),
    ("a scalar operand must be float32", lambda: range_select(bound="bfloat16")),
    ("select_reduce: it needs NeuronCore-v3", select_reduce, "trn1"),
    ("nl.add does not reduce", lambda: select_reduce(reduce_op=nl.add)),
    ("reduce_cmd must be one", lambda: select_reduce(reduce_cmd=COMMAND.reset)),
    ("on_false must be a number", lambda: select_reduce(on_false=None)),
    ("on_true must not be tfloat32, int32, uint32", lambda: select_reduce("int32")),
    ("predicate must be int8, uint8, int16, uint16", lambda: select_reduce(kind="uint32")),
    ("both inputs are in PSUM", lambda: select_reduce(memory=nl.psum)),
    ("reduce_cmd.idle is undefined", lambda: select_reduce(result="float32")),
    ("reduce_res must be of a float",
     lambda: select_reduce(result="int32", reduce_cmd=COMMAND.reset_reduce)),
)  # fmt: skip
def test_what_is_refused(text, body, target):
    refuses(text, body, target=target)
