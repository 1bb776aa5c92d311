"""Several results and operands changed in place, through XLA's custom call."""

import ctypes

import pytest
import torch
import torch_xla
from graphs import lowered
from host import tensor_at
from kinds import ADD_NORM, APPEND, add_norm, append, install, operands

from neuronmm_ops.ops.backends import xla

OPS = torch.ops.neuronmm
for _spec in (ADD_NORM, APPEND):
    xla.register_op(_spec)


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    install(monkeypatch)


def test_two_results_are_a_tuple(device, handler, monkeypatch):
    def call(config, out, given):
        tensors = [
            tensor_at(given[n], s, torch.float32) for n, s in enumerate(((6, 64), (64,), (6, 64)))
        ]
        assert config["neuronmm"]["eps"] == 0.5
        results = (ctypes.c_void_p * 2).from_address(out)
        for address, result in zip(results, add_norm(*tensors, 0.5), strict=True):
            tensor_at(address, (6, 64), torch.float32).copy_(result)

    monkeypatch.setattr(handler, "call", call)
    tensors = [tensor.detach() for tensor in operands(ADD_NORM, (2, 3))]
    y = OPS.add_norm(*[tensor.to(device) for tensor in tensors], 0.5)
    (lowered_call,) = lowered(*y).calls
    assert lowered_call.config["klir_binary"]["output_names"] == ["y0", "y1"]
    for found, expected in zip(y, add_norm(*tensors, 0.5), strict=True):
        torch.testing.assert_close(found.cpu(), expected)


def test_what_is_changed_in_place_is_an_alias(device, handler, monkeypatch):
    def call(config, out, given):
        x, cache = (tensor_at(given[n], (s, 64), torch.float32) for n, s in enumerate((6, 40)))
        changed = tensor_at(out, (40, 64), torch.float32)
        assert changed.data_ptr() == cache.data_ptr()
        append(x, changed, tensor_at(given[2], (1,), torch.int32))

    monkeypatch.setattr(handler, "call", call)
    x, cache, position = operands(APPEND)
    x, there = x.to(device), cache.to(device)
    with pytest.raises(NotImplementedError, match=r"^append: the op has no gradient"):
        OPS.append(x.clone().requires_grad_(), there, position.to(device))
    for start in (7, 20):  # one program: the integer is an operand
        position.fill_(start)
        OPS.append(x, there, position.to(device))
        (lowered_call,) = lowered(there).calls
        assert "output_to_operand_aliasing={{}: (1, {})}" in lowered_call.text
        assert lowered_call.config["klir_binary"]["output_names"] == ["cache"]
        torch_xla.sync()
        append(x.cpu(), cache, position)
        assert torch.equal(there.cpu(), cache)


def test_calls_with_other_biases_are_other_calls(device):
    """Of one shape: a computation that is kept is for the biases that it has."""
    x, u, v = (torch.randn(s, device=device) for s in ((2, 64), (64, 16), (16, 32)))
    bias, names = torch.randn(32, device=device), list[list[str]]()
    for biases in ([None, bias, None], [None, None, bias]):
        (call,) = lowered(OPS.svd_qkv(x, u, v, u, v, u, v, *biases)).calls
        names.append(call.config["klir_binary"]["input_names"])
    assert ["bias_key" in each for each in names] == [True, False]
