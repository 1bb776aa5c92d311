"""`compression.json`: what it says of a run, when it is kept, and what of it is refused."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import tiny_directory

from neuronmm_ops import CheckpointError, SVDConfig, hf
from neuronmm_ops.hf.provenance import ModelSource
from neuronmm_ops.manifest import tensor_hashes, weights_sha256

TEXT = "The quick brown fox jumps over the lazy dog. 0123456789 é\n" * 40
CONFIG = SVDConfig(ratio=0.3, block=8)
RUN_FILE = "compression.json"
pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `dense`, `text.txt`, and `small`, compressed by them."""
    root = tmp_path_factory.mktemp("places")
    tiny_directory(root / "dense")
    (root / "text.txt").write_text(TEXT)
    compress(root, root / "small")
    return root


def compress(places: Path, output: Path, **options: Any) -> None:
    options = {"samples": 16, "seqlen": 64, "order": "head", **options}
    hf.compress(places / "dense", CONFIG, places / "text.txt", output, **options)


def document(directory: Path) -> dict[str, Any]:
    return json.loads((directory / RUN_FILE).read_text())


def test_it_holds_what_the_run_was_given(places: Path) -> None:
    run = document(places / "small")
    assert run == hf.read_run(places / "small" / RUN_FILE).to_dict()
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
    assert run["versions"]["torch"] == torch.__version__
    mode = (places / "small" / "config.json").stat().st_mode
    assert (places / "small" / RUN_FILE).stat().st_mode == mode


def test_running_it_again_gives_the_same_bits(places: Path, tmp_path: Path) -> None:
    run = hf.read_run(places / "small" / RUN_FILE)
    again = tmp_path / "again"
    hf.compress(run.checked_model(), run.config, run.checked_text(), again, **run.options)
    first, second = (load_file(d / "model.safetensors") for d in (places / "small", again))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name
    assert document(again) == {**document(places / "small"), "dtype": "float32"}


@pytest.mark.parametrize(("dtype", "tied"), [(torch.bfloat16, True), (torch.float16, False)])
def test_low_precision_is_run_again_bit_for_bit(
    dtype: torch.dtype, tied: bool, places: Path, tmp_path: Path
) -> None:
    dense = tiny_directory(tmp_path / "dense", dtype=dtype, tied=tied)
    options = {"samples": 16, "seqlen": 64, "dtype": "float32"}
    hf.compress(dense, CONFIG, places / "text.txt", tmp_path / "first", **options)
    run = hf.read_run(tmp_path / "first" / RUN_FILE)
    hf.compress(run.checked_model(), run.config, run.checked_text(), tmp_path / "x", **run.options)
    assert document(tmp_path / "x") == document(tmp_path / "first")
    files = [tmp_path / name / "model.safetensors" for name in ("first", "x")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_model_in_float64_is_run_again(places: Path, tmp_path: Path) -> None:
    dense = tiny_directory(tmp_path / "dense", dtype=torch.float64)
    hf.compress(dense, CONFIG, places / "text.txt", tmp_path / "first", samples=16, seqlen=64)
    run = hf.read_run(tmp_path / "first" / RUN_FILE)
    assert (run.compute_dtype, run.options["dtype"]) == ("float64", "auto")
    hf.compress(run.checked_model(), run.config, run.checked_text(), tmp_path / "x", **run.options)
    assert document(tmp_path / "x") == document(tmp_path / "first")


def test_a_text_that_is_no_file_has_no_path(places: Path, tmp_path: Path) -> None:
    hf.compress(places / "dense", CONFIG, TEXT, tmp_path / "out", samples=16, seqlen=64)
    run = hf.read_run(tmp_path / "out" / RUN_FILE)
    recorded = hf.read_run(places / "small" / RUN_FILE).calibration
    assert run.calibration is not None
    assert recorded is not None
    assert (run.calibration.path, run.calibration.sha256) == (None, recorded.sha256)
    with pytest.raises(ValueError, match="was no file; give --calibration"):
        run.checked_text()


def test_plain_has_no_calibration(places: Path, tmp_path: Path) -> None:
    plain = replace(CONFIG, method="plain")
    hf.compress(places / "dense", plain, places / "text.txt", tmp_path / "out")
    run = hf.read_run(tmp_path / "out" / RUN_FILE)
    assert run.calibration is run.checked_text() is None
    assert set(run.options) == {"dtype", "device", "max_shard_size"}


def test_a_loaded_model_keeps_it_while_it_is_true(places: Path, tmp_path: Path) -> None:
    hf.save(hf.load(places / "small"), tmp_path / "same", max_shard_size="100KB")
    assert len(list((tmp_path / "same").glob("*.safetensors"))) > 1
    assert document(tmp_path / "same") == document(places / "small")

    trained = hf.load(places / "small")
    trained.get_submodule("model.norm").weight.data[3] += 1e-3  # pyright: ignore
    hf.save(trained, tmp_path / "trained")
    hf.save(hf.load(places / "small").half(), tmp_path / "cast")
    damaged = Path(shutil.copytree(places / "small", tmp_path / "damaged"))
    (damaged / RUN_FILE).write_text("{")
    hf.save(hf.load(damaged), tmp_path / "saved")
    assert not [
        name for name in ("trained", "cast", "saved") if (tmp_path / name / RUN_FILE).exists()
    ]


def test_a_forced_save_leaves_no_stale_one(places: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(places / "small", tmp_path / "target"))
    trained = hf.load(places / "small")
    trained.get_submodule("model.norm").weight.data[3] += 1e-3  # pyright: ignore
    hf.save(trained, target, force=True)
    assert not (target / RUN_FILE).exists()


def edit_weights(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def edit_config(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))


def edit_tokenizer(directory: Path) -> None:
    path = directory / "tokenizer.json"
    path.write_text(path.read_text() + " ")


@pytest.mark.parametrize("edit", [edit_weights, edit_config, edit_tokenizer])
def test_a_changed_model_is_refused_with_both_hashes(
    edit: Callable[[Path], None], places: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(places / "dense", tmp_path / "copy"))
    (copy / "README.md").write_text("no part of the model")
    before = hf.read_run(places / "small" / RUN_FILE).model
    assert ModelSource.of(copy).sha256 == before.sha256
    run = replace(hf.read_run(places / "small" / RUN_FILE), model=ModelSource.of(copy))
    edit(copy)
    with pytest.raises(CheckpointError, match=before.sha256) as caught:
        run.checked_model()
    assert ModelSource.of(copy).sha256 in str(caught.value)


def test_shards_have_the_hash_of_the_single_file(places: Path, tmp_path: Path) -> None:
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
def test_what_comes_from_outside_is_checked(
    change: dict[str, Any], word: str, places: Path, tmp_path: Path
) -> None:
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
def test_calibration_from_outside_is_checked(
    name: str, value: object, places: Path, tmp_path: Path
) -> None:
    run = document(places / "small")
    run["calibration"][name] = value
    (tmp_path / RUN_FILE).write_text(json.dumps(run))
    with pytest.raises(CheckpointError, match=rf"calibration\.{name} must be"):
        hf.read_run(tmp_path / RUN_FILE)


@pytest.mark.parametrize(
    "text", ["", "[]", "5", "null", '{"format_version": 1}', "[" * 100_000, "\0", "NaN"]
)
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=RUN_FILE):
        hf.read_run(tmp_path / RUN_FILE)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=RUN_FILE):
        hf.read_run(tmp_path / RUN_FILE)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = (
    SCALARS
    | st.lists(SCALARS, max_size=3)
    | st.dictionaries(st.text(max_size=5), SCALARS, max_size=3)
)


@given(data=st.data())
def test_any_value_in_any_field_is_read_or_refused(data: st.DataObject, places: Path) -> None:
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
