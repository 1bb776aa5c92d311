"""compress --stream: the same checkpoint as in memory, with one layer in memory at a time."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from causal_lms import family_model
from stored import assert_same_bits, config_of, tensors_of
from tiny import tiny_directory, tiny_tokenizer
from torch import Tensor

from neuronmm_ops import CompressionReport, SVDConfig
from neuronmm_ops.hf.streaming import gradients
from neuronmm_ops.hf.streaming.work import Work

CONFIG = replace(small.CONFIG, targets="all-linear")
compress = partial(small.compress, stream=True)
pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")


def directory_of(path: Path, kind: str = "llama", **options: Any) -> Path:
    family_model(kind).save_pretrained(path, **options)
    tiny_tokenizer().save_pretrained(path)
    return path


def close(name: str, written: Tensor, known: Tensor) -> None:
    if known.element_size() == 1:
        assert_same_bits({name: written}, {name: known})
    else:
        torch.testing.assert_close(written, known, rtol=1e-4, atol=1e-5)


def nearly_all(name: str, written: Tensor, known: Tensor) -> None:
    """Sums in another order may round a few numbers the other way."""
    if name.endswith((".u", ".v", ".w")):
        assert float((written.float() != known.float()).float().mean()) < 0.02, name
    else:
        torch.testing.assert_close(written, known, rtol=1e-2, atol=1e-5)


def assert_same(actual: Path, expected: Path, compare: Callable[..., None] = close) -> None:
    """Both hold the same tensors under the same names, and the same config."""
    written, known = tensors_of(actual), tensors_of(expected)
    assert written.keys() == known.keys()
    for name, tensor in known.items():
        assert written[name].dtype == tensor.dtype
        compare(name, written[name], tensor)
    configs = [config_of(directory) for directory in (actual, expected)]
    for layer in configs[1]["quantization_config"]["layers"]:
        layer["loss"] = pytest.approx(layer["loss"], rel=1e-4)
    assert configs[0] == configs[1]
    names = [{path.name for path in directory.iterdir()} for directory in (actual, expected)]
    assert names[1] - names[0] <= {"model.safetensors"}


def both(dense: Path, config: SVDConfig = CONFIG, **options: Any) -> CompressionReport:
    """Compress to `whole` in memory and to `streamed`, beside the model; return the report."""
    expected = compress(dense, dense.with_name("whole"), config, stream=False)
    report = compress(dense, dense.with_name("streamed"), config, **options)
    assert [layer.r for layer in report.layers] == [layer.r for layer in expected.layers]
    assert any(layer.r for layer in report.layers)
    compare = close if config.one_byte is None else nearly_all
    assert_same(dense.with_name("streamed"), dense.with_name("whole"), compare)
    names = sorted(path.name for path in dense.parent.iterdir())
    assert names == ["dense", "streamed", "whole"]
    return report


@pytest.mark.parametrize(
    ("kind", "method", "options"),
    [
        ("llama", "plain", {"allocation": "uniform"}),
        ("llama", "kfac", {}),
        ("llama, untied", "zero-sum", {}),
        ("qwen3", "swift", {}),
        ("gemma2", "kfac", {}),
        ("gemma3", "whiten", {"allocation": "uniform"}),
        ("phi3", "kfac", {}),
        ("gpt2", "kfac", {}),
        ("opt", "swift", {}),
        # The projections of an OPT with a narrow embedding are in no layer.
        ("opt, projected", "kfac", {"targets": "mlp"}),
        ("falcon", "kfac", {}),
        ("bloom", "swift", {"allocation": "uniform"}),
        ("llama", "kfac-drift", {}),
        ("gemma2", "drift", {}),
        ("opt, projected", "kfac-drift", {"targets": "mlp"}),
        ("falcon", "kfac-drift", {"allocation": "uniform"}),
        ("llama", "plain", {"storage": "fp8", "budget": "bytes", "ratio": 0.8}),
        ("llama", "kfac", {"storage": "int8"}),
        ("llama", "swift", {"storage": "int4"}),
        ("qwen3", "swift", {"storage": "fp8"}),
        ("llama", "kfac-drift", {"storage": "int4"}),
        ("gpt2", "kfac-drift", {"storage": "fp8", "budget": "bytes", "ratio": 0.8}),
        ("llama, untied", "kfac-drift", {"storage": "int8", "head_storage": "fp8"}),
        ("llama, untied", "plain", {"head_storage": "int8"}),
        ("llama, untied", "kfac", {"storage": "int8", "head_storage": "fp8"}),
        ("gpt2", "kfac", {"storage": "fp8", "budget": "bytes", "ratio": 0.8}),
        ("opt", "zero-sum", {"storage": "int8", "budget": "bytes", "ratio": 0.8}),
        ("llama", "kfac", {"prune_share": 0.5}),
        ("phi3", "kfac-drift", {"prune_share": 0.5}),
        ("gemma2", "swift", {"prune_share": 0.5, "storage": "fp8"}),
        (
            "qwen3",
            "whiten",
            {"prune_share": 0.3, "storage": "int8", "budget": "bytes", "ratio": 0.8},
        ),
    ],
    ids=str,
)
def test_it_writes_what_a_run_in_memory_writes(kind, method, options, tmp_path):
    config = replace(CONFIG, method=method, **options)
    report = both(directory_of(tmp_path / "dense", kind), config)
    stored = {x.storage for x in report.layers if x.name != "lm_head"}
    assert stored == {config.storage}
    head = [layer.storage for layer in report.layers if layer.name == "lm_head"]
    assert head == [config.head_storage] * (config.head_storage is not None)


def test_a_model_without_ranks_is_the_same(tmp_path):
    dense = directory_of(tmp_path / "dense", "llama, untied")
    config = replace(CONFIG, ratio=0, storage="int8", head_storage="int8")
    for stream in (False, True):
        compress(dense, tmp_path / str(stream), config, stream=stream)
    assert_same(tmp_path / "True", tmp_path / "False", nearly_all)
    assert "model.layers.0.mlp.up_proj.w" in tensors_of(tmp_path / "True")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_narrower_mlps_are_those_of_a_run_in_memory(share, dtype, tmp_path):
    dense = tiny_directory(tmp_path / "dense", dtype=dtype)
    config = replace(CONFIG, ratio=0.25, prune_share=share)
    whole = compress(dense, tmp_path / "whole", config, stream=False)
    report = compress(dense, tmp_path / "streamed", config)
    assert_same(tmp_path / "streamed", tmp_path / "whole")
    assert report.narrowed == whole.narrowed
    assert report.narrowed.kept < report.narrowed.inner
    assert any(layer.r for layer in report.layers) == (share < 1)
    up = tensors_of(tmp_path / "streamed")["model.layers.0.mlp.up_proj.weight"]
    assert up.dtype == dtype
    assert share < 1 or len(up) == report.narrowed.kept


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_bf16_checkpoint_is_computed_in_the_machines_dtype(family, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "neuronmm_ops.ops.backends.cpu.multiplies_fast", lambda dtype: dtype == torch.float32
    )
    dense = tiny_directory(tmp_path / "dense", family, dtype=torch.bfloat16)
    assert both(dense).provenance["compute_dtype"] == "float32"
    before, after = tensors_of(dense), tensors_of(tmp_path / "streamed")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    same = [name for name in before.keys() & after.keys() if after[name].numel()]
    assert_same_bits({name: after[name] for name in same}, {name: before[name] for name in same})


def test_logits_in_parts_give_the_same_gradients(tmp_path, monkeypatch):
    monkeypatch.setattr(gradients, "MAX_LOGITS", 7 * 260)
    both(tiny_directory(tmp_path / "dense"), replace(CONFIG, method="kfac"))


def test_a_sharded_checkpoint_and_large_shards(tmp_path):
    dense = directory_of(tmp_path / "dense", max_shard_size="50KB")
    both(dense, max_shard_size="30KB")
    for directory in (dense, tmp_path / "streamed"):
        assert len(list(directory.glob("*.safetensors"))) > 3


class Stopped(Exception):  # noqa: N818
    """Stands for whatever ends a run."""


def stop_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
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


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("falcon", {}),
        ("llama", {"storage": "fp8"}),
        ("falcon", {"method": "kfac-drift"}),
        ("llama, untied", {"method": "drift", "storage": "int8", "head_storage": "int8"}),
        ("llama", {"prune_share": 0.5}),
    ],
    ids=str,
)
def test_a_run_that_was_stopped_anywhere_goes_on(kind, options, tmp_path, monkeypatch):
    dense, target = directory_of(tmp_path / "dense", kind), tmp_path / "streamed"
    config = replace(CONFIG, **options)
    with monkeypatch.context() as patch:
        everything = stop_at(patch, -1)
        compress(dense, tmp_path / "whole", config)
    done = []
    for number in itertools.cycle((0, 2, 3, 2)):
        with monkeypatch.context() as patch:
            saved = stop_at(patch, number)
            try:
                compress(dense, target, config)
                break
            except Stopped:
                done += saved
        assert not target.exists()
    assert_same(target, tmp_path / "whole")
    assert not (tmp_path / ".streamed.stream").exists()
    assert set(done) <= set(everything)
    # Only what a stopped layer had done was done again.
    assert len(done) <= 1.5 * len(everything)


def test_a_resumed_run_tells_only_of_the_layers_that_it_does(tmp_path, monkeypatch):
    dense, told = directory_of(tmp_path / "dense"), []
    with monkeypatch.context() as patch:
        everything = stop_at(patch, -1)
        compress(dense, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, everything.index("layer-1"))
        with pytest.raises(Stopped):
            compress(dense, tmp_path / "streamed")
    compress(dense, tmp_path / "streamed", progress=lambda *event: told.append(event))
    done = [event for event in told if event[0] not in ("load", "save")]
    assert done == [("factorize", 2, 2), ("drift", 1, 2), ("drift", 2, 2)]
