"""Random numbers: reproducible, independent, distributed as documented, and rules."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import Out, call, refused, values

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.hardware import Engine

BITS = Out((128, 64), "uint32")


def drawn(seed: int = 0, engine: nisa.engine = nisa.vector_engine, out: Out = BITS) -> np.ndarray:
    return call(lambda d, s: nisa.rng(d[0], engine), outs=[out], seed=seed).output


def test_bits_are_uniform_in_every_position():
    bits = drawn()
    ones = [(bits >> i & 1).mean() for i in range(32)]
    # 8192 draws: five standard deviations are 0.028
    assert np.abs(np.array(ones) - 0.5).max() < 0.028
    assert len(np.unique(bits)) > bits.size - 10


def test_the_seed_decides():
    np.testing.assert_array_equal(drawn(3), drawn(3))
    assert (drawn(3) != drawn(4)).mean() > 0.99


def test_engines_and_partitions_are_independent():
    vector, gpsimd = drawn(), drawn(engine=nisa.gpsimd_engine)
    assert (vector != gpsimd).mean() > 0.99
    assert len({row.tobytes() for row in vector}) == 128


def test_draws_go_on():
    done = call(lambda d, s: [nisa.rng(t) for t in d], outs=[BITS, BITS])
    assert (done.outputs[0] != done.outputs[1]).mean() > 0.99


def test_cores_draw_different_numbers():
    @nc.jit
    def kernel(x):
        out = nl.ndarray((2, 1, 32), nl.uint32, buffer=nl.shared_hbm)
        tile = nl.ndarray((1, 32), nl.uint32)
        nisa.rng(tile)
        nisa.dma_copy(out[nl.program_id(0)], tile)
        return out

    first, second = nc.simulate(kernel[2], np.zeros((1, 1), np.float32), target="trn2").outputs
    assert (first != second).mean() > 0.9


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32"])
def test_narrow_types_get_the_lowest_bits(dtype):
    narrow = drawn(out=Out((128, 64), dtype))
    np.testing.assert_array_equal(narrow, drawn().astype(dtype))


def test_rng_writes_psum_and_views():
    done = call(lambda d, s: nisa.rng(d[0]), outs=[BITS], memory=nl.psum, step=2)
    np.testing.assert_array_equal(done.output, drawn())


@pytest.mark.parametrize(
    ("target", "engine", "dtype", "memory", "text"),
    [
        ("trn1", nisa.gpsimd_engine, "uint32", nl.sbuf, "engine.gpsimd needs NeuronCore-v3"),
        ("trn2", nisa.scalar_engine, "uint32", nl.sbuf, "engine.scalar does not run it"),
        ("trn2", nisa.vector_engine, "float32", nl.sbuf, "dst must be int8, int16, int32"),
        ("trn2", nisa.gpsimd_engine, "uint32", nl.psum, "GpSimdE does not reach PSUM"),
    ],
)
def test_rng_refuses(target, engine, dtype, memory, text):
    with refused(text):
        call(
            lambda d, s: nisa.rng(d[0], engine),
            outs=[Out((2, 3), dtype)],
            target=target,
            memory=memory,
        )


def test_set_rng_seed_starts_again():
    def body(dsts, srcs):
        for tile, seed in zip(dsts, (0, 1, 0), strict=True):
            nisa.set_rng_seed(srcs[0][:, seed : seed + 1])
            nisa.rng(tile)

    seeds = np.array([[11, 12]], np.int32)
    first, other, again = call(body, seeds, outs=[BITS] * 3, seed=1).outputs
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.99
    np.testing.assert_array_equal(first, call(body, seeds, outs=[BITS] * 3, seed=2).outputs[0])


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [((1, 2), "uint32", "the tile must be [1, 1]"), ((1, 1), "int16", "must be of a 32-bit type")],
)
def test_set_rng_seed_refuses(shape, dtype, text):
    with refused(text):
        call(lambda d, s: nisa.set_rng_seed(s[0]), values(0, shape, dtype), outs=[])


ENGINES = [
    (nisa.gpsimd_engine, 6, "trn2"),
    (nisa.gpsimd_engine, 6, "trn3"),
    (nisa.vector_engine, 24, "trn3"),
]


@pytest.mark.parametrize(("engine", "words", "target"), ENGINES)
def test_a_state_that_is_set_again_goes_on_where_it_was(engine, words, target):
    def body(dsts, srcs):
        state, first, second = dsts
        nisa.rng(first, engine)
        nisa.rand_get_state(state, engine)
        nisa.rng(first, engine)
        nisa.rng(second, engine)
        nisa.rand_set_state(state, engine)
        nisa.rng(second, engine)

    outs = [Out((32, words), "uint32"), Out((32, 9), "uint32"), Out((32, 9), "uint32")]
    _, first, second = call(body, outs=outs, target=target).outputs
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(("engine", "words", "target"), ENGINES)
def test_a_state_is_stored_as_it_was_set_and_seeds_its_partition(engine, words, target):
    state = np.random.default_rng(0).integers(0, 2**32, (32, words), np.uint32)
    state[1] = state[0]

    def body(dsts, srcs):
        nisa.rand_set_state(srcs[0], engine)
        nisa.rand_get_state(dsts[0], engine)
        nisa.rng(dsts[1], engine)

    outs = [Out((32, words), "uint32"), Out((32, 9), "uint32")]
    kept, bits = call(body, state, outs=outs, target=target).outputs
    np.testing.assert_array_equal(kept, state)
    np.testing.assert_array_equal(bits[0], bits[1])
    assert (bits[0] != bits[2]).mean() > 0.8


STATES: list[tuple[Any, ...]] = [
    ("trn1", nisa.gpsimd_engine, (2, 6), "uint32", nl.sbuf, "it needs NeuronCore-v3"),
    ("trn2", nisa.vector_engine, (2, 24), "uint32", nl.sbuf, "engine.vector needs NeuronCore-v4"),
    ("trn2", nisa.scalar_engine, (2, 6), "uint32", nl.sbuf, "engine.scalar does not run it"),
    ("trn2", nisa.gpsimd_engine, (2, 24), "uint32", nl.sbuf, "must have 6 elements per partition"),
    ("trn3", nisa.vector_engine, (2, 6), "uint32", nl.sbuf, "must have 24 elements per partition"),
    ("trn2", nisa.gpsimd_engine, (2, 6), "int32", nl.sbuf, "must be uint32"),
    ("trn2", nisa.gpsimd_engine, (2, 2, 3), "uint32", nl.sbuf, "has at most 2 dimensions"),
    ("trn2", nisa.gpsimd_engine, (2, 6), "uint32", nl.psum, "GpSimdE does not reach PSUM"),
]


@pytest.mark.parametrize(("target", "engine", "shape", "dtype", "memory", "text"), STATES)
def test_states_are_checked(target, engine, shape, dtype, memory, text):
    for body in (
        lambda d, s: nisa.rand_set_state(s[0], engine),
        lambda d, s: nisa.rand_get_state(d[0], engine),
    ):
        with refused(text):
            call(
                body,
                values(0, shape, dtype),
                outs=[Out(shape, dtype)],
                target=target,
                memory=memory,
            )


def test_vector_state_is_set_from_sbuf_and_stored_to_psum():
    def body(dsts, srcs):
        nisa.rand_get_state(dsts[0], nisa.vector_engine)

    state = Out((2, 24), "uint32")
    assert call(body, outs=[state], target="trn3", memory=nl.psum).output.shape == (2, 24)
    with refused("GpSimdE does not reach PSUM"):
        call(
            lambda d, s: nisa.rand_set_state(s[0], nisa.vector_engine),
            values(0, (2, 24), "uint32"),
            outs=[],
            target="trn3",
            memory=nl.psum,
        )


@settings(max_examples=20)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["float32", "bfloat16", "int32", "uint8"]),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.booleans(),
    st.sampled_from([1, 2]),
)
def test_dropout(seed, dtype, prob, tiled, step):
    x = np.maximum(values(seed, (64, 50), dtype), 1).astype(np.dtype(values(0, (1,), dtype).dtype))
    # partition by partition, another probability
    tile = np.where(np.arange(64) % 2, prob, 1 - prob).astype(np.float32)[:, None]

    def body(dsts, srcs):
        nisa.dropout(dsts[0], srcs[0], srcs[1] if tiled else prob)

    done = call(body, x, tile, outs=[Out(x.shape, dtype)], step=step, seed=seed % 1000)
    dropped = done.output == 0
    np.testing.assert_array_equal(done.output[~dropped], x[~dropped])
    chances = tile[:, 0] if tiled else np.full(64, prob)
    for chance in np.unique(chances):
        share = dropped[chances == chance].mean()
        spread = (chance * (1 - chance) / (50 * (chances == chance).sum())) ** 0.5
        assert abs(share - chance) <= 6 * spread


@pytest.mark.parametrize(
    ("dtype", "out", "prob", "text"),
    [
        ("float32", "bfloat16", 0.5, "must have one dtype"),
        ("float32", "float32", 1.5, "prob must be 0 to 1; got 1.5"),
        ("float32", "float32", None, "prob must be a number"),
        ("int32", "int32", "bfloat16", "a scalar operand must be float32"),
        ("float32", "float32", "int32", "a scalar operand must be float8_e4m3"),
    ],
)
def test_dropout_refuses(dtype, out, prob, text):
    tile = values(0, (2, 1), prob if isinstance(prob, str) else "float32")
    with refused(text):
        call(
            lambda d, s: nisa.dropout(d[0], s[0], s[1] if isinstance(prob, str) else prob),
            values(0, (2, 3), dtype),
            tile,
            outs=[Out((2, 3), out)],
        )


def test_dropout_of_bfloat16_takes_any_float_probability():
    done = call(
        lambda d, s: nisa.dropout(d[0], s[0], s[1]),
        values(0, (2, 3), "bfloat16"),
        np.ones((2, 1), values(0, (1,), "float8_e5m2").dtype),
        outs=[Out((2, 3), "bfloat16")],
    )
    assert not done.output.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("tiled", [False, True])
def test_rand2(dtype, tiled):
    low = np.linspace(-20, 0, 64, dtype=np.float32)[:, None]
    high = low + 40

    def body(dsts, srcs):
        bounds = srcs if tiled else (-20.0, 20.0)
        nisa.rand2(dsts[0], *bounds)

    done = call(body, low, high, outs=[Out((64, 100), dtype)], target="trn3")
    result = done.output.astype(np.float64)
    low, high = (low, high) if tiled else (-20.0, 20.0)
    assert (result >= np.floor(low)).all()
    assert (result <= np.ceil(high)).all()
    share = (result - low) / (high - low)
    # 6400 draws: five standard deviations of the mean are 0.018
    assert abs(share.mean() - 0.5) < 0.02
    assert abs(share.std() - 12**-0.5) < 0.02


@pytest.mark.parametrize(
    ("target", "bounds", "dtype", "text"),
    [
        ("trn2", (0.0, 1.0), "float32", "rand2: it needs NeuronCore-v4"),
        ("trn3", (1.0, 1.0), "float32", "min must be below max"),
        ("trn3", (0.0, 1.0), "float8_e4m3fn", "dst must be float8_e4m3, float8_e5m2"),
        ("trn3", (0.0, None), "float32", "max must be a number"),
    ],
)
def test_rand2_refuses(target, bounds, dtype, text):
    with refused(text):
        call(lambda d, s: nisa.rand2(d[0], *bounds), outs=[Out((2, 3), dtype)], target=target)


COSTS: list[tuple[str, Any, str, Engine]] = [
    ("rng", lambda d, s: nisa.rng(d[0]), "uint32", Engine.VECTOR),
    ("gpsimd", lambda d, s: nisa.rng(d[0], nisa.gpsimd_engine), "uint32", Engine.GPSIMD),
    ("dropout", lambda d, s: nisa.dropout(d[0], s[0], 0.5), "float32", Engine.VECTOR),
    ("rand2", lambda d, s: nisa.rand2(d[0], 0.0, 1.0), "bfloat16", Engine.VECTOR),
]


@pytest.mark.parametrize(
    ("body", "dtype", "engine"), [c[1:] for c in COSTS], ids=[c[0] for c in COSTS]
)
def test_engines_and_costs_in_trace_mode(body, dtype, engine):
    x = values(0, (2, 256))
    done = call(body, x, outs=[Out(x.shape, dtype)], mode="trace", target="trn3")
    assert [(f.engine, f.cycles) for f in done.templates] == [(engine, 256)]
