"""`compress_` with one budget for all matrices, by every method and importance."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from toys import FAMILIES, GatedMLP, causal_lm, token_batches

from neuronmm_ops import SVDConfig, SVDLinear, compress_
from neuronmm_ops.compress.methods import METHODS
from neuronmm_ops.errors import CompressionWarning
from neuronmm_ops.rank import parameter_count

BATCHES = token_batches(5)
WIDER = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def kept(report):
    return sum(layer.parameters for layer in report.layers)


@pytest.mark.parametrize(
    ("family", "method"),
    [*(("Llama", method) for method in METHODS), *((name, "kfac") for name in FAMILIES)],
)
def test_the_budget_is_met_within_one_block(family, method):
    model = causal_lm(family, **WIDER)
    config = SVDConfig(ratio=0.4, block=8, method=method, targets="all-linear")
    report = compress_(model, config, token_batches(10))
    dense = sum(layer.K * layer.N for layer in report.layers)
    block = max(8 * (layer.K + layer.N) for layer in report.layers)
    assert 0 <= 0.6 * dense - kept(report) < block
    assert report.effective_ratio == pytest.approx(1 - kept(report) / dense)
    for layer in report.layers:
        module = model.get_submodule(layer.name)
        assert layer.dense == (type(module) is nn.Linear)
        assert layer.dense or (isinstance(module, SVDLinear) and module.rank == layer.r)
        assert layer.reason in (None, "the allocation keeps it dense")
        assert 0 <= layer.loss < 1
    assert model(BATCHES[0]).logits.isfinite().all()


@pytest.mark.parametrize("importance", ["gradient", "error", "perplexity"])
def test_every_importance_allocates(importance):
    model = causal_lm(**WIDER)
    before = copy.deepcopy(model.state_dict())
    config = SVDConfig(ratio=0.4, block=8, method="swift", importance=importance)
    told = []
    report = compress_(model, config, token_batches(10), lambda *args: told.append(args))
    assert len({layer.r for layer in report.layers}) > 1
    stages = {"gradient": "gradients", "perplexity": "probe"}
    assert stages.get(importance, "calibrate") in {stage for stage, *_ in told}
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if "mlp" not in name)


def test_layers_that_matter_get_more_rank():
    """The second MLP's output is scaled away, so its ranks are worth little."""
    model = causal_lm(**WIDER)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e-3)
    report = compress_(model, SVDConfig(ratio=0.5, block=8), token_batches(10))
    first, second = (
        sum(layer.parameters for layer in report.layers if f"layers.{i}." in layer.name)
        for i in (0, 1)
    )
    assert first > 2 * second


@pytest.mark.parametrize("allocation", ["greedy", "uniform"])
def test_layer_ratios(allocation):
    config = SVDConfig(
        ratio=0.4,
        block=8,
        allocation=allocation,
        layer_ratios={r".*layers\.0\.mlp\.up_proj": 0.0, "down_proj": (0.5, 0.7)},
    )
    report = compress_(causal_lm(**WIDER), config, token_batches(10))
    found = {layer.name.removeprefix("model.layers."): layer for layer in report.layers}
    assert found["0.mlp.up_proj"].dense
    for index in (0, 1):
        down = found[f"{index}.mlp.down_proj"]
        removed = 1 - down.parameters / (down.K * down.N)
        assert (0.5 if allocation == "greedy" else 0.4) <= removed <= 0.7  # uniform rounds
    if allocation == "greedy":
        shared = [layer for name, layer in found.items() if name != "0.mlp.up_proj"]
        dense = sum(layer.K * layer.N for layer in shared)
        spent = sum(parameter_count(layer.K, layer.N, layer.r) for layer in shared)
        assert 0 <= 0.6 * dense - spent < 8 * 192


def test_a_budget_that_no_allocation_meets_changes_nothing():
    model = causal_lm()
    modules = dict(model.named_modules())
    with pytest.raises(ValueError, match=r"no allocation meets the budget .* a smaller block"):
        compress_(model, SVDConfig(ratio=0.8, block=8), BATCHES)
    assert dict(model.named_modules()) == modules


def test_drift_is_nearer_to_the_dense_model_than_its_start():
    """With the same ranks, on the calibration data themselves."""
    dense, batches = causal_lm(**WIDER), token_batches(10)
    errors = {}
    for method in ("swift", "drift"):
        model = copy.deepcopy(dense)
        config = SVDConfig(ratio=0.6, block=8, method=method, allocation="uniform")
        compress_(model, config, batches)
        with torch.no_grad():
            errors[method] = sum(
                float((model.model(b)[0] - dense.model(b)[0]).square().sum()) for b in batches
            )
    assert errors["drift"] < errors["swift"]


class Expert(nn.Module):
    """Sees the tokens that its router gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[..., 0] > 0
        return torch.zeros_like(x).masked_scatter(chosen[..., None], self.up_proj(x[chosen]))


class Twice(nn.Module):
    """Goes through its layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GatedMLP(32, 64), GatedMLP(32, 64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.layers):
            x = x + layer(x)
        return x


class Keyed(GatedMLP):
    """Hands hidden states on by a name that is not Transformers'."""

    def __init__(self) -> None:
        super().__init__(32, 64)
        self.layers = nn.ModuleList([GatedMLP(32, 64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.layers[0](x=x))


def with_expert() -> nn.Module:
    model = causal_lm()
    model.model.layers[1].mlp = Expert()
    return model


@pytest.mark.parametrize(("method", "instead"), [("kfac-drift", "kfac"), ("drift", "swift")])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_expert, r"model\.layers\.1\.mlp\.up_proj is not given all tokens"),
        (lambda: GatedMLP(32, 64), "GatedMLP has no list of layers"),
        (Twice, "run one by one, layers give another output than Twice"),
        (Keyed, "hidden_states"),
    ],
    ids=["expert", "no layers", "twice", "keyed"],
)
def test_a_model_that_drift_cannot_follow_has_the_factors_its_ranks_are_bought_by(
    make, reason, method, instead
):
    models = [make(), make()]
    models[1].load_state_dict(models[0].state_dict())
    batches = BATCHES if make is with_expert else [torch.randn(1, 700, 32)]
    config = SVDConfig(ratio=0.5, block=8, method=method, targets="all-linear")
    with pytest.warns(CompressionWarning, match=f"{instead} is used, not {method}.*{reason}"):
        report = compress_(models[0], config, batches)
    expected = replace(config, method=instead)
    assert report.config == expected
    compress_(models[1], expected, batches)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=0)


def test_drift_rounds_what_is_in_no_layer():
    model = causal_lm(tie_word_embeddings=False)
    kind = {"method": "drift", "allocation": "uniform", "storage": "int8"}
    config = SVDConfig(ratio=0.4, block=8, targets=("mlp", "lm_head"), **kind)
    report = compress_(model, config, BATCHES)
    (head,) = (layer for layer in report.layers if layer.name == "lm_head")
    assert head.storage == "int8"
    assert {value.dtype for value in (model.lm_head.u, model.lm_head.v)} == {torch.int8}


def test_dead_channels_and_one_document():
    """Inputs that are always zero, and fewer tokens than features."""
    model = causal_lm(**WIDER)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[:40] = 0
        model.model.layers[1].post_attention_layernorm.weight[:20] = 0
    for method in [name for name in METHODS if name != "plain"]:
        clone = copy.deepcopy(model)
        config = SVDConfig(ratio=0.4, block=8, method=method)
        with pytest.warns(UserWarning, match="fewer than"):
            compress_(clone, config, [token_batches(1)[0][:1]])
        assert clone(BATCHES[0]).logits.isfinite().all()
