"""The shape of a model from what a user gives: a name, the hub's name, a directory, a file."""

import json
import os

import pytest

from neuronmm_ops.models import SHAPES, model_shape, resolve_shape

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Qwen3-4B", "Qwen3-4B"),
        ("Qwen/Qwen3-4B", "Qwen3-4B"),
        ("meta-llama/llama-3.2-1b", "Llama-3.2-1B"),
        ("mistral", "Mistral-7B-v0.3"),
    ],
)
def test_names(given, name):
    assert resolve_shape(given) is SHAPES[name]


def test_the_sizes_of_any_model_of_the_hub(tmp_path, monkeypatch):
    path = tmp_path / "0123abcd" / "config.json"  # a snapshot in the hub's cache
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repo, file: str(path))
    shape = resolve_shape("acme/New-1B")
    assert (shape.name, shape.hidden_size) == ("New-1B", 64)
    assert resolve_shape("Qwen/Qwen3-4B") is SHAPES["Qwen3-4B"]

    def unreachable(*_):
        raise RuntimeError("the proxy says no\nand more")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    with pytest.raises(ValueError, match=r"'acme/New-1B', whose config.json is .*says no\)$"):
        resolve_shape("acme/New-1B")


def test_directories_and_files_come_before_names(tmp_path, monkeypatch):
    directory = tmp_path / "Qwen" / "Qwen3-4B"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    for given in ("Qwen/Qwen3-4B", str(directory), os.path.join(directory, "config.json")):
        shape = resolve_shape(given)
        assert (shape.name, shape.hidden_size) == ("Qwen3-4B", 64)


@pytest.mark.parametrize(
    ("given", "near", "far"),
    [
        ("Qwen/Qwen3-4", "such as Qwen3-4B", "Llama"),
        ("Qwen4-8B", "Qwen3-8B", "Mistral"),
        ("llama-3.2", "such as Llama-3.2-1B, Llama-3.2-3B; got 'llama-3.2'", "Qwen"),
        ("gpt", "Llama-3.2-1B, Llama-3.2-3B, Llama-3.1-8B", "\n"),
        ("no/such/dir", "Mistral-7B-v0.3; got 'no/such/dir'", "\n"),
    ],
)
def test_unknown_names_are_told_what_is_close(given, near, far):
    with pytest.raises(ValueError, match="must be a directory") as e:
        resolve_shape(given)
    assert near in str(e.value)
    assert far not in str(e.value)


@pytest.mark.parametrize(
    "other",
    [
        {"model_type": "mixtral", "num_local_experts": 8},
        {"model_type": "qwen3_moe", "num_experts": 128},
        {"model_type": "deepseek_v3", "n_routed_experts": 256},
        {"model_type": "gpt2"},
        {"model_type": "bert"},
        {"model_type": "no_such"},
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
        {"layer_types": [["full_attention"]]},
    ],
)
def test_layers_of_another_kind_have_no_shape(tmp_path, other):
    """They were taken for one dense gated MLP a layer, without a word."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | other))
    with pytest.raises(ValueError, match=r"gate, up and down projection; got .*; give a config"):
        resolve_shape(str(path))
    path.write_text(json.dumps(CONFIG | {"num_experts": 1, "num_local_experts": None}))
    assert resolve_shape(str(path)).hidden_size == 64


@pytest.mark.parametrize(
    ("other", "is_fused"),
    [
        ({}, True),
        ({"model_type": "llama"}, True),
        ({"model_type": "gemma2"}, False),
        ({"model_type": "phi3", "partial_rotary_factor": 0.75}, False),
        ({"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 1.0}}, True),
        ({"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 0.5}}, False),
    ],
)
def test_one_launch_is_of_layers_that_the_op_computes(tmp_path, other, is_fused):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | other))
    assert resolve_shape(str(path)).is_fused == is_fused


def test_shapes_are_found_whatever_the_case():
    assert model_shape("llama-3.2-1b") is SHAPES["Llama-3.2-1B"]
    assert model_shape("Qwen3-4B").projections["q_proj"] == (2560, 4096)
    assert model_shape("Llama-3.2-1B").projections["down_proj"] == (8192, 2048)


def test_unknown_shape_lists_the_names():
    with pytest.raises(ValueError, match=r"Llama-3\.2-1B, .*Mistral.*; got 'GPT-9'"):
        model_shape("GPT-9")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Llama-3.2-1B", 1.24), ("Llama-3.1-8B", 8.03), ("Llama-3.1-70B", 70.6), ("Qwen3-32B", 32.8)],
)
def test_shapes_have_the_published_number_of_parameters(name, billions):
    shape = model_shape(name)
    layer = sum(K * N for K, N in shape.projections.values())
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)
    assert shape.layers * layer + embeddings == pytest.approx(billions * 1e9, rel=0.01)
