"""Several layers through XLA's custom call: one call, whose caches are aliases."""

import ctypes
from typing import Any

import torch
import torch_xla
from decoder_layers import cast, operands
from graphs import lowered
from host import tensor_at
from torch.utils._pytree import tree_map_only

from neuronmm_ops.ops.definitions.decoder_layer import SPEC


def test_layers_are_one_call_that_changes_the_caches(device, handler, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    given = operands(torch.float32, (16, 0, 40), layers=2, bias=False)
    args = SPEC.complete((), given)
    spec = SPEC.of(args)
    tensors, options = spec.split(args)
    layouts = [(n, t.shape, t.dtype) for n, t in enumerate(tensors) if t is not None]

    def call(config, out, addresses):
        found: list[Any] = [None] * len(tensors)
        for address, (n, shape, dtype) in zip(addresses, layouts, strict=False):
            found[n] = tensor_at(address, tuple(shape), dtype)
        for n in (*spec.activations, *spec.states):
            found[n] = found[n].clone().view(tensors[n].shape)
        results = spec.reference(*spec.joined(tuple(found), options))
        every = [*results, *[found[n] for n in spec.states]]
        pointers = (ctypes.c_void_p * len(every)).from_address(out)
        for pointer, result in zip(pointers, every, strict=True):
            tensor_at(pointer, tuple(result.shape), result.dtype).copy_(result)

    monkeypatch.setattr(handler, "call", call)
    wanted = cast(given, torch.float32)
    there = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), given)
    results = torch.ops.neuronmm.decoder_layer(**there)
    (lowered_call,) = lowered(*results, *there["caches"]).calls
    assert lowered_call.config["klir_binary"]["input_names"] == [
        operand.name
        for operand, tensor in zip(spec.tensors, tensors, strict=True)
        if tensor is not None
    ]
    caches = [f"{name}_cache_{n}" for n in range(2) for name in ("key", "value")]
    assert lowered_call.config["klir_binary"]["output_names"] == ["y0", "y1", *caches]
    torch_xla.sync()
    expected = [*SPEC.reference(**wanted), *wanted["caches"]]
    for found, own in zip([*results, *there["caches"]], expected, strict=True):
        torch.testing.assert_close(found.cpu(), own)
