"""Copies and element-wise arithmetic against NumPy; rounding, fresh memory, registers."""

import numpy as np
import pytest
from draws import both_ways, either, few, memories, pick, seeds, shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import compute, loaded, new, noted, refuses, run, stored
from samples import ARITHMETIC, DTYPES, INTEGERS, TARGETS, bf16, data, equal, f32, rounded, wide

import neuroncore as nc
import neuroncore.isa as nisa
import neuroncore.language as nl

V, S, G = nisa.engine.vector, nisa.engine.scalar, nisa.engine.gpsimd
BITS = {
    "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor,
    "left_shift": np.left_shift, "right_shift": np.right_shift,
}  # fmt: skip


@settings(max_examples=40)
@given(
    shape=shapes, source=pick(DTYPES), target=pick(DTYPES), machine=pick(TARGETS),
    where=st.tuples(memories, memories), engine=pick([V, G, nisa.engine.unknown]), seed=seeds,
)  # fmt: skip
def test_tensor_copy(shape, source, target, machine, where, engine, seed):
    x = data(shape, source, seed, scale=100)
    if engine is G and nl.psum in where:
        engine = V

    def body(dst, tile):
        nisa.tensor_copy(dst, tile, engine)

    expected = x if source is target else rounded(x.astype(f32), target)
    got = compute(body, shape, target, x, target=machine, memories=where[:1], into=where[1])
    equal(got, expected)


@few
@given(dtype=pick(DTYPES), engine=pick([V, G]), value=st.integers(0, 100))
def test_memset(dtype, engine, value):
    def body(dst):
        nisa.memset(dst, 0)
        nisa.memset(dst[:, 1:], value, engine)

    got = compute(body, (4, 3), dtype)
    equal(got, rounded(np.array([[0, value, value]] * 4), dtype))


@pytest.mark.parametrize(
    ("dtype", "value"), [(nl.int32, 2**24 + 1), (nl.uint32, 2**32 - 1), (nl.int8, 300)]
)
def test_memset_of_integers_is_exact_and_saturates(dtype, value):
    got = compute(lambda d: nisa.memset(d, value), (2, 2), dtype)
    assert (wide(got) == min(value, np.iinfo(dtype.numpy).max)).all()


def test_memset_tells_zeros_apart():
    def body(dst):
        nisa.memset(dst, 0.0)
        nisa.memset(dst, -0.0)

    assert np.signbit(compute(body, (2, 3), nl.float32)).all()


@given(
    shape=shapes, name=pick(sorted(ARITHMETIC)), machine=pick(TARGETS),
    dtypes=st.tuples(*[pick((nl.float32, nl.bfloat16, nl.float16, nl.int8, nl.uint16))] * 3),
    where=pick([(nl.sbuf, nl.sbuf), (nl.psum, nl.sbuf), (nl.sbuf, nl.psum)]), seed=seeds,
)  # fmt: skip
def test_tensor_tensor(shape, name, machine, dtypes, where, seed):
    a, b = data(shape, dtypes[0], seed), data(shape, dtypes[1], seed + 1)
    b[:, ::3] = a[:, ::3].astype(f32).clip(0, 100).astype(b.dtype)  # some are equal

    def body(dst, x, y):
        nisa.tensor_tensor(dst, x, y, getattr(nl, name))

    expected = ARITHMETIC[name](a.astype(f32), b.astype(f32)).astype(f32)
    got = compute(body, shape, dtypes[2], a, b, target=machine, memories=where)
    equal(got, rounded(expected, dtypes[2]))


@few
@given(name=pick(["add", "subtract", "multiply"]), dtype=pick([nl.int32, nl.uint32]), seed=seeds)
def test_32_bit_integers_are_exact_on_gpsimd_and_fp32_on_vector(name, dtype, seed):
    a, b = data((8, 5), dtype, seed), data((8, 5), dtype, seed + 1)
    op = ARITHMETIC[name]
    for engine, expected in (
        (nisa.engine.unknown, op(a, b)),
        (V, rounded(op(a.astype(f32), b.astype(f32)), dtype)),
    ):

        def body(dst, x, y, engine=engine):
            nisa.tensor_tensor(dst, x, y, getattr(nl, name), engine)

        equal(compute(body, (8, 5), dtype, a, b), expected)


@settings(max_examples=30)
@given(name=pick(sorted(BITS)), dtype=pick(INTEGERS), amount=st.integers(0, 7), seed=seeds)
def test_bit_operators(name, dtype, amount, seed):
    a, b = data((8, 5), dtype, seed), data((8, 5), dtype, seed + 1)
    if "shift" in name:
        b = b & 7
    op, unsigned = getattr(nl, name), np.dtype(f"u{dtype.itemsize}")

    def reference(x, y):
        return BITS[name](x.view(unsigned), y.view(unsigned)).view(x.dtype)

    got = compute(lambda d, x, y: nisa.tensor_tensor(d, x, y, op), (8, 5), dtype, a, b)
    equal(got, reference(a, b))
    got = compute(lambda d, x: nisa.tensor_scalar(d, x, op, amount), (8, 5), dtype, a)
    equal(got, reference(a, np.full((8, 5), amount, dtype.numpy)))


def test_bit_patterns_as_constants_of_signed_tiles():
    x = np.array([[1, -2, 2**31 - 1]], np.int32)
    for op, constant, bits, expected in (
        (nl.bitwise_and, 0xFFFFFFFE, x, x & -2),
        (nl.bitwise_xor, -1, x.view(np.uint32), ~x.view(np.uint32)),
    ):

        def body(dst, tile, op=op, constant=constant):
            nisa.tensor_scalar(dst, tile, op, constant)

        equal(compute(body, (1, 3), bits.dtype.name, bits), expected)


@given(
    shape=shapes, ops=st.tuples(pick(sorted(ARITHMETIC)), pick([None, *sorted(ARITHMETIC)])),
    tiles=both_ways, reverse=both_ways, dtype=pick([nl.float32, nl.bfloat16, nl.int16]),
    where=memories, seed=seeds,
)  # fmt: skip
def test_tensor_scalar(shape, ops, tiles, reverse, dtype, where, seed):
    x, columns = data(shape, bf16, seed), data((shape[0], 2), f32, seed + 1)
    operands = [columns[:, i : i + 1] if tiles[i] else f32(0.25 + i) for i in range(2)]
    expected = x.astype(f32)
    for name, operand, swap in zip(ops, operands, reverse, strict=True):
        if name is not None:
            two = (operand, expected) if swap else (expected, operand)
            expected = ARITHMETIC[name](*two).astype(f32)

    def body(dst, t, c):
        first, second = [c[:, i : i + 1] if tiles[i] else 0.25 + i for i in range(2)]
        more = [getattr(nl, ops[1]), second, reverse[1]] if ops[1] else []
        nisa.tensor_scalar(dst, t, getattr(nl, ops[0]), first, reverse[0], *more)

    got = compute(body, shape, dtype, x, columns, memories=(where, nl.sbuf))
    equal(got, rounded(expected, dtype))


@settings(max_examples=40)
@given(
    shape=shapes, ops=st.tuples(*[pick(sorted(ARITHMETIC))] * 2), tile=either, reverse=both_ways,
    dtype=pick([nl.float32, nl.bfloat16]), seed=seeds,
)  # fmt: skip
def test_scalar_tensor_tensor(shape, ops, tile, reverse, dtype, seed):
    x, y = data(shape, f32, seed), data(shape, bf16, seed + 1)
    column = data((shape[0], 1), f32, seed + 2)
    scalar = column if tile else f32(-1.5)
    first = ARITHMETIC[ops[0]](*((scalar, x) if reverse[0] else (x, scalar))).astype(f32)
    other = y.astype(f32)
    expected = ARITHMETIC[ops[1]](*((other, first) if reverse[1] else (first, other))).astype(f32)

    def body(dst, a, b, c):
        op0, op1 = (getattr(nl, op) for op in ops)
        nisa.scalar_tensor_tensor(dst, a, op0, c if tile else -1.5, op1, b, *reverse)

    equal(compute(body, shape, dtype, x, y, column), rounded(expected, dtype))


@few
@given(
    shape=shapes, source=pick([nl.float32, nl.bfloat16, nl.int8]),
    target=pick([nl.float32, nl.bfloat16]),
)  # fmt: skip
def test_reciprocal(shape, source, target):
    x = data(shape, source)
    with np.errstate(divide="ignore"):
        equal(compute(nisa.reciprocal, shape, target, x), rounded(f32(1) / x.astype(f32), target))


def test_in_place_and_overlapping_operands():
    x = data((4, 10), f32)

    def kernel(a):
        t = loaded(a)
        nisa.tensor_copy(t[:, 1:], t[:, :-1])  # reads all before it writes
        nisa.tensor_tensor(t, t, t, nl.add)
        nisa.activation(t[:, 2:], nl.square, t[:, :-2], scale=0.5)
        return stored(t)

    expected = x.copy()
    expected[:, 1:] = x[:, :-1]
    expected = expected + expected
    expected[:, 2:] = np.square(expected[:, :-2] * f32(0.5)).copy()
    equal(run(kernel, x), expected)


def test_writing_an_input_changes_the_callers_array():
    x = data((4, 6), f32)
    before = x.copy()

    def kernel(a):
        t = loaded(a)
        nisa.tensor_scalar(t, t, nl.multiply, 2.0)
        nisa.dma_copy(a[1:3], t[1:3])
        return a

    got = run(kernel, x)
    before[1:3] *= 2
    equal(x, before)
    equal(got, before)


def test_fresh_memory_is_nan_and_four():
    def kernel():
        kinds = ("float32", "bfloat16", "int32", "uint8")
        outputs = [new(2, 4, dtype=kind, buffer=nl.shared_hbm) for kind in kinds]
        for out in outputs:
            nisa.dma_copy(out[:, 2:], nl.zeros((2, 2), out.dtype))
        return tuple(outputs)

    with pytest.warns(nc.NkiWarning, match="is returned, and some of it was never written"):
        outputs = run(kernel)
    for out in outputs:
        got = out[:, :2]
        assert (out[:, 2:].astype(f32) == 0).all()
        assert np.isnan(got.astype(f32)).all() if got.dtype.kind not in "iu" else (got == 4).all()


def test_precise_fp_off_keeps_floats_in_fp32(monkeypatch):
    x = data((4, 6), f32)

    def kernel(a):
        t = nl.ndarray((4, 6), nl.bfloat16)
        nisa.dma_copy(t, a)
        nisa.tensor_scalar(t, t, nl.multiply, 3.0)
        whole = nl.ndarray((4, 6), nl.int32)
        nisa.tensor_copy(whole, t)
        out = nl.ndarray((4, 6), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, t)
        return out, stored(whole), stored(t)

    monkeypatch.setenv("NKI_PRECISE_FP", "0")
    got, whole, narrow = run(kernel, x)
    equal(got, x * f32(3))
    equal(whole, np.rint(x * f32(3)).astype(np.int32))
    assert narrow.dtype == bf16
    inside = x.astype(bf16)
    run(lambda a: nl.store(a, nl.ones((4, 6), nl.float32)), inside)
    assert (inside == 1).all()
    refuses("NKI_PRECISE_FP=0", lambda a: loaded(a).view(nl.int16), inside)


def test_registers():
    x = np.array([[7]], np.int32)

    def kernel(a):
        r, s = nisa.register_alloc(3), nisa.register_alloc()
        assert (r.value, s.value) == (3, 0)
        nisa.register_move(s, r)
        nisa.register_move(r, 5)
        out = nl.ndarray((1, 4), nl.int32)
        for i, source in enumerate((r, s)):
            nisa.register_store(out[:, i : i + 1], source)
        nisa.register_load(s, loaded(a))
        nisa.register_store(out[:, 2:3], s)
        nisa.register_load(s, a)  # from HBM
        nisa.register_store(out[:, 3:4], s)
        assert nc.isa.VirtualRegister(2)
        return stored(out)

    equal(run(kernel, x), np.array([[5, 3, 7, 7]], np.int32))


def test_long_rows_are_noted_once():
    def kernel(elements):
        for _ in range(2):
            nisa.memset(nl.ndarray((4, elements), nl.uint8), 0)

    run(kernel, 32_767)
    with noted("has more than 32,767 elements per partition; .* guide 64K; tile the free") as notes:
        run(kernel, 32_768)
    assert len(notes) == 1


def test_memset_of_integers_by_a_float_is_noted():
    with noted(r"memset: .* takes an int since NKI 0.3; got 2.0"):
        got = compute(lambda dst: nisa.memset(dst, 2.0), (2, 2), nl.int32)
    assert (got == 2).all()
