"""SVDMLP: fused and separate calls, and which Transformers MLPs it stands for."""

import ast
import functools
import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import MethodType

import pytest
import torch
from tolerances import assert_same_in_fp64
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from neuronmm_ops import SVDMLP, SVDLinear
from neuronmm_ops.nn.svd_mlp import _ACTIVATION_CLASSES, GATED_MLPS, gated_activation
from neuronmm_ops.ops import ACTIVATIONS

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Calls(TorchDispatchMode):
    """Record the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "neuronmm":
            self.names.append(func._schema.name.removeprefix("neuronmm::"))
        return func(*args, **(kwargs or {}))


def ops_of(module: nn.Module, x: Tensor) -> list[str]:
    with Calls() as calls:
        module(x)
    return calls.names


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


def test_sizes_are_positive():
    with pytest.raises(ValueError, match="at least 1"):
        SVDMLP(8, 16, (3, 0, 5))


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


def forward_hook(layer: nn.Module, seen: list[str]) -> None:
    layer.register_forward_hook(lambda *_: seen.append("forward"))


def pre_hook(layer: nn.Module, seen: list[str]) -> None:
    layer.register_forward_pre_hook(lambda *_: seen.append("pre"))


def always_hook(layer: nn.Module, seen: list[str]) -> None:
    layer.register_forward_hook(lambda *_: seen.append("always"), always_call=True)


def backward_hook(layer: nn.Module, seen: list[str]) -> None:
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))


def backward_pre_hook(layer: nn.Module, seen: list[str]) -> None:
    layer.register_full_backward_pre_hook(lambda *_: seen.append("backward_pre"))


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize(
    "register", [forward_hook, pre_hook, always_hook, backward_hook, backward_pre_hook]
)
def test_a_hook_on_a_projection_is_called(mlp, x, name, register):
    expected = mlp(x)
    seen: list[str] = []
    register(getattr(mlp, name), seen)
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


def test_gradients_of_the_fused_call(mlp, x):
    grads = [
        torch.autograd.grad(run(x).square().sum(), list(mlp.parameters()))
        for run in (mlp, functools.partial(separate, mlp))
    ]
    for fused, expected in zip(*grads, strict=True):
        assert_same_in_fp64(fused, expected)


# --- the list of Transformers classes ------------------------------------------------------------

FORWARD = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"


def _forward_returns(definition: ast.ClassDef) -> str | None:
    """Return what forward returns with its argument called x, if it does nothing else."""
    found = [n for n in definition.body if isinstance(n, ast.FunctionDef) and n.name == "forward"]
    if not found:
        return None
    forward = found[0]
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


@functools.cache
def transformers_classes() -> dict[str, list[str | None]]:
    """Map every class in Transformers' modeling files to what its forward returns."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("needs transformers")
    classes: dict[str, list[str | None]] = {}
    defines_one = re.compile(rf"^class ({'|'.join(GATED_MLPS)})\(", re.MULTILINE)
    for path in sorted(Path(spec.origin).parent.glob("models/*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if defines_one.search(text) else ():
            if isinstance(node, ast.ClassDef) and node.name in GATED_MLPS:
                classes.setdefault(node.name, []).append(_forward_returns(node))
    return classes


@pytest.mark.parametrize("name", sorted(GATED_MLPS))
def test_every_listed_class_is_a_gated_mlp_in_transformers(name):
    # Modules are recognized by class name alone, so every class of that name must qualify.
    found = transformers_classes().get(name, [])
    assert found, f"transformers has no class {name}"
    assert set(found) == {FORWARD}


MLP_CONFIGS: dict[str, Callable[[], object]] = {
    "LlamaMLP": lambda: _config("LlamaConfig"),
    "MistralMLP": lambda: _config("MistralConfig"),
    "Qwen2MLP": lambda: _config("Qwen2Config"),
    "Qwen3MLP": lambda: _config("Qwen3Config"),
    "GemmaMLP": lambda: _config("GemmaConfig"),
    "Gemma2MLP": lambda: _config("Gemma2Config"),
    "Gemma3MLP": lambda: _config("Gemma3TextConfig"),
    "Olmo2MLP": lambda: _config("Olmo2Config"),
    "SmolLM3MLP": lambda: _config("SmolLM3Config"),
}


def _config(name: str) -> object:
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, name)(hidden_size=8, intermediate_size=16, num_attention_heads=2)


@pytest.mark.parametrize("name", MLP_CONFIGS)
def test_common_classes_compute_what_svd_mlp_computes(name):
    config = MLP_CONFIGS[name]()
    package = inspect.getmodule(type(config)).__package__
    modeling = f"{package}.modeling_{package.rpartition('.')[2]}"
    original = getattr(importlib.import_module(modeling), name)(config).double()
    activation = gated_activation(original)
    assert activation is not None
    projections = [SVDLinear.from_linear(getattr(original, p), 8) for p in PROJECTIONS]
    x = torch.randn(2, 8, dtype=torch.float64)
    mlp = SVDMLP.from_projections(*projections, activation)
    assert ops_of(mlp, x) == ["svd_mlp"]
    assert_same_in_fp64(mlp(x), original(x))


def test_activation_classes_are_mapped_to_what_they_compute():
    activations = pytest.importorskip("transformers.activations")
    x = torch.linspace(-6, 6, 241, dtype=torch.float64)
    seen = set()
    for key in activations.ACT2FN:
        name = _ACTIVATION_CLASSES.get(type(activations.ACT2FN[key]).__name__)
        if name is not None:
            seen.add(name)
            assert_same_in_fp64(activations.ACT2FN[key](x), ACTIVATIONS[name](x))
    assert seen == set(ACTIVATIONS)


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
    activations = pytest.importorskip("transformers.activations")
    home = {"__module__": "transformers.models.llama.modeling_llama"}
    module = type("LlamaMLP", (nn.Module,), home)()
    module.act_fn = activations.ACT2FN[key]
    assert gated_activation(module) == name


def test_other_classes_are_left_alone():
    module = type("MyMLP", (nn.Module,), {})()
    module.act_fn = nn.SiLU()
    assert gated_activation(module) is None
    assert gated_activation(type("LlamaMLP", (nn.Module,), {})()) is None


def test_a_class_of_that_name_from_elsewhere_is_left_alone():
    module = type("LlamaMLP", (nn.Module,), {"__module__": "somebody.elses"})()
    module.act_fn = nn.SiLU()
    assert gated_activation(module) is None
