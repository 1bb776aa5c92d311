"""Checkpoints whose dense layers and head are in one byte: made, saved, loaded and refused."""

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from stored import assert_same_bits, edit_record, edit_tensors, refused, tensors_of
from tiny import tiny_ids, tiny_model
from transformers import AutoModelForCausalLM

from neuronmm_ops import StoredLinear, SVDConfig, SVDLinear, compress_, hf
from neuronmm_ops.checkpoint import inspect_checkpoint
from neuronmm_ops.compress.record import attached_report, compressed_layers
from neuronmm_ops.hf import tensor_parallel
from neuronmm_ops.hf.dense import _difference
from neuronmm_ops.storages import STORAGES

STORED = pytest.mark.parametrize("storage", STORAGES)
LOADERS = (hf.load, AutoModelForCausalLM.from_pretrained)
NAME = "model.layers.0.mlp.up_proj"
LOAD = """
import sys, torch
from neuronmm_ops import hf
from transformers import AutoModelForCausalLM
load = AutoModelForCausalLM.from_pretrained if sys.argv[3] == "auto" else hf.load
torch.save(load(sys.argv[1]).state_dict(), sys.argv[2])
"""


@pytest.fixture(scope="module", params=STORAGES)
def made(request, tmp_path_factory):
    """A storage, the dense model's directory, a checkpoint with pairs, dense layers and a head."""
    base = tmp_path_factory.mktemp(request.param)
    tiny_model("qwen2", torch.bfloat16, tied=False).save_pretrained(base / "dense")
    config = SVDConfig(
        ratio=0.2,
        block=8,
        targets="all-linear",
        method="plain",
        layer_ratios={NAME: 0, "o_proj": 0.4},
        storage=request.param,
        head_storage=request.param,
    )
    model = hf.load(base / "dense")
    report = compress_(model, config)
    hf.save(model, base / "out", report)
    return request.param, base, model


def test_what_is_stored(made):
    storage, base, model = made
    report = inspect_checkpoint(base / "out")
    layers = compressed_layers(model)
    assert len(layers) == len(report.layers)
    for kind in (StoredLinear, SVDLinear):
        assert any(isinstance(layer, kind) for layer in layers.values())
    for found in report.layers:
        assert found.storage == storage
        assert found.bytes == sum(t.nbytes for t in layers[found.name].one_byte_tensors())
    head = report.layers[-1]
    assert (head.name, head.r, head.reason) == ("lm_head", None, "the output head stays dense")
    files = tensors_of(base / "out")
    sizes = {n: t.nbytes for n, t in files.items() if n.rpartition(".")[0] in layers}
    biases = sum(size for n, size in sizes.items() if n.endswith(".bias"))
    assert sum(layer.bytes for layer in report.layers) == sum(sizes.values()) - biases


@pytest.mark.parametrize("loader", ["auto", "hf"])
def test_a_fresh_process_loads_the_same_bits(made, tmp_path, loader):
    _, base, model = made
    command = [sys.executable, "-c", LOAD, base / "out", tmp_path / "state.pt", loader]
    subprocess.run(command, check=True)
    assert_same_bits(torch.load(tmp_path / "state.pt"), model.state_dict())


def test_loaded_models_compute_the_same_and_save_again(made, tmp_path):
    _, base, model = made
    loaded = hf.load(base / "out")
    assert torch.equal(loaded(tiny_ids(1)).logits, model(tiny_ids(1)).logits)
    assert not any(p.requires_grad for n, p in loaded.named_parameters() if n.endswith(".w"))
    loaded.save_pretrained(tmp_path / "again")
    assert_same_bits(hf.load(tmp_path / "again").state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop(f"{NAME}.w_scale"), "w_scale: config.json asks for ["),
        (lambda t: t[f"{NAME}.w_scale"].zero_(), "in float32, positive"),
        (lambda t: t.update({f"{NAME}.w": t[f"{NAME}.w"][:8]}), "the file has [8, 176]"),
        (lambda t: t.update({f"{NAME}.w": t[f"{NAME}.w"].float()}), "the file has F32"),
    ],
)
def test_what_does_not_fit_is_refused(made, tmp_path, edit, words):
    hf.save(made[2], tmp_path / "out")
    edit_tensors(tmp_path / "out", edit)
    refused(tmp_path / "out", words, by=LOADERS)


def test_records_and_scales_that_do_not_fit(made, tmp_path):
    hf.save(made[2], tmp_path / "out")

    def forget(record):
        next(x for x in record["layers"] if x["name"] == NAME).update(storage=None)

    edit_record(tmp_path / "out", forget)
    refused(
        tmp_path / "out",
        f"{NAME}.weight: config.json asks for [176, 64], the file has [0]",
        by=LOADERS,
    )


def test_records_of_before_have_dense_layers_in_bfloat16(tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    targets = {"targets": ("up_proj", "o_proj"), "layer_ratios": {"o_proj": 0}}
    compress_(model, SVDConfig(block=8, method="plain", **targets))
    hf.save(model, tmp_path / "out")

    def old(record):
        del record["svd_config"]["head_storage"]

    edit_record(tmp_path / "out", old)
    assert_same_bits(hf.load(tmp_path / "out").state_dict(), model.state_dict())


@STORED
def test_no_ranks_at_all(storage):
    model = tiny_model(dtype=torch.bfloat16)
    report = compress_(model, SVDConfig(ratio=0, storage=storage, method="plain"))
    assert report.effective_ratio == 0
    assert {layer.storage for layer in report.layers} == {storage}
    mlp = model.model.layers[0].mlp
    assert all(type(child) is StoredLinear for child in mlp.children())
    dense = tiny_model(dtype=torch.bfloat16)(tiny_ids(1)).logits
    assert not torch.equal(model(tiny_ids(1)).logits, dense)
    torch.testing.assert_close(model(tiny_ids(1)).logits, dense, rtol=0.2, atol=0.2)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_without_a_weight_of_its_own_is_refused(tied):
    model = tiny_model() if tied else torch.nn.Sequential(torch.nn.Linear(8, 8))
    error = "shares it with .*tie_word_embeddings false" if tied else "an output head .*, got none"
    with pytest.raises(ValueError, match=f"head_storage needs .*{error}"):
        compress_(model, SVDConfig(targets=".*", head_storage="int8", method="plain", block=8))


def test_plain_linears_come_back(made):
    model = hf.load(made[1] / "out")
    expected = model(tiny_ids(1)).logits
    hf.to_pairs(model)
    assert not compressed_layers(model)
    torch.testing.assert_close(model(tiny_ids(1)).logits, expected, rtol=0.1, atol=0.1)
    hf.from_pairs(model)
    assert all(isinstance(layer, SVDLinear) for layer in compressed_layers(model).values())
    assert {layer.storage for layer in attached_report(model).layers} == {None}


def test_the_dense_model_is_recognised(made):
    _, base, model = made
    dense = hf.load(base / "dense")
    assert _difference(model, dense) is None
    dense.model.norm.weight.data[0] += 1
    assert _difference(model, dense) == "model.norm.weight has other values"


def test_ranks_cut_no_group_of_rows(made):
    model = hf.load(made[1] / "out")
    model.config.distributed_config = SimpleNamespace(tp_size=2)
    refuses = pytest.raises(ValueError, match=r"o_proj: tp must divide the groups of 128 .* got 64")
    with refuses if made[0] == "int4" else nullcontext():
        tensor_parallel.plan_(model)


def test_lora_stands_beside_them(made):
    model = hf.load(made[1] / "out")
    peft = pytest.importorskip("peft")
    config = hf.lora_config(model, target_modules=["up_proj", "lm_head"], r=2)
    adapted = peft.get_peft_model(model, config)
    adapted(tiny_ids(1), labels=tiny_ids(1)).loss.backward()
    trained = [n for n, p in adapted.named_parameters() if p.grad is not None and "lora_B" in n]
    assert any("lm_head" in name for name in trained)
    assert any("layers.0.mlp.up_proj" in name for name in trained)
