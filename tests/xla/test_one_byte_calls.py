"""Factors in one byte through torch_xla: operands of the custom call as they are stored."""

import pytest
import torch
from graphs import lowered
from host import launch_of
from operands import OPS, one_byte_call

import neuronmm_ops as nm
from neuronmm_ops.ops.definitions import SPECS

HLO_NAMES = {torch.int8: "s8", torch.float8_e4m3fn: "f8e4m3fn"}


def call_of(op, dtype, x_dtype):
    return one_byte_call(op, dtype, x_dtype, (2, 3), by_column=False, has_bias=False)


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", HLO_NAMES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_one_call_with_the_values_of_the_reference(op, dtype, x_dtype, device, handler):
    tensors = call_of(op, dtype, x_dtype)
    y = getattr(nm.ops, op)(**{name: tensor.to(device) for name, tensor in tensors.items()})
    (call,) = lowered(y).calls
    problem = launch_of(call.config).plan.problem
    assert problem.weight_dtype == str(dtype).removeprefix("torch.")
    assert f"{HLO_NAMES[dtype]}[64," in call.text
    names = call.config["klir_binary"]["input_names"]
    assert names == [operand.name for operand in SPECS[op].tensors if operand.name in tensors]
    assert torch.equal(y.cpu(), getattr(nm.ops, op)(**tensors))


def test_products_in_fp8_are_another_kernel(device):
    tensors = call_of("xuv", torch.float8_e4m3fn, torch.bfloat16)
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    for compute in ("x", "fp8"):
        y = nm.xuv(**on_device, compute=compute)
        (call,) = lowered(y).calls
        assert call.config["neuronmm"]["compute"] == compute
        assert torch.equal(y.cpu(), nm.xuv(**tensors, compute=compute))


def test_a_compiled_module_and_the_composite_route(device, handler, monkeypatch):
    x, *given = one_byte_call("xuv", torch.int8, torch.float32, (5,), by_column=False).values()
    u, u_scale, v, v_scale, bias = given
    layer = nm.SVDLinear.from_factors(u, v, bias, u_scale, v_scale)
    expected = layer(x)
    layer.to(device)
    compiled = torch.compile(layer, backend="openxla", fullgraph=True)
    with torch.no_grad():
        before = handler.count
        assert torch.equal(compiled(x.to(device)).cpu(), expected)
        assert handler.count == before + 1
        monkeypatch.setenv("NEURONMM_XLA", "composite")
        torch.testing.assert_close(layer(x.to(device)).cpu(), expected)
        assert handler.count == before + 1


def test_missing_scales_are_refused(device):
    tensors = call_of("xuv", torch.int8, torch.float32)
    del tensors["v_scale"]
    with pytest.raises(ValueError, match=r"^xuv: factors in .* no v_scale; pass it$"):
        nm.xuv(**{name: tensor.to(device) for name, tensor in tensors.items()})
