"""Fused projections and GPT-2's Conv1D: calibrated, factored and replaced as nn.Linears are."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from toys import relative_error, token_batches

from neuronmm_ops import SVDConfig, SVDLinear, collect_moments, compress_
from neuronmm_ops.nn import dense_linear

transformers = pytest.importorskip("transformers")

METHODS = ("plain", "whiten", "swift")


def linear_of(K: int, N: int) -> nn.Module:
    return nn.Linear(K, N)


def conv1d_of(K: int, N: int) -> nn.Module:
    return transformers.pytorch_utils.Conv1D(N, K)


class Block(nn.Module):
    """Two layers of one input, of which the channels in `dead` are always 0, and a narrower one."""

    def __init__(self, build, dead: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.qkv_proj, self.gate_up_proj = build(16, 48), build(16, 40)
        self.down_proj = build(40, 16)
        for layer in (self.qkv_proj, self.gate_up_proj, self.down_proj):
            view = dense_linear(layer)
            values = torch.randn(view.out_features, view.in_features, generator=generator)
            view.weight.detach().copy_(values)
            view.bias.detach().copy_(torch.randn(view.out_features, generator=generator))
        self.dead = dead

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([torch.zeros_like(x[..., : self.dead]), x[..., self.dead :]], dim=-1)
        return self.qkv_proj(x).sum(-1, keepdim=True) + self.down_proj(self.gate_up_proj(x).relu())


def inputs(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(16, 16, generator=generator)
    return [torch.randn(8, 16, generator=generator) @ mixing for _ in range(count)]


def compressed(model: nn.Module, **options: object) -> list[float | None]:
    config = SVDConfig(
        **{"ratio": 0.3, "block": 8, "allocation": "uniform", "targets": "all-linear", **options}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few tokens
        return [layer.loss for layer in compress_(model, config, inputs()).layers]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dead", [0, 5])
def test_a_conv1d_becomes_what_an_equal_linear_becomes(method, dead):
    models = Block(linear_of, dead), Block(conv1d_of, dead)
    losses = [compressed(model, method=method) for model in models]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    one, other = (dict(model.named_modules()) for model in models)
    for name in ("qkv_proj", "gate_up_proj", "down_proj"):
        assert type(one[name]) is type(other[name]) is SVDLinear
        products = [(layer.u @ layer.v).detach() for layer in (other[name], one[name])]
        assert relative_error(*products) < 1e-4
        assert torch.equal(one[name].bias, other[name].bias)
    x = inputs()[0]
    torch.testing.assert_close(models[0](x), models[1](x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("build", [linear_of, conv1d_of])
def test_layers_of_one_input_share_its_moment(build):
    model = Block(build)
    sides = {"qkv_proj": "input", "gate_up_proj": "input", "down_proj": "output"}
    moments = dict(collect_moments(model, sides, inputs()))
    assert moments["qkv_proj"] is moments["gate_up_proj"]
    x = torch.cat(inputs()).double()
    torch.testing.assert_close(moments["qkv_proj"].matrix, x.t() @ x, rtol=1e-5, atol=1e-3)
    # An output's moment is without the bias.
    down = dense_linear(model.down_proj)
    y = model.gate_up_proj(x.float()).relu().double() @ down.weight.double().t()
    torch.testing.assert_close(moments["down_proj"].matrix, y.t() @ y, rtol=1e-4, atol=1e-1)


def test_a_conv1d_called_by_keyword():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_fc = conv1d_of(16, 40)

        def forward(self, x):
            return self.c_fc(x=x)

    moments = dict(collect_moments(Keyword(), {"c_fc": "input"}, inputs()))
    assert moments["c_fc"].tokens == 32


def gpt2(**options: object) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
def test_gpt2(method, dtype, tied):
    model = gpt2(tie_word_embeddings=tied).to(dtype)
    config = SVDConfig(
        ratio=0.3,
        block=8,
        targets=("mlp", "attention", "lm_head"),
        method=method,
        allocation="uniform",
    )
    report = compress_(model, config, token_batches())
    swapped = {layer.name for layer in report.layers if layer.r}
    leaves = {name.removeprefix("transformer.h.0.") for name in swapped if ".0." in name}
    assert leaves >= {"mlp.c_fc", "mlp.c_proj", "attn.c_attn"}
    assert ("lm_head" in swapped) != tied
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    for name in swapped:
        layer = model.get_submodule(name)
        assert layer.u.dtype == layer.v.dtype == dtype
    assert model(token_batches()[0]).logits.isfinite().all()
