"""`torch.export` to StableHLO keeps the op as the custom call."""

import re

import pytest
import torch
from host import decode
from torch import nn
from torch_xla.stablehlo import exported_program_to_stablehlo

from neuronmm_ops.nn import SVDLinear
from neuronmm_ops.ops.backends import xla


def test_stablehlo_contains_the_custom_call():
    model = nn.Sequential(SVDLinear(64, 96, 16), nn.ReLU(), nn.Linear(96, 8)).eval()
    program = torch.export.export(model, (torch.randn(3, 64),))
    assert "neuronmm.xuv.default" in str(program.graph)
    with xla.api_version(xla.API_NEURON):
        text = exported_program_to_stablehlo(program).get_stablehlo_text("forward")
    (line,) = [line for line in text.splitlines() if "stablehlo.custom_call" in line]
    assert "@AwsNeuronCustomNativeKernel" in line
    assert "api_version = 2" in line
    config = decode(re.search(r'backend_config = "([^"]+)"', line)[1])
    assert config["neuronmm"]["ranks"] == [16]
    assert text.count("stablehlo.dot_general") == 1


@pytest.mark.parametrize("first", [[], [nn.Linear(64, 64), nn.ReLU()]], ids=["input", "inner"])
def test_a_dynamic_size_is_refused_and_each_size_is_exported(first):
    model = nn.Sequential(*first, SVDLinear(64, 96, 16)).eval()
    x = torch.randn(6, 64)
    batch = torch.export.Dim("batch")
    dynamic = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    rule = (
        r"neuronmm.xuv.default: the custom call has static shapes, got \[\w+, 64\]; "
        "export one program for each size"
    )
    with pytest.raises(ValueError, match=f"^{rule}$"):
        exported_program_to_stablehlo(dynamic)
    static = exported_program_to_stablehlo(torch.export.export(model, (x,)))
    assert "stablehlo.custom_call @AwsNeuronCustomNativeKernel" in static.get_stablehlo_text()
