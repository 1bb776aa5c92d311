"""hf.prune: an ordinary checkpoint of a smaller intermediate_size."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hf.small import TEXT, compress
from hf.test_dense_export import ALONE
from safetensors.torch import load_file, save_file
from tiny import tiny_directory, tiny_ids, tiny_model, tiny_tokenizer

from neuronmm_ops import CheckpointError, NonFiniteError, hf, output, prune_
from neuronmm_ops.manifest import verify

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
