"""`neuronmm demo`: what it prints of the shipped model, and what it leaves behind."""

from pathlib import Path

import pytest
from outcomes import refused, shorten_held_out
from transformers import AutoConfig

from neuronmm_ops import demo
from neuronmm_ops.cli import parser
from neuronmm_ops.eval import encode_documents
from neuronmm_ops.hf import load_tokenizer, read_text


@pytest.mark.slow
def test_dense_stands_beside_low_rank_and_its_rivals(run, tmp_path, monkeypatch, capsys):
    shorten_held_out(tmp_path / "texts", monkeypatch)
    out = tmp_path / "out"
    outcome = run("demo", "--quick", "--json", "-o", out)
    document = outcome.document()
    assert "warning" not in outcome.err
    rows = {row["model"]: row for row in document["rows"]}
    low_rank = ("low rank", "low rank int8", "plain SVD")
    narrower = ("narrower", "narrower int8")
    assert tuple(rows) == ("dense", "dense int8", *low_rank, *narrower)
    ppl = {name: row["ppl_token"] for name, row in rows.items()}
    size = {name: row["bytes"] for name, row in rows.items()}
    assert ppl["dense"] < ppl["low rank"] < ppl["plain SVD"]
    assert ppl["dense int8"] == pytest.approx(ppl["dense"], rel=0.01)
    assert size["low rank int8"] < size["dense int8"] < size["low rank"] < size["dense"]
    assert size["narrower int8"] < size["low rank int8"]
    assert rows["narrower"]["effective_ratio"] > 0.4
    assert ppl["narrower"] < ppl["low rank"]
    assert rows["low rank"]["effective_ratio"] == pytest.approx(0.4, abs=0.03)
    assert 0 < document["modelled"]["op_ms"] < document["modelled"]["dense_ms"]
    ends = document["modelled"]["speedup"]
    assert ends["low"] <= ends["middle"] <= ends["high"]
    assert document["timed"]["threads"] == 1

    names = {"calibration.txt", "held_out.txt", "dense"}
    made = {f"{name.replace(' ', '-')}-0.4" for name in low_rank}
    assert {path.name for path in out.iterdir()} == names | made
    compared = run("inspect", out / "low-rank-0.4", "--json").document()
    assert compared["bytes"] == size["low rank"]
    refused(run("demo", "-o", out), "exists; choose another")

    parser().parse_args(["demo"]).show(document)
    table = capsys.readouterr().out
    for words in (
        "low rank int8",
        "measured here",
        "half of the rounds",
        "modelled on one trn2 core, never run",
    ):
        assert words in table


def test_what_ships_is_what_the_script_trains(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "demo")
    import shipped

    config = AutoConfig.from_pretrained(demo.MODEL)
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"):
        assert getattr(config, name) == getattr(shipped.SHAPE, name)
    held_out, calibration = map(read_text, (demo.HELD_OUT, demo.CALIBRATION))
    assert len(held_out) == shipped.HELD_OUT_CHARS
    paragraphs = [each for each in held_out.split("\n\n") if len(each) > 200]
    assert not [each for each in paragraphs if each in calibration]
    tokens = encode_documents(load_tokenizer(demo.MODEL), [calibration])
    assert len(tokens) > 10 * config.intermediate_size
