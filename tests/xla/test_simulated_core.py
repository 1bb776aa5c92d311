"""One way through: torch.compile -> HLO -> custom call -> NKI kernel on the simulated core."""

import json
import os
import sys
from pathlib import Path

from commands import run

from neuronmm_ops.plan import plan_svd_mlp, plan_xuv

SCRIPT = """
import copy, json
import torch, torch_xla
from tolerances import assert_close_to_oracle
from host import SimulatedCore, register
from neuronmm_ops.nn import SVDLinear, SVDMLP
from neuronmm_ops.ops.backends import xla

core = SimulatedCore()
register(core.address)
kernels = {}
for name in ("float32", "bfloat16"):
    dtype = getattr(torch, name)
    torch.manual_seed(0)
    mlp = SVDMLP(512, 200, (24, 32, 40))
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model = torch.nn.Sequential(SVDLinear(256, 512, 64), mlp).to(dtype).eval()
    prompts = [torch.randn(2, tokens, 256, dtype=dtype) for tokens in (65, 1)]
    core.configs.clear()
    with torch.no_grad(), xla.api_version(xla.API_HOST):
        lows = [model(x) for x in prompts]
        oracles = [copy.deepcopy(model).double()(x.double()) for x in prompts]
        model.to(torch_xla.device())
        compiled = torch.compile(model, backend="openxla", fullgraph=True, dynamic=False)
        actual = [compiled(x.to(torch_xla.device())).cpu() for x in prompts]
    for compared in zip(actual, oracles, lows):
        assert_close_to_oracle(*compared)
    kernels[name] = [config["func_name"] for config in core.configs]
print(json.dumps(kernels))
"""


def planned(tokens, dtype):
    pair = plan_xuv(tokens, 256, 64, 512, dtype, "trn1")
    mlp = plan_svd_mlp(tokens, 512, (24, 32, 40), 200, 512, dtype, "trn1")
    return [pair.kernel, mlp.kernel]


def test_prefill_and_decode_run_the_planned_kernels():
    here = Path(__file__).parent
    path = f"{here}{os.pathsep}{here.parent}"
    environment = {"PYTHONPATH": path, "NEURON_PLATFORM_TARGET_OVERRIDE": "trn1"}
    executed = json.loads(run(sys.executable, "-c", SCRIPT, OMP_NUM_THREADS=1, **environment))
    for dtype, kernels in executed.items():
        assert kernels == planned(130, dtype) + planned(2, dtype)
        assert {"xuv", "svd_mlp"} <= set(kernels)
    assert list(executed) == ["float32", "bfloat16"]
