"""Factors in one byte through torch_xla: operands of the custom call as they are stored."""

import pytest
import torch
from graphs import lowered
from host import launch_of

import neuronmm_ops as nm
from neuronmm_ops.ops.definitions import SPECS

HLO_NAMES = {torch.int8: "s8", torch.float8_e4m3fn: "f8e4m3fn"}


def factor(rows, columns, dtype):
    scale = torch.rand(columns) / 400 + 0.001
    return torch.randint(-99, 100, (rows, columns)).float().to(dtype), scale


def call_of(op, dtype, x_dtype, compute="x"):
    """Positional arguments of an op by name, without missing ones, and its options."""
    sizes = {"K": 64, "K_up": 48, "r": 24, "N": 40, "I": 96, "r_gate": 24, "r_up": 16, "r_down": 32}
    sizes |= {"r_query": 32, "r_key": 16, "r_value": 24, "N_query": 40, "N_key": 10, "N_value": 12}
    spec = SPECS[op]
    tensors = {
        spec.operands[place].name: torch.randn(2, 3, sizes[spec.operands[place].sizes[0]]).to(
            x_dtype
        )
        for place in spec.activations
    }
    for place in spec.factors:
        name, shape = spec.operands[place].name, spec.operands[place].sizes
        tensors[name], tensors[f"{name}_scale"] = factor(*[sizes[s] for s in shape], dtype)
    return tensors, {"compute": compute}


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", HLO_NAMES, ids=str)
@pytest.mark.parametrize("op", ["xw", "xuv", "mlp", "svd_mlp", "svd_qkv"])
def test_one_call_with_the_values_of_the_reference(op, dtype, x_dtype, device, handler):
    tensors, options = call_of(op, dtype, x_dtype)
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    y = getattr(nm.ops, op)(**on_device, **options)
    (call,) = lowered(y).calls
    problem = launch_of(call.config).plan.problem
    assert problem.weight_dtype == str(dtype).removeprefix("torch.")
    assert f"{HLO_NAMES[dtype]}[64," in call.text
    names = call.config["klir_binary"]["input_names"]
    assert names == [operand.name for operand in SPECS[op].tensors if operand.name in tensors]
    assert torch.equal(y.cpu(), getattr(nm.ops, op)(**tensors, **options))


def test_products_in_fp8_are_another_kernel(device):
    configs = []
    for compute in ("x", "fp8"):
        tensors, options = call_of("xuv", torch.float8_e4m3fn, torch.bfloat16, compute)
        on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
        y = nm.xuv(**on_device, **options)
        (call,) = lowered(y).calls
        configs.append(call.config["neuronmm"])
        assert torch.equal(y.cpu(), nm.xuv(**tensors, **options))
    assert [config["compute"] for config in configs] == ["x", "fp8"]


def test_a_compiled_module_and_the_composite_route(device, handler, monkeypatch):
    (u, u_scale), (v, v_scale) = (factor(*s, torch.int8) for s in ((64, 24), (24, 40)))
    layer = nm.SVDLinear.from_factors(u, v, torch.randn(40), u_scale, v_scale)
    x = torch.randn(5, 64)
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
    tensors, _ = call_of("xuv", torch.int8, torch.float32)
    del tensors["v_scale"]
    with pytest.raises(ValueError, match=r"^xuv: factors in .* no v_scale; pass it$"):
        nm.xuv(**{name: tensor.to(device) for name, tensor in tensors.items()})
