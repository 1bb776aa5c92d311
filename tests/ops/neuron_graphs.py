"""What the ops become when a model is compiled for the device `neuron`, in each call mode.

A program for test_neuron.py, in a process of its own, for a device is named once: it prints a JSON
object. The device is torch's Python backend, its tensors are fake.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

from neuronmm_ops import kernels, ops

OFFERS = ("nki_op", "wrap_nki", "wrap_nki in lite", "direct")
LENGTHS = (6, 7, 9, 7)
PAIR = ((128, 24), (24, 40))
MLP = ((32, 8), (8, 32)) * 3

kernel_named = kernels.kernel_named


class Compiler:
    """A backend for AOTAutograd that keeps what it is given to compile."""

    def __init__(self) -> None:
        self.graphs: list[tuple[list[str], list[int]]] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., list[Tensor]]:
        *nodes, output = graph.graph.nodes
        targets = [str(node.target) for node in nodes]
        ours = [name for name in targets if name.startswith(("stand_in", "neuronmm"))]
        result = output.args[0][0].meta["val"]
        self.graphs.append((ours, [int(size) for size in result.shape]))
        return lambda *_: [torch.empty_like(result)]

    def compile(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.compile(function, backend=aot_autograd(fw_compiler=self), fullgraph=True)


def on_device(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.empty(shape, device="neuron") for shape in shapes]


def graphs() -> list[tuple[list[str], list[int]]]:
    """What is compiled for prompts of several lengths, and for one MLP."""
    torch._dynamo.reset()
    compiler = Compiler()
    pair, mlp = compiler.compile(ops.xuv), compiler.compile(ops.svd_mlp)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for tokens in LENGTHS:
            pair(*on_device((2, tokens, 128), *PAIR))
        mlp(*on_device((3, 32), *MLP))
    return compiler.graphs


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def refusal() -> str:
    """The error of a size that only the data tells."""
    compiled = Compiler().compile(lambda x, w: ops.xw(torch.nonzero(x).float(), w))
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            compiled(*on_device((3, 32), (2, 8)))
        except Exception as error:
            return str(error)
    return ""


def main() -> None:
    backend_registration._setup_privateuseone_for_python_backend("neuron")
    kernels.kernel_named = lambda *name: stand_ins.DirectKernel(kernel_named(*name))
    found: dict[str, Any] = {}
    for offered in OFFERS:
        with (
            tempfile.TemporaryDirectory() as root,
            pytest.MonkeyPatch.context() as patch,
            stand_ins.neuron_machine(Path(root), patch) as machine,
        ):
            machine.nki()
            machine.torch_neuronx(offered)
            machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
            found[offered] = {"graphs": graphs(), "refusal": refusal()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
