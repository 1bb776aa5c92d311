"""`neuronmm verify`, and the other commands' refusal of weights that are not what was written."""

import json
import shutil

from outcomes import refused


def test_what_was_written_is_verified(small, run):
    document = run("verify", small, "--json").document()
    manifest = json.loads((small / "manifest.json").read_text())
    assert document["files"] == len(manifest["files"])
    assert document["weights_sha256"] == manifest["weights_sha256"]
    assert document["bytes"] == sum((small / name).stat().st_size for name in manifest["files"])
    shown = run("verify", small).page()
    assert f"{document['tensors']} tensors are what manifest.json says; made by compress" in shown
    for options, verified in (((), True), (("--no-verify",), False)):
        assert run("inspect", small, "--json", *options).document()["verified"] is verified


def test_no_command_takes_a_changed_value(small, dense, text, tmp_path, run):
    bad = shutil.copytree(small, tmp_path / "bad")
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
    run("inspect", bad, "--no-verify").page()
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]
