"""Autocast casts as it does for nn.Linear."""

import pytest
import torch
from operands import OPS, make, shapes_of

from neuronmm_ops import SVDLinear, ops

CALLS = {op: (getattr(ops, op), shapes_of(op, (4,))) for op in OPS}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_runs_in_the_dtype_of_autocast(name, guard, dtype):
    function, shapes = CALLS[name]
    args = [make(shape) for shape in shapes]
    mixed = [args[0].to(torch.bfloat16), *(a.float() for a in args[1:])]
    with guard(), torch.autocast("cpu", dtype=dtype):
        y = function(*mixed)
    assert y.dtype == dtype
    assert torch.equal(y, function(*(a.to(dtype) for a in mixed)))


@pytest.mark.parametrize("name", CALLS)
def test_a_privateuse1_device_follows_its_own_autocast(name, monkeypatch):
    """Dispatched by the key on CPU tensors: no such device is here."""
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "cpu")
    function, shapes = CALLS[name]
    args = [make(shape) for shape in shapes]
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    y = getattr(torch.ops.neuronmm, name).default.redispatch(key, *args)
    assert y.dtype == torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert torch.equal(y, function(*(a.bfloat16() for a in args)))


def test_gradients_come_back_in_the_dtype_of_the_parameters():
    layer = SVDLinear(6, 5, 3)
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call(torch.randn(4, 6))
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        for parameter in layer.parameters():
            assert parameter.grad.dtype == torch.float32
