"""activate2: both operators, either way round, functions, reductions and their accumulators."""

import math

import numpy as np
from draws import both_ways, either, memories, pick, seeds
from hypothesis import given, settings
from instruction_runs import Out, call, compute, new, refusals, refuses, zeros
from samples import data, values, wide

from neuroncore import isa as nisa
from neuroncore import language as nl

COMMAND = nisa.reduce_cmd
PAIRS = [
    ("multiply", "add"), ("multiply", "subtract"), ("multiply", "bypass"),
    ("add", "bypass"), ("subtract", "bypass"), ("bypass", "bypass"),
]  # fmt: skip
ALU = {"multiply": np.multiply, "add": np.add, "subtract": np.subtract}
REDUCE = {
    "add": lambda v: v.sum(1),
    "maximum": lambda v: v.max(1),
    "minimum": lambda v: v.min(1),
    "abs_max": lambda v: np.take_along_axis(v, abs(v).argmax(1)[:, None], 1)[:, 0],
    "abs_min": lambda v: np.take_along_axis(v, abs(v).argmin(1)[:, None], 1)[:, 0],
}


def staged(x, pair, operands, reverse):
    for op, operand, swap in zip(pair, operands, reverse, strict=True):
        if op != "bypass":
            x = ALU[op](operand, x) if swap else ALU[op](x, operand)
    return x


@settings(max_examples=40)
@given(pick(PAIRS), both_ways, either, either, memories, pick([None, *REDUCE]), seeds)
def test_activate2(pair, reverse, tiles, prelu, memory, reduce, seed):
    reverse = tuple(r and op != "bypass" for r, op in zip(reverse, pair, strict=True))
    x, columns = values(seed, (8, 5)), values(seed + 1, (8, 2))
    operands = (columns[:, :1], columns[:, 1:]) if tiles else (-1.5, 0.25)
    expected = staged(wide(x), pair, operands, reverse)
    expected = np.where(expected < 0, (0.5 if prelu else 0) * expected, expected)

    def body(dsts, srcs):
        t, c = srcs
        given = (c[:, :1], c[:, 1:]) if tiles else (-1.5, 0.25)
        options = {"relu_param": 0.5} if prelu else {}
        if reduce:
            options |= {"reduce_op": getattr(nl, reduce), "reduce_res": dsts[1]}
            options["reduce_cmd"] = COMMAND.reset_reduce
        else:
            nisa.memset(dsts[1], 0)
        function, ops = nl.prelu if prelu else nl.relu, [getattr(nl, op) for op in pair]
        options |= {"reverse0": reverse[0], "reverse1": reverse[1]}
        nisa.activate2(dsts[0], function, t, *given, *ops, **options)

    outs = [Out((8, 5)), Out((8, 1))]
    done = call(body, x, columns, outs=outs, target="trn3", memory=memory)
    np.testing.assert_array_equal(done.outputs[0], expected)
    if reduce:
        np.testing.assert_array_equal(done.outputs[1][:, 0], REDUCE[reduce](expected))


def test_accumulators_go_on_and_are_those_of_activation():
    x, y = values(0, (4, 6)), values(1, (4, 6))

    def body(dsts, srcs):
        add, most = {"reduce_op": nl.add}, {"reduce_op": nl.maximum}
        t, plain = dsts[0], (0.0, 0.0, nl.bypass, nl.bypass)
        nisa.activation(t, nl.copy, srcs[0], reduce_cmd=COMMAND.reset_reduce, **add)
        nisa.activate2(t, nl.copy, srcs[1], *plain, reduce_cmd=COMMAND.reduce, **add)
        nisa.activate2(t, nl.copy, srcs[0], *plain, reduce_res=dsts[1])  # idle: read only
        reset = {"reduce_cmd": COMMAND.reset, "reduce_res": dsts[2]}
        nisa.activate2(t, nl.copy, srcs[0], *plain, **reset, **most)

    outs = [Out((4, 6)), Out((4, 1)), Out((4, 1))]
    done = call(body, x, y, outs=outs, target="trn3")
    np.testing.assert_array_equal(done.outputs[1][:, 0], x.sum(1) + y.sum(1))
    np.testing.assert_array_equal(done.outputs[2], np.full((4, 1), -np.inf))


def test_the_documented_example():
    x = data((8, 16))

    def body(dst, src):
        nisa.activate2(dst, nl.gelu, src, imm0=2.0, imm1=0.5, op0=nl.multiply, op1=nl.add)

    u = wide(x) * 2 + 0.5
    gelu = u * (1 + np.vectorize(math.erf)(u / math.sqrt(2))) / 2
    got = compute(body, (8, 16), "float32", x, target="trn3")
    np.testing.assert_allclose(got, gelu, rtol=1e-5, atol=1e-6)


def issue(op0=nl.multiply, op1=nl.add, imm0=1.0, imm1=1.0, **options):
    nisa.activate2(new(4, 6), nl.copy, zeros(4, 6), imm0, imm1, op0, op1, **options)


@refusals(
    ("it needs NeuronCore-v4", issue, "trn2"),
    ("(op0, op1) must be one of", lambda: issue(nl.add, nl.multiply)),
    ("got (bypass, add)", lambda: issue(None, nl.add)),
    ("reverse0 needs op0", lambda: issue(None, None, reverse0=True)),
    ("reverse1 needs op1", lambda: issue(nl.add, nl.bypass, reverse1=True)),
    ("relu_param is nl.prelu's; nl.copy", lambda: issue(nl.add, nl.bypass, relu_param=0.5)),
    ("needs a reduce_op", lambda: issue(nl.add, None, reduce_cmd=COMMAND.reduce)),
    ("reduce_op must be one of", lambda: issue(nl.add, None, reduce_op=nl.multiply)),
    ("not one of ScalarE's", lambda: issue(nl.add, None, reduce_cmd=COMMAND.load_reduce)),
    ("must have one dtype",
     lambda: issue(imm0=zeros(4, 1), imm1=zeros(4, 1, dtype="bfloat16"))),
    ("a scalar operand must be a number or a tile [4, 1]", lambda: issue(imm0=zeros(4, 6))),
    target="trn3",
)  # fmt: skip
def test_what_is_refused(text, body, target):
    refuses(text, body, target=target)
