"""Checkpoints and options that vLLM cannot serve: one line each says why."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lowrank import RANKS, low_rank
from offline import generated
from stored import edit_record, edit_tensors
from torch import nn

pytestmark = pytest.mark.slow

KEY = "model.layers.0.self_attn.k_proj"


def edited(source: Path, target: Path, record=None, tensors=None) -> Path:
    """Copy a checkpoint, with its record and its tensors changed in place."""
    shutil.copytree(source, target)
    if record is not None:
        edit_record(target, record)
    if tensors is not None:
        edit_tensors(target, tensors)
    return target


def layer(record, name: str):
    return next(entry for entry in record["layers"] if entry["name"] == name)


# What is changed in the record and in the tensors, and what is said of it. Other damage is found by
# the same reader of headers as in test_bad_checkpoints.
BROKEN = {
    "another format": (
        lambda record: record.update(format_version=2),
        None,
        "format_version must be 1, got 2; the checkpoint was written by another version",
    ),
    "a missing member": (
        None,
        lambda tensors: tensors.pop(f"{KEY}.v"),
        f"{KEY}.v: config.json asks for [23, 64], the file has none",
    ),
}
# The same of checkpoints whose files vLLM reads from elsewhere: the loaders find out.
UNSEEN = {
    "a missing member": (
        None,
        lambda tensors: tensors.pop(f"{KEY}.v"),
        f"{KEY}.v: config.json asks for [23, 64], the files have none",
    ),
    "a missing layer": (
        None,
        lambda tensors: [tensors.pop(f"{KEY.replace('k_', 'o_')}.{key}") for key in "uv"],
        "o_proj.u: config.json asks for [128, 45], the files have none",
    ),
    "a missing bias": (
        None,
        lambda tensors: tensors.pop(f"{KEY}.bias"),
        f"{KEY}.bias: the architecture has one, the files have none",
    ),
    "a dense weight": (
        None,
        lambda tensors: tensors.update({f"{KEY}.weight": torch.zeros(64, 128)}),
        f"{KEY}.weight: config.json says nothing of it, the file has [64, 128]",
    ),
    "another dtype": (
        None,
        lambda tensors: tensors.update({f"{KEY}.u": tensors[f"{KEY}.u"].to(torch.float8_e4m3fn)}),
        f"{KEY}.u: config.json asks for bfloat16 or float16 or float32 or float64, the file has "
        "float8_e4m3fn",
    ),
    "other sizes": (
        lambda record: layer(record, KEY).update(N=96),
        None,
        f"{KEY}: config.json asks for [K, N] = [128, 96], the architecture has [128, 64]",
    ),
    "not a number": (
        None,
        lambda tensors: tensors[f"{KEY}.v"].fill_(torch.nan),
        f"{KEY}",
    ),
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """What vLLM says of each broken checkpoint, and of options that cannot be."""
    folder = tmp_path_factory.mktemp("checkpoints")
    low_rank(folder / "base", "qwen2")
    low_rank(folder / "head", tied=False, ranks={**RANKS, "lm_head": 8})
    runs = {
        f"seen: {name}": {"model": edited(folder / "base", folder / name, *changes)}
        for name, (*changes, _) in BROKEN.items()
    }
    base = {"model": folder / "base"}
    runs["a low-rank head"] = {"model": folder / "head"}
    runs["three ranks"] = {**base, "tensor_parallel_size": 3}
    runs["another divide"] = {**base, "additional_config": {"neuronmm_divide": "neither"}}
    found = generated(runs, [], 1)
    runs = {
        f"unseen: {name}": {"model": edited(folder / "base", folder / f"{name}, unseen", *changes)}
        for name, (*changes, _) in UNSEEN.items()
    }
    return found | generated(runs, [], 1, check_headers=False)


def said(errors, name: str, text: str) -> None:
    lines = errors[name].get("error", "no error").splitlines()
    assert any(text in line for line in lines), errors[name]


@pytest.mark.parametrize("name", BROKEN)
def test_a_checkpoint_on_disk_is_checked_before_it_is_loaded(errors, name):
    said(errors, f"seen: {name}", BROKEN[name][-1])


@pytest.mark.parametrize("name", UNSEEN)
def test_any_checkpoint_is_checked_when_it_is_loaded(errors, name):
    said(errors, f"unseen: {name}", UNSEEN[name][-1])
    assert "\n" not in errors[f"unseen: {name}"]["error"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a low-rank head",
            "lm_head: vLLM's ParallelLMHead takes no low-rank factors and",
        ),
        ("three ranks", "must be divisible by tensor parallel size"),
        ("another divide", "neuronmm_divide must be one or both, got 'neither'"),
    ],
)
def test_options_that_cannot_be(errors, name, text):
    said(errors, name, text)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """vLLM's config of a record that lists an expert, in an MLP that two ranks cannot divide."""
    from neuronmm_ops.engines.vllm import config as module

    given = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(intermediate_size=193)),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    monkeypatch.setattr(module, "get_current_vllm_config", lambda: given)
    low_rank(tmp_path / "m")
    record = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    layer(record, KEY)["name"] = "model.layers.0.mlp.experts.3.gate_proj"
    made = module.VllmNeuronMMConfig.from_config(record)
    made.given = given
    return made


def linear():
    from vllm.model_executor.layers.linear import ReplicatedLinear

    return ReplicatedLinear.__new__(ReplicatedLinear)


@pytest.mark.parametrize("root", ["", "draft_model."])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's own
def test_low_rank_experts_are_refused(config, root):
    with pytest.raises(ValueError, match=r"experts\.3\.gate_proj: vLLM's Module takes no low-rank"):
        config.get_quant_method(nn.Module(), f"{root}model.layers.0.mlp.experts")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's own
def test_a_layer_of_the_record_is_one_layer_of_the_model(config):
    name = KEY.replace("k_proj", "o_proj")
    assert config.get_quant_method(linear(), f"draft_model.{name}").names == (name,)
    config.get_quant_method(linear(), f"draft_model.{name.replace('.0.', '.1.')}")
    assert not hasattr(config.get_quant_method(linear(), f"tower.{name}s"), "names")
    with pytest.raises(ValueError, match=rf"tower\.{name}: .* below 'draft_model' and 'tower'; "):
        config.get_quant_method(linear(), f"tower.{name}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's own
def test_weights_that_were_changed_after_writing_are_refused(config, tmp_path):
    config.maybe_update_config(str(tmp_path / "m"))
    file = tmp_path / "m" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"manifest\.json says, it has other values of model"):
        config.maybe_update_config(str(tmp_path / "m"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's own
def test_ranks_must_divide_the_mlp(config):
    """vLLM would fail by an assertion without a word."""
    config.given.parallel_config.tensor_parallel_size = 2
    with pytest.raises(ValueError, match="must divide intermediate_size, got 2 and 193; use one"):
        config.get_quant_method(linear(), "model.layers.0.o_proj")
