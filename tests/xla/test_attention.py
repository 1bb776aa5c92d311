"""A chunk of a prompt through XLA's custom call, whose caches are aliases."""

import ctypes

import pytest
import torch
import torch_xla
from graphs import lowered
from host import tensor_at
from kernels.test_attention_chunk import copied, operands

import neuronmm_ops as nm
from neuronmm_ops.ops.definitions.attention import SPEC


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_chunk_is_one_call_that_changes_the_caches(device, handler, monkeypatch, mode):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    given = operands(torch.float32, 12, [3, 50])
    layouts = [(tensor.shape, tensor.dtype) for tensor in given.values()]

    def call(config, out, addresses):
        found = []
        for address, (shape, dtype) in zip(addresses, layouts, strict=False):
            found.append(tensor_at(address, tuple(shape), dtype).clone())
        result = SPEC.reference(*found)
        pointers = (ctypes.c_void_p * 3).from_address(out)
        for pointer, value in zip(pointers, [result, *found[5:7]], strict=True):
            tensor_at(pointer, tuple(value.shape), value.dtype).copy_(value)

    monkeypatch.setattr(handler, "call", call)
    wanted = copied(given)
    there = {name: tensor.to(device) for name, tensor in given.items()}
    with mode():
        result = nm.attention(**there)
    (lowered_call,) = lowered(result, there["key_cache"], there["value_cache"]).calls
    assert lowered_call.config["klir_binary"]["input_names"] == list(given)
    names = ["y", "key_cache", "value_cache"]
    assert lowered_call.config["klir_binary"]["output_names"] == names
    torch_xla.sync()
    torch.testing.assert_close(result.cpu(), nm.attention(**wanted))
    for name in names[1:]:
        torch.testing.assert_close(there[name].cpu(), wanted[name])
