"""activate2: both operators, either way round, functions, reductions and their accumulators."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import Out, bf16, call, data, refused, seeds, values, wide

from neuroncore import isa as nisa
from neuroncore import language as nl

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


@settings(max_examples=40, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    reverse=st.tuples(st.booleans(), st.booleans()),
    tiles=st.booleans(),
    prelu=st.booleans(),
    memory=st.sampled_from([nl.sbuf, nl.psum]),
    reduce=st.sampled_from([None, *REDUCE]),
    seed=seeds,
)
def test_activate2(pair, reverse, tiles, prelu, memory, reduce, seed):
    reverse = tuple(r and op != "bypass" for r, op in zip(reverse, pair, strict=True))
    x, columns = values(seed, (8, 5)), values(seed + 1, (8, 2))
    operands = (columns[:, :1], columns[:, 1:]) if tiles else (-1.5, 0.25)
    expected = staged(wide(x), pair, operands, reverse)
    expected = (
        np.where(expected < 0, 0.5 * expected, expected) if prelu else np.maximum(expected, 0)
    )

    def body(dsts, srcs):
        t, c = srcs
        given = (c[:, :1], c[:, 1:]) if tiles else (-1.5, 0.25)
        options = {"relu_param": 0.5} if prelu else {}
        if reduce:
            options |= {"reduce_op": getattr(nl, reduce), "reduce_res": dsts[1]}
            options["reduce_cmd"] = nisa.reduce_cmd.reset_reduce
        else:
            nisa.memset(dsts[1], 0)
        nisa.activate2(
            dsts[0], nl.prelu if prelu else nl.relu, t, *given,
            *[getattr(nl, op) for op in pair],
            reverse0=reverse[0], reverse1=reverse[1], **options,
        )  # fmt: skip

    outs = [Out((8, 5)), Out((8, 1))]
    done = call(body, x, columns, outs=outs, target="trn3", memory=memory)
    np.testing.assert_array_equal(done.outputs[0], expected)
    if reduce:
        np.testing.assert_array_equal(done.outputs[1][:, 0], REDUCE[reduce](expected))


def test_accumulators_go_on_and_are_those_of_activation():
    x, y = values(0, (4, 6)), values(1, (4, 6))

    def body(dsts, srcs):
        command, add = nisa.reduce_cmd, {"reduce_op": nl.add}
        t, plain = dsts[0], (0.0, 0.0, nl.bypass, nl.bypass)
        nisa.activation(t, nl.copy, srcs[0], reduce_cmd=command.reset_reduce, **add)
        nisa.activate2(t, nl.copy, srcs[1], *plain, reduce_cmd=command.reduce, **add)
        nisa.activate2(t, nl.copy, srcs[0], *plain, reduce_res=dsts[1])  # idle: read only
        nisa.activate2(
            t, nl.copy, srcs[0], *plain, reduce_cmd=command.reset, reduce_op=nl.maximum,
            reduce_res=dsts[2],
        )  # fmt: skip

    outs = [Out((4, 6)), Out((4, 1)), Out((4, 1))]
    done = call(body, x, y, outs=outs, target="trn3")
    np.testing.assert_array_equal(done.outputs[1][:, 0], x.sum(1) + y.sum(1))
    np.testing.assert_array_equal(done.outputs[2], np.full((4, 1), -np.inf))


def test_the_documented_example():
    x = data((8, 16))
    body = lambda dsts, srcs: nisa.activate2(  # noqa: E731
        dsts[0], nl.gelu, srcs[0], imm0=2.0, imm1=0.5, op0=nl.multiply, op1=nl.add
    )
    u = wide(x) * 2 + 0.5
    got = call(body, x, outs=[Out((8, 16))], target="trn3").output
    gelu = u * (1 + np.vectorize(math.erf)(u / math.sqrt(2))) / 2
    np.testing.assert_allclose(got, gelu, rtol=1e-5, atol=1e-6)


def issue(*operators, **options):
    def body(dsts, srcs):
        given = {"imm0": 1.0, "imm1": 1.0, "op": nl.copy, **options}
        nisa.activate2(
            dsts[0], given.pop("op"), srcs[0], op0=operators[0], op1=operators[1], **given
        )

    return body


REFUSED = [
    ("trn2", issue(nl.multiply, nl.add), "it needs NeuronCore-v4"),
    ("trn3", issue(nl.add, nl.multiply), "(op0, op1) must be one of"),
    ("trn3", issue(None, nl.add), "got (bypass, add)"),
    ("trn3", issue(None, None, reverse0=True), "reverse0 needs op0"),
    ("trn3", issue(nl.add, nl.bypass, reverse1=True), "reverse1 needs op1"),
    ("trn3", issue(nl.add, nl.bypass, relu_param=0.5), "relu_param is nl.prelu's; nl.copy"),
    ("trn3", issue(nl.add, None, reduce_cmd=nisa.reduce_cmd.reduce), "needs a reduce_op"),
    ("trn3", issue(nl.add, None, reduce_op=nl.multiply), "reduce_op must be one of"),
    ("trn3", issue(nl.add, None, reduce_cmd=nisa.reduce_cmd.load_reduce), "not one of ScalarE's"),
]


@pytest.mark.parametrize(("target", "body", "text"), REFUSED)
def test_activate2_refuses(target, body, text):
    with refused(text):
        call(body, values(0, (4, 6)), outs=[Out((4, 6))], target=target)


def test_operands_are_columns_of_one_dtype():
    def mixed(dsts, srcs):
        nisa.activate2(
            dsts[0], nl.copy, srcs[0], srcs[0][:, :1], srcs[1][:, :1], nl.multiply, nl.add
        )

    with refused("must have one dtype"):
        call(mixed, values(0, (4, 6)), data((4, 6), bf16), outs=[Out((4, 6))], target="trn3")
    with refused("a scalar operand must be a number or a tile [4, 1]"):
        call(
            lambda dsts, srcs: nisa.activate2(
                dsts[0], nl.copy, srcs[0], srcs[0], 0.0, nl.multiply, nl.add
            ),
            values(0, (4, 6)), outs=[Out((4, 6))], target="trn3",
        )  # fmt: skip


def test_cost():
    body = issue(nl.multiply, nl.add)
    (template,) = call(body, values(0, (4, 600)), outs=[Out((4, 600))], target="trn3").templates
    assert (template.engine.name, template.cycles) == ("SCALAR", 600)
