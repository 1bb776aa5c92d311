"""The MLP classes that run as one op compute in vLLM's source what the op does."""

import ast
from pathlib import Path

import pytest
import vllm.model_executor.models as models

from neuronmm_ops.engines.vllm.mlp import GATED_MLPS

FORWARD = """
x, _ = self.gate_up_proj(x)
x = self.act_fn(x)
x, _ = self.down_proj(x)
return x
"""
# The activation, and with an fp8 `down_proj` of vLLM's own its rounding.
ACT = "maybe_fused_act_quant(self.act_fn, x, self.down_proj)"


def forwards() -> list[tuple[str, str]]:
    """Class and file of every forward of a listed name, with its body."""
    found = []
    for file in sorted(Path(models.__file__).parent.glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in GATED_MLPS:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "forward":
                        found.append((f"{node.name} in {file.name}", body(method)))
    return found


def body(method: ast.FunctionDef) -> str:
    """The statements, with one name for x and what it becomes."""
    for node in ast.walk(method):
        if isinstance(node, ast.Name) and node.id == "gate_up":
            node.id = "x"
    return "\n".join(map(ast.unparse, method.body)).replace(ACT, "self.act_fn(x)")


def test_every_listed_class_is_in_vllm():
    assert {name.partition(" ")[0] for name, _ in forwards()} == GATED_MLPS


@pytest.mark.parametrize(("name", "source"), forwards(), ids=lambda value: value.partition(" ")[0])
def test_forward_is_that_of_a_gated_mlp(name, source):
    assert source == FORWARD.strip(), name
