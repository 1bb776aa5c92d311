"""SVDMLP: fused and separate calls, and which Transformers MLPs it stands for."""

import ast
import importlib
import inspect
from types import MethodType

import pytest
import torch
import transformers
from nn.layers import ops_of, transformers_forwards
from tolerances import assert_same_in_fp64
from torch import Tensor, nn
from transformers.activations import ACT2FN

from neuronmm_ops import SVDMLP, SVDLinear
from neuronmm_ops.nn.svd_mlp import _ACTIVATION_CLASSES, GATED_MLPS, gated_activation
from neuronmm_ops.ops import ACTIVATIONS

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def separate(mlp: SVDMLP, x: Tensor) -> Tensor:
    activation = ACTIVATIONS[mlp.activation]
    return mlp.down_proj(activation(mlp.gate_proj(x)) * mlp.up_proj(x))


@pytest.fixture
def mlp() -> SVDMLP:
    return SVDMLP(8, 16, (3, 4, 5), dtype=torch.float64)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 8, dtype=torch.float64)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_op_equals_separate_calls(activation, x):
    mlp = SVDMLP(8, 16, (3, 4, 5), activation, dtype=torch.float64)
    assert ops_of(mlp, x) == ["svd_mlp"]
    assert_same_in_fp64(mlp(x), separate(mlp, x))
    assert f"activation={activation}" in repr(mlp)


def test_constructor_on_meta():
    mlp = SVDMLP(8, 16, (3, 4, 5), device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in mlp.parameters()} == {("meta", torch.bfloat16)}
    assert mlp(torch.empty(2, 8, device="meta", dtype=torch.bfloat16)).shape == (2, 8)
    factors = ("u", "v", "weight")
    assert set(mlp.state_dict()) == {f"{name}.{key}" for name in PROJECTIONS for key in factors}


@pytest.mark.parametrize("make", [SVDMLP, SVDMLP.from_projections])
def test_an_unknown_activation_is_refused(make):
    layer = SVDLinear(4, 4, 2)
    arguments = (4, 8, (1, 1, 1)) if make is SVDMLP else (layer, layer, layer)
    with pytest.raises(ValueError, match="one of silu, gelu, gelu_tanh, relu; got 'tanh'"):
        make(*arguments, "tanh")


@pytest.mark.parametrize("dense", PROJECTIONS)
def test_a_dense_projection_is_called_by_itself(mlp, x, dense):
    expected = mlp(x)
    setattr(mlp, dense, getattr(mlp, dense).to_linear())
    assert ops_of(mlp, x) == ["xuv", "xuv"]
    assert_same_in_fp64(mlp(x), expected)


@pytest.mark.parametrize("biased", PROJECTIONS)
def test_a_bias_is_added(mlp, x, biased):
    layer = getattr(mlp, biased)
    layer.bias = nn.Parameter(torch.randn(layer.out_features, dtype=torch.float64))
    assert ops_of(mlp, x) == ["xuv"] * 3
    assert_same_in_fp64(mlp(x), separate(mlp, x))


HOOKS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize(
    ("register", "options"), [*((hook, {}) for hook in HOOKS), (HOOKS[1], {"always_call": True})]
)
def test_a_hook_on_a_projection_is_called(mlp, x, name, register, options):
    expected = mlp(x)
    seen: list[str] = []
    getattr(getattr(mlp, name), register)(lambda *_: seen.append(register), **options)
    output = mlp(x.requires_grad_())
    output.sum().backward()
    assert len(seen) == 1
    assert_same_in_fp64(output, expected)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_replaced_forward_is_called(mlp, x, name):
    # What accelerate's add_hook_to_module does to a module whose weights it moves.
    layer, seen = getattr(mlp, name), []
    original = layer.forward

    def forward(self, *args):
        seen.append(name)
        return original(*args)

    layer.forward = MethodType(forward, layer)
    expected = separate(mlp, x)
    seen.clear()
    assert_same_in_fp64(mlp(x), expected)
    assert seen == [name]


def test_a_subclass_is_called(mlp, x):
    class Doubled(SVDLinear):
        def forward(self, x):
            return 2 * super().forward(x)

    expected = 2 * mlp(x)
    up = mlp.up_proj
    mlp.up_proj = Doubled.from_factors(up.u, up.v)
    assert_same_in_fp64(mlp(x), expected)


def test_from_projections_copies_nothing():
    layers = [SVDLinear(4, 6, 2, bias=False), nn.Linear(4, 6), SVDLinear(6, 4, 2, bias=False)]
    mlp = SVDMLP.from_projections(*layers, "relu")
    assert [mlp.gate_proj, mlp.up_proj, mlp.down_proj] == layers


FORWARD = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"


def returned(forward: ast.FunctionDef) -> str | None:
    """What a forward returns with its argument called x, if it does nothing else."""
    argument = forward.args.args[1].arg
    for node in ast.walk(forward):
        if isinstance(node, ast.Name) and node.id == argument:
            node.id = "x"
    match forward.body:
        case [ast.Return(value)] if value is not None:
            return ast.unparse(value)
        case [ast.Assign(targets=[ast.Name(name)], value=value), ast.Return(ast.Name(result))]:
            return ast.unparse(value) if name == result else None
    return None


def test_every_listed_class_is_a_gated_mlp_in_transformers():
    # Modules are recognized by class name alone, so every class of that name must qualify.
    found = transformers_forwards(GATED_MLPS)
    assert found.keys() == GATED_MLPS
    for name, forwards in found.items():
        assert {returned(forward) for forward in forwards} == {FORWARD}, name


@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Olmo2", "SmolLM3"]
)
def test_common_classes_compute_what_svd_mlp_computes(name):
    kind = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    config = kind(hidden_size=8, intermediate_size=16, num_attention_heads=2)
    package = inspect.getmodule(type(config)).__package__
    modeling = f"{package}.modeling_{package.rpartition('.')[2]}"
    original = getattr(importlib.import_module(modeling), f"{name}MLP")(config).double()
    activation = gated_activation(original)
    projections = [SVDLinear.from_linear(getattr(original, p), 8) for p in PROJECTIONS]
    x = torch.randn(2, 8, dtype=torch.float64)
    mlp = SVDMLP.from_projections(*projections, activation)
    assert ops_of(mlp, x) == ["svd_mlp"]
    assert_same_in_fp64(mlp(x), original(x))


def test_activation_classes_are_mapped_to_what_they_compute():
    x = torch.linspace(-6, 6, 241, dtype=torch.float64)
    seen = set()
    for key in ACT2FN:
        name = _ACTIVATION_CLASSES.get(type(ACT2FN[key]).__name__)
        if name is not None:
            seen.add(name)
            assert_same_in_fp64(ACT2FN[key](x), ACTIVATIONS[name](x))
    assert seen == set(ACTIVATIONS)


HOME = "transformers.models.llama.modeling_llama"


def module_of(name: str, module: str, activation: nn.Module | None) -> nn.Module:
    made = type(name, (nn.Module,), {"__module__": module})()
    if activation is not None:
        made.act_fn = activation
    return made


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("relu", "relu"),
        ("quick_gelu", None),
        ("relu2", None),
        ("gelu_10", None),
    ],
)
def test_an_unknown_activation_leaves_the_mlp_alone(key, name):
    assert gated_activation(module_of("LlamaMLP", HOME, ACT2FN[key])) == name


@pytest.mark.parametrize(
    "other",
    [("MyMLP", HOME, nn.SiLU()), ("LlamaMLP", HOME, None), ("LlamaMLP", "somebodys", nn.SiLU())],
)
def test_other_classes_are_left_alone(other):
    assert gated_activation(module_of(*other)) is None
