"""What published kernels do that the documentation refuses: taken where its meaning is plain."""

import importlib
import sys
import warnings

import numpy as np
import pytest
from instruction_runs import compute, full, loaded, new, noted, refused, refuses, run, stored
from samples import bf16, data, equal, values

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl


def test_constants_of_isa():
    with nc.as_nki():
        constants = importlib.import_module("nki.isa.constants")
        assert constants.oob_mode is nisa.oob_mode
        assert importlib.import_module("nki.isa").constants is constants
    assert "nki.isa.constants" not in sys.modules


def test_generations_have_an_order():
    gen2, gen3, gen4 = nisa.nc_version
    assert gen2 < gen3 < gen4 > gen2
    assert gen2 <= gen3 <= gen3 != gen4 >= gen3
    with pytest.raises(TypeError):
        assert gen3 >= 3


def test_names_that_the_documentation_lacks():
    with noted("nl.range is taken as range"):
        assert list(nl.range(1, 7, 3)) == [1, 4]
    with noted("nl.bool is taken as nl.bool_"):
        assert nl.bool is nl.bool_
    assert not hasattr(nl, "arange")


def test_jit_takes_options_of_the_compiler():
    with noted("debug_kernel has no effect"):
        kernel = nc.jit(debug_kernel=True, mode="auto")(lambda x: x)
    equal(kernel(data((4, 6))), data((4, 6)))
    with pytest.raises(TypeError, match="NEURON_PLATFORM_TARGET_OVERRIDE"):
        nc.jit(platform_target="trn2")


@pytest.mark.parametrize("into", [nl.sbuf, nl.psum, nl.shared_hbm])
def test_assigning_a_tile_copies_it(into):
    name = "dma_copy" if into is nl.shared_hbm else "tensor_copy"
    x = data((4, 6))

    def body(x):
        tile, got = loaded(x), new(4, 12, buffer=into)
        with noted(rf"assigning into a tile is taken as nisa\.{name}, as NKI 0\.3 did"):
            got[:, 0:6] = tile
            got[:, 6:] = tile
        return got if into is nl.shared_hbm else stored(got)

    equal(run(body, x), np.tile(x, 2))


@pytest.mark.parametrize("mode", ["double_row", nisa.matmul_perf_mode.double_row])
def test_the_name_of_a_perf_mode_is_that_mode(mode):
    a, b = (values(s, (16, 2, n)).astype(nl.float8_e4m3.numpy) for s, n in ((0, 8), (1, 24)))

    def body(x, y):
        acc = nl.ndarray((8, 24), nl.float32, nl.psum)
        nisa.nc_matmul(acc, loaded(x), loaded(y), perf_mode=mode)
        return stored(acc)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = run(body, a, b)
    expected = a.astype(np.float32).reshape(32, 8).T @ b.astype(np.float32).reshape(32, 24)
    equal(got, expected)
    assert [w.category for w in caught] == ([nc.NkiWarning] if mode == "double_row" else [])


@pytest.mark.parametrize(
    ("given", "meant"), [(2, "hwdge"), (3, "none"), ("swdge", "swdge"), (0, "unknown")]
)
def test_a_number_or_name_of_dge_mode_is_that_mode(given, meant):
    def kernel(mode):
        def body(x):
            tile = nl.ndarray(x.shape, x.dtype)
            nisa.dma_copy(tile, x, dge_mode=mode)
            return stored(tile)

        return nc.simulate(body, data((4, 6)), target="trn2")

    with noted(f"dge_mode={given!r} is taken as dge_mode.{meant}; .*migration guide"):
        done = kernel(given)
    equal(done.outputs, data((4, 6)))
    assert done.profile.time_ms == kernel(nisa.dge_mode[meant]).profile.time_ms


def test_an_engine_and_a_reduce_command_by_name():
    def body(x):
        tile, out, total = loaded(x), *(nl.ndarray((4, n), nl.float32) for n in (6, 1))
        with noted("engine='gpsimd' is taken as engine.gpsimd"):
            nisa.tensor_copy(out, tile, engine="gpsimd")
        nisa.activation(out, nl.copy, tile, reduce_op=nl.add, reduce_res=total, reduce_cmd=3)
        return stored(total)

    with noted("reduce_cmd=3 is taken as reduce_cmd.reset_reduce"):
        got = run(body, values(0, (4, 6)))
    equal(got, values(0, (4, 6)).sum(1, keepdims=True))


def test_a_range_as_an_index_is_a_slice():
    """nkipy's simple_nki_kernel.py indexes with nl.affine_range; the other two index parts."""

    def body(a, b):
        ix, iy = nl.affine_range(a.shape[0]), nl.affine_range(a.shape[1])
        c = nl.add(nl.load(a[ix, iy]), nl.load(b[ix, iy]))
        out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
        nl.store(out[ix, iy], value=c)
        part = nl.ndarray((2, 3), a.dtype, buffer=nl.shared_hbm)
        nl.store(part, nl.load(a[nl.affine_range(1, 3), range(0, 6, 2)]))
        return out, part

    a, b = values(0, (4, 6)), values(1, (4, 6))
    whole, part = run(body, a, b)
    equal(whole, a + b)
    equal(part, a[1:3, ::2])
    with refused("slice 0:7:1 is out of bounds of dimension 1"):
        run(lambda x: x[range(4), range(7)], a)


def test_dma_transpose_without_dge():
    def body(x):
        tile = nl.ndarray((6, 4), x.dtype)
        nisa.dma_transpose(tile, x, dge_mode=nisa.dge_mode.none)
        return stored(tile)

    with noted("dge_mode.none is taken as dge_mode.unknown"):
        equal(run(body, data((4, 6))), data((4, 6)).T)


def test_the_documented_lowest_float_of_range_select():
    def body(x):
        tile, out, low, high = loaded(x), new(4, 6), full(1, 4, 1), full(3, 4, 1)
        nisa.range_select(out, tile, nl.greater_equal, nl.less, low, high,
                          on_false_value=-3.4028235e+38)  # fmt: skip
        return stored(out)

    got = run(body, data((4, 6)))
    assert (got[:, 3:] == np.finfo(np.float32).min).all()
    equal(got[:, 1:3].copy(), data((4, 6))[:, 1:3])


def test_the_dtype_of_a_result_that_is_returned_no_more():
    def body(dst, x):
        nisa.tensor_copy(dst, x, dtype=nl.bfloat16)

    with noted("dtype=bfloat16 is dst's own and without effect"):
        got = compute(body, (4, 6), nl.bfloat16, data((4, 6), bf16))
    equal(got, data((4, 6), bf16))


def test_an_output_in_private_hbm():
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, nl.hbm)
        nisa.dma_copy(out, x)
        return out

    with noted("does not compile since NKI 0.3"):
        equal(nc.simulate(kernel, data((4, 6))).outputs, data((4, 6)))
    with refused("must be a tensor in nl.shared_hbm"):
        nc.simulate(nc.jit(kernel)[2], data((4, 6)), target="trn2")


def test_the_partition_stride_of_a_view():
    x = values(0, (8, 12))

    def body(a):
        view = loaded(a)[:, 4:8]
        out = nl.ndarray((8, 2), nl.float32)
        nisa.tensor_copy(out, view.ap([[4, 8], [2, 2]]))
        return stored(out)

    with noted("ap takes its partition stride 4, that of the view, as 12"):
        equal(run(body, x), x[:, 4:8:2].copy())


def test_an_access_pattern_may_be_cut_before_it_is_used():
    x = values(0, (5, 12))

    def body(a):
        rows = a.ap([[12, 8], [1, 12]])  # three rows too many
        with refused("reaches elements 0 to 95 of a storage of 60"):
            nl.load(rows)
        return stored(nl.load(rows[:5]))

    equal(run(body, x), x)


def test_a_gathering_transpose_of_a_reshaped_tensor():
    x = data((4, 64, 16), bf16)
    places = np.arange(15, -1, -1, dtype=np.uint32).reshape(16, 1) * 16

    def body(a, index):
        rows = a.reshape((256, 16))
        out = nl.ndarray((16, 16), a.dtype)
        nisa.dma_transpose(out, rows.ap([[16, 16], [1, 16]], vector_offset=loaded(index)))
        return stored(out)

    equal(run(body, x, places), x.reshape(256, 16)[places[:, 0]].T.copy())
    with refused("dma_transpose: a dynamic index runs out"):
        run(body, x, places + 16)


def test_only_what_nonzero_with_count_reads_must_be_written():
    x = values(0, (1, 8), "int32")

    def body(a):
        tile, out = nl.ndarray((32, 8), nl.int32), nl.zeros((32, 9), nl.int32)
        for row in (0, 16):
            nisa.dma_copy(tile[row : row + 1], a)
        nisa.nonzero_with_count(out, tile)
        return stored(out[:1])

    got = run(body, x)[0]
    places = np.flatnonzero(x[0])
    assert got[: len(places)].tolist() == places.tolist()
    assert got[-1] == len(places)


def test_a_sum_that_is_overwritten_unread():
    def kernel(accumulate, read):
        def body(x):
            acc, tile = nl.ndarray((6, 6), nl.float32, nl.psum), loaded(x)
            for k in range(2):
                nisa.nc_matmul(acc, tile, tile, accumulate=accumulate(k))
                if read:
                    nl.copy(acc)
            return stored(acc)

        return body

    x = data((4, 6))
    with noted("accumulate=False overwrites .* wrote and nothing has read; accumulate=.k > 0."):
        run(kernel(lambda k: False, False), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(kernel(lambda k: k > 0, False), x)
        run(kernel(lambda k: False, True), x)


def test_a_loop_is_noted_once_a_run():
    def kernel(x):
        for _ in range(3):
            tile = nl.ndarray(x.shape, x.dtype)
            nisa.dma_copy(tile, x, dge_mode=2)
            nisa.tensor_copy(nl.ndarray((4, 8), x.dtype)[:, :6], tile)
            nl.copy(nl.ndarray((4, 8), x.dtype))

    for _ in range(2):
        with pytest.warns(nc.NkiWarning) as caught:
            nc.simulate(kernel, data((4, 6)), uninitialised="warn")
        assert len(caught) == 2


def test_calls_that_do_not_fit_a_signature_name_their_line():
    for text, body in (
        ("nc_matmul() missing 1 required positional argument: 'moving'",
         lambda x: nisa.nc_matmul(x, x)),
        ("dma_copy() got an unexpected keyword argument 'mask'",
         lambda x: nisa.dma_copy(x, x, mask=1)),
        ("NkiTensor.slice() missing 2 required positional arguments", lambda x: x.slice(0)),
    ):  # fmt: skip
        refuses(text, body, data((4, 6)))

    for wrong in (None, np.ones((4, 6)), 1.0):
        for body in (
            lambda x, w=wrong: nisa.dma_copy(new(4, 6), w),
            lambda x, w=wrong: nisa.nc_matmul(w, loaded(x), loaded(x)),
        ):
            refuses("an operand must be a tensor; got ", body, data((4, 6)))
    with pytest.raises(AttributeError, match="no attribute 'storage'"):
        run(lambda x: None.storage, data((4, 6)))  # pyright: ignore

    def own(a, b):
        return a

    with pytest.raises(TypeError, match=r"own\(\) missing 1 required"):
        run(lambda x: own(x), data((4, 6)))  # pyright: ignore
    with pytest.raises(TypeError, match="unsupported operand"):
        run(lambda x: 1 + "a", data((4, 6)))
