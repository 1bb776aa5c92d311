"""`compress_` on whole models: what it reports, and that an error changes nothing."""

import copy
import warnings

import pytest
import torch
from torch import nn
from toys import FAMILIES, causal_lm, relative_error, token_batches

from neuronmm_ops import (
    SVDMLP,
    NonFiniteError,
    SVDConfig,
    SVDLinear,
    aligned_rank,
    compress_,
)
from neuronmm_ops.compress.factorization import Factorization, Method
from neuronmm_ops.compress.methods import METHODS

SMALL = {"allocation": "uniform", "ratio": 0.3, "block": 8}


def tokens_for(K: int = 64) -> list[torch.Tensor]:
    """Return batches of ten tokens for each of K features, with which there is no warning."""
    return token_batches(count=-(-10 * K // 128))


def linear_parameters(model: nn.Module, names: set[str]) -> int:
    """Count the parameters of the named layers without their biases."""
    return sum(
        p.numel()
        for name in names
        for key, p in model.get_submodule(name).named_parameters()
        if key != "bias"
    )


@pytest.mark.parametrize(
    ("family", "targets", "method"),
    [
        *((family, "all-linear", "swift") for family in FAMILIES),
        *(("Llama", "mlp", method) for method in ("plain", "whiten", "swift")),
    ],
)
def test_the_report_is_what_was_done(family, targets, method):
    model = causal_lm(family)
    before = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
    untouched = {n: p for n, p in model.named_parameters() if "_proj.weight" not in n}
    total = sum(p.numel() for p in model.parameters())
    config = SVDConfig(**SMALL, targets=targets, method=method)
    report = compress_(model, config, tokens_for())

    names = {layer.name for layer in report.layers}
    assert len(names) == (6 if targets == "mlp" else 14)
    assert "lm_head" not in names
    dense = sum(before[n].weight.numel() for n in names)
    kept = linear_parameters(model, names)
    assert report.ratio == 0.3
    assert report.effective_ratio == pytest.approx(1 - kept / dense)
    assert sum(p.numel() for p in model.parameters()) == total - dense + kept

    for layer in report.layers:
        module, linear = model.get_submodule(layer.name), before[layer.name]
        assert (linear.in_features, linear.out_features) == (layer.K, layer.N)
        assert layer.r == aligned_rank(layer.K, layer.N, 0.3, 8)
        assert layer.dense == (layer.r is None) == (module is linear)
        assert (layer.reason is not None) == layer.dense
        parameters = [p for key, p in module.named_parameters() if key != "bias"]
        assert layer.bytes == sum(p.nbytes for p in parameters)
        assert layer.dense_bytes == linear.weight.nbytes
        assert 0 <= layer.loss < 1
        assert (layer.loss == 0) == layer.dense
        if not layer.dense:
            assert isinstance(module, SVDLinear)
            assert module.rank == layer.r
            assert module.bias is linear.bias
    assert all(type(block.mlp) is SVDMLP for block in model.model.layers)
    after = dict(model.named_parameters())
    assert all(after[n] is p for n, p in untouched.items())
    assert model(token_batches(1)[0]).logits.isfinite().all()


def test_effective_ratio_of_dense_layers_is_reported():
    # 8x8 has no rank of 8 that saves anything; the report says so and counts it as dense.
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(64, 64))
    config = SVDConfig(**{**SMALL, "ratio": 0.5}, targets="all-linear", method="plain")
    report = compress_(model, config)
    assert [layer.dense for layer in report.layers] == [True, True, False]
    assert "no aligned rank" in report.layers[0].reason
    assert type(model[0]) is nn.Linear
    dense = 64 + 512 + 4096
    assert report.effective_ratio == pytest.approx(1 - (64 + 512 + 16 * 128) / dense)


@pytest.mark.parametrize("method", ["plain", "whiten", "swift"])
def test_loss_is_what_the_first_layer_loses(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, dtype=torch.float64))
    linear = copy.deepcopy(model[0]).requires_grad_(False)
    data = [torch.randn(64, 32, dtype=torch.float64)] * 6
    config = SVDConfig(**{**SMALL, "ratio": 0.5}, targets="all-linear", method=method)
    report = compress_(model, config, data)
    x = torch.eye(32, dtype=torch.float64) if method == "plain" else data[0]
    expected = x @ linear.weight.t()
    u, v = model[0].u.detach(), model[0].v.detach()
    lost = (x @ u @ v - expected).square().sum() / expected.square().sum()
    assert report.layers[0].loss == pytest.approx(float(lost), rel=1e-6)


def test_calibrated_methods_beat_plain_on_their_data():
    data = tokens_for()
    errors = {}
    for method in ("plain", "whiten", "swift"):
        model = causal_lm()
        expected = model(data[0]).logits.detach()
        compress_(model, SVDConfig(ratio=0.5, block=8, method=method), data)
        errors[method] = relative_error(model(data[0]).logits.detach(), expected)
    assert errors["swift"] == pytest.approx(errors["whiten"], rel=0.02)
    assert errors["swift"] < errors["plain"]


def test_a_method_is_what_the_registry_holds(monkeypatch):
    def first_columns(w, statistics, rank):
        assert statistics.moment.side == "input"
        u, v = torch.eye(w.shape[1]).double()[:, :rank], w.t()[:rank]
        return Factorization(u, v, torch.ones(min(w.shape)).double())

    method = Method(first_columns, side=lambda K, N: "input")
    monkeypatch.setitem(METHODS, "columns", method)
    model = nn.Sequential(nn.Linear(32, 48, bias=False))
    weight, x = model[0].weight.detach().clone(), torch.randn(700, 32)
    config = SVDConfig(ratio=0.5, block=8, targets="0", method="columns", allocation="uniform")
    report = compress_(model, config, [x])
    assert (report.layers[0].r, report.layers[0].loss) == (8, 24 / 32)
    assert torch.equal(model(x), x[:, :8] @ weight[:, :8].t())
    assert report.calibration["tokens"] == 700


def test_progress_is_told():
    told = []
    compress_(causal_lm(), SVDConfig(**SMALL), tokens_for(), lambda *args: told.append(args))
    assert [t for t in told if t[0] == "calibrate"] == [("calibrate", i, 5) for i in range(1, 6)]
    assert [t for t in told if t[0] == "factorize"] == [("factorize", i, 6) for i in range(1, 7)]


def test_enough_tokens_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compress_(causal_lm(), SVDConfig(**SMALL), tokens_for())
        plain = compress_(causal_lm(), SVDConfig(**SMALL, method="plain"))
    assert plain.calibration is None


def _fill(name, value):
    def spoil(model):
        model.get_parameter(f"model.layers.1.{name}.weight").data.view(-1)[3] = value

    return spoil


def _on_meta(model):
    model.model.layers[1].mlp.up_proj.to("meta")


_NAN_WEIGHT = _fill("mlp.up_proj", torch.nan)
_INF_NORM = _fill("post_attention_layernorm", torch.inf)


def _nothing(model):
    pass


ERRORS = {
    "weight": (_NAN_WEIGHT, {}, "tokens", NonFiniteError, "layers.1.mlp.up_proj: weight must"),
    "activation": (_INF_NORM, {}, "tokens", NonFiniteError, "layers.1.mlp.(gate|up)_proj: "),
    "meta": (_on_meta, {}, "tokens", ValueError, "layers.1.mlp.up_proj is on the meta device"),
    "rounded weight": (
        _NAN_WEIGHT,
        {"storage": "fp8"},
        "tokens",
        NonFiniteError,
        "up_proj: weight",
    ),
    "rounded meta": (_on_meta, {"storage": "int8"}, "tokens", ValueError, "is on the meta device"),
    "no calibration": (
        _nothing,
        {},
        None,
        ValueError,
        "method kfac-drift needs calibration batches",
    ),
    "no batches": (_nothing, {}, [], ValueError, "calibration has no batches"),
    "no target": (_nothing, {"targets": "fc9"}, "tokens", ValueError, "match no nn.Linear"),
    "bad token": (_nothing, {}, [torch.tensor([[99]])], ValueError, "batch 0 has token id 99, the"),
    "negative token": (_nothing, {}, [torch.tensor([[3, -1]])], ValueError, "has token id -1, the"),
    "too long": (_nothing, {}, [torch.ones(1, 65).long()], ValueError, "65 positions, the model"),
    "a list": (_nothing, {}, [[1, 2]], TypeError, "tensor or a mapping .* got list"),
}


@pytest.mark.parametrize(
    ("spoil", "options", "data", "error", "message"), ERRORS.values(), ids=ERRORS
)
def test_an_error_leaves_the_model_as_it_was(spoil, options, data, error, message):
    model = causal_lm().train()
    spoil(model)
    modules = dict(model.named_modules())
    parameters = {n: (p, p._version) for n, p in model.named_parameters()}
    with pytest.raises(error, match=message):
        compress_(model, SVDConfig(**SMALL, **options), tokens_for() if data == "tokens" else data)
    assert dict(model.named_modules()) == modules
    after = dict(model.named_parameters())
    assert all(after[n] is p and p._version == v for n, (p, v) in parameters.items())
    assert all(m.training and not m._forward_hooks for m in model.modules())


def test_factors_that_the_weight_s_dtype_cannot_hold_are_refused():
    model = nn.Sequential(nn.Linear(32, 48, dtype=torch.float16))
    linear = model[0]
    nn.init.constant_(linear.weight, 6e4)
    data = [torch.full((400, 32), 1e-3, dtype=torch.float16)]
    # Its v has rows of length one, so that u has the whole scale.
    config = SVDConfig(ratio=0.5, block=8, targets="0", method="swift")
    with pytest.raises(NonFiniteError, match=r"0\.u must be finite in float16.* a wider dtype"):
        compress_(model, config, data)
    assert model[0] is linear


def test_layers_kept_dense_for_a_tied_weight_are_reported():
    model = causal_lm("Qwen3")
    config = SVDConfig(ratio=0.3, block=8, targets=("down_proj", "lm_head"), method="plain")
    report = compress_(model, config)
    (head,) = [layer for layer in report.layers if layer.name == "lm_head"]
    assert (head.dense, head.r, head.loss) == (True, None, 0.0)
    assert head.reason == "shares its weight with model.embed_tokens.weight"
    assert head.bytes == head.dense_bytes == model.lm_head.weight.nbytes
