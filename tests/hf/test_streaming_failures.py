"""compress --stream: what ends it loses nothing, and what it cannot do it says in one line."""

import fcntl
import os
import re
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import small
import torch
from causal_lms import family_model
from families import tiny_family
from fleet import run_fleet
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small import CONFIG
from stored import config_of, edit_tensors
from tiny import tiny_directory, tiny_tokenizer
from transformers import AutoModelForCausalLM, ProphetNetConfig, XLNetConfig

from neuronmm_ops import CheckpointError, NonFiniteError, SVDConfig, hf
from neuronmm_ops.hf.streaming.checkpoint import Checkpoint
from neuronmm_ops.hf.streaming.sweep import Sweep
from neuronmm_ops.hf.streaming.work import Work

UP_PROJ = "model.layers.1.mlp.up_proj.weight"
compress = partial(small.compress, samples=8, stream=True)
pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def sharded(tmp_path):
    """A checkpoint in many files, and the file of a matrix of its last layer."""
    dense = tmp_path / "dense"
    family_model("llama").save_pretrained(dense, max_shard_size="50KB")
    tiny_tokenizer().save_pretrained(dense)
    (shard,) = [file for file in dense.glob("*.safetensors") if UP_PROJ in load_file(file)]
    return dense, shard


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A folder with `dense`, to be compressed to `out`, of which the first layer is done."""
    tiny_directory(tmp_path / "dense")
    interrupt(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        compress(tmp_path / "dense", tmp_path / "out")
    monkeypatch.undo()
    assert (tmp_path / ".out.stream" / "layer-0.safetensors").exists()
    return tmp_path


@pytest.fixture
def unfinished(places):
    return places / ".out.stream"


def interrupt(monkeypatch):
    original = Work.save

    def interrupted(self, name, tensors):
        if name == "layer-1":
            raise KeyboardInterrupt
        original(self, name, tensors)

    monkeypatch.setattr(Work, "save", interrupted)


def test_a_shard_that_disappears_midway(sharded, tmp_path, monkeypatch):
    (dense, shard), target, away = sharded, tmp_path / "out", tmp_path / "away"
    config = replace(CONFIG, method="kfac")
    original = Work.save

    def save(self, name, tensors):
        original(self, name, tensors)
        if name == "layer-0" and shard.exists():
            shard.rename(away)

    monkeypatch.setattr(Work, "save", save)
    with pytest.raises(CheckpointError, match=f"{shard.name} is gone; put it back and run the"):
        compress(dense, target, config)
    assert not target.exists()
    away.rename(shard)
    monkeypatch.setattr(Work, "save", original)
    monkeypatch.setattr(Sweep, "embed", pytest.fail)  # it would begin at the first layer
    compress(dense, target, config)
    hf.load(target)
    assert names(tmp_path) == ["dense", "out"]


def test_a_shard_that_is_another_one_midway(sharded):
    dense, shard = sharded
    checkpoint = Checkpoint(dense)
    tensors = {key: tensor.clone() for key, tensor in load_file(shard).items()}
    save_file({**tensors, UP_PROJ: tensors[UP_PROJ] + 1}, shard)
    with pytest.raises(CheckpointError, match=f"{shard.name} has been changed since this run"):
        checkpoint.read(UP_PROJ)


def add_one(directory):
    edit_tensors(directory, lambda tensors: tensors[UP_PROJ][0, 0].add_(1))


@pytest.mark.parametrize(
    ("edit", "options", "words"),
    [
        (None, {"config": SVDConfig(ratio=0.4, block=8)}, "another SVDConfig"),
        (None, {"samples": 7}, "another calibration"),
        (None, {"dtype": "float16"}, "another compute dtype"),
        (lambda dense: tiny_directory(dense, "qwen3"), {}, "compression with another config"),
        (add_one, {}, "an unfinished compression with another model"),
    ],
)
def test_an_unfinished_run_of_something_else_is_kept(edit, options, words, unfinished, places):
    before = names(unfinished)
    if edit is not None:
        edit(places / "dense")
    with pytest.raises(ValueError, match=words):
        compress(places / "dense", places / "out", **options)
    assert names(unfinished) == before
    assert not (places / "out").exists()


@pytest.mark.parametrize("value", [3.0, torch.nan])
@pytest.mark.parametrize(
    ("kept", "key"),
    [
        ("layer-0", "model.layers.0.mlp.up_proj.u"),
        ("layer-0", "model.layers.0.mlp.up_proj.spectrum"),
        ("states-1-0", "states"),
    ],
)
def test_a_number_that_was_changed_in_what_is_kept_is_refused(kept, key, value, unfinished, places):
    path = unfinished / f"{kept}.safetensors"
    with safe_open(path, "pt") as found:
        header = found.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors[key].view(-1)[0] = value
    save_file(tensors, path, header)
    line = rf"{kept}\.safetensors cannot be read \({key} is not what this run has written\); remove"
    with pytest.raises(OSError, match=line):
        compress(places / "dense", places / "out")
    assert not (places / "out").exists()


def test_a_kept_set_in_the_place_of_another_is_refused(unfinished, places):
    shutil.copyfile(unfinished / "layer-0.safetensors", unfinished / "layer-1.safetensors")
    with pytest.raises(OSError, match=r"layer-1\.safetensors cannot be read"):
        compress(places / "dense", places / "out")


def test_foreign_files_are_never_deleted(unfinished, places):
    (unfinished / "notes.txt").write_text("mine")
    compress(places / "dense", places / "out")
    assert names(unfinished) == ["notes.txt"]
    shutil.rmtree(places / "out")
    with pytest.raises(FileExistsError, match=r"no work directory .* it holds notes\.txt"):
        compress(places / "dense", places / "out")
    assert (unfinished / "notes.txt").read_text() == "mine"


def test_two_runs_do_not_share_a_work_directory(unfinished, places):
    descriptor = os.open(unfinished, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="another run works in"):
            compress(places / "dense", places / "out")
    finally:
        os.close(descriptor)


def test_a_full_disk_midway_is_told_in_one_line(places, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("neuronmm_ops.hf.streaming.work.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        compress(places / "dense", places / "out")
    assert names(places) == [".out.stream", "dense"]
    monkeypatch.undo()
    compress(places / "dense", places / "out")  # keeps what is done
    assert names(places) == ["dense", "out"]


def test_too_little_room_for_the_work_is_seen_before_it(dense, tmp_path, monkeypatch):
    output = sum(tensor.nbytes for tensor in load_file(dense / "model.safetensors").values())
    # Room for the checkpoint, but not for hidden states and factors besides.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=output + 1000))
    with pytest.raises(OSError, match="MB and the disk has"):
        compress(dense, tmp_path / "out")
    assert names(tmp_path) == []


def test_a_weight_that_is_not_finite_is_named(tmp_path):
    dense = tiny_directory(tmp_path / "dense")
    edit_tensors(dense, lambda tensors: tensors[UP_PROJ][0, 0].fill_(torch.nan))
    for method in ("kfac-drift", "swift", "plain"):
        config = SVDConfig(ratio=0.3, block=8, method=method, allocation="uniform")
        with pytest.raises(NonFiniteError, match=UP_PROJ.removesuffix(".weight")):
            compress(dense, tmp_path / method, config)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "swift", "importance": "perplexity"}, "importance perplexity cannot be"),
        ({"targets": ("mlp", "lm_head")}, "lm_head is in none of model.layers"),
        ({"prune_share": 0.5, "targets": ("mlp", "lm_head")}, "lm_head is in none of model.layers"),
        ({"prune_share": 0.5, "targets": "attention"}, "mlp.gate_proj is not among the targets"),
        ({"prune_share": 1.0, "ratio": 0.01, "block": 256}, "leaves 0; use another share or a"),
        ({"ratio": 0.95, "block": 40}, "no allocation meets the budget"),
    ],
)
def test_what_cannot_be_streamed_is_refused_at_once(options, words, tmp_path):
    dense = tiny_directory(tmp_path / "dense", tied=False)
    with pytest.raises(ValueError, match=words):
        compress(dense, tmp_path / "out", SVDConfig(**{"ratio": 0.3, "block": 8, **options}))
    assert names(tmp_path) == ["dense"]


def test_experts_that_are_merged_on_loading_are_refused(tmp_path):
    tiny_family("mixtral").save_pretrained(tmp_path / "dense")
    tiny_tokenizer().save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="made of several stored tensors"):
        compress(tmp_path / "dense", tmp_path / "out", SVDConfig(block=8, targets="attention"))


@pytest.mark.parametrize(
    ("config", "targets", "states"),
    [
        (XLNetConfig(d_model=64, n_layer=2, n_head=4, vocab_size=260), ".*layer_1", [2, 1, 64]),
        (
            ProphetNetConfig(
                hidden_size=64, num_decoder_layers=2, num_decoder_attention_heads=4, vocab_size=260
            ),
            ".*intermediate",
            [1, 6, 64],
        ),
    ],
    ids=["xlnet", "prophetnet"],
)
def test_layers_that_are_given_no_rows_of_tokens_are_refused(config, targets, states, tmp_path):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    tiny_tokenizer().save_pretrained(tmp_path / "dense")
    told = rf"gives its layers hidden states {re.escape(str(states))} for token ids \[1, 2\]"
    with pytest.raises(ValueError, match=told):
        compress(
            tmp_path / "dense",
            tmp_path / "out",
            SVDConfig(ratio=0.3, block=8, targets=targets, method="kfac"),
        )
    assert names(tmp_path) == ["dense"]


def test_force_replaces_only_at_the_end(dense, tmp_path, monkeypatch):
    out, other = tmp_path / "out", SVDConfig(ratio=0.5, block=8)
    compress(dense, out)
    before = config_of(out)
    with monkeypatch.context() as patch:
        interrupt(patch)
        with pytest.raises(KeyboardInterrupt):
            compress(dense, out, other, force=True)
    assert config_of(out) == before
    compress(dense, out, other, force=True)
    assert config_of(out) != before


def kill_after(name, dense, out, storage, method):
    """Compress until a set has been saved."""
    original = Work.save

    def save(self, kept, tensors):
        original(self, kept, tensors)
        if kept == name:
            os.kill(os.getpid(), signal.SIGKILL)

    Work.save = save
    compress(Path(dense), Path(out), killed_config(name, storage, method))


def killed_config(name, storage, method):
    """A set of narrower MLPs is made with a share of them alone."""
    share = 0.5 if name.startswith(("narrow", "wide")) else 0.0
    return replace(CONFIG, storage=storage or None, method=method, prune_share=share)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "storage", "method"),
    [
        *(("upstream-2", "", "kfac"), ("layer-0", "", "kfac-drift")),
        *(("again-1-0", "int8", "kfac"), ("rounded-0", "fp8", "kfac")),
        *(("paths-1-0", "int8", "kfac-drift"), ("drift-0", "", "kfac-drift")),
        *(("wide-1-0", "", "kfac"), ("narrow-0", "", "kfac"), ("narrow-1", "int8", "kfac")),
    ],
)
def test_a_killed_run_goes_on(name, storage, method, dense, tmp_path, monkeypatch):
    code = "import sys; import test_streaming_failures as t; t.kill_after(*sys.argv[1:])"
    arguments = (name, dense, tmp_path / "out", storage, method)
    (outcome,) = run_fleet(tmp_path / "printed", 1, code, *arguments)
    assert outcome.code == -signal.SIGKILL, outcome.err
    config = killed_config(name, storage, method)
    assert not (tmp_path / "out").exists()
    compress(dense, tmp_path / "whole", config)
    saved, original = [], Work.save
    monkeypatch.setattr(
        Work, "save", lambda self, name, t: (saved.append(name), original(self, name, t))
    )
    compress(dense, tmp_path / "out", config)
    assert name.startswith(("narrow", "wide")) or "rows-0" not in saved
    assert not name.startswith("narrow") or "narrow-0" not in saved
    assert name.startswith("narrow") or not storage or "layer-0" not in saved
    whole, out = (hf.load(tmp_path / directory).state_dict() for directory in ("whole", "out"))
    for key, tensor in whole.items():
        torch.testing.assert_close(out[key].float(), tensor.float())
