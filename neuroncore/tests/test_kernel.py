"""`jit`, `simulate`, launches on two cores, arguments and outputs, and the name `nki`."""

import gc
import inspect
import tracemalloc
import types
import weakref

import numpy as np
import pytest
import torch
from instruction_runs import loaded, run, stored
from samples import TARGETS, bf16, data, equal

import neuroncore as nc
import neuroncore.isa as nisa
import neuroncore.language as nl


@nc.jit
def double(x, factor=2.0):
    """Multiply by a factor."""
    t = loaded(x)
    nisa.tensor_scalar(t, t, nl.multiply, factor)
    return stored(t)


def test_a_kernel_keeps_its_functions_name_signature_and_docstring():
    assert (double.__name__, double.__doc__) == ("double", "Multiply by a factor.")
    assert list(inspect.signature(double).parameters) == ["x", "factor"]
    assert (double.lnc, double[2].lnc, double[1].lnc) == (1, 2, 1)
    assert "double" in repr(double)


def test_every_way_to_run():
    x = data((4, 6))
    expected = x * 2
    result = nc.simulate(double, x, target="trn2")
    assert isinstance(result, nc.Simulation)
    assert isinstance(result.profile, nc.Profile)
    ways = nc.simulate(double), double, double[1], nc.simulate(double.func)
    for got in (result.outputs, *[way(x) for way in ways]):
        equal(got, expected)
    equal(nc.simulate(double, x, factor=3.0).outputs, x * 3)
    equal(double(x=x, factor=4.0), x * 4)


def test_jit_takes_mode_and_simulate_known_options():
    decorated = nc.jit(mode="auto")(double.func)
    equal(decorated(data((4, 6))), data((4, 6)) * 2)
    with pytest.raises(TypeError, match="takes no platform_target"):
        nc.jit(double.func, platform_target="trn2")
    for options in ({"mode": "fast"}, {"model": "wrong"}, {"target": "trn9"}):
        with pytest.raises(ValueError, match="must be"):
            nc.simulate(double, data((4, 6)), **options)


@pytest.mark.parametrize(
    ("name", "version"),
    [("trn1", 2), ("inf2", 2), ("gen3", 3), ("trn2", 3), ("TRN3", 4), (None, 3)],
)
def test_target_from_the_environment(name, version, monkeypatch):
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    if name:
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", name)
    seen = []

    def kernel(x):
        seen.append(nisa.get_nc_version())
        return double(x)

    nc.simulate(kernel)(data((4, 6)))
    nc.simulate(kernel, data((4, 6)), target="trn1")
    assert seen == [nisa.nc_version(version), nisa.nc_version.gen2]
    assert nisa.get_nc_version() is nisa.nc_version(version)


# two cores


def test_two_cores_write_one_output():
    @nc.jit
    def kernel(x):
        me, count = nl.program_id(axis=0), nl.num_programs(axes=0)
        assert (count, nl.program_ndim()) == (2, 1)
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        rows = nl.ds(me * 2, 2)
        t = loaded(x[rows])
        nisa.tensor_scalar(t, t, nl.add, float(me + 1))
        nisa.dma_copy(out[rows], t)
        return out

    x = data((4, 6))
    equal(kernel[2](x), x + np.array([[1], [1], [2], [2]], np.float32))


def test_private_hbm_is_per_core_and_a_barrier_orders_them():
    @nc.jit
    def kernel(x):
        me = nl.program_id()
        own = nl.ndarray((1, 6), nl.float32, nl.private_hbm)
        shared, out = (nl.ndarray((2, 6), nl.float32, nl.shared_hbm) for _ in range(2))
        nisa.dma_copy(own, loaded(x[me : me + 1]))
        nisa.dma_copy(shared[me : me + 1], own)
        nisa.core_barrier(shared, (0, 1))
        nisa.dma_copy(out[me : me + 1], loaded(shared[1 - me : 2 - me]))
        return out

    equal(kernel[2](data((2, 6))), data((2, 6))[::-1])


def test_one_core_has_no_grid():
    def kernel(x):
        assert (nl.program_id(), nl.num_programs(), nl.program_ndim()) == (0, 1, 0)
        return x

    equal(run(kernel, data((4, 6))), data((4, 6)))


# arguments and outputs


def test_outputs_are_one_tensor_a_tuple_or_nothing():
    x = data((4, 6))

    def several(a):
        return double(a), double(a, 3.0), a

    got = run(several, x)
    assert isinstance(got, tuple)
    for g, factor in zip(got, (2, 3, 1), strict=True):
        equal(g, x * factor)
    assert run(lambda a: None, x) is None
    np.testing.assert_array_equal(run(lambda a: double(a)[1:3, ::2], x), 2 * x[1:3, ::2])


def test_lists_are_noted_and_tuples_taken():
    with pytest.warns(nc.NkiWarning, match="argument xs is a list .* pass a tuple"):
        listed = nc.simulate(lambda xs: xs[0] if isinstance(xs, list) else None, [data((4, 6))])
    equal(listed.outputs, data((4, 6)))
    assert nc.simulate(lambda xs, n: xs[n], (data((4, 6)), data((2, 3))), 1).outputs.shape == (2, 3)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.complex64])
def test_dtypes_that_the_core_lacks(dtype):
    with pytest.raises(TypeError, match="the NeuronCore has no dtype"):
        double(np.ones((4, 6), dtype))


def test_other_arguments_are_compile_time_constants():
    seen = []

    def kernel(x, flag, dtype, config, nothing=None):
        seen.append((flag, dtype, config, nothing))
        return x

    config = types.SimpleNamespace(a=1)
    nc.simulate(kernel, data((4, 6)), True, nl.bfloat16, config)
    assert seen == [(True, nl.bfloat16, config, None)]


def test_strided_and_read_only_arrays():
    base = data((8, 12))
    x = base[::2, 1::2]
    equal(double(x), x * 2)

    def overwrite(a):
        nl.store(a, nl.zeros((4, 6), nl.float32))

    run(overwrite, x)
    assert (x == 0).all()
    frozen = data((4, 6))
    frozen.flags.writeable = False
    run(overwrite, frozen)
    equal(frozen, data((4, 6)))


def test_arguments_by_position_by_name_and_in_dictionaries():
    def kernel(first, /, *rest, table, **others):
        return tuple(double(x) for x in (first, *rest, table["a"], others["last"]))

    xs = [data((4, 6), seed=i) for i in range(5)]
    run_ = nc.simulate(kernel, *xs[:3], table={"a": xs[3]}, last=xs[4])
    for got, x in zip(run_.outputs, xs, strict=True):
        equal(got, x * 2)


def test_torch_has_no_ieee_fp8():
    def kernel(x):
        t = nl.ndarray((4, 6), nl.float8_e4m3)
        nisa.dma_copy(t, x)
        return stored(t)

    with pytest.raises(TypeError, match="torch has no float8_e4m3; give the kernel NumPy arrays"):
        nc.simulate(kernel, torch.ones(4, 6))
    assert nc.simulate(kernel, np.ones((4, 6), np.float32)).outputs.dtype == "float8_e4m3"


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_tensors(dtype):
    x = (torch.arange(24) % 7).reshape(4, 6).to(dtype)
    got = double(x)
    assert isinstance(got, torch.Tensor)
    assert got.dtype == dtype
    assert (got.float() == 2 * x.float()).all()
    run(lambda a: nl.store(a, nl.ones((4, 6), nl.float32)), x)
    assert (x.float() == 1).all()  # written in place
    strided = torch.ones(6, 4).to(dtype).t()
    assert (double(strided).float() == 2).all()
    assert (double(torch.ones(4, 6, requires_grad=True)) == 2).all()


def test_torch_tensors_elsewhere_are_refused():
    with pytest.raises(ValueError, match="argument x is on meta"):
        double(torch.empty(4, 6, device="meta"))


def test_trace_mode_computes_nothing_and_returns_specs():
    spec = nc.TensorSpec((100_000, 60_000), nl.bfloat16)  # 12 GB

    @nc.jit
    def kernel(x):
        out = nl.ndarray(x.shape, nl.float32, nl.shared_hbm)
        t = loaded(x[:128, :512])
        nisa.dma_copy(out[:128, :512], t)
        return out, t.shape[0] and out[:5]

    with pytest.warns(nc.NkiWarning, match="some of it was never written"):
        result = nc.simulate(kernel, spec, mode="trace")
    assert result.outputs == (
        nc.TensorSpec((100_000, 60_000), nl.float32), nc.TensorSpec((5, 60_000), nl.float32)
    )  # fmt: skip
    x = data((4, 6))
    assert nc.simulate(double, x, mode="trace").outputs == nc.TensorSpec((4, 6), nl.float32)
    with pytest.raises(ValueError, match="TensorSpec without values"):
        nc.simulate(double, nc.TensorSpec((4, 6), nl.float32))


def test_a_launch_is_freed_without_the_garbage_collector():
    gc.disable()
    try:
        done = nc.simulate(double, nc.TensorSpec((128, 4), nl.float32), mode="trace", target="trn2")
        launch = weakref.ref(done.profile.launch)
        del done
        assert launch() is None
    finally:
        gc.enable()


class _Ring:
    """Refers to itself: only the collector frees it."""

    def __init__(self):
        self.itself = self


def test_what_a_kernel_leaves_in_rings_is_collected_while_it_is_young():
    """Counted as old it would stay until the rare walk over everything, with its arrays."""
    rings = []

    @nc.jit
    def kernel(x):
        rings.append(weakref.ref(_Ring()))
        return stored(loaded(x))

    nc.simulate(kernel, data((4, 4)))
    gc.collect(1)
    assert [ring() for ring in rings] == [None]


@pytest.mark.parametrize("call", [lambda: nl.ndarray((4, 6), nl.float32), nl.program_id,
                                  lambda: nl.shared_identity_matrix(4)])  # fmt: skip
def test_instructions_outside_a_kernel(call):
    with pytest.raises(RuntimeError, match="outside a kernel"):
        call()


# the language


def test_shared_constants(tmp_path):
    values = data((4, 6), bf16)
    path = tmp_path / "constant.npy"
    np.save(path, data((4, 6)))

    def kernel(x):
        constants = [nl.shared_constant(source) for source in (values, path, str(path))]
        assert constants[0].buffer is nl.shared_hbm
        return tuple([stored(loaded(constant)) for constant in constants])

    for got, expected in zip(run(kernel, data((1, 1))), (values, *[data((4, 6))] * 2), strict=True):
        equal(got, expected)


@pytest.mark.parametrize("dtype", [nl.uint8, nl.float32, nl.bfloat16, nl.float8_e4m3])
def test_shared_identity_matrix(dtype):
    def kernel(x):
        first = nl.shared_identity_matrix(5, dtype)
        assert nl.shared_identity_matrix(5, dtype) is first
        assert nl.shared_identity_matrix(6, dtype) is not first
        mine = nl.ndarray((5, 5), dtype)
        assert nl.shared_identity_matrix(5, dtype, mine) is mine
        return stored(first), stored(mine)

    for got in run(kernel, data((1, 1))):
        equal(got, np.eye(5).astype(dtype.numpy))


def test_fori_loop_with_bounds_from_memory():
    x, bounds = data((8, 6)), np.array([[1, 6]], np.int32)

    def kernel(a, b):
        out = nl.ndarray((8, 6), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, a)
        low, high = nisa.register_alloc(), nisa.register_alloc()
        tile = loaded(b)
        nisa.register_load(low, tile[:, :1])
        nisa.register_load(high, tile[:, 1:])

        def body(i):
            row = nl.zeros((1, 6), nl.float32)
            nisa.dma_copy(out.ap([[6, 1], [1, 6]], scalar_offset=i), row)

        nl.fori_loop(low, high, body, step=2)
        assert [i.value for i in nl.dynamic_range(high)] == [0, 1, 2, 3, 4, 5]
        return out

    expected = x.copy()
    expected[1:6:2] = 0
    equal(run(kernel, x, bounds), expected)


@pytest.mark.parametrize("turns", [0, 1, 5])
def test_while_loop(turns):
    def kernel(count):
        left, one, total = loaded(count), nl.ones((1, 1), nl.int32), nl.zeros((1, 1), nl.float32)
        reg = nisa.register_alloc()
        nisa.register_load(reg, left)

        def body(r):
            nisa.tensor_scalar(total, total, nl.add, 2.5)
            nisa.tensor_tensor(left, left, one, nl.subtract)
            nisa.register_load(r, left)
            return r

        nl.while_loop(reg, body)
        return stored(total)

    assert run(kernel, np.array([[turns]], np.int32)).item() == 2.5 * turns


def test_kernels_call_kernels():
    inner = nc.jit(lambda t: nisa.tensor_scalar(t, t, nl.add, 1.0))

    @nc.jit
    def outer(x):
        t = loaded(x)
        inner(t)
        inner(t[:, :2])
        return double(stored(t))

    expected = data((4, 6)) + 1
    expected[:, :2] += 1
    equal(outer(data((4, 6))), expected * 2)


def test_nki_objects_carry_configuration():
    class Config(nl.NKIObject):
        size: int

    def kernel(x, config):
        return stored(loaded(x[:, : config.size]))

    equal(nc.simulate(kernel, data((4, 6)), Config(size=2)).outputs, data((4, 6))[:, :2])


def test_device_print(capsys):
    run(lambda x: nl.device_print("tile", loaded(x)), np.array([[1.5, -2.25]], np.float32))
    assert "tile" in (text := capsys.readouterr().out)
    assert "-2.25" in text


def test_ranges_are_pythons_and_sizes_depend_on_the_target():
    assert list(nl.affine_range(3)) == [0, 1, 2]
    assert list(nl.sequential_range(1, 6, 2)) == [1, 3, 5]
    assert nl.static_range(2, 4) == range(2, 4)
    sizes = []
    for target in TARGETS:
        run(lambda: sizes.append(nl.tile_size.sbuf_fmax_bytes), target=target)
    assert sizes == [180_224, 212_984, 245_752]
    assert nl.tile_size.sbuf_size_bytes == 128 * nl.tile_size.sbuf_fmax_bytes
    assert nl.tile_size.total_available_sbuf_size == nl.tile_size.sbuf_fmax * 4 // 1


def test_values_live_as_long_as_the_tensors_of_the_kernel():
    """512 tiles of 256 KiB pass through SBUF; two are live at once. The trace keeps none."""

    def kernel(x, on_device):
        def body(_):
            tile = nl.ndarray((128, 512), nl.float32)
            nisa.dma_copy(tile, x)
            nisa.tensor_tensor(total, total, tile, nl.add)

        total = nl.zeros((128, 512), nl.float32)
        y = nl.ndarray((128, 512), nl.float32, nl.shared_hbm)
        if on_device:
            nl.fori_loop(0, 512, body)
        else:
            for i in range(512):
                body(i)
        nisa.dma_copy(y, total)
        return y

    x = np.ones((128, 512), np.float32)
    for on_device in (True, False):
        tracemalloc.start()
        budget = nc.Budget(bytes=4 * x.nbytes)
        done = nc.simulate(kernel, x, on_device, target="trn2", budget=budget)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (done.outputs == 512).all()
        assert peak < 8 * x.nbytes
        assert done.profile.sbuf_peak_bytes == 2 * 512 * 4


def test_a_view_keeps_the_values_of_its_tensor():
    def kernel(x):
        half = nl.ndarray((4, 8), nl.float32)[:, 4:]
        nisa.dma_copy(half, x)
        parts = [half[:, i : i + 1] for i in range(4)]
        del half
        y = nl.ndarray(x.shape, nl.float32, nl.shared_hbm)
        for i, part in enumerate(parts):
            nisa.dma_copy(y[:, i : i + 1], part)
        return y

    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    assert (nc.simulate(kernel, x, target="trn2").outputs == x).all()


def test_a_storage_alone_keeps_no_values():
    def kernel(x):
        storage = nl.ndarray((4, 8), nl.float32).storage
        nisa.dma_copy(nl.NkiTensor((4, 8), nl.float32, storage), x)
        return x

    with pytest.raises(nc.NkiValidationError, match=r"has lost its values; keep its tensor.*py:"):
        nc.simulate(kernel, data((4, 8)), target="trn2")
