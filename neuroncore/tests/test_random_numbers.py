"""Random numbers: reproducible, independent, distributed as documented, and rules."""

import numpy as np
import pytest
from draws import either, few, pick, seeds
from hypothesis import given
from instruction_runs import Out, call, compute, new, refusals, refuses, zeros
from samples import values

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl

V, G = nisa.vector_engine, nisa.gpsimd_engine
BITS = Out((128, 64), "uint32")


def drawn(seed: int = 0, engine: nisa.engine = V, out: Out = BITS) -> np.ndarray:
    return call(lambda d, s: nisa.rng(d[0], engine), outs=[out], seed=seed).output


def test_bits_are_uniform_in_every_position():
    bits = drawn()
    ones = [(bits >> i & 1).mean() for i in range(32)]
    # 8192 draws: five standard deviations are 0.028
    assert np.abs(np.array(ones) - 0.5).max() < 0.028
    assert len(np.unique(bits)) > bits.size - 10


def test_seeds_engines_partitions_and_draws_are_independent():
    np.testing.assert_array_equal(drawn(3), drawn(3))
    vector = drawn()
    assert len({row.tobytes() for row in vector}) == 128
    first, second = call(lambda d, s: [nisa.rng(t) for t in d], outs=[BITS, BITS]).outputs
    for one, other in ((drawn(3), drawn(4)), (vector, drawn(engine=G)), (first, second)):
        assert (one != other).mean() > 0.99


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
    ("engine", "words", "target"), [(G, 6, "trn2"), (G, 6, "trn3"), (V, 24, "trn3")]
)
def test_a_state_is_stored_as_it_was_set_and_goes_on_where_it_was(engine, words, target):
    given = np.random.default_rng(0).integers(0, 2**32, (32, words), np.uint32)
    given[1] = given[0]

    def body(dsts, srcs):
        kept, bits, state, first, second = dsts
        nisa.rand_set_state(srcs[0], engine)
        nisa.rand_get_state(kept, engine)
        nisa.rng(bits, engine)
        nisa.rand_get_state(state, engine)
        nisa.rng(first, engine)
        nisa.rng(second, engine)
        nisa.rand_set_state(state, engine)
        nisa.rng(second, engine)

    a_state, nine = Out((32, words), "uint32"), Out((32, 9), "uint32")
    outs = [a_state, nine, a_state, nine, nine]
    kept, bits, _, first, second = call(body, given, outs=outs, target=target).outputs
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(kept, given)
    np.testing.assert_array_equal(bits[0], bits[1])
    assert (bits[0] != bits[2]).mean() > 0.8


def test_vector_state_is_stored_to_psum():
    def body(dst):
        nisa.rand_get_state(dst, nisa.vector_engine)

    got = compute(body, (2, 24), "uint32", target="trn3", memories=nl.psum)
    assert got.shape == (2, 24)


@few
@given(
    seeds, pick(["float32", "bfloat16", "int32", "uint8"]), pick([0.0, 0.25, 1.0]), either,
    pick([1, 2]),
)  # fmt: skip
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


def rng(engine, dtype="uint32", memory=nl.sbuf):
    nisa.rng(new(2, 3, dtype=dtype, buffer=memory), engine)


def set_state(engine, shape=(2, 6), dtype="uint32", memory=nl.sbuf):
    nisa.rand_set_state(zeros(*shape, dtype=dtype, buffer=memory), engine)


def get_state(engine, shape=(2, 6), dtype="uint32", memory=nl.sbuf):
    nisa.rand_get_state(new(*shape, dtype=dtype, buffer=memory), engine)


def states(*case):
    """Both instructions on states refuse it."""
    text, *given, target = case
    return [(text, lambda body=body: body(*given), target) for body in (set_state, get_state)]


def dropout(prob=0.5, dtype="float32", out="float32"):
    prob = zeros(2, 1, dtype=prob) if isinstance(prob, str) else prob
    nisa.dropout(new(2, 3, dtype=out), zeros(2, 3, dtype=dtype), prob)


def rand2(low, high, dtype="float32"):
    nisa.rand2(new(2, 3, dtype=dtype), low, high)


@refusals(
    ("engine.gpsimd needs NeuronCore-v3", lambda: rng(G), "trn1"),
    ("engine.scalar does not run it", lambda: rng(nisa.scalar_engine)),
    ("dst must be int8, int16, int32", lambda: rng(V, "float32")),
    ("GpSimdE does not reach PSUM", lambda: rng(G, memory=nl.psum)),
    ("the tile must be [1, 1]", lambda: nisa.set_rng_seed(zeros(1, 2, dtype="uint32"))),
    ("must be of a 32-bit type", lambda: nisa.set_rng_seed(zeros(1, 1, dtype="int16"))),
    *states("it needs NeuronCore-v3", G, "trn1"),
    *states("engine.vector needs NeuronCore-v4", V, (2, 24), "trn2"),
    *states("engine.scalar does not run it", nisa.scalar_engine, "trn2"),
    *states("must have 6 elements per partition", G, (2, 24), "trn2"),
    *states("must have 24 elements per partition", V, "trn3"),
    *states("must be uint32", G, (2, 6), "int32", "trn2"),
    *states("has at most 2 dimensions", G, (2, 2, 3), "trn2"),
    *states("GpSimdE does not reach PSUM", G, (2, 6), "uint32", nl.psum, "trn2"),
    ("GpSimdE does not reach PSUM",
     lambda: set_state(V, (2, 24), memory=nl.psum), "trn3"),
    ("must have one dtype", lambda: dropout(out="bfloat16")),
    ("prob must be 0 to 1; got 1.5", lambda: dropout(1.5)),
    ("prob must be a number", lambda: dropout(None)),
    ("a scalar operand must be float32", lambda: dropout("bfloat16", "int32", "int32")),
    ("a scalar operand must be float8_e4m3", lambda: dropout("int32")),
    ("rand2: it needs NeuronCore-v4", lambda: rand2(0.0, 1.0)),
    ("min must be below max", lambda: rand2(1.0, 1.0), "trn3"),
    ("dst must be float8_e4m3, float8_e5m2", lambda: rand2(0.0, 1.0, "float8_e4m3fn"), "trn3"),
    ("max must be a number", lambda: rand2(0.0, None), "trn3"),
)  # fmt: skip
def test_what_is_refused(text, body, target):
    refuses(text, body, target=target)
