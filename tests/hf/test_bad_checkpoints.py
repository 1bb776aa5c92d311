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
from safetensors.torch import load_file, save_file
from tiny import tiny_directory, tiny_ids, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from neuronmm_ops import CalibrationWarning, CheckpointError, SVDConfig, compress_, hf
from neuronmm_ops.compress.checkpoint import inspect_checkpoint

NAME = "model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "out"
    model = tiny_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        report = compress_(model, SVDConfig(ratio=0.3, block=8), [tiny_ids()])
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


@pytest.mark.parametrize("name", ["../secret.safetensors", "/tmp/x.safetensors", "w.bin"])  # noqa: S108
def test_index_must_stay_in_its_directory(checkpoint: Path, name: str) -> None:
    index = {"metadata": {}, "weight_map": {"a": name}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (hf.load, inspect_checkpoint):
        with pytest.raises(CheckpointError, match="beside it"):
            read(checkpoint)


def test_shard_missing(checkpoint: Path) -> None:
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
        (("svd_config", "version"), 7, "version must be 1"),
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
