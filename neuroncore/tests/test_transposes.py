"""nc_transpose on TensorE and VectorE, and dma_transpose, against NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import (
    FLOATS,
    INTEGERS,
    TARGETS,
    bf16,
    compute,
    data,
    equal,
    loaded,
    refused,
    refuses,
    run,
    seeds,
    stored,
)

import neuroncore.isa as nisa
import neuroncore.language as nl

F, B = nl.float32, nl.bfloat16
DTYPES = (*FLOATS, *INTEGERS)
hw, sw = nisa.dge_mode.hwdge, nisa.dge_mode.swdge
TENSOR, VECTOR = nisa.engine.tensor, nisa.engine.vector


@settings(max_examples=20, deadline=None)
@given(
    p=st.integers(1, 128), f=st.integers(1, 128),
    dtype=st.sampled_from([nl.float32, nl.bfloat16, nl.int8, nl.uint32, nl.float8_e4m3]),
    target=st.sampled_from(TARGETS), seed=seeds,
)  # fmt: skip
def test_transpose_on_tensor_engine(p, f, dtype, target, seed):
    x = data((p, f), dtype, seed)
    into = nl.float32 if target == "trn1" else dtype
    got = compute(nisa.nc_transpose, (f, p), into, x, target=target, into=nl.psum)
    equal(got, x.astype(into.numpy).T)


@settings(max_examples=20, deadline=None)
@given(
    p=st.integers(1, 32),
    f=st.integers(1, 32),
    asked=st.sampled_from([VECTOR, nisa.engine.unknown]),
    dtype=st.sampled_from([nl.float32, nl.bfloat16, nl.int16]),
    source=st.sampled_from([nl.sbuf, nl.psum]),
)
def test_transpose_on_vector_engine(p, f, asked, dtype, source):
    def body(dst, x):
        nisa.nc_transpose(dst, x, asked)

    x = data((p, f), dtype)
    equal(compute(body, (f, p), dtype, x, memories=(source,)), x.T)
    if source is nl.psum or asked is VECTOR:
        equal(compute(body, (f, p), dtype, x, memories=(source,), into=nl.psum), x.T)


def test_transpose_flattens_free_dimensions():
    x = data((16, 2, 5), np.float32)
    equal(compute(nisa.nc_transpose, (10, 16), nl.float32, x, into=nl.psum), x.reshape(16, 10).T)


def test_trn1_transposes_into_fp32():
    x = data((16, 10), bf16)
    got = compute(nisa.nc_transpose, (10, 16), nl.float32, x, target="trn1", into=nl.psum)
    equal(got, x.astype(np.float32).T)


@pytest.mark.parametrize("dtype", [nl.bfloat16, nl.float16, nl.float8_e4m3])
def test_trn1_refuses_narrow_transposes_of_tensor_engine_alone(dtype):
    def body(dst, x):
        nisa.nc_transpose(dst, x, TENSOR if dst.buffer is nl.psum else VECTOR)

    x = data((16, 10), dtype)
    with refused("nc_transpose: dst must be float32 on trn1.*copy it to 16 bits afterwards"):
        compute(body, (10, 16), dtype, x, target="trn1", into=nl.psum)
    equal(compute(body, (10, 16), dtype, x, target="trn1"), x.T)
    equal(compute(body, (10, 16), dtype, x, target="trn2", into=nl.psum), x.T)


@pytest.mark.parametrize(
    ("match", "dst", "source", "asked"),
    [
        ("TENSOR transposes up to 128 x 128", ((128, 128), F, nl.psum), ((128, 129), F), TENSOR),
        ("VECTOR transposes up to 32 x 32", ((33, 32), F), ((32, 33), F), VECTOR),
        ("dst must be [16, 32]", ((32, 16), F), ((32, 16), F), VECTOR),
        ("one dtype", ((16, 32), F, nl.psum), ((32, 16), B), TENSOR),
        ("dst must be in psum", ((16, 32), F), ((32, 16), F), TENSOR),
        ("data must be in sbuf", ((16, 32), F, nl.psum), ((32, 16), F, nl.psum), TENSOR),
        ("engine.gpsimd does not run it", ((16, 32), F), ((32, 16), F), nisa.engine.gpsimd),
    ],
)
def test_transpose_refuses(match, dst, source, asked):
    def kernel():
        x = nl.ndarray(*source)
        nisa.memset(x, 0)
        nisa.nc_transpose(nl.ndarray(*dst), x, asked)

    refuses(match, kernel)


AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 8), min_size=2, max_size=4),
    dtype=st.sampled_from([d for d in DTYPES if d.itemsize > 1]),
    explicit=st.booleans(), on_chip=st.booleans(),
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


def _transposes(shape, dtype, axes=None, mode=nisa.dge_mode.unknown, dst=None, dst_dtype=None):
    def kernel(x):
        dst_shape = dst or tuple(shape[i] for i in AXES[len(shape)])
        nisa.dma_transpose(nl.ndarray(dst_shape, dst_dtype or dtype), x, axes, dge_mode=mode)

    return kernel, data(shape, dtype)


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        ("axes must be", ((4, 6), nl.float32, (0, 1))),
        ("axes must be", ((4, 6, 2), nl.float32, (1, 0, 2))),
        ("dst must be [6, 4]", ((4, 6), nl.float32, None, nisa.dge_mode.unknown, (4, 6))),
        ("one dtype", ((4, 6), nl.float32, None, nisa.dge_mode.unknown, None, nl.bfloat16)),
        ("hwdge takes 2-byte src", ((16, 6), nl.float32, None, hw)),
        ("hwdge takes 2-byte src", ((8, 6), nl.bfloat16, None, hw)),
        ("swdge does not transpose", ((16, 6), nl.bfloat16, None, sw)),
    ],
)
def test_dma_transpose_refuses(match, arguments):
    kernel, x = _transposes(*arguments)
    refuses(match, kernel, x)


@pytest.mark.parametrize("shape", [(16, 128), (2, 24, 16), (4, 1, 4, 16)])
def test_hardware_transposes(shape):
    kernel, x = _transposes(shape, nl.bfloat16, None, hw)
    run(kernel, x)
    refuses("needs NeuronCore-v3", kernel, x, target="trn1")


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
        dst = nl.ndarray((8, columns), dtype)
        nisa.dma_transpose(dst, x.ap([[8, columns], [1, 8]], vector_offset=loaded(i)))

    refuses(match, kernel, data((64, 8), dtype), np.zeros(*index), target=target)
