"""Pairs of Linears for other libraries: peft, pruning; and LoRA on the factors themselves."""

from typing import Any

import pytest
import small
import torch
from peft import LoraConfig, get_peft_model
from tiny import FAMILIES, tiny_ids, tiny_model
from torch import nn
from torch.nn.utils import prune

from neuronmm_ops import SVDMLP, SVDLinear, hf
from neuronmm_ops.compress.record import low_rank_layers
from neuronmm_ops.nn import LinearPair


def compressed(family: str = "llama", **options: Any) -> Any:
    return small.compressed(family, "all-linear", **options)[0]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(tiny_ids(2)).logits


def randomize_adapters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)


@pytest.mark.parametrize(
    ("family", "tied"), [*((family, True) for family in FAMILIES), ("llama", False)]
)
def test_there_and_back(family, tied, tmp_path):
    model = compressed(family, tied=tied)
    before, layers = logits(model), low_rank_layers(model)
    assert hf.to_pairs(model) is model
    assert not low_rank_layers(model)
    pairs = {n for n, m in model.named_modules() if isinstance(m, LinearPair)}
    assert pairs == set(layers)
    torch.testing.assert_close(logits(model), before)

    model.save_pretrained(tmp_path / "plain")  # as Trainer would
    assert torch.equal(logits(hf.load(tmp_path / "plain")), before)

    assert hf.from_pairs(model) is model
    assert set(low_rank_layers(model)) == set(layers)
    assert torch.equal(logits(model), before)
    assert isinstance(model.model.layers[0].mlp, SVDMLP)
    hf.save(model, tmp_path / "ours")
    assert torch.equal(logits(hf.load(tmp_path / "ours")), before)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_peft_adapts_a_pair_by_all_linear(family, tmp_path):
    model = compressed(family)
    before = logits(model)
    names = set(low_rank_layers(model))
    adapted = get_peft_model(hf.to_pairs(model), LoraConfig(target_modules="all-linear", r=4))
    found = {n.split(".lora_A")[0] for n, _ in adapted.named_parameters() if ".lora_A" in n}
    assert found == {f"base_model.model.{n}.{factor}" for n in names for factor in ("u", "v")}
    randomize_adapters(adapted)
    trained = logits(adapted)
    assert (trained - before).abs().max() > 0.001
    with pytest.raises(ValueError, match=r"q_proj must hold two plain nn.Linear: u is a peft"):
        hf.from_pairs(model)
    with pytest.raises(ValueError, match="from_pairs"):
        hf.save(model, tmp_path / "unmerged")
    assert not (tmp_path / "unmerged").exists()

    merged = hf.from_pairs(adapted.merge_and_unload())
    torch.testing.assert_close(logits(merged), trained)
    hf.save(merged, tmp_path / "merged")
    assert torch.equal(logits(hf.load(tmp_path / "merged")), logits(merged))


def test_what_is_saved_with_adapters_is_refused_on_loading(tmp_path):
    model = hf.to_pairs(compressed())
    get_peft_model(model, LoraConfig(target_modules="all-linear", r=4))
    model.save_pretrained(tmp_path / "o")
    with pytest.raises(ValueError, match=r"q_proj\.u: config.json asks for"):
        hf.load(tmp_path / "o")


@pytest.mark.parametrize(("factors", "count"), [(("u", "v"), 2), (("u",), 1), (("v",), 1)])
def test_lora_on_the_factors(factors, count):
    model = compressed()
    before = logits(model)
    config = hf.lora_config(model, ["gate_proj", "up_proj", "down_proj"], factors, r=4)
    adapted = get_peft_model(model, config)
    trainable = {n for n, p in adapted.named_parameters() if p.requires_grad}
    assert len(trainable) == 2 * 6 * count
    adapted(tiny_ids(2), labels=tiny_ids(2)).loss.backward()
    moved = [p for n, p in adapted.named_parameters() if "lora_B" in n and p.grad.abs().sum() > 0]
    assert len(moved) == 6 * count
    randomize_adapters(adapted)
    trained = logits(adapted)
    assert (trained - before).abs().max() > 0.001

    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged), trained)
    mlp = merged.model.layers[0].mlp
    assert type(mlp.gate_proj) is SVDLinear
    assert mlp.gate_proj.u.is_contiguous()
    with torch.profiler.profile() as profile:
        logits(merged)
    called = [event.name for event in profile.events()]
    assert "neuronmm::xuv" in called
    assert "neuronmm::svd_mlp" in called


def test_lora_takes_linears_too():
    model, _ = small.compressed()
    config = hf.lora_config(model, r=2)
    assert "model.layers.0.self_attn.q_proj" in config.target_modules
    assert "model.layers.0.mlp.up_proj.v" in config.target_parameters
    assert not any("lm_head" in name for name in config.target_modules)
    by_pattern = hf.lora_config(model, r".*layers\.1\.mlp\..*")
    assert sorted(by_pattern.target_parameters) == [
        f"model.layers.1.mlp.{n}_proj.{factor}" for n in ("down", "gate", "up") for factor in "uv"
    ]
    with pytest.raises(ValueError, match="names no SVDLinear"):
        hf.lora_config(model, ["q_proj"])
    with pytest.raises(ValueError, match="factors must be u, v or both, got w"):
        hf.lora_config(model, factors=["w"])


def test_pruning_a_pair(tmp_path):
    model = hf.to_pairs(compressed())
    pair = model.model.layers[0].mlp.up_proj
    for linear in pair:
        prune.l1_unstructured(linear, "weight", amount=0.5)
    pruned = logits(model)
    with pytest.raises(ValueError, match=r"up_proj must hold two plain nn.Linear: u.weight"):
        hf.from_pairs(model)
    for linear in pair:
        prune.remove(linear, "weight")
    hf.save(hf.from_pairs(model), tmp_path / "o")
    loaded = hf.load(tmp_path / "o")
    torch.testing.assert_close(logits(loaded), pruned)
    u = loaded.model.layers[0].mlp.up_proj.u
    assert int((u == 0).sum()) == u.numel() // 2


def test_models_without_any():
    with pytest.raises(ValueError, match="no SVDLinear; compress it first"):
        hf.to_pairs(tiny_model())
    with pytest.raises(ValueError, match="no LinearPair"):
        hf.from_pairs(tiny_model())
