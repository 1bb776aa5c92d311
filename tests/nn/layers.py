"""Shared by the tests of layers: their memory, their ops, and the classes they stand for."""

import ast
import importlib.util
import re
from collections.abc import Set
from pathlib import Path

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from neuronmm_ops import SVDLinear


def is_contiguous(layer: SVDLinear) -> bool:
    return layer.u.is_contiguous() and layer.v.is_contiguous()


class Calls(TorchDispatchMode):
    """Record the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "neuronmm":
            self.names.append(func._schema.name.removeprefix("neuronmm::"))
        return func(*args, **(kwargs or {}))


def ops_of(module: nn.Module, *inputs: object) -> list[str]:
    with Calls() as calls:
        module(*inputs)
    return calls.names


def transformers_forwards(names: Set[str]) -> dict[str, list[ast.FunctionDef]]:
    """Map classes of these names to their forwards in Transformers' modeling files."""
    spec = importlib.util.find_spec("transformers")
    found: dict[str, list[ast.FunctionDef]] = {}
    defines_one = re.compile(rf"^class ({'|'.join(names)})\(", re.MULTILINE)
    for path in sorted(Path(spec.origin).parent.glob("models/*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if defines_one.search(text) else ():
            if isinstance(node, ast.ClassDef) and node.name in names:
                (forward,) = [f for f in node.body if getattr(f, "name", "") == "forward"]
                found.setdefault(node.name, []).append(forward)
    return found
