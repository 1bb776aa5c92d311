"""With NKI and torch_neuronx installed (stand-ins), the kernel is called and emits the call."""

import pytest
import stand_ins
import torch
from graphs import graph_of
from torch_xla import _XLAC
from torch_xla.experimental.stablehlo_custom_call import stablehlo_custom_call

import neuronmm_ops as nm
from neuronmm_ops import kernels
from neuronmm_ops.errors import NkiVersionError
from neuronmm_ops.kernels import source_fingerprint
from neuronmm_ops.plan import plan_xuv


@pytest.fixture
def machine(tmp_path, monkeypatch):
    with stand_ins.neuron_machine(tmp_path, monkeypatch) as found:
        found.torch_neuronx(version="2.9.0.2.15.32035")
        found.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn2", NEURON_LOGICAL_NC_CONFIG="1")
        yield found


def test_the_kernel_is_called_on_xla_tensors(machine, device, monkeypatch):
    machine.nki()
    seen = []

    def kernel(x, u, v, bias, u_scale, v_scale, **constants):
        seen.append((tuple(x.shape), x.device.type, [bias, u_scale, v_scale], constants))
        shape = [x.shape[0], v.shape[1]]
        return stablehlo_custom_call([x, u, v], "Theirs", [shape], [x.dtype], False, "e30=", 2)

    monkeypatch.setattr(kernels, "nki_kernel", lambda plan: kernel)
    tensors = [torch.randn(shape).to(device) for shape in ((2, 3, 200), (200, 40), (40, 64))]
    y = nm.xuv(*tensors)
    plan = plan_xuv(6, 200, 40, 64, "float32", "trn2")
    constants = {**plan.arguments, "fingerprint": source_fingerprint()}
    assert seen == [((6, 200), "xla", [None, None, None], constants)]
    assert y.shape == (2, 3, 64)
    graph = graph_of(_XLAC._get_xla_tensors_hlo([y]))
    assert [call.target for call in graph.calls] == ["Theirs"]
    assert graph.dots == 0


@pytest.mark.parametrize(
    ("version", "target", "error", "words"),
    [
        ("0.2.0", "trn2", NkiVersionError, r"which nki 0\.2"),
        ("0.7.0", "", RuntimeError, "set NEURON_PLATFORM_TARGET_OVERRIDE"),
    ],
)
def test_what_cannot_be_compiled_is_an_error(machine, device, version, target, error, words):
    machine.nki(version)
    machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE=target)
    x, w = torch.randn(2, 8).to(device), torch.randn(8, 8).to(device)
    with pytest.raises(error, match=words):
        nm.xw(x, w)


def test_composite_needs_no_nki(machine, device):
    machine.nki("0.2.0")
    machine.environment(NEURONMM_XLA="composite")
    x, w = torch.randn(2, 8).to(device), torch.randn(8, 8).to(device)
    graph = graph_of(_XLAC._get_xla_tensors_hlo([nm.xw(x, w)]))
    assert (graph.calls, graph.dots) == ([], 1)
