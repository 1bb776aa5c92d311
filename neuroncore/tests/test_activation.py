"""ScalarE's activations, with bias, scale and sums, against NumPy in fp64."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import (
    TARGETS,
    Out,
    bf16,
    call,
    compute,
    data,
    loaded,
    noted,
    refused,
    run,
    seeds,
    stored,
    wide,
)

import neuroncore.isa as nisa
import neuroncore.language as nl

f32 = np.float32
shapes = st.tuples(st.integers(1, 128), st.integers(1, 24))
memories = st.sampled_from([nl.sbuf, nl.psum])
FUNCTIONS = {
    "copy": lambda x: x,
    "square": np.square,
    "relu": lambda x: np.maximum(x, 0),
    "exp": np.exp,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "abs": np.abs,
    "sign": np.sign,
}


@settings(max_examples=40, deadline=None)
@given(
    shape=shapes,
    name=st.sampled_from(sorted(FUNCTIONS)),
    bias=st.sampled_from(["none", "tile", "number"]),
    scale=st.sampled_from(["none", "tile", "number"]),
    dtype=st.sampled_from([nl.float32, nl.bfloat16]),
    target=st.sampled_from(TARGETS),
    where=memories,
    seed=seeds,
)
def test_activation(shape, name, bias, scale, dtype, target, where, seed):
    if target == "trn1" and bias == "number":
        bias = "tile"
    x, columns = data(shape, bf16, seed), data((shape[0], 2), f32, seed + 1)
    values = {"none": (0, 1), "number": (-0.75, 1.5), "tile": (columns[:, :1], columns[:, 1:])}
    expected = FUNCTIONS[name](wide(x) * wide(values[scale][1]) + wide(values[bias][0]))

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
        np.testing.assert_allclose(
            wide(got), expected, rtol=1e-5 if dtype is nl.float32 else 2.0**-7, atol=1e-5
        )


@settings(max_examples=20, deadline=None)
@given(shape=shapes, fused=st.booleans(), seed=seeds)
def test_activation_sums_its_results(shape, fused, seed):
    x = data(shape, f32, seed)

    def body(dst, t):
        out = nl.ndarray(shape, nl.bfloat16)
        if fused:
            nisa.activation_reduce(out, nl.exp, t, nl.add, dst)
        else:
            nisa.activation(
                out,
                nl.exp,
                t,
                reduce_op=nl.add,
                reduce_res=dst,
                reduce_cmd=nisa.reduce_cmd.reset_reduce,
            )

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
            nisa.activation(
                junk[rows], nl.copy, tile, reduce_op=op, reduce_res=result, reduce_cmd=command
            )
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
    for got, expected in zip(
        run(kernel, x), [s, 2 * s, 2 * s, 3 * s[32:], last, 0 * s], strict=True
    ):
        np.testing.assert_allclose(wide(got), expected, atol=1e-5)


def test_an_operator_that_is_no_activation_is_refused():
    with refused("activation: op: nl.add is an ALU operator, not an activation: use nisa.tensor_"):
        compute(lambda dst, x: nisa.activation(dst, nl.add, x), (4, 6), nl.float32, data((4, 6)))
