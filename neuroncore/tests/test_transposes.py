"""nc_transpose on TensorE and VectorE, and dma_transpose, against NumPy."""

import numpy as np
import pytest
from draws import either, few, memories, pick, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import compute, loaded, new, refusals, refused, refuses, run, stored, zeros
from samples import DTYPES, TARGETS, bf16, data, equal

import neuroncore.isa as nisa
import neuroncore.language as nl

F, B = nl.float32, nl.bfloat16
hw = nisa.dge_mode.hwdge
TENSOR, VECTOR = nisa.engine.tensor, nisa.engine.vector


@few
@given(
    p=st.integers(1, 128), f=st.integers(1, 128),
    dtype=pick([nl.float32, nl.bfloat16, nl.int8, nl.uint32, nl.float8_e4m3]), target=pick(TARGETS),
    seed=seeds,
)  # fmt: skip
def test_transpose_on_tensor_engine(p, f, dtype, target, seed):
    x = data((p, f), dtype, seed)
    into = nl.float32 if target == "trn1" else dtype
    got = compute(nisa.nc_transpose, (f, p), into, x, target=target, into=nl.psum)
    equal(got, x.astype(into.numpy).T)


@few
@given(
    p=st.integers(1, 32), f=st.integers(1, 32), asked=pick([VECTOR, nisa.engine.unknown]),
    dtype=pick([nl.float32, nl.bfloat16, nl.int16]), source=memories,
)  # fmt: skip
def test_transpose_on_vector_engine(p, f, asked, dtype, source):
    def body(dst, x):
        nisa.nc_transpose(dst, x, asked)

    x = data((p, f), dtype)
    equal(compute(body, (f, p), dtype, x, memories=(source,)), x.T)
    if source is nl.psum or asked is VECTOR:
        equal(compute(body, (f, p), dtype, x, memories=(source,), into=nl.psum), x.T)


@pytest.mark.parametrize(("target", "shape"), [("trn2", (16, 2, 5)), ("trn1", (16, 10))])
def test_transpose_flattens_free_dimensions_and_on_trn1_goes_into_fp32(target, shape):
    x = data(shape, np.float32 if target == "trn2" else bf16)
    got = compute(nisa.nc_transpose, (10, 16), nl.float32, x, target=target, into=nl.psum)
    equal(got, x.reshape(16, 10).astype(np.float32).T)


@pytest.mark.parametrize("dtype", [nl.bfloat16, nl.float16, nl.float8_e4m3])
def test_trn1_refuses_narrow_transposes_of_tensor_engine_alone(dtype):
    def body(dst, x):
        nisa.nc_transpose(dst, x, TENSOR if dst.buffer is nl.psum else VECTOR)

    x = data((16, 10), dtype)
    with refused("nc_transpose: dst must be float32 on trn1.*copy it to 16 bits afterwards"):
        compute(body, (10, 16), dtype, x, target="trn1", into=nl.psum)
    equal(compute(body, (10, 16), dtype, x, target="trn1"), x.T)
    equal(compute(body, (10, 16), dtype, x, target="trn2", into=nl.psum), x.T)


AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


@settings(max_examples=30)
@given(
    shape=st.lists(st.integers(1, 8), min_size=2, max_size=4),
    dtype=pick([d for d in DTYPES if d.itemsize > 1]), explicit=either, on_chip=either,
)  # fmt: skip
def test_dma_transpose(shape, dtype, explicit, on_chip):
    x, axes = data(tuple(shape), dtype), AXES[len(shape)]

    def kernel(a):
        dst = nl.ndarray(tuple(shape[i] for i in axes), dtype)
        nisa.dma_transpose(dst, loaded(a) if on_chip else a, axes if explicit else None)
        return stored(dst)

    equal(run(kernel, x), x.transpose(axes))


@pytest.mark.parametrize(
    ("p", "n", "rows"), [(16, 1, 16), (128, 1, 128), (128, 2, 256), (128, 2, 144)]
)
@pytest.mark.parametrize("inner", [(), (2, 3)])
def test_gathering_transpose_takes_indices_column_by_column(p, n, rows, inner):
    rng = np.random.default_rng(0)
    table = data((300, *inner, 20), bf16)
    index = rng.integers(0, 300, (p, n), np.uint32)
    expected = table[index.T.ravel()[:rows]].transpose(AXES[len(inner) + 2])
    strides = [int(s) // 2 for s in table.strides]

    def kernel(x, i):
        dst = nl.ndarray(expected.shape, nl.bfloat16)
        counts = (rows, *inner, 20)
        pattern = [list(pair) for pair in zip(strides, counts, strict=True)]
        nisa.dma_transpose(dst, x.ap(pattern, vector_offset=loaded(i)))
        return stored(dst)

    equal(run(kernel, table, index), expected)


def transpose(dst, source, asked, into=nl.sbuf, out=F, dtype=F, memory=nl.sbuf):
    nisa.nc_transpose(new(*dst, dtype=out, buffer=into), zeros(*source, dtype=dtype, buffer=memory),
                      asked)  # fmt: skip


def dma(shape, dtype=F, axes=None, mode=nisa.dge_mode.unknown, dst=None, out=None):
    dst = dst or tuple(shape[i] for i in AXES[len(shape)])
    x = zeros(*shape, dtype=dtype)
    nisa.dma_transpose(new(*dst, dtype=out or dtype), x, axes, dge_mode=mode)


P = nl.psum


@refusals(
    ("TENSOR transposes up to 128 x 128", lambda: transpose((128, 128), (128, 129), TENSOR, P)),
    ("dst must be [16, 32]", lambda: transpose((32, 16), (32, 16), VECTOR)),
    ("dst must be in psum", lambda: transpose((16, 32), (32, 16), TENSOR)),
    ("data must be in sbuf", lambda: transpose((16, 32), (32, 16), TENSOR, P, memory=P)),
    ("engine.gpsimd does not run it", lambda: transpose((16, 32), (32, 16), nisa.engine.gpsimd)),
    ("axes must be", lambda: dma((4, 6, 2), axes=(1, 0, 2))),
    ("dst must be [6, 4]", lambda: dma((4, 6), dst=(4, 6))),
    ("one dtype", lambda: dma((4, 6), out=B)),
    ("hwdge takes 2-byte src", lambda: dma((8, 6), B, mode=hw)),
)
def test_what_is_refused(text, body, target):
    refuses(text, body, target=target)


@pytest.mark.parametrize("shape", [(16, 128), (2, 24, 16), (4, 1, 4, 16)])
def test_hardware_transposes(shape):
    def kernel(x):
        nisa.dma_transpose(new(*(shape[i] for i in AXES[len(shape)]), dtype=B), x, dge_mode=hw)

    run(kernel, data(shape, B))
    refuses("needs NeuronCore-v3", kernel, data(shape, B), target="trn1")


@pytest.mark.parametrize(
    ("match", "dtype", "index", "columns", "target"),
    [
        ("indirect src must be 2-byte", nl.float32, ((16, 1), np.uint32), 16, "trn2"),
        ("indirect src must be 2-byte", nl.bfloat16, ((16, 1), np.uint32), 15, "trn2"),
        ("index must be uint32", nl.bfloat16, ((16, 1), np.int32), 16, "trn2"),
        ("indices .* must be", nl.bfloat16, ((16, 2), np.uint32), 16, "trn2"),
        ("indices .* must be", nl.bfloat16, ((16, 1), np.uint32), 32, "trn2"),
        ("needs NeuronCore-v3", nl.bfloat16, ((16, 1), np.uint32), 16, "trn1"),
    ],
)
def test_gathering_transpose_refuses(match, dtype, index, columns, target):
    def kernel(x, i):
        view = x.ap([[8, columns], [1, 8]], vector_offset=loaded(i))
        nisa.dma_transpose(new(8, columns, dtype=dtype), view)

    refuses(match, kernel, data((64, 8), dtype), np.zeros(*index), target=target)
