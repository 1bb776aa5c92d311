"""`neuronmm plan`: a model's plans, and one line for every mistake in its config.json."""

import json
import re

import pytest
from outcomes import refused
from splits import split_plans
from tiny_model import CONFIG, write_tiny

from neuronmm_ops.plan import plan_problem

FIELDS = {
    *("projection", "M", "K", "r", "N", "target", "form", "blocks", "time_ms", "dense_ms"),
    *("hbm_bytes", "instructions", "launches", "bound", "worth_it", "weight_dtype", "compute"),
    *("time_low_ms", "time_high_ms", "regret", "speedup_low", "speedup_high"),
}


@pytest.fixture
def plan(run):
    return lambda model, *options: run("plan", "--model", model, *options)


def test_a_search_that_takes_seconds_is_told_once(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("neuronmm_ops.cli.console.SECONDS_BETWEEN_LINES", 0.0)
    plan_problem.cache_clear()
    model = write_tiny(tmp_path)
    for told in (1, 0):
        outcome = plan(model, "--tokens", "1")
        assert (outcome.code, outcome.err.count("searching plans of new shapes")) == (0, told)


@pytest.mark.parametrize("model", ["Llama-3.2-3B", "meta-llama/Llama-3.2-3B"])
def test_rows_of_a_named_model(plan, model):
    options = ("--ratio", "0.2", "--tokens", "1,4096", "--target", "trn1", "--json")
    rows = plan(model, *options).document()
    assert all(set(row) == FIELDS for row in rows)
    assert {row["M"] for row in rows} == {1, 4096}
    up = {row["M"]: row for row in rows if row["projection"] == "up_proj"}
    assert (up[1]["K"], up[1]["r"], up[1]["N"]) == (3072, 1792, 8192)
    assert (up[1]["form"], up[4096]["form"]) == ("decode", "prefill")
    assert up[1]["worth_it"]
    assert up[1]["time_ms"] < up[1]["dense_ms"]
    assert 1 < up[1]["speedup_low"] <= up[1]["speedup_high"]
    assert up[1]["time_low_ms"] <= up[1]["time_ms"] <= up[1]["time_high_ms"]
    assert 0 <= up[1]["regret"] < 0.1
    mlp = next(row for row in rows if row["projection"] == "mlp" and row["M"] == 4096)
    assert mlp["time_ms"] < mlp["dense_ms"]


def test_a_time_is_a_range_where_dma_models_differ(plan):
    arguments = ("Llama-3.2-1B", "--tokens", "1,4096", "--target", "trn2")
    rows = {(r["projection"], r["M"]): r for r in plan(*arguments, "--json").document()}
    key, up = rows["k_proj", 4096], rows["up_proj", 1]
    low, high = key["time_low_ms"], key["time_high_ms"]
    assert high > 1.05 * low
    assert up["time_low_ms"] == up["time_high_ms"]
    page = plan(*arguments).page()
    assert f" {low:.4g}-{high:.4g} " in page
    assert f" {up['time_ms']:.4g} " in page


def test_attention_in_one_launch(plan, tmp_path):
    options = ("--tokens", "1", "--target", "trn2", "--lnc", "2", "--storage", "int8", "--json")
    config = json.dumps(CONFIG | {"hidden_size": 512, "head_dim": 128})
    (tmp_path / "config.json").write_text(config)
    document = plan(tmp_path, "--ratio", "0.5", *options).document()
    rows = {row["projection"]: row for row in document}
    qkv = rows["qkv"]
    assert (qkv["K"], qkv["r"], qkv["N"]) == (512, 128, 1024)
    assert qkv["weight_dtype"] == "int8"
    for time in ("time_ms", "dense_ms"):
        assert qkv[time] < sum(rows[name][time] for name in ("q_proj", "k_proj", "v_proj"))


def test_the_page_says_where_low_rank_does_not_pay(plan, tmp_path):
    model = write_tiny(tmp_path)
    page = plan(model, "--tokens", "1", "300", "--target", "trn1").page()
    assert "Modelled times on trn1" in page
    assert re.search(r"The longest plan has [\d,]+ instructions\.", page)
    assert "down_proj" in page
    assert "Low rank does not pay at M = 1:" in page
    file = tmp_path / "config.json"
    rows = plan(file, "--tokens", "1", "--ratio", "0.9", "--json").document()
    assert {row["K"] for row in rows} == {256, 512}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "must hold one JSON object"),
        ({"hidden_size": -1}, "hidden_size must be an integer from 1 to"),
        ({"vocab_size": "9"}, "vocab_size must be an integer from 1 to"),
        ({"num_attention_heads": True}, "num_attention_heads must be an int"),
    ],
)
def test_bad_configs_are_one_line(plan, changes, words, tmp_path):
    is_text = isinstance(changes, str)
    (tmp_path / "config.json").write_text(changes if is_text else json.dumps(CONFIG | changes))
    refused(plan(tmp_path), words)


def test_launches_of_a_split_plan_are_counted(plan, tmp_path, monkeypatch):
    split_plans(monkeypatch, 128)
    arguments = (write_tiny(tmp_path), "--tokens", "1,300")
    document = plan(*arguments, "--json").document()
    rows = {(row["projection"], row["M"]): row for row in document}
    mlp = rows["mlp", 300]
    assert (mlp["launches"], rows["mlp", 1]["launches"]) == (3, 1)
    words = f"{mlp['instructions']:,} instructions, in {mlp['launches']} launches."
    assert words in plan(*arguments).page()


def test_shards_of_a_rank(plan):
    arguments = ("Llama-3.2-1B", "--ratio", "0.2", "--tokens", "1", "--target", "trn2", "--tp", "4")
    rows = plan(*arguments, "--json").document()
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
    shown = plan(*arguments).page()
    assert {"2048x320", "1280x2048"} <= set(shown.split())
    assert "one of 4 ranks on trn2" in shown


def test_no_more_ranks_than_links_connect(plan):
    """An internal error before."""
    refused(
        plan("Llama-3.1-70B", "--tp", "64", "--target", "trn1", "--tokens", "1"),
        "tp must be at most 32, the ranks of lnc 1 that NeuronLink connects on trn1; got 64",
    )
