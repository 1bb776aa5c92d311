"""Run by test_generations in a Python of its own: plans and values on targets, one of them new.

`hardware.py` is read with a line more, as a person would add a generation to it; what else exists
of the packages is as it is. Prints what a plan of each op is on each target.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

NEW = 'MACHINES["trn4"] = replace(TRN3, target="trn4", generation=5, aliases=())\n'

spec = importlib.util.find_spec("neuroncore")
assert spec
assert spec.origin
path = Path(spec.origin).with_name("hardware.py")
hardware = types.ModuleType("neuroncore.hardware")
sys.modules["neuroncore.hardware"] = hardware
exec(compile(path.read_text() + NEW, path, "exec"), hardware.__dict__)  # noqa: S102 - our own file

import numpy as np  # noqa: E402

import neuroncore as nc  # noqa: E402
from neuronmm_ops import cli  # noqa: E402
from neuronmm_ops.kernels import nki_kernel  # noqa: E402
from neuronmm_ops.kernels.simulated import simulated_kernel  # noqa: E402
from neuronmm_ops.plan import Problem, mlp_matrices, plan_problem  # noqa: E402

OPS = {"xuv": ((512, 128), (128, 4096)), "svd_mlp": mlp_matrices(512, (128, 128, 128), 256, 4096)}


def matmuls(run: nc.Simulation) -> int:
    records = run.profile.schedule.cores[0].trace.records
    return sum([form.opcode == "nc_matmul" for form, *_ in records])


def planned(op: str, target: str) -> dict[str, object]:
    problem = Problem(op, 128, OPS[op], target=target)
    plan = plan_problem(problem)
    rng = np.random.default_rng(0)
    shapes = [(128, 512), *OPS[op]]
    bfloat16 = nc.dtypes.dtype_of("bfloat16")
    operands = [rng.standard_normal(shape).astype(bfloat16) for shape in shapes]
    arguments: dict[str, Any] = plan.arguments
    run = nc.simulate(nki_kernel(plan), *operands, target=target, **arguments)
    kernel = simulated_kernel(op, f"{op}_decode", 1)
    decode = nc.simulate(kernel, *operands, target=target, mode="trace")
    return {
        "decode_matmuls": matmuls(decode),
        "matmuls": matmuls(run),
        "arguments": arguments,
        "times_ms": plan.times_ms,
        "sum": float(np.abs(run.outputs.astype(np.float64)).sum()),
    }


if sys.argv[1] == "plan":
    targets = ("trn2", "trn3", "trn4")
    print(json.dumps({op: {target: planned(op, target) for target in targets} for op in OPS}))
else:
    sys.exit(cli.main(sys.argv[1:]))
