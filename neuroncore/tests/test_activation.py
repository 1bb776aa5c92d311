"""ScalarE's activations, with bias, scale and sums, against NumPy in fp64."""

import numpy as np
from draws import either, few, memories, pick, seeds, shapes
from hypothesis import given, settings
from instruction_runs import Out, call, compute, loaded, noted, run, stored
from samples import FUNCTIONS, TARGETS, bf16, data, f32, wide

import neuroncore.isa as nisa
import neuroncore.language as nl

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
