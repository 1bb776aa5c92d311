"""A save writes the whole checkpoint or nothing."""

import dataclasses
import errno
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_ids, tiny_model
from transformers import PreTrainedModel

from neuronmm_ops import (
    CalibrationWarning,
    CheckpointError,
    CompressionReport,
    NonFiniteError,
    SVDConfig,
    compress_,
    hf,
    output,
)
from neuronmm_ops.hf import saving

Compressed = tuple[PreTrainedModel, CompressionReport]


@pytest.fixture(scope="module")
def compressed() -> Compressed:
    model = tiny_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return model, compress_(
            model, SVDConfig(ratio=0.3, block=8, allocation="uniform"), [tiny_ids()]
        )


def test_existing_target_is_refused_without_force(compressed: Compressed, tmp_path: Path) -> None:
    target = tmp_path / "out"
    hf.save(*_arguments(compressed, target))
    before = (target / "model.safetensors").stat()
    with pytest.raises(FileExistsError, match="--force"):
        hf.save(*_arguments(compressed, target))
    assert (target / "model.safetensors").stat() == before


def test_force_replaces_and_leaves_nothing_behind(compressed: Compressed, tmp_path: Path) -> None:
    target = tmp_path / "out"
    hf.save(*_arguments(compressed, target))
    (target / "merges.txt").touch()
    hf.save(*_arguments(compressed, target), force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert not (target / "merges.txt").exists()
    assert (target / "model.safetensors").exists()


def test_a_file_is_never_replaced(compressed: Compressed, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_text("precious")
    with pytest.raises(FileExistsError, match="no directory"):
        hf.save(*_arguments(compressed, target), force=True)
    assert target.read_text() == "precious"


def test_too_little_room_is_seen_before_writing(
    compressed: Compressed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)  # pyright: ignore
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"needs 0\.\d+ MB and the disk has 0\.001 MB free"):
        hf.save(*_arguments(compressed, tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_factors_that_their_dtype_cannot_hold_are_not_written(tmp_path: Path) -> None:
    model = tiny_model()
    compress_(model, SVDConfig(ratio=0.3, block=8, method="plain", allocation="uniform"))
    layer = model.get_submodule("model.layers.1.mlp.up_proj")
    layer.v.data[2, 3] = 1e5  # pyright: ignore
    hf.save(model, tmp_path / "float32")
    with pytest.raises(NonFiniteError, match=r"1\.mlp\.up_proj\.v must be finite in float16"):
        hf.save(model.half(), tmp_path / "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["float32"]


def test_a_failed_write_leaves_the_old_checkpoint(
    compressed: Compressed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tmp_path / "out"
    hf.save(*_arguments(compressed, target))
    before = (target / "model.safetensors").read_bytes()

    def fail(self: PreTrainedModel, directory: Path, **_: object) -> None:
        (directory / "model.safetensors").write_bytes(before[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "_save_pretrained", fail)
    with pytest.raises(OSError, match=r"No space left on device; writing .* needs"):
        hf.save(*_arguments(compressed, target), force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert (target / "model.safetensors").read_bytes() == before


def test_an_old_checkpoint_comes_back_when_the_new_one_cannot_take_its_place(
    compressed: Compressed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tmp_path / "out"
    hf.save(*_arguments(compressed, target))
    (target / "merges.txt").touch()
    rename = Path.rename

    def fail(self: Path, to: Path) -> Path:
        if self.suffix == ".tmp":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    monkeypatch.setattr(output, "_exchange", lambda *_: False)
    with pytest.raises(OSError, match="Input/output error"):
        hf.save(*_arguments(compressed, target), force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (target / "merges.txt").exists()


def test_a_report_of_another_run_is_refused(
    compressed: Compressed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, report = compressed
    first = report.layers[0]
    assert first.r is not None
    other_rank = dataclasses.replace(first, r=first.r + 8)
    for layers in (report.layers[1:], (other_rank, *report.layers[1:])):
        monkeypatch.setattr(model.config, "quantization_config", None, raising=False)
        with pytest.raises(ValueError, match=r"see model\.layers\.0\.mlp\.gate_proj"):
            hf.save(model, tmp_path / "out", dataclasses.replace(report, layers=layers))
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_load_back_is_not_kept(
    compressed: Compressed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_pretrained = saving._save_pretrained

    def change(edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
        def changed(self: PreTrainedModel, directory: Path, **options: object) -> None:
            save_pretrained(self, directory, **options)  # pyright: ignore
            file = directory / "model.safetensors"
            tensors = load_file(file)
            edit(tensors)
            save_file(tensors, file, metadata={"format": "pt"})

        monkeypatch.setattr(saving, "_save_pretrained", changed)

    up, norm = "model.layers.1.mlp.up_proj.u", "model.norm.weight"
    cases = {
        "cannot be loaded": lambda tensors: tensors.pop(up),
        f"missing keys, first {norm}": lambda tensors: tensors.pop(norm),
        "unexpected keys, first stray": lambda tensors: tensors.update(stray=torch.ones(1)),
        f"{up} differs": lambda tensors: tensors[up][3].mul_(2),
        f"{norm} differs": lambda tensors: tensors.update({norm: tensors[norm].bfloat16()}),
    }
    for words, edit in cases.items():
        change(edit)
        with pytest.raises(CheckpointError, match=words):
            hf.save(*_arguments(compressed, tmp_path / "out"))
        assert list(tmp_path.iterdir()) == []


def _arguments(
    compressed: Compressed, target: Path
) -> tuple[PreTrainedModel, Path, CompressionReport]:
    return compressed[0], target, compressed[1]
