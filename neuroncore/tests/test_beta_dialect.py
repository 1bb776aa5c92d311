"""The Beta dialect, interpreted: what its compiler does with sums in PSUM, zeros and tiles."""

import functools
import logging
import types

import numpy as np
import pytest
from samples import data, equal, f32

import neuroncore as nc
from neuroncore.legacy import as_neuronxcc
from neuroncore.migrate import migrate

KERNELS = """
import logging
import numpy as np
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

logging.disable(logging.OFF)


@nki.jit
def summed(w, x):
    K, M = w.shape[0] // 2, w.shape[1]
    out = nl.ndarray((M, *x.shape[1:]), x.dtype, buffer=nl.shared_hbm)
    acc = nl.zeros((M, *x.shape[1:]), nl.float32, buffer=nl.psum)
    for k in nl.affine_range(2):
        a, b = nl.load(w[k * K:(k + 1) * K]), nl.load(x[k * K:(k + 1) * K])
        acc += nisa.nc_matmul(a, b)
    nl.store(out, nl.copy(acc, dtype=x.dtype))
    return out


@nki.jit
def on_top(w, x, value):
    out = nl.ndarray((w.shape[1], x.shape[1]), x.dtype, buffer=nl.shared_hbm)
    acc = nl.full(out.shape, value, nl.float32, buffer=nl.psum)
    a, b = nl.load(w), nl.load(x)
    acc[:, 0:4] = nisa.tensor_copy(b[0:w.shape[1], 0:4], dtype=nl.float32)
    acc += nisa.nc_matmul(a, b)
    acc[:, 2:6] += nisa.nc_matmul(a, b[:, 2:6])
    nl.store(out, acc)
    return out


@nki.jit
def kept(w, x):
    out = nl.ndarray((w.shape[1], x.shape[1]), x.dtype, buffer=nl.shared_hbm)
    acc = nl.zeros(out.shape, nl.float32, buffer=nl.psum)
    a, b = nl.load(w), nl.load(x)
    before = nisa.nc_matmul(a, b)
    a[...] = nl.load(x[:, 0:w.shape[1]])
    acc += before
    nl.store(out, acc)
    return out


@nki.jit
def scaled(x, inside):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    zeros = nl.zeros((128, x.shape[1]), x.dtype, buffer=nl.sbuf)
    tile = nl.ndarray((128, x.shape[1]), x.dtype, buffer=nl.sbuf)
    for m in nl.affine_range(x.shape[0] // 128):
        if inside:
            tile = nl.ndarray((128, x.shape[1]), x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x[m * 128:(m + 1) * 128])
        doubled = nl.add(nl.multiply(tile, 2.0), zeros)
        nisa.dma_copy(dst=out[m * 128:(m + 1) * 128], src=doubled)
    return out


@nki.jit
def biased(x, bias):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    columns = nl.ndarray((x.shape[0], 2), bias.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=columns[:, 1], src=bias)
    tile = nisa.tensor_tensor(nl.load(x), columns[:, 1], nl.add)
    nl.store(out, tile)
    return out


@nki.jit
def chained(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, nl.float32, buffer=nl.sbuf)
    tile[...] = nl.load(x)
    tile[...] = nisa.tensor_scalar(tile, nl.add, 1.0)
    tile += nisa.tensor_tensor(tile, tile, nl.multiply)
    tile[:, 0:4] = nisa.tensor_copy(tile[:, 2:6])
    most = nl.ndarray((x.shape[0], 2), nl.float32, buffer=nl.sbuf)
    most[:, 1] = nisa.tensor_reduce(nl.max, tile, axis=1)
    nisa.dma_copy(dst=out, src=nisa.tensor_scalar(tile, nl.subtract, most[:, 1]))
    return out


@nki.jit
def named(w, x):
    out = nl.ndarray((3, w.shape[1], x.shape[1]), x.dtype, buffer=nl.shared_hbm)
    a, b = nl.load(w), nl.load(x)
    acc = nl.zeros(out.shape[1:], nl.float32, buffer=nl.psum)
    product = nisa.nc_matmul(a, b)
    acc += product
    b[...] = nl.load(x)
    b[...] = nisa.tensor_scalar(b, nl.multiply, 0.0)
    nl.store(out[0], product)
    tile = nl.ndarray(out.shape[1:], x.dtype, buffer=nl.sbuf)
    doubled = nisa.tensor_scalar(acc, nl.multiply, 2.0)
    tile[...] = doubled
    tile[...] = nisa.tensor_scalar(tile, nl.add, 1.0)
    nl.store(out[1], tile)
    nl.store(out[2], doubled)
    return out


@nki.jit
def unread(w, x):
    out = nl.ndarray((w.shape[1], x.shape[1]), x.dtype, buffer=nl.shared_hbm)
    acc = nl.zeros(out.shape, nl.float32, buffer=nl.psum)
    a, b = nl.load(w), nl.load(x)
    for _ in range(4):
        b[...] = nisa.tensor_scalar(b, nl.add, 1.0)
        product = nisa.nc_matmul(a, b)
        acc += product
    nl.store(out, acc)
    return out


@nki.jit
def copied(x):
    out = nl.ndarray((8, *x.shape), x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    for i in range(8):
        nl.store(out[i], nl.copy(tile))
    return out


@nki.jit
def reloaded(x, weights, rounds):
    out = nl.ndarray((rounds, *x.shape), x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(rounds):
        total = nl.load(x)
        for row in nl.affine_range(weights.shape[0] // 128):
            total += nl.load(weights[row * 128:(row + 1) * 128])
        nl.store(out[i], total)
    return out


@nki.jit
def updated(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x))
    nl.store(out, nl.multiply(nl.load(out), 2.0))
    nl.store(out, nl.add(nl.load(out), 1.0))
    return out


@nki.jit
def halves(x):
    out = nl.ndarray((x.shape[0], 2, x.shape[1] // 2), x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x).reshape((x.shape[0], 2, x.shape[1] / 2)))
    return out


@nki.jit
def transposed(x):
    out = nl.ndarray((x.shape[1], x.shape[0]), x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.copy(nisa.nc_transpose(nl.load(x)), dtype=x.dtype))
    return out


@nki.jit
def turned(x):
    out = nl.ndarray((x.shape[1], x.shape[0]), x.dtype, buffer=nl.shared_hbm)
    kept = nl.ndarray((2, nl.par_dim(x.shape[1]), x.shape[0]), x.dtype, buffer=nl.sbuf)
    kept[1] = nisa.nc_transpose(nl.load(x))
    nl.store(out, kept[1])
    return out


@nki.jit
def marked(w, x):
    out = nl.ndarray((w.shape[1], x.shape[1]), nl.float32, buffer=nl.shared_hbm)
    nl.store(out, nisa.nc_matmul(nl.load(w), nl.load(x), is_transpose=True))
    return out


@nki.jit
def pooled(x):
    P, H, W = x.shape
    out = nl.ndarray((P, H // 2, W // 2), x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    windows = tile.reshape((P, H // 2, 2, W // 2, 2))
    nl.store(out, nisa.tensor_reduce(nl.max, windows, axis=(2, 4)))
    return out
"""


@functools.cache
def kernels():
    made = types.ModuleType("beta")
    with as_neuronxcc():
        exec(compile(KERNELS, "beta.py", "exec"), vars(made))  # noqa: S102
    return made


@functools.cache
def migrated():
    made = types.ModuleType("migrated")
    with nc.as_nki(), as_neuronxcc():
        exec(compile(migrate(KERNELS)[0], "migrated.py", "exec"), vars(made))  # noqa: S102
    return made


def in_both(name, *args):
    """The output, which is the same when migrated."""
    before, after = (nc.simulate(getattr(m, name), *args).outputs for m in (kernels(), migrated()))
    equal(after, before)
    return before


def run(name, *args, target="trn2", mode="execute"):
    return nc.simulate(getattr(kernels(), name), *args, target=target, mode=mode)


def whole(*shape, seed=0, dtype=f32):
    """Small integers, whose sums are exact."""
    return np.round(2 * data(shape, f32, seed)).astype(dtype)


def test_a_sum_of_matmuls_is_matmuls_alone():
    w, x = whole(32, 8), whole(32, 5, 6, seed=1)
    done = run("summed", w, x)
    equal(done.outputs, np.einsum("km,kij->mij", w, x))
    assert done.profile.opcodes == {"dma_copy": 5, "nc_matmul": 2, "tensor_copy": 1}


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_sum_adds_to_what_is_there(value):
    w, x = whole(16, 8), whole(16, 12, seed=1)
    begun = np.full((8, 12), value)
    begun[:, :4] = x[:8, :4]
    product = w.T @ x
    begun[:, 2:6] += product[:, 2:6]
    equal(run("on_top", w, x, value).outputs, (begun + product).astype(f32))


def test_a_matmul_has_the_operands_of_its_line():
    w, x = whole(16, 8), whole(16, 12, seed=1)
    equal(run("kept", w, x).outputs, w.T @ x)


def test_a_result_is_written_where_it_is_assigned():
    x = whole(16, 12)
    done = run("chained", x)
    tile = (x + 1) + (x + 1) ** 2
    tile[:, :4] = tile[:, 2:6].copy()
    equal(done.outputs, tile - tile.max(1, keepdims=True))
    assert done.profile.opcodes == {
        "dma_copy": 2, "tensor_scalar": 2, "tensor_tensor": 2, "tensor_copy": 2, "tensor_reduce": 1,
    }  # fmt: skip


def test_a_result_with_a_name_is_kept_where_it_was_used():
    w, x = whole(16, 8), whole(16, 12, seed=1)
    product = w.T @ x
    equal(run("named", w, x).outputs, np.stack([product, 2 * product + 1, 2 * product]))


def test_what_nothing_reads_is_not_run():
    w, x = whole(16, 8), whole(16, 12, seed=1)
    done = run("unread", w, x)
    equal(done.outputs, w.T @ (4 * x + 10))
    assert done.profile.opcodes["nc_matmul"] == 4


def test_two_engines_share_copies():
    x = whole(16, 64)
    for target, others in (("trn2", 0), ("trn1", 4)):
        done = run("copied", x, target=target)
        equal(done.outputs, np.broadcast_to(x, (8, 16, 64)))
        busy = [use.busy_ms > 0 for use in done.profile.engines[0] if use.engine != "DMA"]
        assert sum(busy) == 2
        # before NeuronCore-v3 ScalarE copies by its identity
        assert done.profile.opcodes.get("activation", 0) == others


def test_a_tile_that_is_overwritten_whole_is_a_new_one():
    x = whole(1024, 64)
    outside, inside = run("scaled", x, False), run("scaled", x, True)
    for done in outside, inside:
        equal(done.outputs, 2 * x)
    assert outside.profile.time_ms == pytest.approx(inside.profile.time_ms, rel=0.02)
    idle = {use.engine: use.busy_ms for use in outside.profile.engines[0]}
    assert idle["GpSimdE"] > 0  # zeros in SBUF


@pytest.mark.parametrize(
    ("tiles", "columns", "loads"),
    [(4, 64, 5), (2, 10_000, 3), (4, 10_000, 3 * 5)],  # of 40 KB of a partition three have room
)
def test_what_sbuf_still_has_is_not_loaded_again(tiles, columns, loads):
    x, weights = whole(128, columns), whole(tiles * 128, columns, seed=1)
    done = run("reloaded", x, weights, 3)
    total = x + weights.reshape(tiles, 128, columns).sum(0)
    equal(done.outputs, np.broadcast_to(total, (3, 128, columns)))
    assert done.profile.opcodes["dma_copy"] == loads + 3


def test_what_was_written_since_is_loaded_again():
    x = whole(16, 12)
    done = run("updated", x)
    equal(done.outputs, 2 * x + 1)
    assert done.profile.opcodes["dma_copy"] == 6


def test_a_column_is_added_to_a_tile_of_three_dimensions():
    x, bias = whole(16, 4, 6), whole(16, seed=1)
    equal(in_both("biased", x, bias), x + bias[:, None, None])


def test_sizes_may_be_whole_floats():
    x = whole(16, 6)
    equal(run("halves", x).outputs, x.reshape(16, 2, 3))


def test_windows_of_a_reshaped_tile_are_reduced():
    x = whole(16, 6, 8)
    expected = x.reshape(16, 3, 2, 4, 2).max((2, 4))
    equal(in_both("pooled", x), expected)


def test_a_transpose_into_a_block_goes_through_psum():
    x = whole(64, 40)
    equal(in_both("turned", x), x.T)


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("dtype", [np.float16, f32])
def test_transposes_keep_their_dtype(target, dtype):
    x = whole(24, 40, dtype=dtype)
    equal(run("transposed", x, target=target).outputs, x.T)


def test_before_native_transposes_a_marked_matmul_sums_in_float32():
    w, x = whole(32, 16, dtype=np.float16), whole(32, 24, dtype=np.float16)
    equal(run("marked", w, x, target="trn1").outputs, w.astype(f32).T @ x.astype(f32))


def test_its_compiler_adds_a_level_to_logging():
    kernels()  # whose file uses it to switch all logging off
    assert logging.OFF > logging.CRITICAL
    assert logging.root.isEnabledFor(logging.CRITICAL)
