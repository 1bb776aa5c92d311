"""Replacing Linears inside a model: where, by what, and what survives."""

from collections.abc import Iterator

import pytest
import torch
from tolerances import assert_same_in_fp64
from torch import Tensor, nn

from neuronmm_ops import SVDMLP, SVDLinear, swap_
from neuronmm_ops.nn import shared_weights


@pytest.fixture(autouse=True)
def _fp64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class LlamaMLP(nn.Module):
    """A gated MLP under the name and module that Transformers gives it."""

    __module__ = "transformers.models.llama.modeling_llama"

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(6, 10, bias=False)
        self.up_proj = nn.Linear(6, 10, bias=False)
        self.down_proj = nn.Linear(10, 6, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A residual block with an MLP and a Linear beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)
        self.mlp = LlamaMLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.proj(x))


PROJECTIONS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def factors_of(model: nn.Module, *names: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return full-rank factors, which leave the function as it is."""
    factors = {}
    for name in names:
        weight = model.get_submodule(name).weight.detach()
        layer = SVDLinear.from_linear(model.get_submodule(name), min(weight.shape))
        factors[name] = (layer.u.detach(), layer.v.detach())
    return factors


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 6)


class MyMLP(LlamaMLP):
    """Of somebody else."""


GATE, UP, DOWN = PROJECTIONS
WHOLE = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("build", "swapped", "left"),
    [
        (Block, ("proj", *PROJECTIONS), {}),
        (Block, PROJECTIONS, {"proj": nn.Linear}),
        (Block, (GATE, DOWN), {"proj": nn.Linear, UP: nn.Linear}),
        (lambda: nn.Sequential(MyMLP()), tuple(f"0.{name}" for name in WHOLE), {"0": MyMLP}),
        (LlamaMLP, WHOLE, {"": LlamaMLP}),  # has no parent in which to replace it
    ],
    ids=["all", "fused", "a dense projection", "another class", "the model itself"],
)
def test_what_is_replaced_computes_the_same(build, swapped, left, x):
    model = build()
    expected = model(x)
    untouched = {name: model.get_submodule(name) for name in left}
    assert swap_(model, factors_of(model, *swapped)) is None
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert {name: kinds[name] for name in swapped} == dict.fromkeys(swapped, SVDLinear)
    assert {name: kinds[name] for name in left} == left
    assert all(model.get_submodule(name) is module for name, module in untouched.items())
    if isinstance(model, Block):
        assert (kinds["mlp"], model.mlp.activation) == (SVDMLP, "silu")
    assert_same_in_fp64(model(x), expected)


def test_a_gated_mlp_whose_forward_was_replaced_is_left_alone(x):
    model, seen = Block(), []
    original = model.mlp.forward
    model.mlp.forward = lambda x: seen.append("forward") or original(x)
    expected = model(x)
    swap_(model, factors_of(model, *PROJECTIONS))
    assert_same_in_fp64(model(x), expected)
    assert seen == ["forward"] * 2


def test_a_hooked_activation_keeps_its_mlp():
    block = Block()
    block.mlp.act_fn.register_forward_hook(lambda *_: None)
    swap_(block, factors_of(block, *PROJECTIONS))
    assert isinstance(block.mlp, LlamaMLP)
    assert isinstance(block.mlp.gate_proj, SVDLinear)


def test_an_mlp_of_two_parents_is_replaced_in_both(x):
    model = nn.Sequential(Block(), Block())
    model[1].mlp = model[0].mlp
    expected = model(x)
    swap_(model, factors_of(model, *(f"0.{name}" for name in PROJECTIONS)))
    assert type(model[0].mlp) is SVDMLP
    assert model[1].mlp is model[0].mlp
    assert_same_in_fp64(model(x), expected)


@pytest.mark.parametrize("name", ["0", "2"])
def test_a_shared_linear_is_replaced_everywhere_by_one(name, x):
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.ModuleDict({"again": shared})["again"])
    expected = model(x)
    swap_(model, factors_of(model, name))
    assert type(model[0]) is SVDLinear
    assert model[2] is model[0]
    assert model[3] is model[0]
    assert_same_in_fp64(model(x), expected)


def test_a_shared_linear_under_two_names_is_not_half_replaced(x):
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with pytest.raises(ValueError, match="0 and 2 are one module"):
        swap_(model, factors_of(model, "0", "2"))
    assert model[0] is shared
    assert model[2] is shared


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_dtype_device_flags_and_bias_survive(dtype, device, trainable, training):
    model = nn.Sequential(nn.Linear(6, 4, device=device, dtype=dtype)).train(training)
    model[0].weight.requires_grad_(trainable)
    bias = model[0].bias.requires_grad_(not trainable)
    swap_(model, {"0": (torch.randn(6, 2), torch.randn(2, 4))})
    layer = model[0]
    assert {(p.dtype, p.device.type) for p in layer.parameters()} == {(dtype, device)}
    assert layer.u.requires_grad is layer.v.requires_grad is trainable
    assert layer.bias is bias
    assert bias.requires_grad is not trainable
    assert layer.training is training


def test_training_flags_of_an_mlp_survive():
    model = Block().eval()
    model.mlp.up_proj.train()
    swap_(model, factors_of(model, *PROJECTIONS))
    assert not model.mlp.training
    assert not model.mlp.gate_proj.training
    assert model.mlp.up_proj.training


def test_buffers_survive():
    model = Block()
    for module in (model.proj, model.mlp):
        module.register_buffer("scale", torch.ones(1))
        module.register_buffer("cache", torch.zeros(1), persistent=False)
    swap_(model, factors_of(model, "proj", *PROJECTIONS))
    assert type(model.mlp) is SVDMLP
    for module in (model.proj, model.mlp):
        buffers = {name for name, buffer in module.named_buffers() if buffer.numel()}
        assert buffers == {"scale", "cache"}
    assert {"proj.scale", "mlp.scale"} <= set(model.state_dict())
    assert not {"proj.cache", "mlp.cache"} & set(model.state_dict())


def test_hooks_survive_and_can_still_be_removed(x):
    model, seen = Block(), []
    handles = []
    for name in ("proj", "mlp", "mlp.gate_proj"):
        module = model.get_submodule(name)
        handles += [
            module.register_forward_hook(lambda *_, name=name: seen.append(name)),
            module.register_forward_pre_hook(
                lambda *_, name=name: seen.append(f"pre {name}"), with_kwargs=True
            ),
            module.register_full_backward_hook(lambda *_, name=name: seen.append(f"back {name}")),
        ]
    swap_(model, factors_of(model, "proj", *PROJECTIONS))
    assert type(model.mlp) is SVDMLP
    model(x.requires_grad_()).sum().backward()
    assert sorted(seen) == sorted(
        f"{kind}{name}"
        for kind in ("", "pre ", "back ")
        for name in ("proj", "mlp", "mlp.gate_proj")
    )
    for handle in handles:
        handle.remove()
    seen.clear()
    model(x).sum().backward()
    assert not seen


def test_state_dict_hooks_survive():
    model = Block()
    model.proj.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({f"{prefix}extra": torch.ones(1)})
    )
    swap_(model, factors_of(model, "proj"))
    assert "proj.extra" in model.state_dict()


class Subclass(nn.Linear):
    """Computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(9, 6), "head": nn.Linear(6, 9, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def _sequential(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), *modules)


def _with_replaced_forward() -> nn.Module:
    model = _sequential(nn.Linear(6, 4))
    model[1].forward = lambda x: x
    return model


def pair(K: int, r: int, s: int, N: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(K, r), torch.zeros(s, N)


GOOD = pair(6, 2, 2, 4)
SHAPES = r"1: u must be \[6, r\] and v \[r, 4\], got "
REFUSALS = {
    "unknown": (_sequential, {"9": GOOD}, "no module named '9'"),
    "not a Linear": (
        lambda: _sequential(nn.ReLU()),
        {"1": GOOD},
        "1 must be an nn.Linear, got ReLU",
    ),
    "a subclass": (
        lambda: _sequential(Subclass(6, 4)),
        {"1": GOOD},
        "1 must be an nn.Linear, got Subclass",
    ),
    "tied": (
        lambda: _sequential(_tied()),
        {"1.head": pair(6, 2, 2, 9)},
        "1.head shares its weight with 1.embed.weight; a swap would untie them",
    ),
    "replaced forward": (_with_replaced_forward, {"1": GOOD}, "1 has its forward replaced"),
    **{
        name: (lambda: _sequential(nn.Linear(6, 4)), {"1": pair(*sizes)}, f"{SHAPES}{words}")
        for name, sizes, words in (
            ("wrong K", (5, 2, 2, 4), r"\[5, 2\] and \[2, 4\]"),
            ("wrong N", (6, 2, 2, 5), r"\[6, 2\] and \[2, 5\]"),
            ("two ranks", (6, 2, 3, 4), r"\[6, 2\] and \[3, 4\]"),
        )
    },
}


@pytest.mark.parametrize(("build", "factors", "message"), REFUSALS.values(), ids=REFUSALS)
def test_an_error_replaces_nothing(build, factors, message):
    model = build()
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=message):
        swap_(model, {"0": GOOD} | factors)
    assert dict(model.named_modules()) == before


def test_shared_weights():
    assert shared_weights(Block()) == {}
    assert shared_weights(_tied()) == {"head": "embed.weight"}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert shared_weights(model) == {"0": "1.weight", "1": "0.weight"}
    # One module at two places is not two modules that share a weight.
    linear = nn.Linear(4, 4)
    assert shared_weights(nn.Sequential(linear, linear)) == {}
