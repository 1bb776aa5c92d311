"""`neuronmm plan`: a model's plans, and one line for every mistake."""

import json
import re

import pytest

from neuronmm_ops.cli import main
from neuronmm_ops.plan import plan_problem

FIELDS = {
    *("projection", "M", "K", "r", "N", "target", "form", "blocks", "time_ms", "dense_ms"),
    *("hbm_bytes", "instructions", "launches", "bound", "worth_it"),
    *(
        "weight_dtype",
        "compute",
        "time_low_ms",
        "time_high_ms",
        "regret",
        "speedup_low",
        "speedup_high",
    ),
}
CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}


def test_a_search_that_takes_seconds_is_told_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("neuronmm_ops.cli.console.SECONDS_BETWEEN_LINES", 0.0)
    plan_problem.cache_clear()
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    for told in (1, 0):
        assert main(["plan", "--model", str(config), "--tokens", "1"]) == 0
        assert capsys.readouterr().err.count("searching plans of new shapes") == told


@pytest.mark.parametrize("model", ["Llama-3.2-3B", "meta-llama/Llama-3.2-3B"])
def test_rows_of_a_named_model(capsys, model):
    arguments = ["--ratio", "0.2", "--tokens", "1,512", "--target", "trn1", "--json"]
    assert main(["plan", "--model", model, *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(set(row) == FIELDS for row in rows)
    assert {row["M"] for row in rows} == {1, 512}
    up = {row["M"]: row for row in rows if row["projection"] == "up_proj"}
    assert (up[1]["K"], up[1]["r"], up[1]["N"]) == (3072, 1792, 8192)
    assert (up[1]["form"], up[512]["form"]) == ("decode", "prefill")
    assert up[1]["worth_it"]
    assert up[1]["time_ms"] < up[1]["dense_ms"]
    assert 1 < up[1]["speedup_low"] <= up[1]["speedup_high"]
    assert up[1]["time_low_ms"] <= up[1]["time_ms"] <= up[1]["time_high_ms"]
    assert 0 <= up[1]["regret"] < 0.1
    mlp = next(row for row in rows if row["projection"] == "mlp" and row["M"] == 512)
    assert mlp["time_ms"] < mlp["dense_ms"]


def test_attention_in_one_launch(capsys):
    arguments = ["--tokens", "1", "--target", "trn2", "--lnc", "2", "--storage", "int8", "--json"]
    assert main(["plan", "--model", "Llama-3.2-1B", *arguments]) == 0
    rows = {row["projection"]: row for row in json.loads(capsys.readouterr().out)}
    qkv = rows["qkv"]
    assert (qkv["K"], qkv["r"], qkv["N"]) == (2048, 768, 3072)
    assert qkv["weight_dtype"] == "int8"
    alone = sum(rows[name]["time_ms"] for name in ("q_proj", "k_proj", "v_proj"))
    assert qkv["time_ms"] < alone
    assert qkv["dense_ms"] < sum(rows[name]["dense_ms"] for name in ("q_proj", "k_proj", "v_proj"))


def test_the_page_says_where_low_rank_does_not_pay(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert main(["plan", "--model", str(tmp_path), "--tokens", "1", "300", "--target", "trn1"]) == 0
    page = capsys.readouterr().out
    assert "Modelled times on trn1" in page
    assert re.search(r"The longest plan has [\d,]+ instructions\.", page)
    assert "down_proj" in page
    assert "Low rank does not pay at M = 1:" in page
    assert main(["plan", "--model", str(path), "--tokens", "1", "--ratio", "0.9", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["K"] for row in rows} == {256, 512}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt-7"], "model must be a directory"),
        (["--model", "Qwen3-8B", "--ratio", "1.5"], "--ratio must be between 0 and 1"),
        (["--model", "Qwen3-8B", "--tokens", "1,x"], "--tokens must be numbers of at least 1"),
        (["--model", "Qwen3-8B", "--target", "trn9"], "target must be one of trn1"),
        (
            ["--model", "Qwen3-8B", "--target", "trn1", "--lnc", "2"],
            "lnc must be 1, or 2 on trn2 and trn3",
        ),
        (["--model", "Qwen3-8B", "--dtype", "int8"], "dtype must be one of bfloat16"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must hold one JSON object"),
        (
            json.dumps(CONFIG | {"hidden_size": -1}),
            "hidden_size must be an integer from 1 to",
        ),
        (
            json.dumps(CONFIG | {"vocab_size": "9"}),
            "vocab_size must be an integer from 1 to",
        ),
        (json.dumps(CONFIG | {"num_attention_heads": True}), "num_attention_heads must be an int"),
    ],
)
def test_bad_configs_are_one_line(text, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    assert main(["plan", "--model", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.slow
def test_launches_of_a_split_plan_are_counted(capsys, tmp_path):
    small = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 4096}
    small |= {"num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(small))
    arguments = ["plan", "--model", str(tmp_path), "--tokens", str(2**20)]
    assert main([*arguments, "--json"]) == 0
    rows = {row["projection"]: row for row in json.loads(capsys.readouterr().out)}
    mlp = rows["mlp"]
    assert mlp["launches"] > 1
    assert 1 < mlp["instructions"] / 500_000 <= mlp["launches"]
    assert rows["k_proj"]["launches"] == 1
    assert main(arguments) == 0
    words = f"{mlp['instructions']:,} instructions, in {mlp['launches']} launches."
    assert words in capsys.readouterr().out


def test_shards_of_a_rank(capsys):
    options = ["--ratio", "0.2", "--tokens", "1", "--target", "trn2", "--tp", "4"]
    assert main(["plan", "--model", "Llama-3.2-1B", *options, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    found = {(row["projection"], row["divide"]): row for row in rows}
    assert len(found) == len(rows) == 2 * 7
    assert found["up_proj", "one"]["shards"] == [[2048, 1280], [1280, 2048]]
    assert found["up_proj", "both"]["shards"] == [[2048, 320], [1280, 2048]]
    assert found["down_proj", "one"]["shards"] == [[2048, 1280], [1280, 2048]]
    assert found["down_proj", "both"]["shards"] == [[2048, 1280], [1280, 512]]
    sent = {key: [(c["kind"], c["N"]) for c in row["collectives"]] for key, row in found.items()}
    assert sent["up_proj", "one"] == []
    assert sent["up_proj", "both"] == [("all_gather", 1280)]
    assert sent["down_proj", "one"] == [("all_reduce", 1280)]
    assert sent["down_proj", "both"] == [("all_reduce", 1280), ("all_gather", 2048)]
    for row in rows:
        assert row["time_ms"] == pytest.approx(row["launches_ms"] + row["collectives_ms"])
        assert row["time_low_ms"] <= row["time_ms"] <= row["time_high_ms"]
        assert len(row["blocks"]) == (1 if not row["collectives"] else 2)
        speedup = row["dense_ms"] / row["time_ms"]
        assert row["speedup_low"] <= speedup * (1 + 1e-9)
        assert speedup <= row["speedup_high"] * (1 + 1e-9)
    assert main(["plan", "--model", "Llama-3.2-1B", *options]) == 0
    shown = capsys.readouterr().out
    assert {"2048x320", "1280x2048"} <= set(shown.split())
    assert "one of 4 ranks on trn2" in shown


@pytest.mark.parametrize("tp", ["0", "3", "-8"])
def test_ranks_that_do_not_divide(tp, capsys):
    assert main(["plan", "--model", "Llama-3.2-1B", "--tp", tp]) == 2
    error = capsys.readouterr().err
    assert f"got {tp}, use one of 1, 2, 4, 8, 16, 32" in error
    assert len(error.strip().splitlines()) == 1
