"""Commands on checkpoints whose factors are in one byte."""

import pytest
from outcomes import refused

from neuronmm_ops import SVDConfig, hf
from neuronmm_ops.compress.record import compressed_layers

DTYPES = {"fp8": "float8_e4m3fn", "int8": "int8"}
STORED = pytest.mark.parametrize("storage", DTYPES)
DTYPE = ("--dtype", "float32")


@pytest.fixture(scope="module")
def stored(dense, text, tmp_path_factory):
    """A checkpoint of each storage."""
    directory = tmp_path_factory.mktemp("stored")
    for storage in DTYPES:
        config = SVDConfig(ratio=0.3, block=8, storage=storage)
        hf.compress(dense, config, text, directory / storage, samples=32, seqlen=64)
    return directory


@STORED
def test_inspect(storage, run, small, stored):
    document = run("inspect", stored / storage, "--json").document()
    for layer in document["layers"]:
        K, N, r = layer["K"], layer["N"], layer["r"]
        assert layer["storage"] == DTYPES[storage]
        assert layer["compute"] == "x"
        assert layer["bytes"] == r * (K + N) + 4 * (r + N)
        assert layer["bits_per_weight"] == pytest.approx(8 * layer["bytes"] / (K * N))
    assert document["bytes"] == sum(layer["bytes"] for layer in document["layers"])
    assert document["config"]["storage"] == storage
    shown = run("inspect", stored / storage).page()
    assert shown.count(f" {storage} ") >= len(document["layers"])
    assert "bits: stored for each weight of the dense matrix, scales included" in shown
    assert "bits" not in run("inspect", small).page()


@STORED
def test_eval_generate_and_compare(storage, run, dense, stored, text, monkeypatch):
    monkeypatch.setattr("neuronmm_ops.measure.compare.DECODE_TOKENS", 2)
    options = ("--text", text, "--seqlen", "64", "--json", *DTYPE)
    found = run("eval", stored / storage, *options).document()["ppl_token"]
    run("generate", stored / storage, "--prompt", "The quick", *DTYPE).page()
    rows = run("compare", stored / storage, "--dense", dense, *options).document()
    assert rows[1]["ppl_token"][str(text)] == pytest.approx(found, rel=1e-3)
    assert rows[1]["bytes"] < 0.6 * rows[0]["bytes"]


def test_eval_with_rounded_activations(run, stored, text):
    options = ("--text", text, "--seqlen", "64", "--json", *DTYPE)
    found = {}
    for compute in (None, "x", "fp8"):
        option = () if compute is None else ("--compute", compute)
        document = run("eval", stored / "fp8", *options, *option).document()
        assert document["compute"] == (compute or "x")
        found[compute] = document["ppl_token"]
    assert found[None] == found["x"]
    assert found["fp8"] != found["x"]
    assert found["fp8"] == pytest.approx(found["x"], rel=0.05)
    outcome = run("eval", stored / "int8", *options, "--compute", "fp8")
    refused(outcome, "compute fp8 needs layers stored in float8_e4m3fn")


def test_a_storage_for_each_matrix(run, dense, text, tmp_path):
    """Made, inspected, verified, loaded, and made again from its record."""
    options = ("--samples", "16", "--seqlen", "64", "--block", "8", "--targets", "all-linear")
    out = tmp_path / "out"
    auto = ("--storage", "auto", "--ratio", "0.6", "--calibration", text, *options)
    run("compress", dense, "-o", out, *auto, *DTYPE).page()
    document = run("inspect", out, "--json").document()
    assert document["config"]["budget"] == "bytes"
    assert len({layer["storage"] for layer in document["layers"]}) > 1
    assert document["bytes"] <= 0.4 * document["dense_bytes"]
    run("verify", out).page()
    model = hf.load(out)
    assert {layer.storage for layer in compressed_layers(model).values()} - {None}
    again = run("compress", "--from", out / "compression.json", "-o", tmp_path / "b", "--json")
    assert again.document()["same_weights"]
    refused(run("compress", dense, "-o", tmp_path / "c", *auto, "--stream"), "cannot be streamed")
    refused(run("compress", dense, "-o", tmp_path / "c", *auto, "--ratio", "0.99"), "budget of")
