"""`compression.json`: what it says of a run, when it is kept, and what of it is refused."""

import hashlib
import json
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stored import edit_config, edit_tensors
from tiny import tiny_directory

from neuronmm_ops import CheckpointError, SVDConfig, hf
from neuronmm_ops.hf.provenance import ModelSource
from neuronmm_ops.manifest import tensor_hashes, weights_sha256

TEXT = "The quick brown fox jumps over the lazy dog. 0123456789 é\n" * 40
CONFIG = SVDConfig(ratio=0.3, block=8)
RUN_FILE = "compression.json"
pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A directory with `dense`, `text.txt`, and `small`, compressed by them."""
    root = tmp_path_factory.mktemp("places")
    tiny_directory(root / "dense")
    (root / "text.txt").write_text(TEXT)
    compress(root, root / "small")
    return root


def compress(places: Path, output: Path, **options: Any) -> None:
    options = {"samples": 16, "seqlen": 64, "order": "head", **options}
    hf.compress(places / "dense", CONFIG, places / "text.txt", output, **options)


def run_of(directory: Path) -> hf.CompressionRun:
    return hf.read_run(directory / RUN_FILE)


def document(directory: Path) -> dict[str, Any]:
    return json.loads((directory / RUN_FILE).read_text())


def test_it_holds_what_the_run_was_given(places):
    run = document(places / "small")
    assert run == run_of(places / "small").to_dict()
    assert run["model"]["path"] == str(places / "dense")
    assert SVDConfig.from_dict(run["config"]) == CONFIG
    assert run["calibration"] == {
        "path": str(places / "text.txt"),
        "sha256": hashlib.sha256((places / "text.txt").read_bytes()).hexdigest(),
        "samples": 16,
        "seqlen": 64,
        "order": "head",
    }
    assert (run["dtype"], run["compute_dtype"], run["device"]) == ("auto", "float32", "cpu")
    assert run["max_shard_size"] == "50GB"
    assert run["threads"] == torch.get_num_threads()
    assert run["versions"]["torch"] == version("torch")
    mode = (places / "small" / "config.json").stat().st_mode
    assert (places / "small" / RUN_FILE).stat().st_mode == mode


@pytest.mark.parametrize(
    ("dtype", "tied", "asked", "compute", "again"),
    [
        (torch.float32, True, "auto", "float32", "float32"),
        (torch.bfloat16, True, "float32", "float32", "float32"),
        (torch.float16, False, "float32", "float32", "float32"),
        (torch.float64, True, "auto", "float64", "auto"),
    ],
)
def test_it_is_run_again_bit_for_bit(dtype, tied, asked, compute, again, places, tmp_path):
    tiny_directory(tmp_path / "dense", dtype=dtype, tied=tied)
    (tmp_path / "text.txt").write_text(TEXT)
    first, second = tmp_path / "first", tmp_path / "second"
    compress(tmp_path, first, dtype=asked)
    run = run_of(first)
    assert (run.compute_dtype, run.options["dtype"]) == (compute, again)
    hf.compress(run.checked_model(), run.config, run.checked_text(), second, **run.options)
    assert document(second) == {**document(first), "dtype": again}
    files = [directory / "model.safetensors" for directory in (first, second)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_text_that_is_no_file_has_no_path(places, tmp_path):
    hf.compress(places / "dense", CONFIG, TEXT, tmp_path / "out", samples=16, seqlen=64)
    run, recorded = run_of(tmp_path / "out"), run_of(places / "small").calibration
    assert (run.calibration.path, run.calibration.sha256) == (None, recorded.sha256)
    with pytest.raises(ValueError, match="was no file; give --calibration"):
        run.checked_text()


def test_plain_has_no_calibration(places, tmp_path):
    plain = replace(CONFIG, method="plain")
    hf.compress(places / "dense", plain, places / "text.txt", tmp_path / "out")
    run = run_of(tmp_path / "out")
    assert run.calibration is run.checked_text() is None
    assert set(run.options) == {"dtype", "device", "max_shard_size"}


def test_a_loaded_model_keeps_it_while_it_is_true(places, tmp_path):
    hf.save(hf.load(places / "small"), tmp_path / "same", max_shard_size="100KB")
    assert len(list((tmp_path / "same").glob("*.safetensors"))) > 1
    assert document(tmp_path / "same") == document(places / "small")

    trained = hf.load(places / "small")
    trained.get_submodule("model.norm").weight.data[3] += 1e-3
    hf.save(trained, tmp_path / "trained")
    shutil.copytree(places / "small", tmp_path / "stale")
    hf.save(trained, tmp_path / "stale", force=True)
    hf.save(hf.load(places / "small").half(), tmp_path / "cast")
    shutil.copytree(places / "small", tmp_path / "damaged")
    (tmp_path / "damaged" / RUN_FILE).write_text("{")
    hf.save(hf.load(tmp_path / "damaged"), tmp_path / "saved")
    for name in ("trained", "stale", "cast", "saved"):
        assert not (tmp_path / name / RUN_FILE).exists(), name


def append(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


MODEL_EDITS = {
    "weights": lambda path: edit_tensors(path, lambda t: t["model.norm.weight"][0].add_(1e-3)),
    "config": lambda path: edit_config(path, lambda config: config.update(rms_norm_eps=1e-3)),
    "tokenizer": lambda path: append(path / "tokenizer.json", " "),
}


@pytest.mark.parametrize("edit", MODEL_EDITS.values(), ids=MODEL_EDITS)
def test_a_changed_model_is_refused_with_both_hashes(edit, places, tmp_path):
    copy = Path(shutil.copytree(places / "dense", tmp_path / "copy"))
    (copy / "README.md").write_text("no part of the model")
    before = run_of(places / "small").model
    assert ModelSource.of(copy).sha256 == before.sha256
    run = replace(run_of(places / "small"), model=ModelSource.of(copy))
    edit(copy)
    with pytest.raises(CheckpointError, match=before.sha256) as caught:
        run.checked_model()
    assert ModelSource.of(copy).sha256 in str(caught.value)


def test_shards_have_the_hash_of_the_single_file(places, tmp_path):
    hf.load(places / "dense").save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    shards, single = (tensor_hashes(path) for path in (tmp_path / "shards", places / "dense"))
    assert weights_sha256(shards) == weights_sha256(single)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format_version": 2}, "format_version must be 1, got 2"),
        ({"frobnicate": 1}, "see 'frobnicate'"),
        ({"model": "path"}, "model must be an object, got 'path'"),
        ({"model": {"path": "x"}}, "model must have exactly path, sha256; see 'sha256'"),
        ({"model": {"path": 5, "sha256": "0" * 64}}, "model.path must be a path, got 5"),
        ({"model": {"path": "x", "sha256": "0" * 63}}, "model.sha256 must be a SHA-256"),
        ({"config": None}, "config must be an object, got None"),
        ({"config": {"version": 2, "ratio": 2.0}}, r"ratio must be in \(0, 1\)"),
        ({"config": {"version": 2, "ratio": "0.2"}}, "config: ratio must be a number"),
        ({"config": {"version": 2, "speed": 3}}, "no field 'speed'"),
        ({"calibration": []}, "calibration must be an object"),
        ({"dtype": "float7"}, "dtype must be one of auto, float32"),
        ({"compute_dtype": "auto"}, "compute_dtype must be one of float32"),
        ({"device": 0}, "device must be a device's name, got 0"),
        ({"max_shard_size": 0}, "max_shard_size must be bytes or a size"),
        ({"max_shard_size": True}, "max_shard_size must be bytes or a size"),
        ({"threads": 1.5}, "threads must be a positive integer"),
        ({"versions": {"torch": 2}}, "versions must be an object of texts"),
        ({"weights_sha256": None}, "weights_sha256 must be a SHA-256"),
    ],
)
def test_what_comes_from_outside_is_checked(change, word, places, tmp_path):
    path = tmp_path / RUN_FILE
    path.write_text(json.dumps({**document(places / "small"), **change}))
    with pytest.raises(CheckpointError, match=word):
        hf.read_run(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("path", 5), ("path", ""), ("samples", 0), ("samples", True), ("seqlen", "64")),
        *(("seqlen", None), ("order", "tail"), ("order", ["head"]), ("sha256", "é" * 64)),
    ],
)
def test_calibration_from_outside_is_checked(name, value, places, tmp_path):
    run = document(places / "small")
    run["calibration"][name] = value
    (tmp_path / RUN_FILE).write_text(json.dumps(run))
    with pytest.raises(CheckpointError, match=rf"calibration\.{name} must be"):
        run_of(tmp_path)


@pytest.mark.parametrize("data", [b"[]", b"[" * 100_000, b"\xff\xfe"])
def test_what_is_no_record_is_refused(data, tmp_path):
    (tmp_path / RUN_FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match=RUN_FILE):
        run_of(tmp_path)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = (
    SCALARS
    | st.lists(SCALARS, max_size=3)
    | st.dictionaries(st.text(max_size=5), SCALARS, max_size=3)
)


@given(data=st.data())
def test_any_value_in_any_field_is_read_or_refused(data, places):
    values = document(places / "small")
    at = data.draw(st.sampled_from([values, *(v for v in values.values() if isinstance(v, dict))]))
    at[data.draw(st.sampled_from(sorted(at)))] = data.draw(JSON)
    path = places / "changed.json"
    path.write_text(json.dumps(values))
    try:
        run = hf.read_run(path)
    except CheckpointError:
        return
    assert hf.CompressionRun.from_dict(run.to_dict()) == run
