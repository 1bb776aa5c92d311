"""`neuronmm verify`, and the other commands' refusal of weights that are not what was written."""

import json
import shutil
from pathlib import Path

import pytest
from outcomes import COMPRESS, Run, refused


@pytest.fixture(scope="module")
def small(dense: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from neuronmm_ops.cli import main

    out = tmp_path_factory.mktemp("compressed") / "small"
    options = ("--calibration", text, "--method", "plain", *COMPRESS)
    assert main([str(part) for part in ("compress", dense, "-o", out, *options)]) == 0
    return out


def test_what_was_written_is_verified(small: Path, run: Run) -> None:
    outcome = run("verify", small, "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    manifest = json.loads((small / "manifest.json").read_text())
    assert document["files"] == len(manifest["files"])
    assert document["weights_sha256"] == manifest["weights_sha256"]
    assert document["bytes"] == sum(p.stat().st_size for p in small.iterdir() if p.name in
                                    manifest["files"])  # fmt: skip
    shown = run("verify", small).out
    assert f"{document['tensors']} tensors are what manifest.json says; made by compress" in shown
    assert json.loads(run("inspect", small, "--json").out)["verified"] is True
    assert json.loads(run("inspect", small, "--json", "--no-verify").out)["verified"] is False


def test_no_command_takes_a_changed_value(
    small: Path, dense: Path, text: Path, tmp_path: Path, run: Run
) -> None:
    bad = Path(shutil.copytree(small, tmp_path / "bad"))
    content = bytearray((bad / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (bad / "model.safetensors").write_bytes(content)
    for arguments in (
        ("verify", bad),
        ("inspect", bad),
        ("generate", bad, "--prompt", "The"),
        ("eval", bad, "--text", text, "--seqlen", 64),
        ("compare", bad, "--dense", dense, "--text", text, "--seqlen", 64),
        ("recover", bad, "--data", text, "-o", tmp_path / "recovered"),
        ("export", "nxdi", bad, "-o", tmp_path / "exported"),
    ):
        words = ("is not what manifest.json says, it has other values of", "remove manifest.json")
        refused(run(*arguments), *words)
    assert run("inspect", bad, "--no-verify").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_a_directory_without_a_manifest(dense: Path, run: Run) -> None:
    refused(run("verify", dense), "has no manifest.json to verify it by; load it and save it")
