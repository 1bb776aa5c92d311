"""The PrivateUse1 kernels: the three call modes of torch_neuronx.

No device is needed: the kernels are dispatched by their key on CPU tensors.
"""

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import neuron_graphs
import pytest
import stand_ins
import torch
from commands import run
from decoder_layers import cast
from decoder_layers import operands as layer_operands
from kernels.test_attention_chunk import copied
from kernels.test_attention_chunk import operands as attention_operands
from operands import (
    ACTIVATIONS,
    OPS,
    PLAIN,
    doubled,
    magnitude_of,
    make,
    mlp_shapes,
    names_of,
    plain_mlp,
    plain_svd_mlp,
    plain_xuv,
)
from stand_ins import TORCH_NEURONX, DirectKernel, NeuronMachine, record
from tolerances import assert_close_to_oracle
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

import neuronmm_ops as nm
from neuronmm_ops import kernels
from neuronmm_ops.errors import NkiVersionError
from neuronmm_ops.ops.backends import neuron
from neuronmm_ops.ops.definitions import SPECS

PAIR = ((2, 3, 128), (128, 24), (24, 40), (40,))
KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
CALL_MODES = {name: name.split()[0] for name in TORCH_NEURONX}
kernel_named = kernels.kernel_named


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Iterator[NeuronMachine]:
    """A trn2 whose kernels are called directly where nothing wraps them."""
    monkeypatch.setattr(kernels, "kernel_named", lambda *name: DirectKernel(kernel_named(*name)))
    with stand_ins.neuron_machine(tmp_path, monkeypatch) as found:
        found.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
        yield found


@pytest.fixture(params=TORCH_NEURONX)
def offers(request, machine) -> str:
    """Install nki, and a torch_neuronx that offers one of the call modes."""
    machine.nki()
    machine.torch_neuronx(request.param)
    return request.param


def dispatched(op, *args):
    """Run an op's PrivateUse1 kernel on whatever tensors."""
    return getattr(torch.ops.neuronmm, op).default.redispatch(KEY, *args)


def xuv_tensors(*lead: int, dtype=torch.float32, bias=True):
    shapes = [(*lead, 128), (128, 24), (24, 40)]
    return [*[make(s, dtype) for s in shapes], make((40,), dtype) if bias else None]


def assert_right(y, plain, tensors, op="xuv"):
    """Compare a result with plain torch in fp64, as tightly as plain torch itself allows."""
    bound = magnitude_of(op, *tensors)
    assert_close_to_oracle(y, plain(*doubled(*tensors)), plain(*tensors), bound)


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_kernel(op):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"neuronmm::{op}", "PrivateUse1")


def test_another_vendors_device_runs_the_reference(machine, monkeypatch):
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")
    tensors = xuv_tensors(3)
    assert torch.equal(dispatched("xuv", *tensors), nm.xuv(*tensors))
    assert not record.calls


@pytest.mark.parametrize(
    ("op", "shapes", "dtype", "layout"),
    [
        *[
            ("xuv", ((*lead, 128), (128, 24), (24, 40), *bias), torch.float32, "contiguous")
            for lead in ((), (3,), (2, 5), (130,))
            for bias in ((), ((40,),))
        ],
        *[
            ("xw", ((2, 3, 40), (40, 24), *bias), torch.float32, "contiguous")
            for bias in ((), ((24,),))
        ],
        *[("xuv", PAIR, dtype, "contiguous") for dtype in (torch.bfloat16, torch.float16)],
        *[("xuv", PAIR, torch.float32, layout) for layout in ("transposed", "sliced")],
    ],
    ids=str,
)
def test_products(offers, op, shapes, dtype, layout):
    tensors = [make(shape, dtype, layout) for shape in shapes]
    y = dispatched(op, *tensors, *[None] * (len(names_of(op)) - len(tensors)))
    assert y.dtype == dtype
    assert_right(y, PLAIN[op], tensors, op)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_svd_mlp(offers, activation):
    tensors = [make((2, 3, 32)), *[make(s).mul_(0.25) for s in mlp_shapes(32, 48, 40)]]
    y = dispatched("svd_mlp", *tensors, activation)
    assert_right(y, partial(plain_svd_mlp, activation=activation), tensors, "svd_mlp")
    assert record.calls[0].constants["activation"] == activation


@pytest.mark.parametrize("lead", [(), (2, 3), (150,)])
def test_mlp_with_an_x_up(offers, lead):
    shapes = ((32, 48), (24, 48), (48, 40))
    x, x_up = make((*lead, 32)), make((*lead, 24), layout="sliced")
    tensors = [x, *[make(s).mul_(0.25) for s in shapes], x_up]
    assert_right(dispatched("mlp", *tensors), plain_mlp, tensors, "mlp")
    given = dispatched("mlp", x, tensors[1], tensors[1], tensors[3])
    assert_right(given, plain_mlp, [x, tensors[1], tensors[1], tensors[3]], "mlp")


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        ("xuv", ((0, 128), (128, 24), (24, 40), (40,))),
        ("xuv", ((2, 0, 128), (128, 24), (24, 40), (40,))),
        ("xuv", ((3, 128), (128, 0), (0, 40), (40,))),
        ("xuv", ((3, 0), (0, 24), (24, 40), (40,))),
        ("xuv", ((3, 128), (128, 24), (24, 0), (0,))),
        ("xw", ((3, 0), (0, 40), (40,))),
        ("xw", ((0,), (0, 40), (40,))),
        ("svd_mlp", ((3, 32), *mlp_shapes(32, 0, 40))),
        ("svd_mlp", ((3, 32), *mlp_shapes(32, 48, 40, (0, 8, 8)))),
        ("svd_qkv", ((3, 32), (32, 0), (0, 40), (32, 8), (8, 4), (32, 8), (8, 4))),
    ],
)
def test_an_empty_dimension_launches_nothing(offers, op, shapes):
    tensors = list(map(make, shapes))
    y = dispatched(op, *tensors)
    assert torch.equal(y, getattr(torch.ops.neuronmm, op)(*tensors)), "no product is rounded"
    assert not record.calls


@pytest.mark.parametrize("lnc", [1, 2])
def test_the_first_call_mode_offered_is_taken(machine, offers, lnc):
    machine.environment(NEURON_LOGICAL_NC_CONFIG=str(lnc))
    expected = neuron.expected_call_mode()
    assert "torch_neuronx" not in sys.modules, "expected without an import"
    dispatched("xuv", *xuv_tensors(3))
    assert neuron.call_mode() == CALL_MODES[offers] == expected == neuron.expected_call_mode()
    assert record.ops == (
        [f"neuronmm_nki::{op}" for op in SPECS] if CALL_MODES[offers] == "nki_op" else []
    )
    (call,) = record.calls
    assert call.mode == ("direct" if offers in ("direct", "nki_op alone") else "wrap_nki")
    assert call.grid == (lnc,)
    assert call.kernel.lnc == lnc


def test_each_kernel_and_grid_has_one_wrapper(machine):
    machine.nki()
    machine.torch_neuronx()
    for target, lead in (("trn1", (130,)), ("trn2", (130,)), ("trn1", (3,)), ("trn1", (2, 3))):
        machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE=target)
        tensors = [*map(make, [(*lead, 256), (256, 64), (64, 512)]), None]
        assert_right(dispatched("xuv", *tensors), plain_xuv, tensors)
        assert record.calls[-1].grid == ((2,) if target == "trn2" else (1,))
    assert len(record.calls) == 4
    assert record.wrapped == 3  # two grids of the prefill kernel, and the decode kernel


@pytest.mark.parametrize(
    ("suffix", "content"), [(EXTENSION_SUFFIXES[0], ""), (".py", "# coding: no-such-encoding\n")]
)
def test_a_torch_neuronx_that_cannot_be_read_tells_nothing(machine, suffix, content):
    (machine.root / f"torch_neuronx{suffix}").write_text(content)
    assert neuron.expected_call_mode() is None


@pytest.mark.parametrize("installed", [(), ("nki",), ("torch_neuronx",)])
def test_missing_packages_name_the_extra(machine, installed):
    for package in installed:
        getattr(machine, package)()
    missing = " and ".join(p for p in ("nki", "torch_neuronx") if p not in installed)
    words = rf"{missing} not found; run: pip install 'neuronmm-ops\[neuron\]' --extra-index-url"
    with pytest.raises(ImportError, match=words):
        dispatched("xuv", *xuv_tensors(3))


@pytest.mark.parametrize(
    ("version", "words"), [("0.1.0", "got 0.1.0"), ("0.2.0", r"need nc_matmul.*nki 0.2.0 lacks")]
)
def test_an_old_nki_is_refused(machine, version, words):
    machine.nki(version)
    machine.torch_neuronx()
    with pytest.raises(NkiVersionError, match=words):
        dispatched("xuv", *xuv_tensors(3))


def test_a_broken_torch_neuronx_is_not_passed_over(machine):
    machine.nki()
    source = "import a_library_that_it_needs"
    machine.package("torch_neuronx", "2.13.3.0", {"torch_neuronx/__init__.py": source})
    with pytest.raises(ModuleNotFoundError, match="a_library_that_it_needs"):
        dispatched("xuv", *xuv_tensors(3))


def test_a_guessed_core_is_refused(offers, monkeypatch):
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    with pytest.raises(RuntimeError, match="set NEURON_PLATFORM_TARGET_OVERRIDE"):
        dispatched("xuv", *xuv_tensors(3))


def test_arguments_are_checked(offers):
    x, u, _, _ = xuv_tensors(3)
    with pytest.raises(ValueError, match="last dimension of x must equal first dimension of w"):
        dispatched("xw", x, u.t(), None)
    with pytest.raises(TypeError, match="a NeuronCore takes bfloat16, float16 and float32"):
        dispatched("xw", x.double(), u.double(), None)
    assert not record.calls


def test_the_kernels_run_on_fake_tensors(offers):
    with FakeTensorMode() as mode:
        tensors = [None if t is None else mode.from_tensor(t) for t in xuv_tensors(2, 3)]
        y = dispatched("xuv", *tensors)
    assert y.shape == (2, 3, 40)


@pytest.fixture(scope="module")
def compiled():
    """What `neuron_graphs.py` prints."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("torch has Python backends, as the device neuron, from 2.10 on")
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here.parent, here)))
    program = here / "neuron_graphs.py"
    return json.loads(run(sys.executable, program, PYTHONPATH=path, OMP_NUM_THREADS=1))


@pytest.mark.parametrize("offered", neuron_graphs.OFFERS)
@pytest.mark.slow
def test_a_compiled_graph_holds_the_kernels_node_for_each_prompt_length(compiled, offered):
    shapes = [[2, tokens, 40] for tokens in dict.fromkeys(neuron_graphs.LENGTHS)]
    expected = [[["stand_in.kernel.default"], shape] for shape in [*shapes, [3, 32]]]
    assert compiled[offered]["graphs"] == expected, "a known length is compiled once more"


@pytest.mark.parametrize("offered", neuron_graphs.OFFERS)
def test_a_size_that_only_the_data_tells_is_refused(compiled, offered):
    words = "xw: a kernel's shapes must be static, got [u0, 2]; pad to a fixed size"
    assert f"ValueError: {words}" in compiled[offered]["refusal"].splitlines()


@pytest.mark.parametrize("offers", CALL_MODES)
def test_layers_of_a_decoder_are_one_launch(machine, offers):
    machine.nki()
    machine.torch_neuronx(offers)
    machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn1")
    given = layer_operands(torch.float32, (16, 0, 40), layers=2)
    wanted = cast(given, torch.float32)
    found = dispatched("decoder_layer", *SPECS["decoder_layer"].complete((), given))
    assert len(record.calls) == 1
    expected = [*nm.decoder_layer(**wanted), *wanted["caches"]]
    for own, each in zip([*found, *given["caches"]], expected, strict=True):
        torch.testing.assert_close(own, each, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("offers", CALL_MODES)
def test_a_chunk_of_a_prompt_is_one_launch(machine, offers):
    machine.nki()
    machine.torch_neuronx(offers)
    machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn1")
    given = attention_operands(torch.float32, 12, [3, 50])
    wanted = copied(given)
    found = dispatched("attention", *SPECS["attention"].complete((), given))
    assert len(record.calls) == 1
    expected = [nm.attention(**wanted), wanted["key_cache"], wanted["value_cache"]]
    for own, each in zip([found, given["key_cache"], given["value_cache"]], expected, strict=True):
        torch.testing.assert_close(own, each, rtol=1e-4, atol=1e-4)
