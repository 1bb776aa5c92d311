"""Damaged, inconsistent or hostile checkpoints are refused, by name, before any weight is used."""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tiny import SIZES, tiny_directory, tiny_ids, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from neuronmm_ops import (
    CalibrationWarning,
    CheckpointError,
    NonFiniteError,
    SVDConfig,
    compress_,
    hf,
)
from neuronmm_ops.checkpoint import inspect_checkpoint
from neuronmm_ops.hf import loading

NAME = "model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "out"
    model = tiny_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        report = compress_(model, SVDConfig(ratio=0.3, block=8, allocation="uniform"), [tiny_ids()])
    hf.save(model, directory, report, tiny_tokenizer())
    return directory


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


def _edit_config(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def _refused_by_all(directory: Path, *words: str) -> None:
    """Every reader refuses the directory, with one line that holds all words."""
    for read in (hf.load, inspect_checkpoint, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError) as caught:
            read(directory)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)


def test_rank_in_config_differs_from_the_weights(checkpoint: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        layer = config["quantization_config"]["layers"][0]
        assert (layer["name"], layer["r"]) == (NAME, 32)
        layer["r"] = 24

    _edit_config(checkpoint, edit)
    _refused_by_all(checkpoint, f"{NAME}.u", "[64, 24]", "[64, 32]")


def test_tensor_with_another_shape(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{NAME}.v"] = torch.zeros(32, 175)
    save_file(tensors, file, metadata={"format": "pt"})
    _refused_by_all(checkpoint, f"{NAME}.v", "[32, 176]", "[32, 175]")


def test_tensor_missing(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{NAME}.u"]
    save_file(tensors, file, metadata={"format": "pt"})
    _refused_by_all(checkpoint, f"{NAME}.u", "the file has none")


def test_ordinary_tensor_missing_is_not_initialized_at_random(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        hf.load(checkpoint)


def test_truncated_weights(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    for read in (hf.load, inspect_checkpoint):
        with pytest.raises(CheckpointError, match="damaged or truncated"):
            read(checkpoint)


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    for read in (hf.load, inspect_checkpoint):
        with pytest.raises(CheckpointError, match="has no weights"):
            read(checkpoint)


def test_an_index_without_metadata_is_named(checkpoint: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json must have an object metadata"):
        hf.load(checkpoint)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/tmp/x.safetensors", "w.bin"])  # noqa: S108
def test_index_must_stay_in_its_directory(checkpoint: Path, name: str) -> None:
    (checkpoint / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"a": name}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (hf.load, inspect_checkpoint):
        with pytest.raises(CheckpointError, match="beside it"):
            read(checkpoint)


def test_shard_missing(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="lacks model-00001-of-00002"):
        hf.load(checkpoint)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_config_is_no_json_object(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    for read in (hf.load, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=r"config\.json must hold"):
            read(checkpoint)


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        (("format_version",), 99, "format_version must be 1, got 99"),
        (("layers",), [], "at least one layer"),
        (("layers",), [1], "malformed"),
        (("layers", 0, "r"), "32", "positive integer"),
        (("layers", 0, "r"), -8, "positive integer"),
        (("layers", 0, "r"), None, "null for a dense layer"),
        (("layers", 0, "K"), 0, "positive integer sizes"),
        (("layers", 0, "name"), "model.nothing", "model.nothing"),
        (("layers", 0, "loss"), "high", "number in [0, 1]"),
        (("layers", 0, "loss"), 1.5, "number in [0, 1]"),
        (("layers", 0, "reason"), 3, "text or null"),
        (("calibration",), 3, "object or null"),
        (("provenance",), [], "provenance an object"),
        (("svd_config", "ratio"), 2, "ratio must be in (0, 1)"),
        (("svd_config", "version"), 7, "version must be 2"),
    ],
)
def test_malformed_record(
    checkpoint: Path, path: tuple[str | int, ...], value: object, word: str
) -> None:
    def edit(config: dict[str, Any]) -> None:
        place = config["quantization_config"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    _edit_config(checkpoint, edit)
    for read in (hf.load, inspect_checkpoint):
        with pytest.raises(CheckpointError) as caught:
            read(checkpoint)
        assert word in str(caught.value)


def test_field_missing_from_the_record(checkpoint: Path) -> None:
    _edit_config(checkpoint, lambda config: config["quantization_config"].pop("calibration"))
    with pytest.raises(CheckpointError, match="calibration"):
        hf.load(checkpoint)


def test_sizes_disagree_with_the_architecture(checkpoint: Path) -> None:
    _edit_config(checkpoint, lambda config: config.update(intermediate_size=184))
    with pytest.raises(CheckpointError, match=r"\[64, 176\].*\[64, 184\]"):
        hf.load(checkpoint)


def test_dense_directory_is_no_compressed_checkpoint(tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path / "dense")
    assert hf.load(directory).config.model_type == "llama"
    with pytest.raises(CheckpointError, match="not a compressed checkpoint"):
        inspect_checkpoint(directory)


def test_unknown_architecture(checkpoint: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        config.update(model_type="unheard_of", architectures=["UnheardOf"])

    _edit_config(checkpoint, edit)
    with pytest.raises(CheckpointError, match="unheard_of"):
        hf.load(checkpoint)


def test_from_pretrained_does_not_compress(tmp_path: Path, pristine: Path) -> None:
    dense = tiny_directory(tmp_path / "dense")
    record = json.loads((pristine / "config.json").read_text())["quantization_config"]
    with pytest.raises(ValueError, match="it does not compress"):
        AutoModelForCausalLM.from_pretrained(dense, quantization_config=hf.NeuronMMConfig(**record))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", None),
        ("num_attention_heads", 3),
        ("num_attention_heads", 0),
        ("dtype", "float7"),
        ("rope_parameters", "x"),
        ("quantization_config", []),
        ("quantization_config", "x"),
        ("quantization_config", 5),
        ("quantization_config", {}),
        ("model_type", 7),
        ("num_hidden_layers", -1),
        ("vocab_size", "many"),
    ],
)
def test_a_malformed_config_is_one_line(tmp_path: Path, key: str, value: object) -> None:
    directory = tiny_directory(tmp_path / "dense")
    _edit_config(directory, lambda config: config.update({key: value}))
    with pytest.raises(CheckpointError) as caught:
        hf.load(directory)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "{", "5"])
def test_other_json_than_an_object_is_one_line(name: str, text: str, tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path / "dense")
    (directory / name).write_text(text)
    read = hf.load if name == "config.json" else hf.load_tokenizer
    with pytest.raises(CheckpointError) as caught:
        read(directory)
    assert "\n" not in str(caught.value)


def test_layers_that_the_config_does_not_have(tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path / "dense")
    _edit_config(directory, lambda config: config.update(num_hidden_layers=1))
    with pytest.raises(CheckpointError, match=r"has no place for, first model\.layers\.1\."):
        hf.load(directory)


def test_a_classification_head_is_not_dropped(tmp_path: Path) -> None:
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "dense")
    with pytest.raises(CheckpointError, match=r"first score\.weight; the checkpoint is of a Llama"):
        hf.load(tmp_path / "dense")


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_a_dense_value_that_is_not_finite(checkpoint: Path, name: str) -> None:
    file = checkpoint / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    tensors[name].view(-1)[5] = torch.inf
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(NonFiniteError, match=f"{name} must be finite in float32, got NaN or Inf"):
        hf.load(checkpoint)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"transformers_weights": "b.safetensors"}, "names other weights than are read here"),
        ({"attn_implementation": "org/kernel"}, "attn_implementation must be one of Transformers'"),
        ({"_attn_implementation": "org/kernel@v1:f"}, "code of a hub; set it to sdpa or eager"),
        ({"attn_implementation": {"": "sdpa", "x": "a/b"}}, "attn_implementation must be"),
        ({"text_config": {"_experts_implementation": "a/b"}}, "_experts_implementation must be"),
    ],
)
def test_what_lets_other_weights_or_code_in_is_refused(
    entry: dict[str, Any], words: str, checkpoint: Path
) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entry))
    for read in (hf.load, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=words):
            read(checkpoint)


def test_an_adapter_beside_the_weights_is_refused(checkpoint: Path) -> None:
    (checkpoint / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for read in (hf.load, inspect_checkpoint):
        with pytest.raises(CheckpointError, match="merge it by peft's merge_and_unload"):
            read(checkpoint)


def test_transformers_itself_takes_no_other_weights(checkpoint: Path) -> None:
    shutil.copyfile(checkpoint / "model.safetensors", checkpoint / "b.safetensors")
    _edit_config(checkpoint, lambda config: config.update(transformers_weights="b.safetensors"))
    _refused_by_all(checkpoint, "by transformers_weights 'b.safetensors'; remove that entry")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_factor_that_is_not_finite(checkpoint: Path, value: float) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{NAME}.v"][2, 3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    for read in (hf.load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(NonFiniteError, match=f"{NAME}.v must be finite"):
            read(checkpoint)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_low_precision_weights_without_scales(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = tiny_directory(tmp_path / "dense")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{NAME}.weight"] = tensors[f"{NAME}.weight"].to(dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{NAME}\.weight is .* no quantization_config"):
        hf.load(directory)


def test_an_unreadable_file_is_not_called_damaged(tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path / "dense")
    weights, config = directory / "model.safetensors", directory / "config.json"
    weights.unlink()
    weights.mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        hf.load(directory)
    config.unlink()
    config.mkdir()
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        hf.load(directory)


def test_a_hub_id_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(loading, "snapshot_download", unreachable)
    for read in (hf.load, hf.load_tokenizer):
        with pytest.raises(CheckpointError) as caught:
            read("some-org/some-model")
        assert "the hub cannot be reached" in str(caught.value)
        assert "local Transformers model directory" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_hub_id_is_downloaded_and_loaded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "snapshot_download", lambda *_, **__: str(checkpoint))
    restored = hf.load("some-org/some-model")
    assert torch.equal(
        restored.state_dict()[f"{NAME}.u"], hf.load(checkpoint).state_dict()[f"{NAME}.u"]
    )
    with pytest.raises(CheckpointError, match="is no directory"):
        hf.load(Path("some-org/some-model"))


def test_a_record_of_more_layers_than_any_model_has(checkpoint: Path) -> None:
    def add_ghosts(config: dict[str, Any]) -> None:
        layers = config["quantization_config"]["layers"]
        layers += [{**layers[0], "name": f"ghost.{i}"} for i in range(20_000)]

    _edit_config(checkpoint, add_ghosts)
    for read in (hf.load, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=r"at most 20000 layers, got 20\d\d\d; copy"):
            read(checkpoint)
