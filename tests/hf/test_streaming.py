"""compress --stream: the same checkpoint as in memory, with one layer in memory at a time."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lms import family_model
from safetensors.torch import load_file
from tiny import tiny_directory, tiny_tokenizer
from torch import Tensor

from neuronmm_ops import CompressionReport, SVDConfig, hf
from neuronmm_ops.compress.record import low_rank_layers
from neuronmm_ops.hf.streaming import gradients
from neuronmm_ops.hf.streaming.work import Work

TEXT = "The quick brown fox jumps over the lazy dog. 0123456789\n" * 40
CONFIG = SVDConfig(ratio=0.3, block=8, targets="all-linear")
pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")


def _directory(path: Path, kind: str) -> Path:
    family_model(kind).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def _compress(
    model: Path, output: Path, config: SVDConfig = CONFIG, **options: Any
) -> CompressionReport:
    given: dict[str, Any] = {"samples": 16, "seqlen": 64, "stream": True, **options}
    return hf.compress(model, config, TEXT, output, **given)


def _tensors(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def _assert_same(actual: Path, expected: Path) -> None:
    """Both hold the same tensors under the same names, and the same config."""
    written, known = _tensors(actual), _tensors(expected)
    assert written.keys() == known.keys()
    for name, tensor in known.items():
        assert written[name].dtype == tensor.dtype
        if tensor.element_size() == 1:  # rounded to one byte
            assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8))
        else:
            torch.testing.assert_close(written[name], tensor, rtol=1e-4, atol=1e-5)
    assert _config(actual) == _config(expected)
    assert {p.name for p in expected.iterdir()} - {p.name for p in actual.iterdir()} <= {
        "model.safetensors"
    }


def _config(directory: Path) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text())
    for layer in config["quantization_config"]["layers"]:
        layer["loss"] = pytest.approx(layer["loss"], rel=1e-4)
    return config


@pytest.mark.parametrize(
    ("kind", "method", "allocation"),
    [
        ("llama", "plain", "uniform"),
        ("llama", "kfac", "greedy"),
        ("llama, untied", "zero-sum", "greedy"),
        ("qwen3", "swift", "greedy"),
        ("gemma2", "kfac", "greedy"),
        ("gemma3", "whiten", "uniform"),
        ("phi3", "kfac", "greedy"),
        ("gpt2", "kfac", "greedy"),
        ("opt", "swift", "greedy"),
        ("opt, projected", "kfac", "greedy"),
        ("falcon", "kfac", "greedy"),
        ("bloom", "swift", "uniform"),
    ],
)
def test_it_writes_what_a_run_in_memory_writes(
    kind: str, method: str, allocation: str, tmp_path: Path
) -> None:
    dense = _directory(tmp_path / "dense", kind)
    # The projections of an OPT with a narrow embedding are in no layer.
    targets = "mlp" if kind == "opt, projected" else "all-linear"
    config = SVDConfig(ratio=0.3, block=8, targets=targets, method=method, allocation=allocation)
    expected = _compress(dense, tmp_path / "whole", config, stream=False)
    report = _compress(dense, tmp_path / "streamed", config)
    assert [layer.r for layer in report.layers] == [layer.r for layer in expected.layers]
    assert any(layer.r for layer in report.layers)
    _assert_same(tmp_path / "streamed", tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "streamed", "whole"]


@pytest.mark.parametrize("budget", ["parameters", "bytes"])
@pytest.mark.parametrize(
    ("kind", "method", "storage"),
    [
        ("llama", "plain", "fp8"),
        ("llama", "kfac", "int8"),
        ("qwen3", "swift", "fp8"),
        ("gpt2", "kfac", "fp8"),
        ("opt", "zero-sum", "int8"),
    ],
)
def test_one_byte_is_what_a_run_in_memory_writes(
    kind: str, method: str, storage: str, budget: str, tmp_path: Path
) -> None:
    dense = _directory(tmp_path / "dense", kind)
    options: dict[str, Any] = {"method": method, "storage": storage, "budget": budget}
    config = SVDConfig(ratio=0.3, block=8, targets="all-linear", **options)
    expected = _compress(dense, tmp_path / "whole", config, stream=False)
    report = _compress(dense, tmp_path / "streamed", config)
    assert [layer.r for layer in report.layers] == [layer.r for layer in expected.layers]
    assert any(layer.storage == storage for layer in report.layers)
    _assert_same_rounding(tmp_path / "streamed", tmp_path / "whole")
    layers = low_rank_layers(hf.load(tmp_path / "streamed"))
    assert {layer.storage for layer in layers.values()} == {storage}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "streamed", "whole"]


def _assert_same_rounding(actual: Path, expected: Path) -> None:
    """Both hold the same tensors; sums in another order may round a few numbers the other way."""
    written, known = _tensors(actual), _tensors(expected)
    assert written.keys() == known.keys()
    for name, tensor in known.items():
        assert written[name].dtype == tensor.dtype
        if name.endswith((".u", ".v")):
            differ = written[name].float() != tensor.float()
            assert float(differ.float().mean()) < 0.02, name
        else:
            torch.testing.assert_close(written[name], tensor, rtol=1e-2, atol=1e-5)
    assert _config(actual) == _config(expected)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_bf16_checkpoint_is_computed_in_the_machines_dtype(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "neuronmm_ops.ops.backends.cpu.multiplies_fast", lambda dtype: dtype == torch.float32
    )
    dense = tiny_directory(tmp_path / "dense", family, dtype=torch.bfloat16)
    _compress(dense, tmp_path / "whole", stream=False)
    report = _compress(dense, tmp_path / "streamed")
    assert report.provenance["compute_dtype"] == "float32"
    _assert_same(tmp_path / "streamed", tmp_path / "whole")
    before, after = _tensors(dense), _tensors(tmp_path / "streamed")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    for name in before.keys() & after.keys():
        if after[name].numel():
            assert torch.equal(before[name], after[name]), name


def test_logits_in_parts_give_the_same_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = tiny_directory(tmp_path / "dense")
    _compress(dense, tmp_path / "whole", stream=False)
    monkeypatch.setattr(gradients, "MAX_LOGITS", 7 * 260)
    _compress(dense, tmp_path / "streamed")
    _assert_same(tmp_path / "streamed", tmp_path / "whole")


def test_a_sharded_checkpoint_and_large_shards(tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    family_model("llama").save_pretrained(dense, max_shard_size="50KB")
    tiny_tokenizer().save_pretrained(dense)
    assert len(list(dense.glob("*.safetensors"))) > 3
    _compress(dense, tmp_path / "whole", stream=False)
    _compress(dense, tmp_path / "streamed", max_shard_size="30KB")
    _assert_same(tmp_path / "streamed", tmp_path / "whole")
    assert len(list((tmp_path / "streamed").glob("*.safetensors"))) > 3


class Stopped(Exception):  # noqa: N818
    """Stands for whatever ends a run."""


def _stop_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Let the run stop before the `number`-th set is saved; return the names saved."""
    saved: list[str] = []
    original = Work.save

    def save(self: Work, name: str, tensors: dict[str, Tensor]) -> None:
        if len(saved) == number:
            raise Stopped
        original(self, name, tensors)
        saved.append(name)

    monkeypatch.setattr(Work, "save", save)
    return saved


@pytest.mark.parametrize(("kind", "storage"), [("llama", None), ("falcon", None), ("llama", "fp8")])
def test_a_run_that_was_stopped_anywhere_goes_on(
    kind: str, storage: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = _directory(tmp_path / "dense", kind)
    config = replace(CONFIG, storage=storage)
    with monkeypatch.context() as patch:
        everything = _stop_at(patch, -1)
        _compress(dense, tmp_path / "whole", config)
    done: list[str] = []
    target = tmp_path / "streamed"
    for number in itertools.cycle((0, 2, 3, 2)):
        with monkeypatch.context() as patch:
            saved = _stop_at(patch, number)
            try:
                _compress(dense, target, config)
                break
            except Stopped:
                done += saved
        assert not target.exists()
    _assert_same(target, tmp_path / "whole")
    assert not (tmp_path / ".streamed.stream").exists()
    assert set(done) <= set(everything)
    # Only what a stopped layer had done was done again.
    assert len(done) <= 1.5 * len(everything)


def test_a_resumed_run_tells_only_of_the_layers_that_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = _directory(tmp_path / "dense", "llama")
    with monkeypatch.context() as patch:
        everything = _stop_at(patch, -1)
        _compress(dense, tmp_path / "whole")
    with monkeypatch.context() as patch:
        _stop_at(patch, everything.index("layer-1"))
        with pytest.raises(Stopped):
            _compress(dense, tmp_path / "streamed")
    told: list[tuple[str, int, int]] = []
    _compress(dense, tmp_path / "streamed", progress=lambda *event: told.append(event))
    assert [event for event in told if event[0] not in ("load", "save")] == [("factorize", 2, 2)]
