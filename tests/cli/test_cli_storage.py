"""Commands on checkpoints whose factors are in one byte."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from outcomes import COMPRESS, Run, refused
from safetensors.torch import load_file, save_file

from neuronmm_ops.cli import main

STORED = pytest.mark.parametrize("storage", ["fp8", "int8"])
DTYPES = {"fp8": "float8_e4m3fn", "int8": "int8"}
DTYPE = ("--dtype", "float32")


@pytest.fixture(scope="module")
def small(dense: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each storage, and one in the model's own dtype."""
    directory = tmp_path_factory.mktemp("stored")
    for storage in (*DTYPES, "float"):
        out = directory / storage
        arguments = ("compress", dense, "-o", out, "--ratio", "0.3", "--calibration", text)
        options = () if storage == "float" else ("--storage", storage)
        assert main([str(argument) for argument in (*arguments, *COMPRESS, *options)]) == 0
    return {storage: directory / storage for storage in (*DTYPES, "float")}


@STORED
def test_inspect(storage: str, run: Run, small: dict[str, Path]) -> None:
    outcome = run("inspect", small[storage], "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    for layer in document["layers"]:
        K, N, r = layer["K"], layer["N"], layer["r"]
        assert layer["storage"] == DTYPES[storage]
        assert layer["compute"] == "x"
        assert layer["bytes"] == r * (K + N) + 4 * (r + N)
        assert layer["bits_per_weight"] == pytest.approx(8 * layer["bytes"] / (K * N))
    assert document["bytes"] == sum(layer["bytes"] for layer in document["layers"])
    assert document["config"]["storage"] == storage
    shown = run("inspect", small[storage]).out
    assert shown.count(f" {storage} ") >= len(document["layers"])
    assert "bits: stored for each weight of the dense matrix, scales included" in shown
    assert "bits" not in run("inspect", small["float"]).out


@STORED
def test_eval_generate_and_compare(
    storage: str,
    run: Run,
    dense: Path,
    small: dict[str, Path],
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("neuronmm_ops.measure.compare.DECODE_TOKENS", 2)
    evaluated = run("eval", small[storage], "--text", text, "--seqlen", "64", "--json", *DTYPE)
    assert evaluated.code == 0, evaluated.err
    found = json.loads(evaluated.out)["ppl_token"]
    generated = run("generate", small[storage], "--prompt", "The quick", *DTYPE)
    assert generated.code == 0, generated.err
    options = ("--dense", dense, "--seqlen", "64", "--json", *DTYPE)
    compared = run("compare", small[storage], "--text", text, *options)
    assert compared.code == 0, compared.err
    rows = json.loads(compared.out)
    assert rows[1]["ppl_token"][str(text)] == pytest.approx(found, rel=1e-3)
    assert rows[1]["bytes"] < 0.6 * rows[0]["bytes"]


def test_eval_with_rounded_activations(
    run: Run, small: dict[str, Path], dense: Path, text: Path
) -> None:
    common = ("--text", text, "--seqlen", "64", "--json", *DTYPE)
    found = {}
    for compute in (None, "x", "fp8"):
        option = () if compute is None else ("--compute", compute)
        outcome = run("eval", small["fp8"], *common, *option)
        assert outcome.code == 0, outcome.err
        document = json.loads(outcome.out)
        assert document["compute"] == (compute or "x")
        found[compute] = document["ppl_token"]
    assert found[None] == found["x"]
    assert found["fp8"] != found["x"]
    assert found["fp8"] == pytest.approx(found["x"], rel=0.05)
    for model in (small["int8"], dense):
        outcome = run("eval", model, *common, "--compute", "fp8")
        refused(outcome, "compute fp8 needs layers with factors in float8_e4m3fn")
    refused(run("eval", dense, *common, "--compute", "fp4"), "compute must be one of x, fp8")


@STORED
def test_recover_is_refused(
    storage: str, run: Run, small: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    for method in ("distill", "lora"):
        outcome = run(
            "recover", small[storage], "--data", text, "--method", method, "-o", tmp_path / "out"
        )
        refused(outcome, "its factors are in one byte", DTYPES[storage], "compressed without stora")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["inspect", "eval", "generate", "compare", "recover"])
def test_a_checkpoint_that_disagrees_with_its_config(
    command: str, run: Run, small: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(small["int8"], tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".u_scale"))
    options = {
        "inspect": (),
        "eval": ("--text", text),
        "generate": ("--prompt", "The"),
        "compare": ("--text", text),
        "recover": ("--data", text, "-o", tmp_path / "out"),
    }[command]
    for value, words in (
        (tensors[name].half(), "config.json asks for F32, the file has F16"),
        (tensors[name][1:], "config.json asks for ["),
    ):
        changed = {**tensors, name: value.contiguous()}
        save_file(changed, copy / "model.safetensors", metadata={"format": "pt"})
        refused(run(command, copy, *options), name, words)
    bad = tensors[name].clone()
    bad[0] = 0
    save_file({**tensors, name: bad}, copy / "model.safetensors", metadata={"format": "pt"})
    (copy / "manifest.json").unlink()
    if command != "inspect":  # which reads headers only
        refused(run(command, copy, *options), "u_scale must be", "got 0.0 at 0")


def test_compressing_it_again_is_refused(
    run: Run, small: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    refused(
        run("compress", small["fp8"], "-o", out, "--calibration", text, *COMPRESS),
        "is compressed or quantized already",
    )
    refused(run("compress", small["fp8"], "-o", out, "--storage", "fp4"), "storage must be one of")


@STORED
def test_the_values_are_what_compress_found(storage: str, small: dict[str, Path]) -> None:
    tensors = load_file(small[storage] / "model.safetensors")
    factors = {name: t for name, t in tensors.items() if name.endswith((".u", ".v"))}
    assert factors
    for name, factor in factors.items():
        assert str(factor.dtype) == f"torch.{DTYPES[storage]}"
        scale = tensors[f"{name}_scale"]
        assert torch.equal(scale, scale.bfloat16().float())
        assert scale.shape == (factor.shape[1],)
