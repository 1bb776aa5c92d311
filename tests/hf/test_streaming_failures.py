"""compress --stream: what ends it loses nothing, and what it cannot do it says in one line."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from causal_lms import family_model
from families import tiny_family
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import tiny_directory, tiny_tokenizer

from neuronmm_ops import CheckpointError, CompressionReport, NonFiniteError, SVDConfig, hf
from neuronmm_ops.hf.streaming.sweep import Sweep
from neuronmm_ops.hf.streaming.work import Work

TEXT = "The quick brown fox jumps over the lazy dog. 0123456789\n" * 40
CONFIG = SVDConfig(ratio=0.3, block=8)
OPTIONS: dict[str, Any] = {"samples": 8, "seqlen": 64, "stream": True}
pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")


def _compress(
    model: Path, output: Path, config: SVDConfig = CONFIG, **options: Any
) -> CompressionReport:
    return hf.compress(model, config, TEXT, output, **OPTIONS | options)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint in many files."""
    family_model("llama").save_pretrained(tmp_path / "dense", max_shard_size="50KB")
    tiny_tokenizer().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def _file_of(directory: Path, key: str) -> Path:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / index["weight_map"][key]


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work directory with the first layer of `dense`, to be compressed to `out`, done."""
    tiny_directory(tmp_path / "dense")
    _interrupt(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        _compress(tmp_path / "dense", tmp_path / "out")
    monkeypatch.undo()
    assert (tmp_path / ".out.stream" / "layer-0.safetensors").exists()
    return tmp_path / ".out.stream"


def _interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Work.save

    def interrupted(self: Work, name: str, tensors: Any) -> None:
        if name == "layer-1":
            raise KeyboardInterrupt
        original(self, name, tensors)

    monkeypatch.setattr(Work, "save", interrupted)


def test_a_shard_that_disappears_midway(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, away = tmp_path / "out", tmp_path / "away"
    shard = _file_of(sharded, "model.layers.1.mlp.down_proj.weight")
    original = Work.save

    def save(self: Work, name: str, tensors: Any) -> None:
        original(self, name, tensors)
        if name == "layer-0" and shard.exists():
            shard.rename(away)

    monkeypatch.setattr(Work, "save", save)
    with pytest.raises(CheckpointError, match=f"{shard.name} is gone; put it back and run the"):
        _compress(sharded, target)
    assert not target.exists()
    away.rename(shard)
    monkeypatch.setattr(Work, "save", original)
    monkeypatch.setattr(Sweep, "embed", pytest.fail)  # it would begin at the first layer
    _compress(sharded, target)
    hf.load(target)
    assert not (tmp_path / ".out.stream").exists()


def test_a_shard_that_is_another_one_midway(sharded: Path, tmp_path: Path) -> None:
    from neuronmm_ops.hf.streaming.checkpoint import Checkpoint

    checkpoint = Checkpoint(sharded)
    name = "model.layers.1.mlp.down_proj.weight"
    shard = _file_of(sharded, name)
    tensors = {key: tensor.clone() for key, tensor in load_file(shard).items()}
    save_file({**tensors, name: tensors[name] + 1}, shard)
    with pytest.raises(CheckpointError, match=f"{shard.name} has been changed since this run"):
        checkpoint.read(name)


def test_an_interrupted_run_keeps_what_is_done(unfinished: Path, tmp_path: Path) -> None:
    assert not (tmp_path / "out").exists()
    _compress(tmp_path / "dense", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"config": SVDConfig(ratio=0.4, block=8)}, "another SVDConfig"),
        ({"samples": 7}, "another calibration"),
        ({"dtype": "float16"}, "another compute dtype"),
    ],
)
def test_an_unfinished_run_of_other_options_is_kept(
    change: dict[str, Any], word: str, unfinished: Path, tmp_path: Path
) -> None:
    before = sorted(unfinished.iterdir())
    with pytest.raises(ValueError, match=word):
        _compress(tmp_path / "dense", tmp_path / "out", **change)
    assert sorted(unfinished.iterdir()) == before


def test_an_unfinished_run_of_another_model_is_kept(unfinished: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an unfinished compression with another config"):
        _compress(tiny_directory(tmp_path / "other", "qwen3"), tmp_path / "out")
    assert (unfinished / "layer-0.safetensors").exists()


def test_other_weights_of_the_same_shapes_are_another_model(
    unfinished: Path, tmp_path: Path
) -> None:
    file = tmp_path / "dense" / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, file, {"format": "pt"})
    before = sorted(unfinished.iterdir())
    with pytest.raises(ValueError, match="an unfinished compression with another model"):
        _compress(tmp_path / "dense", tmp_path / "out")
    assert sorted(unfinished.iterdir()) == before
    assert not (tmp_path / "out").exists()


def _edit(path: Path, key: str, value: float) -> None:
    """Change one number of a kept set, and nothing else."""
    with safe_open(path, "pt") as kept:
        tensors = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118
        header = kept.metadata()
    tensors[key].view(-1)[0] = value
    save_file(tensors, path, header)


@pytest.mark.parametrize("value", [3.0, torch.nan])
@pytest.mark.parametrize(
    ("kept", "key"),
    [
        ("layer-0", "model.layers.0.mlp.up_proj.u"),
        ("layer-0", "model.layers.0.mlp.up_proj.spectrum"),
        ("states-1-0", "states"),
    ],
)
def test_a_number_that_was_changed_in_what_is_kept_is_refused(
    kept: str, key: str, value: float, unfinished: Path, tmp_path: Path
) -> None:
    _edit(unfinished / f"{kept}.safetensors", key, value)
    line = rf"{kept}\.safetensors cannot be read \({key} is not what this run has written\); remove"
    with pytest.raises(OSError, match=line):
        _compress(tmp_path / "dense", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_kept_set_in_the_place_of_another_is_refused(unfinished: Path, tmp_path: Path) -> None:
    shutil.copyfile(unfinished / "layer-0.safetensors", unfinished / "layer-1.safetensors")
    with pytest.raises(OSError, match=r"layer-1\.safetensors cannot be read"):
        _compress(tmp_path / "dense", tmp_path / "out")


def test_foreign_files_are_never_deleted(unfinished: Path, tmp_path: Path) -> None:
    (unfinished / "notes.txt").write_text("mine")
    _compress(tmp_path / "dense", tmp_path / "out")
    assert [path.name for path in unfinished.iterdir()] == ["notes.txt"]
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(FileExistsError, match=r"no work directory .* it holds notes\.txt"):
        _compress(tmp_path / "dense", tmp_path / "out")
    assert (unfinished / "notes.txt").read_text() == "mine"


def test_two_runs_do_not_share_a_work_directory(unfinished: Path, tmp_path: Path) -> None:
    descriptor = os.open(unfinished, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="another run works in"):
            _compress(tmp_path / "dense", tmp_path / "out")
    finally:
        os.close(descriptor)


def test_too_little_room_for_the_work_is_seen_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = tiny_directory(tmp_path / "dense")
    output = sum(tensor.nbytes for tensor in load_file(dense / "model.safetensors").values())
    # Room for the checkpoint, but not for hidden states and factors besides.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=output + 1000))
    with pytest.raises(OSError, match="MB and the disk has"):
        _compress(dense, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


def test_a_full_disk_midway_is_told_in_one_line(
    unfinished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("neuronmm_ops.hf.streaming.work.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        _compress(tmp_path / "dense", tmp_path / "out")
    monkeypatch.undo()
    _compress(tmp_path / "dense", tmp_path / "out")


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    dense = tiny_directory(tmp_path / "dense")
    name = "model.layers.1.mlp.up_proj.weight"
    file = dense / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    tensors[name][0, 0] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    for method in ("kfac", "swift", "plain"):
        config = SVDConfig(ratio=0.3, block=8, method=method, allocation="uniform")
        with pytest.raises(NonFiniteError, match=name.removesuffix(".weight")):
            _compress(dense, tmp_path / method, config)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"method": "drift"}, "method drift cannot be streamed"),
        ({"method": "swift", "importance": "perplexity"}, "importance perplexity cannot be"),
        ({"targets": ("mlp", "lm_head")}, "lm_head is in none of model.layers"),
        ({"ratio": 0.95, "block": 40}, "no allocation meets the budget"),
    ],
)
def test_what_cannot_be_streamed_is_refused_at_once(
    options: dict[str, Any], word: str, tmp_path: Path
) -> None:
    dense = tiny_directory(tmp_path / "dense", tied=False)
    given: dict[str, Any] = {"ratio": 0.3, "block": 8, **options}
    config = SVDConfig(**given)
    with pytest.raises(ValueError, match=word):
        _compress(dense, tmp_path / "out", config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


def test_a_compressed_checkpoint_is_refused(tmp_path: Path) -> None:
    dense = tiny_directory(tmp_path / "dense")
    _compress(dense, tmp_path / "out")
    with pytest.raises(ValueError, match="is compressed or quantized already"):
        _compress(tmp_path / "out", tmp_path / "again")


def test_experts_that_are_merged_on_loading_are_refused(tmp_path: Path) -> None:
    tiny_family("mixtral").save_pretrained(tmp_path / "dense")
    tiny_tokenizer().save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="made of several stored tensors"):
        _compress(tmp_path / "dense", tmp_path / "out", SVDConfig(block=8, targets="attention"))


def test_force_replaces_only_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = tiny_directory(tmp_path / "dense")
    _compress(dense, tmp_path / "out")
    before = (tmp_path / "out" / "config.json").read_text()
    with pytest.raises(FileExistsError, match="--force"):
        _compress(dense, tmp_path / "out")
    other = SVDConfig(ratio=0.5, block=8)
    with monkeypatch.context() as patch:
        _interrupt(patch)
        with pytest.raises(KeyboardInterrupt):
            _compress(dense, tmp_path / "out", other, force=True)
    assert (tmp_path / "out" / "config.json").read_text() == before
    _compress(dense, tmp_path / "out", other, force=True)
    assert (tmp_path / "out" / "config.json").read_text() != before


KILLED = """
import os, signal, sys
from neuronmm_ops import SVDConfig, hf
from neuronmm_ops.hf.streaming.work import Work

dense, out, text, name, storage = sys.argv[1:]
original = Work.save

def save(self, kept, tensors):
    original(self, kept, tensors)
    if kept == name:
        os.kill(os.getpid(), signal.SIGKILL)

Work.save = save
config = SVDConfig(ratio=0.3, block=8, storage=storage or None)
hf.compress(dense, config, text, out, samples=8, seqlen=64, stream=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "storage"),
    [("upstream-2", ""), ("layer-0", ""), ("again-1-0", "int8"), ("rounded-0", "fp8")],
)
def test_a_killed_run_goes_on(
    name: str, storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = tiny_directory(tmp_path / "dense")
    arguments = [str(part) for part in (dense, tmp_path / "out", TEXT, name, storage)]
    config = replace(CONFIG, storage=storage or None)
    result = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
    assert result.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    _compress(dense, tmp_path / "whole", config)
    with monkeypatch.context() as patch:
        saved: list[str] = []
        original = Work.save
        patch.setattr(
            Work, "save", lambda self, name, t: (saved.append(name), original(self, name, t))
        )
        _compress(dense, tmp_path / "out", config)
    assert "rows-0" not in saved
    assert not storage or "layer-0" not in saved
    whole, out = (hf.load(tmp_path / directory).state_dict() for directory in ("whole", "out"))
    for key, tensor in whole.items():
        torch.testing.assert_close(out[key].float(), tensor.float())
