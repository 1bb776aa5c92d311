"""Linear layers of other classes than nn.Linear, seen as one and replaced."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from neuronmm_ops import SVDLinear, swap_
from neuronmm_ops.nn import dense_linear, dense_linears, shared_weights

K, N = 6, 10
BUILDERS = {
    "Linear": lambda: nn.Linear(K, N),
    "Conv1D": lambda: Conv1D(N, K),  # GPT-2's: the weight is [K, N]
    "FalconLinear": lambda: FalconLinear(K, N),
}


@pytest.fixture(params=BUILDERS)
def layer(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    layer = BUILDERS[request.param]()
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer


def test_what_it_computes_with_the_modules_own_weight(layer):
    view = dense_linear(layer)
    assert (view.in_features, view.out_features, view.weight.shape) == (K, N, (N, K))
    x = torch.randn(2, 3, K)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, view.weight, view.bias))
    view.weight.detach().zero_()
    assert layer.weight.abs().sum() == 0
    assert view.stored is layer.weight
    assert view.bias is layer.bias


def full_rank(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Factors that leave the function as it is, in the rounding of fp64."""
    u, s, v = torch.linalg.svd(dense_linear(layer).weight.detach().double().t(), False)
    return u * s, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trainable", [True, False])
def test_replaced(layer, dtype, trainable):
    layer = layer.to(dtype)
    layer.weight.requires_grad_(trainable)
    model, x = nn.ModuleDict({"fc": layer}), torch.randn(2, 3, K)
    u, v = full_rank(layer)
    expected = layer.float()(x)
    layer.to(dtype)
    swap_(model, {"fc": (u, v)})
    assert type(model["fc"]) is SVDLinear
    assert model["fc"].bias is layer.bias
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model["fc"].u.requires_grad is model["fc"].v.requires_grad is trainable
    error = (model["fc"](x.to(dtype)).float() - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype == torch.float32 else 2e-2)


def test_factors_of_the_transposed_shape_are_refused(layer):
    model = nn.ModuleDict({"fc": layer})
    with pytest.raises(ValueError, match=r"fc: u must be \[6, r\] and v \[r, 10\]"):
        swap_(model, {"fc": (torch.zeros(N, 2), torch.zeros(2, K))})
    assert model["fc"] is layer


def test_weights_that_another_module_holds_too(layer):
    model = nn.ModuleDict({"one": layer, "other": type(layer)(K, N)})
    model["other"].weight = layer.weight
    assert shared_weights(model) == {"one": "other.weight", "other": "one.weight"}
    with pytest.raises(ValueError, match=r"one shares its weight with other\.weight"):
        swap_(model, {"one": full_rank(layer)})


def test_other_modules_are_no_linear_layers():
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    foreign = type("Conv1D", (nn.Module,), {})()
    foreign.weight, foreign.bias = nn.Parameter(torch.zeros(3, 4)), None
    others = [foreign, Doubled(4, 4), nn.Embedding(4, 4), nn.Conv1d(4, 4, 1), SVDLinear(4, 4, 2)]
    assert [dense_linear(module) for module in others] == [None] * len(others)
    assert list(dense_linears(nn.Sequential(nn.Linear(4, 4), *others))) == ["0"]
