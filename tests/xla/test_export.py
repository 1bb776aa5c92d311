"""`torch.export` to StableHLO keeps the op as the custom call."""

import re

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
