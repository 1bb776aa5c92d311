"""`python benchmarks drafts`: what a draft may win."""

import json

import pytest

from benchmarks import drafts


def test_fewer_layers_and_more_acceptance_win_more(run, monkeypatch):
    monkeypatch.setattr(drafts, "CASES", (("Llama-3.2-1B", 1),))
    monkeypatch.setattr(drafts, "AHEAD", (1,))
    rows = json.loads(run("drafts", "--json").out)
    assert [(row["model"], row["layers"]) for row in rows] == [
        ("Llama-3.2-1B", 16),
        ("Llama-3.2-1B", 4),
    ]
    assert rows[1]["draft_ms"] < rows[0]["draft_ms"] < rows[0]["model_ms"]
    wins = [[float(row[f"{a:g}"].split("x")[0]) for a in drafts.ACCEPTANCES] for row in rows]
    assert all(each == sorted(each) for each in wins)
    assert all(few > many for many, few in zip(*wins, strict=True))
    a, spent = 0.9, rows[1]["draft_ms"] + rows[1]["model_ms"]
    assert wins[1][-1] == pytest.approx((1 + a) * rows[1]["model_ms"] / spent, rel=0.05)
