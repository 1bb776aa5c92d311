"""Which of vLLM's MLPs run as one op, by stand-ins for its classes."""

import pytest
import torch
from torch import nn

from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.members import DenseMember, Pair
from neuronmm_ops.engines.places import Shard, member_sections
from neuronmm_ops.engines.vllm.mlp import GATED_MLPS, activation_of, fuse_
from neuronmm_ops.ops import svd_mlp

K, INNER, WHOLE = 6, 10, Shard(None, "both", 0, 1)


class Linear(nn.Module):
    def __init__(self, *members: nn.Module) -> None:
        super().__init__()
        self.members, self.bias = nn.ModuleList(members), None


def pair(name: str, k: int, n: int, **changes: object) -> Pair:
    layer = LayerReport(name, k, n, 3, False, None, None, 1, 1, **changes)
    (sections,) = member_sections([name], [n], [1], WHOLE)
    made = Pair(layer, WHOLE, sections, torch.float32)
    if made.storage is None:
        for factor in (made.u, made.v):
            nn.init.normal_(factor)
    return made


def mlp(name: str = "LlamaMLP", act: str = "SiluAndMul", home: str = "vllm.model") -> nn.Module:
    kind = type(name, (nn.Module,), {"__module__": home, "forward": lambda self, x: None})
    module = kind()
    module.gate_up_proj = Linear(pair("gate", K, INNER), pair("up", K, INNER))
    module.down_proj = Linear(pair("down", INNER, K))
    module.act_fn = type(act, (nn.Module,), {})()
    return module


@pytest.mark.parametrize("name", sorted(GATED_MLPS))
def test_a_listed_class_runs_as_one_op(name):
    module, x = mlp(name), torch.randn(4, K)
    kind = type(module)
    assert fuse_(module)
    assert isinstance(module, kind)
    gate, up = module.gate_up_proj.members
    (down,) = module.down_proj.members
    expected = svd_mlp(x, gate.u, gate.v, up.u, up.v, down.u, down.v)
    assert torch.equal(module(x), expected)


def changed(change) -> nn.Module:
    module = mlp()
    change(module)
    return module


def dense_gate(module):
    (sections,) = member_sections(["gate"], [INNER], [1], WHOLE)
    module.gate_up_proj.members[0] = DenseMember(
        LayerReport("gate", K, INNER, None, True, None, None, 0, 0), WHOLE, sections, torch.float32
    )


def other_storage(module):
    module.down_proj.members[0] = pair("down", INNER, K, storage="fp8")


@pytest.mark.parametrize(
    "module",
    [
        mlp("Qwen2MoeMLP"),
        mlp(home="another.package"),
        mlp(act="FatreluAndMul"),
        changed(dense_gate),
        changed(other_storage),
        changed(lambda m: setattr(m.down_proj, "bias", nn.Parameter(torch.zeros(K)))),
        changed(lambda m: m.down_proj.register_forward_hook(lambda *args: None)),
        changed(lambda m: setattr(m, "gate_up_proj", nn.Linear(K, INNER, bias=False))),
    ],
)
def test_any_other_is_left_as_it_is(module):
    kind = type(module)
    assert not fuse_(module)
    assert type(module) is kind


@pytest.mark.parametrize(
    ("kind", "approximate", "expected"),
    [
        ("SiluAndMul", None, "silu"),
        ("GeluAndMul", "tanh", "gelu_tanh"),
        ("GeluAndMul", "none", "gelu"),
        ("GeluAndMul", "sigmoid", None),
        ("SwigluOAIAndMul", None, None),
    ],
)
def test_activations(kind, approximate, expected):
    act = type(kind, (nn.Module,), {"approximate": approximate})()
    assert activation_of(act) == expected
