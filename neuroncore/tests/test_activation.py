"""ScalarE's activations, with bias, scale and sums, and activate2, against NumPy in fp64."""

import math

import numpy as np
from draws import both_ways, either, few, memories, pick, seeds, shapes
from hypothesis import given, settings
from instruction_runs import (
    Out,
    call,
    compute,
    loaded,
    new,
    noted,
    refusals,
    refuses,
    run,
    stored,
    zeros,
)
from samples import FUNCTIONS, TARGETS, bf16, data, f32, values, wide

from neuroncore import isa as nisa
from neuroncore import language as nl

NAMES = ["abs", "copy", "exp", "relu", "sigmoid", "sign", "silu", "square", "tanh"]


@settings(max_examples=40)
@given(
    shape=shapes, name=pick(NAMES), bias=pick(["none", "tile", "number"]),
    scale=pick(["none", "tile", "number"]), dtype=pick([nl.float32, nl.bfloat16]),
    target=pick(TARGETS), where=memories, seed=seeds,
)  # fmt: skip
def test_activation(shape, name, bias, scale, dtype, target, where, seed):
    if target == "trn1" and bias == "number":
        bias = "tile"
    x, columns = data(shape, bf16, seed), data((shape[0], 2), f32, seed + 1)
    values = {"none": (0, 1), "number": (-0.75, 1.5), "tile": (columns[:, :1], columns[:, 1:])}
    expected = np.vectorize(FUNCTIONS[name], otypes=[float])(
        wide(x) * wide(values[scale][1]) + wide(values[bias][0])
    )

    def body(dst, t, c):
        options = {}
        if bias != "none":
            options["bias"] = c[:, :1] if bias == "tile" else -0.75
        if scale != "none":
            options["scale"] = c[:, 1:] if scale == "tile" else 1.5
        nisa.activation(dst, getattr(nl, name), t, **options)

    got = compute(body, shape, dtype, x, columns, target=target, memories=(where, nl.sbuf))
    assert got.dtype == dtype.numpy
    if name != "sign":  # near 0 the sign of a sum depends on rounding
        near = 1e-5 if dtype is nl.float32 else 2.0**-7
        np.testing.assert_allclose(wide(got), expected, rtol=near, atol=1e-5)


@few
@given(shape=shapes, fused=either, seed=seeds)
def test_activation_sums_its_results(shape, fused, seed):
    x = data(shape, f32, seed)

    def body(dst, t):
        out = nl.ndarray(shape, nl.bfloat16)
        if fused:
            nisa.activation_reduce(out, nl.exp, t, nl.add, dst)
        else:
            result = {"reduce_res": dst, "reduce_cmd": nisa.reduce_cmd.reset_reduce}
            nisa.activation(out, nl.exp, t, reduce_op=nl.add, **result)

    got = compute(body, (shape[0], 1), nl.float32, x)
    np.testing.assert_allclose(wide(got), np.exp(wide(x)).sum(1, keepdims=True), rtol=1e-5)


def test_a_sum_that_no_command_asks_for_is_noted():
    def body(dsts, srcs):
        nisa.activation(dsts[0], nl.copy, srcs[0], reduce_op=nl.add, reduce_res=dsts[1])

    with noted("activation: reduce_cmd.idle sums nothing, .*use reduce_cmd.reset_reduce"):
        call(body, data((4, 6), f32), outs=[Out((4, 6)), Out((4, 1))])


def test_reduce_commands_keep_their_registers():
    x = data((64, 8), f32)

    def kernel(a):
        t, junk = loaded(a), nl.ndarray((64, 8), nl.float32)
        outs = []

        def step(command, tile=t, rows=slice(0, 64)):
            result = nl.ndarray((tile.shape[0], 1), nl.float32)
            op = nl.add if "reduce" in command.name else None
            result_of = {"reduce_op": op, "reduce_res": result, "reduce_cmd": command}
            nisa.activation(junk[rows], nl.copy, tile, **result_of)
            outs.append(stored(result))

        c = nisa.reduce_cmd
        step(c.reset_reduce)
        step(c.reduce)
        step(c.idle)
        step(c.reduce, t[32:], slice(32, 64))
        step(c.idle)
        step(c.reset)
        return tuple(outs)

    s = wide(x).sum(1, keepdims=True)
    last = np.concatenate([2 * s[:32], 3 * s[32:]])
    sums = [s, 2 * s, 2 * s, 3 * s[32:], last, 0 * s]
    for got, expected in zip(run(kernel, x), sums, strict=True):
        np.testing.assert_allclose(wide(got), expected, atol=1e-5)


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


def activate2(op0=nl.multiply, op1=nl.add, imm0=1.0, imm1=1.0, **options):
    nisa.activate2(new(4, 6), nl.copy, zeros(4, 6), imm0, imm1, op0, op1, **options)


@refusals(
    ("it needs NeuronCore-v4", activate2, "trn2"),
    ("(op0, op1) must be one of", lambda: activate2(nl.add, nl.multiply)),
    ("got (bypass, add)", lambda: activate2(None, nl.add)),
    ("reverse0 needs op0", lambda: activate2(None, None, reverse0=True)),
    ("reverse1 needs op1", lambda: activate2(nl.add, nl.bypass, reverse1=True)),
    ("relu_param is nl.prelu's; nl.copy", lambda: activate2(nl.add, nl.bypass, relu_param=0.5)),
    ("needs a reduce_op", lambda: activate2(nl.add, None, reduce_cmd=COMMAND.reduce)),
    ("reduce_op must be one of", lambda: activate2(nl.add, None, reduce_op=nl.multiply)),
    ("not one of ScalarE's", lambda: activate2(nl.add, None, reduce_cmd=COMMAND.load_reduce)),
    ("must have one dtype",
     lambda: activate2(imm0=zeros(4, 1), imm1=zeros(4, 1, dtype="bfloat16"))),
    ("a scalar operand must be a number or a tile [4, 1]", lambda: activate2(imm0=zeros(4, 6))),
    target="trn3",
)  # fmt: skip
def test_what_is_refused(text, body, target):
    refuses(text, body, target=target)
