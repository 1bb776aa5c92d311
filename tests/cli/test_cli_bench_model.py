"""`neuronmm bench model`: its document, its tables and mistakes in options."""

import json
import re
from pathlib import Path

import pytest
from outcomes import Run, refused

from neuroncore.cli.console import stdout

TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
}
SHORT = ("--prompt-tokens", "40", "--new-tokens", "4", "--target", "trn2")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY))
    return path


def test_json_and_table(run: Run, tiny: Path) -> None:
    options = ("bench", "model", "--model", tiny, *SHORT, "--storage", "int8")
    outcome = run(*options, "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert (document["model"], document["storage"], document["storage_dense"]) == (
        "tiny",
        "int8",
        None,
    )
    names = ["dense", "low", "rank", "dense,", "1", "byte", "publ.", "dense", "publ."]
    names += ["low", "rank"]

    table = run(*options)
    assert table.code == 0, table.err
    lines = [line.split() for line in table.out.splitlines()]
    assert "modelled" in table.out.splitlines()[0]
    assert ["Prefill", *names] in lines
    assert ["Decode", *names] in lines
    decode = [variant["phases"]["decode"] for variant in document["variants"]]
    assert ["all", *[f"{phase['time_ms']:.4g}" for phase in decode]] in lines
    assert ["launches", *[str(phase["launches"]) for phase in decode]] in lines
    dense = document["variants"][0]
    rate, weights = dense["tokens_per_s"], dense["memory"]["weight_bytes"]
    assert any(line[-2:] == [f"{rate:.4g}", f"{weights / 1e9:.3g}"] for line in lines)
    (ours,) = (line for line in table.out.splitlines() if "  low rank over dense:" in line)
    assert re.search(r"prefill [\d.]+x(?: to [\d.]+x)?, decode [\d.]+x.*, end to end ", ours)
    assert "collectives" not in table.out  # no launch of it
    assert "sampling beyond argmax" in table.out


def test_ranks_and_two_cores(run: Run, tiny: Path) -> None:
    options = ("bench", "model", "--model", tiny, *SHORT, "--tp", "2", "--lnc", "2")
    document = json.loads(run(*options, "--targets", "all-linear", "--json").out)
    assert [variant["name"] for variant in document["variants"]] == ["dense", "low_rank"]
    assert "--lnc 1 --tp 1" in document["left_out"][-1]
    assert "collectives" in run(*options).out


def test_several_numbers_of_ranks(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdout._console, "_width", 160)
    options = ("bench", "model", "--model", tiny, *SHORT, "--tp", "1,2,4")
    documents = json.loads(run(*options, "--json").out)
    assert [document["tp"] for document in documents] == [1, 2, 4]
    assert documents[1] == json.loads(run(*options[:-1], "2", "--json").out)
    shown = run(*options).out
    lines = [line.split() for line in shown.splitlines()]
    assert "tp 1, 2, 4: 1 x 40 tokens" in shown
    for document in documents:
        for variant in document["variants"][:2]:
            name = variant["name"].replace("_", " ").split()
            prefill = f"{variant['phases']['prefill']['time_ms']:.4g}"
            assert any(
                line[: 2 + len(name)] == [str(document["tp"]), *name, prefill] for line in lines
            )


def test_what_the_layouts_exchange_is_shown(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdout._console, "_width", 160)
    options = ("bench", "model", "--model", tiny, *SHORT, "--tp", "4", "--targets", "all-linear")
    document = json.loads(run(*options, "--ratio", "0.1", "--json").out)
    shown = " ".join(run(*options, "--ratio", "0.1").out.split())
    low = document["variants"][1]
    for phase, title in (("prefill", "Prefill"), ("decode", "Decode")):
        assert f"{title}, tp 4: a layer's weights in each layout (* taken)" in shown
        for row in low["phases"][phase]["layouts"]:
            names = set(row["layouts"].values())
            if names != {"dense"} and (row["taken"] or len(names) == 1):
                numbers = [row["launches_ms"] * 1e3, row["time_ms"] * 1e3]
                assert f"{numbers[0]:.4g} {numbers[1]:.4g}" in shown
    assert "gather [M, 256], sum [M, 128], gather [M, 256]" in shown
    assert "sum [M, 256], scattered sum [M, 128], sum [M, 256]" in shown
    weights = low["weight_bytes_by_layout"]
    assert f"one {weights['one'] / 1e9:.3g}, both {weights['both'] / 1e9:.3g}" in shown
    assert "With no collective under 6.16 us" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "GPT-5"), ("model must be a directory", "got 'GPT-5'")),
        (("--model", "Llama-3.1-70B", "--lnc", "2"), ("does not fit at tp 1", "greater tp")),
        (("--tp", "3"), ("tp must divide", "got 3, use one of 1, 2, 4")),
        (("--tp", "x"), ("--tp must be numbers of at least 1, such as 8,32; got 'x'",)),
        (("--tp", "2,0"), ("--tp must be numbers of at least 1",)),
        (("--tp", "2,3"), ("tp must divide", "got 3, use one of 1, 2, 4")),
        (("--new-tokens", "1"), ("new must be at least 2",)),
        (("--storage", "fp4"), ("storage must be fp8 or int8",)),
        (("--targets", "mlp", "lm_head"), ("targets must select", "'lm_head' selects none")),
        (("--target", "trn1", "--lnc", "2"), ("lnc must be 1",)),
        (("--ratio", "nan"), ("ratio must be between 0 and 1",)),
    ],
)
def test_mistakes_take_one_line(
    run: Run, tiny: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    given = options if "--model" in options else ("--model", str(tiny), *options)
    refused(run("bench", "model", *SHORT, *given), *words)
