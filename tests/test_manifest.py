"""`manifest.json`: what a directory holds, and that nothing else passes for it."""

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tiny import tiny_directory, tiny_model
from transformers import PreTrainedModel
from transformers.utils import hub

from neuronmm_ops import CheckpointError, SVDConfig, compress_, hf
from neuronmm_ops.checkpoint import read_headers
from neuronmm_ops.engines.nxdi import export
from neuronmm_ops.manifest import (
    MANIFEST,
    Origin,
    check_weights,
    read_manifest,
    tensor_hashes,
    verify,
    weights_sha256,
    write_manifest,
)

TEXT = "The quick brown fox jumps over the lazy dog. 0123456789\n" * 40
PLAIN = SVDConfig(ratio=0.3, block=8, method="plain")
pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compressed checkpoint, the text and the dense model beside it."""
    root = tmp_path_factory.mktemp("pristine")
    (root / "text.txt").write_text(TEXT)
    dense, config = tiny_directory(root / "dense"), SVDConfig(ratio=0.3, block=8)
    hf.compress(dense, config, root / "text.txt", root / "small", samples=8, seqlen=64)
    return root / "small"


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


def test_it_lists_every_file_and_tensor_and_what_they_are_of(pristine):
    manifest = verify(pristine)
    assert set(manifest["files"]) == {path.name for path in pristine.iterdir()} - {MANIFEST}
    for name, entry in manifest["files"].items():
        content = (pristine / name).read_bytes()
        assert entry["bytes"] == len(content)
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
    tensors = load_file(pristine / "model.safetensors")
    headers = read_headers([pristine / "model.safetensors"])
    assert manifest["tensors"] == {
        name: hashlib.sha256(
            f"{headers[name].dtype} {list(tensor.shape)};".encode() + tensor.numpy().tobytes()
        ).hexdigest()
        for name, tensor in tensors.items()
    }
    run = hf.read_run(pristine / "compression.json")
    assert manifest["weights_sha256"] == run.weights_sha256
    assert manifest["source"] == {"path": run.model.path, "sha256": run.model.sha256}
    assert run.calibration is not None
    text = {"path": run.calibration.path, "sha256": hashlib.sha256(TEXT.encode()).hexdigest()}
    assert manifest["texts"] == [text]
    assert (manifest["made_by"], manifest["versions"]) == ("compress", dict(run.versions))


def test_every_way_of_writing_leaves_one(pristine, tmp_path):
    dense = pristine.parent / "dense"
    hf.compress(dense, PLAIN, None, tmp_path / "compress, streamed", stream=True)
    hf.save(hf.load(pristine).bfloat16(), tmp_path / "save")
    model = tiny_model()
    compress_(model, PLAIN)
    model.save_pretrained(tmp_path / "save_pretrained, compressed here")
    hf.load(pristine).save_pretrained(tmp_path / "save_pretrained", max_shard_size="100KB")
    export(pristine, tmp_path / "export nxdi")
    for path in tmp_path.iterdir():
        assert verify(path)["made_by"] == path.name.partition(",")[0]
    sources = {path.name: (read_manifest(path) or {})["source"] for path in tmp_path.iterdir()}
    assert sources["save"]["path"] == sources["export nxdi"]["path"] == str(pristine)
    hashes = [tensor_hashes(path) for path in (tmp_path / "save_pretrained", pristine)]
    assert weights_sha256(hashes[0]) == weights_sha256(hashes[1])


def test_saving_in_place_renews_it_and_a_dense_model_ends_it(checkpoint):
    model = hf.load(checkpoint)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(1.5)
    model.save_pretrained(checkpoint)
    assert hf.load(checkpoint, verify=True).get_parameter("model.norm.weight")[0] == 1.5
    tiny_model().save_pretrained(checkpoint)
    assert not (checkpoint / MANIFEST).exists()


def test_a_hub_gets_one(pristine, tmp_path, monkeypatch):
    model = hf.load(pristine)
    repository = SimpleNamespace(repo_id="a/b")
    api = SimpleNamespace(create_repo=lambda *_, **__: repository)
    monkeypatch.setattr(hub, "hf_api", lambda: api)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: ModelCard("text"))
    pushed = tmp_path / "pushed"

    def upload(self: PreTrainedModel, directory: str, *_: object, **__: object) -> None:
        shutil.copytree(directory, pushed)

    monkeypatch.setattr(PreTrainedModel, "_upload_modified_files", upload)
    model.push_to_hub("a/b")
    assert verify(pushed)["made_by"] == "save_pretrained"
    assert "README.md" not in verify(pushed)["files"]


@pytest.mark.parametrize("place", [1, 2, 257, 4099, 30_001, 77_777, 101_010, 200_003, 300_000])
def test_a_flipped_bit_is_found_by_all_who_read_values(place, checkpoint):
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-place] ^= 1
    file.write_bytes(content)
    words = r"is not what manifest\.json says, it has other values of (lm_head|model)\."
    for read in (
        *(verify, lambda path: check_weights(path, True), hf.load_computing),
        lambda path: hf.load(path, verify=True),
        lambda path: export(path, path.parent / "out"),
    ):
        with pytest.raises(CheckpointError, match=words):
            read(checkpoint)
    assert not (checkpoint.parent / "out").exists()
    hf.load(checkpoint)  # compares headers and sizes alone


def rename_tensor(directory: Path) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    one, other = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    tensors[one], tensors[other] = tensors[other].clone(), tensors[one] * 2
    save_file(dict(reversed(tensors.items())), file, {"format": "pt", "by": "another"})


def add_a_file_that_is_read_first(directory: Path) -> None:
    shutil.copyfile(directory / "model.safetensors", directory / "other.safetensors")
    manifest = json.loads((directory / MANIFEST).read_text())
    manifest["files"]["other.safetensors"] = manifest["files"].pop("model.safetensors")
    (directory / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (rename_tensor, "it has (another header|[0-9]+ bytes instead of)"),
        (add_a_file_that_is_read_first, "is read, and manifest.json does not list it"),
        (lambda d: (d / MANIFEST).write_text("{}"), "format_version must be 1, got None"),
        (lambda d: (d / MANIFEST).write_text("["), "must hold JSON"),
        (
            lambda d: (d / MANIFEST).write_text('{"format_version": 1, "files": {"a": 3}}'),
            "must hold the objects files and tensors",
        ),
    ],
)
def test_loading_compares_headers_at_least(edit, words, checkpoint):
    edit(checkpoint)
    for read in (hf.load, verify):
        with pytest.raises(CheckpointError, match=words) as caught:
            read(checkpoint)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), "lacks tokenizer.json, which manifest.json"),
        (lambda d: (d / "config.json").write_text(" {}"), "config.json is not what .* has 3 bytes"),
        (lambda d: (d / MANIFEST).unlink(), "has no manifest.json to verify it by"),
    ],
)
def test_verify_looks_at_every_file(edit, words, checkpoint):
    edit(checkpoint)
    with pytest.raises(CheckpointError, match=words):
        verify(checkpoint)


def test_it_is_the_same_of_the_same_directory(checkpoint):
    before = (checkpoint / MANIFEST).read_bytes()
    manifest = verify(checkpoint)
    fields = ("made_by", "source", "texts", "versions")
    write_manifest(checkpoint, tensor_hashes(checkpoint), Origin(*(manifest[f] for f in fields)))
    assert (checkpoint / MANIFEST).read_bytes() == before
