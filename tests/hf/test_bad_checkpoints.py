"""Damaged, inconsistent or hostile checkpoints are refused, by name, before any weight is used."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from small import compressed
from stored import config_of, edit_config, edit_record, edit_tensors, refused
from tiny import SIZES, tiny_directory, tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from neuronmm_ops import CheckpointError, NonFiniteError, hf
from neuronmm_ops.checkpoint import inspect_checkpoint
from neuronmm_ops.hf import loading

NAME = "model.layers.0.mlp.gate_proj"
OURS = (hf.load, inspect_checkpoint)
LOADERS = (hf.load, AutoModelForCausalLM.from_pretrained)
SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint") / "out"
    model, report = compressed()
    hf.save(model, directory, report, tiny_tokenizer())
    return directory


@pytest.fixture
def checkpoint(pristine, tmp_path):
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


@pytest.fixture(scope="module")
def small_dense(tmp_path_factory):
    return tiny_directory(tmp_path_factory.mktemp("dense") / "dense")


@pytest.fixture
def dense(small_dense, tmp_path):
    return Path(shutil.copytree(small_dense, tmp_path / "dense"))


def other_rank(config):
    layer = config["quantization_config"]["layers"][0]
    assert (layer["name"], layer["r"]) == (NAME, 32)
    layer["r"] = 24


TENSORS = {
    "shape": (
        lambda t: t.update({f"{NAME}.v": torch.zeros(32, 175)}),
        (f"{NAME}.v", "[32, 176]", "[32, 175]"),
    ),
    "missing": (lambda t: t.pop(f"{NAME}.u"), (f"{NAME}.u", "the file has none")),
}
CONFIGS = {
    "rank": (other_rank, (f"{NAME}.u", "[64, 24]", "[64, 32]")),
    "other weights": (
        lambda config: config.update(transformers_weights="b.safetensors"),
        ("by transformers_weights 'b.safetensors'; remove that entry",),
    ),
}


@pytest.mark.parametrize(("edit", "words"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_differ_from_the_record(checkpoint, edit, words):
    edit_tensors(checkpoint, edit)
    refused(checkpoint, *words, by=(*OURS, AutoModelForCausalLM.from_pretrained))


@pytest.mark.parametrize(("edit", "words"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_all_readers_refuse(checkpoint, edit, words):
    shutil.copyfile(checkpoint / SINGLE, checkpoint / "b.safetensors")
    edit_config(checkpoint, edit)
    refused(checkpoint, *words, by=(*OURS, AutoModelForCausalLM.from_pretrained))


def test_ordinary_tensor_missing_is_not_initialized_at_random(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors.pop("model.norm.weight"))
    refused(checkpoint, "model.norm.weight", by=[hf.load])


@pytest.mark.parametrize(
    ("index", "words", "by"),
    [
        (None, "has no weights", OURS),
        ({"weight_map": {"a": SINGLE}}, "index.json must have an object metadata", [hf.load]),
        *(
            ({"metadata": {}, "weight_map": {"a": name}}, "next to it", OURS)
            for name in ("../secret.safetensors", "/tmp/x.safetensors", "w.bin")  # noqa: S108
        ),
        (
            {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}},
            "lacks model-00001-of-00002",
            [hf.load],
        ),
    ],
)
def test_an_index_without_its_weights(checkpoint, index, words, by):
    (checkpoint / SINGLE).unlink()
    if index is not None:
        (checkpoint / f"{SINGLE}.index.json").write_text(json.dumps(index))
    refused(checkpoint, words, by=by)


@pytest.mark.parametrize(
    ("path", "value", "words"),
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
def test_malformed_record(checkpoint, path, value, words):
    def edit(place):
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    edit_record(checkpoint, edit)
    refused(checkpoint, words, by=OURS)


def test_field_missing_from_the_record(checkpoint):
    edit_record(checkpoint, lambda record: record.pop("calibration"))
    refused(checkpoint, "calibration", by=[hf.load])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"intermediate_size": 184}, ("[64, 176]", "[64, 184]")),
        ({"model_type": "unheard_of", "architectures": ["UnheardOf"]}, ("unheard_of",)),
    ],
)
def test_a_config_of_another_architecture(checkpoint, fields, words):
    edit_config(checkpoint, lambda config: config.update(fields))
    refused(checkpoint, *words, by=[hf.load])


def test_dense_directory_is_no_compressed_checkpoint(dense):
    assert hf.load(dense).config.model_type == "llama"
    refused(dense, "not a compressed checkpoint", by=[inspect_checkpoint])


def test_from_pretrained_does_not_compress(dense, pristine):
    record = hf.NeuronMMConfig(**config_of(pristine)["quantization_config"])
    with pytest.raises(ValueError, match="it does not compress"):
        AutoModelForCausalLM.from_pretrained(dense, quantization_config=record)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("hidden_size", "64"), ("hidden_size", None), ("num_attention_heads", 3)),
        *(("num_attention_heads", 0), ("dtype", "float7"), ("rope_parameters", "x")),
        *(("quantization_config", value) for value in ([], "x", 5, {})),
        *(("model_type", 7), ("num_hidden_layers", -1), ("vocab_size", "many")),
    ],
)
def test_a_malformed_config_is_one_line(dense, key, value):
    edit_config(dense, lambda config: config.update({key: value}))
    with pytest.raises(CheckpointError) as caught:
        hf.load(dense)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "{", "5"])
def test_other_json_than_an_object_is_one_line(name, text, dense):
    (dense / name).write_text(text)
    refused(dense, by=[hf.load if name == "config.json" else hf.load_tokenizer])


def test_layers_that_the_config_does_not_have(dense):
    edit_config(dense, lambda config: config.update(num_hidden_layers=1))
    refused(dense, "has no place for, first model.layers.1.", by=[hf.load])


def test_a_classification_head_is_not_dropped(tmp_path):
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    refused(tmp_path, "first score.weight; the checkpoint is of a Llama", by=[hf.load])


@pytest.mark.parametrize(
    ("name", "value", "by"),
    [
        ("model.layers.0.self_attn.q_proj.weight", torch.inf, [hf.load]),
        ("model.norm.weight", torch.inf, [hf.load]),
        *((f"{NAME}.v", value, LOADERS) for value in (torch.nan, torch.inf, -torch.inf)),
    ],
)
def test_a_value_that_is_not_finite(checkpoint, name, value, by):
    edit_tensors(checkpoint, lambda tensors: tensors[name].view(-1)[5].fill_(value))
    words = f"{name} must be finite in float32, got NaN or Inf"
    refused(checkpoint, words, by=by, error=NonFiniteError)


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
def test_what_lets_other_weights_or_code_in_is_refused(entry, words, checkpoint):
    edit_config(checkpoint, lambda config: config.update(entry))
    refused(checkpoint, words, by=OURS)


def test_an_adapter_beside_the_weights_is_refused(checkpoint):
    (checkpoint / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    refused(checkpoint, "merge it by peft's merge_and_unload", by=OURS)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_low_precision_weights_without_scales(dense, dtype):
    name = f"{NAME}.weight"
    edit_tensors(dense, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    refused(dense, f"{name} is ", "no quantization_config", by=[hf.load])


def test_an_unreadable_file_is_not_called_damaged(dense):
    for name, words in ((SINGLE, "cannot be read"), ("config.json", "be read: Is a directory")):
        (dense / name).unlink()
        (dense / name).mkdir()
        refused(dense, words, by=[hf.load])


def test_a_hub_id_without_a_hub(monkeypatch):
    def unreachable(*_, **__):
        raise LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(loading, "snapshot_download", unreachable)
    words = "the hub cannot be reached", "local Transformers model directory"
    refused("some-org/some-model", *words, by=(hf.load, hf.load_tokenizer))


def test_a_hub_id_is_downloaded_and_loaded(checkpoint, monkeypatch):
    monkeypatch.setattr(loading, "snapshot_download", lambda *_, **__: str(checkpoint))
    restored = hf.load("some-org/some-model")
    u = f"{NAME}.u"
    assert torch.equal(restored.state_dict()[u], hf.load(checkpoint).state_dict()[u])
    refused(Path("some-org/some-model"), "is no directory", by=[hf.load])


def test_a_record_of_more_layers_than_any_model_has(checkpoint):
    def add_ghosts(record):
        layers = record["layers"]
        layers += [{**layers[0], "name": f"ghost.{i}"} for i in range(20_000)]

    edit_record(checkpoint, add_ghosts)
    refused(checkpoint, "at most 20000 layers, got 20", "; copy", by=OURS)
