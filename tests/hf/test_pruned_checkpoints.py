"""hf.prune: an ordinary checkpoint of a smaller intermediate_size."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hf.small import TEXT, compress
from hf.test_dense_export import ALONE
from safetensors.torch import load_file, save_file
from tiny import tiny_directory, tiny_ids, tiny_model, tiny_tokenizer

from neuronmm_ops import (
    CheckpointError,
    NonFiniteError,
    SVDConfig,
    compress_,
    hf,
    output,
    prune_,
)
from neuronmm_ops.checkpoint import inspect_checkpoint
from neuronmm_ops.manifest import verify
from neuronmm_ops.recover import RecoverConfig

pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
OPTIONS = {"ratio": 0.25, "block": 8, "samples": 16, "seqlen": 64}


def test_the_checkpoint_loads_without_this_package(tmp_path):
    dense, narrow = tiny_directory(tmp_path / "dense"), tmp_path / "narrow"
    found = hf.prune(dense, TEXT, narrow, **OPTIONS)
    assert (found["inner"], found["kept"]) == (176, 128)
    assert json.loads((narrow / "config.json").read_text())["intermediate_size"] == 128
    verify(narrow)
    model = tiny_model()
    batches = hf.calibration_batches(tiny_tokenizer(), TEXT, 16, 64)
    assert prune_(model, 0.25, batches, block=8).losses == pytest.approx(found["losses"])
    torch.save(tiny_ids(), tmp_path / "ids")
    given = [str(tmp_path / name) for name in ("narrow", "ids", "logits")]
    subprocess.run([sys.executable, "-c", ALONE, *given], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "logits"), model(tiny_ids()).logits)


def test_it_is_compressed_like_any_dense_model(tmp_path):
    dense, narrow = tiny_directory(tmp_path / "dense", "qwen3"), tmp_path / "narrow"
    hf.prune(dense, TEXT, narrow, **OPTIONS)
    report = compress(narrow, tmp_path / "small")
    assert {layer.K for layer in report.layers} == {64, 128}
    loaded = hf.load(tmp_path / "small", dtype=torch.float32)
    assert torch.isfinite(loaded(tiny_ids()).logits).all()


SHARED = SVDConfig(ratio=0.4, block=8, targets="all-linear", prune_share=0.75)
IN_A_NEW_PROCESS = """
import sys, torch
from neuronmm_ops import hf
model = hf.load(sys.argv[1], dtype=torch.float32)
torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])
"""


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("storage", [None, "int8"])
def test_a_share_is_saved_and_loaded(family, storage, tmp_path):
    dense, small = tiny_directory(tmp_path / "dense", family), tmp_path / "small"
    config = replace(SHARED, storage=storage)
    report = compress(dense, small, config)
    assert json.loads((small / "config.json").read_text())["intermediate_size"] == 104
    verify(small)
    assert inspect_checkpoint(small) == report
    assert report.narrowed.kept == 104
    model = hf.load(dense, dtype=torch.float32)
    compress_(model, config, hf.calibration_batches(tiny_tokenizer(), TEXT, 16, 64))
    torch.save(tiny_ids(), tmp_path / "ids")
    given = [str(tmp_path / name) for name in ("small", "ids", "logits")]
    subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS, *given], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "logits"), model(tiny_ids()).logits)


def test_a_run_with_a_share_is_repeated_to_the_bit(tmp_path):
    dense = tiny_directory(tmp_path / "dense")
    compress(dense, tmp_path / "small", SHARED)
    run = hf.read_run(tmp_path / "small" / "compression.json")
    assert run.config == SHARED
    compress(dense, tmp_path / "again", run.config)
    again = hf.read_run(tmp_path / "again" / "compression.json")
    assert again.weights_sha256 == run.weights_sha256


def test_recovery_learns_from_the_wider_model(tmp_path):
    dense, small = tiny_directory(tmp_path / "dense"), tmp_path / "small"
    compress(dense, small, SHARED)
    config = RecoverConfig(steps=2, seqlen=32, batch_tokens=128)
    report = hf.recover(small, TEXT, tmp_path / "better", config)
    assert report.narrowed == inspect_checkpoint(small).narrowed
    assert report.provenance["recovery"][-1]["improved"]
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("small", "better"))
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    dense_mlps = {f"{x.name}.weight" for x in report.layers if x.dense and "mlp" in x.name}
    assert dense_mlps
    assert changed == dense_mlps | {n for n in before if n.endswith((".u", ".v"))}
    assert inspect_checkpoint(tmp_path / "better") == report
    weights = load_file(dense / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, dense / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has other values"):
        hf.recover(small, TEXT, tmp_path / "other", config)
    wider = tiny_directory(tmp_path / "wider", intermediate_size=192)
    with pytest.raises(CheckpointError, match=r"mlp\.\w+\.weight is .*192.*, not "):
        hf.recover(small, TEXT, tmp_path / "other", config, dense=wider)


def test_narrower_mlps_without_pairs_are_recovered_too(tmp_path):
    dense, small = tiny_directory(tmp_path / "dense"), tmp_path / "small"
    compress(dense, small, SVDConfig(ratio=0.25, block=8, prune_share=1.0))
    config = RecoverConfig(steps=12, seqlen=32, batch_tokens=256, learning_rate=3e-3)
    report = hf.recover(small, TEXT, tmp_path / "better", config)
    assert report.provenance["recovery"][-1]["improved"]
    compress(
        dense, tmp_path / "int8", SVDConfig(ratio=0.25, block=8, prune_share=1.0, storage="int8")
    )
    for given, method in (("int8", "distill"), ("small", "lora")):
        with pytest.raises(CheckpointError, match="it has no low-rank layer to train"):
            hf.recover(tmp_path / given, TEXT, tmp_path / "no", replace(config, method=method))
    assert not (tmp_path / "no").exists()


def test_all_of_the_budget_in_width_is_exported_as_what_prune_writes(tmp_path):
    dense = tiny_directory(tmp_path / "dense")
    compress(dense, tmp_path / "small", SVDConfig(ratio=0.25, block=8, prune_share=1.0))
    hf.export_dense(tmp_path / "small", tmp_path / "exported")
    hf.prune(dense, TEXT, tmp_path / "pruned", **OPTIONS)
    found, expected = (
        load_file(tmp_path / n / "model.safetensors") for n in ("exported", "pruned")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_is_refused_writes_nothing(tmp_path):
    dense, narrow = tiny_directory(tmp_path / "dense"), tmp_path / "narrow"
    compress(dense, tmp_path / "small")
    with pytest.raises(ValueError, match="small is compressed or quantized already; prune the"):
        hf.prune(tmp_path / "small", TEXT, narrow, **OPTIONS)
    with pytest.raises(FileExistsError, match="exists"):
        hf.prune(dense, TEXT, tmp_path / "small", **OPTIONS)
    with pytest.raises(CheckpointError, match="absent"):
        hf.prune(tmp_path / "absent", TEXT, narrow, **OPTIONS)
    with pytest.raises(ValueError, match="ratio must leave some and not all"):
        hf.prune(dense, TEXT, narrow, **OPTIONS | {"block": 160})
    with pytest.raises(ValueError, match="calibration text"):
        hf.prune(dense, "short", narrow, **OPTIONS)
    assert not narrow.exists()


def test_room_is_looked_for_before_the_text_is_run(tmp_path, monkeypatch):
    dense = tiny_directory(tmp_path / "dense")
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    module = sys.modules["neuronmm_ops.hf.prune"]  # `hf.prune` is the function
    monkeypatch.setattr(module, "prune_", lambda *_: pytest.fail("it ran"))
    with pytest.raises(OSError, match="MB and the disk has"):
        hf.prune(dense, TEXT, tmp_path / "narrow", **OPTIONS)


def test_a_damaged_weight_is_named(tmp_path):
    dense, narrow = tiny_directory(tmp_path / "dense"), tmp_path / "narrow"
    weights = load_file(dense / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, dense / "model.safetensors", {"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"model\.norm\.weight"):
        hf.prune(dense, TEXT, narrow, **OPTIONS)
    assert not narrow.exists()
