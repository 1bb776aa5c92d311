"""A save writes the whole checkpoint or nothing."""

import dataclasses
import errno
import shutil
from pathlib import Path

import pytest
import small
import torch
from stored import edit_tensors
from tiny import tiny_model

from neuronmm_ops import CheckpointError, NonFiniteError, SVDConfig, compress_, hf, output
from neuronmm_ops.hf import saving


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope="module")
def compressed():
    return small.compressed()


@pytest.fixture
def save(compressed, tmp_path):
    """Save the model with its report as `out`."""
    model, report = compressed
    return lambda **options: hf.save(model, tmp_path / "out", report, **options)


@pytest.fixture
def target(save, tmp_path):
    """An earlier checkpoint, with a file of another's."""
    save()
    (tmp_path / "out" / "merges.txt").touch()
    return tmp_path / "out"


def test_too_little_room_is_seen_before_writing(save, tmp_path, monkeypatch):
    usage = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"needs 0\.\d+ MB and the disk has 0\.001 MB free"):
        save()
    assert names(tmp_path) == []


def test_factors_that_their_dtype_cannot_hold_are_not_written(tmp_path):
    model = tiny_model()
    compress_(model, SVDConfig(ratio=0.3, block=8, method="plain", allocation="uniform"))
    layer = model.get_submodule("model.layers.1.mlp.up_proj")
    layer.v.data[2, 3] = 1e5
    hf.save(model, tmp_path / "float32")
    with pytest.raises(NonFiniteError, match=r"1\.mlp\.up_proj\.v must be finite in float16"):
        hf.save(model.half(), tmp_path / "float16")
    assert names(tmp_path) == ["float32"]


def test_a_failed_write_leaves_the_old_checkpoint(save, target, tmp_path, monkeypatch):
    before = (target / "model.safetensors").read_bytes()

    def fail(self, directory, **_):
        (directory / "model.safetensors").write_bytes(before[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "_save_pretrained", fail)
    with pytest.raises(OSError, match=r"No space left on device; writing .* needs"):
        save(force=True)
    assert names(tmp_path) == ["out"]
    assert (target / "model.safetensors").read_bytes() == before


def test_an_old_checkpoint_comes_back_when_the_new_one_cannot_take_its_place(
    save, target, tmp_path, monkeypatch
):
    rename = Path.rename

    def fail(self, to):
        if self.suffix == ".tmp":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    monkeypatch.setattr(output, "_exchange", lambda *_: False)
    with pytest.raises(OSError, match="Input/output error"):
        save(force=True)
    assert names(tmp_path) == ["out"]
    assert (target / "merges.txt").exists()


def test_a_report_of_another_run_is_refused(compressed, tmp_path, monkeypatch):
    model, report = compressed
    first = report.layers[0]
    other_rank = dataclasses.replace(first, r=first.r + 8)
    stored = dataclasses.replace(first, storage="int8")
    for changed in ((), (other_rank,), (stored,)):
        other = dataclasses.replace(report, layers=(*changed, *report.layers[1:]))
        monkeypatch.setattr(model.config, "quantization_config", None, raising=False)
        with pytest.raises(ValueError, match=r"see model\.layers\.0\.mlp\.gate_proj"):
            hf.save(
                model,
                tmp_path / "out",
                other,
            )
    assert names(tmp_path) == []


UP, NORM = "model.layers.1.mlp.up_proj.u", "model.norm.weight"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop(UP), "cannot be loaded"),
        (lambda tensors: tensors.pop(NORM), f"missing keys, first {NORM}"),
        (lambda tensors: tensors.update(stray=torch.ones(1)), "unexpected keys, first stray"),
        (lambda tensors: tensors[UP][3].mul_(2), f"{UP} differs"),
        (lambda tensors: tensors.update({NORM: tensors[NORM].bfloat16()}), f"{NORM} differs"),
    ],
)
def test_what_does_not_load_back_is_not_kept(save, edit, words, tmp_path, monkeypatch):
    save_pretrained = saving._save_pretrained

    def changed(self, directory, **options):
        save_pretrained(self, directory, **options)
        edit_tensors(directory, edit)

    monkeypatch.setattr(saving, "_save_pretrained", changed)
    with pytest.raises(CheckpointError, match=words):
        save()
    assert names(tmp_path) == []


def test_a_tokenizer_for_which_there_is_no_room_is_one_line(save, tmp_path):
    class Full:
        def save_pretrained(self, directory):
            raise Exception("No space left on device (os error 28)")  # as tokenizers raises it

    with pytest.raises(OSError, match=r"^the tokenizer cannot be written \(No space .*; writing "):
        save(tokenizer=Full())
    assert names(tmp_path) == []
