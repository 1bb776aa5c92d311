"""`python benchmarks`: options, tables and mistakes."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from outcomes import TEXT, Run, refused

from benchmarks import methods, published, storages


def test_overhead_of_xla_needs_torch_xla(run):
    refused(run("overhead", "--xla"), "torch_xla is not installed", "neuronmm-ops[xla]")


@pytest.fixture
def corpus(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """Arguments of a measurement on two texts, of a few short samples."""
    texts = [tmp_path / name for name in ("near.txt", "far.txt")]
    for path in texts:
        path.write_text(TEXT[:1500])
    for module in (methods, storages):
        monkeypatch.setattr(module, "run", partial(module.run, samples=16, seqlen=64))
    return dense, "--text", texts[0], "--text", texts[1], "--calibration", texts[0]


def measured(run: Run, *arguments: object) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """The rows of a command, and the words of its table's lines."""
    outcome = run(*arguments, "--json")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out), [line.split() for line in run(*arguments).out.splitlines()]


@pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
def test_methods(run, corpus, monkeypatch):
    few = partial(methods.candidates_at, (0.4, 0.6), candidates=methods.CANDIDATES[:2])
    monkeypatch.setattr(methods, "candidates_at", few)
    rows, shown = measured(run, "methods", *corpus, "--dtype", "bfloat16")
    methods_of_a_ratio = ["whiten", "whiten", "kfac-drift", "kfac-drift"]
    assert [row["method"] for row in rows] == ["dense", "dense", *methods_of_a_ratio * 2]
    assert {row["text"] for row in rows} == {str(corpus[2]), str(corpus[4])}
    assert {row["compute_dtype"] for row in rows} == {"bfloat16"}
    assert all(row["ppl_token"] > 1 for row in rows)

    assert ["ratio", "effective", "method", "near", "far"] in shown
    (default,) = (line for line in shown if line[:1] == ["0.6"] and "kfac-drift" in line)
    near, far = (row for row in rows if (row["ratio"], row["method"]) == (0.6, "kfac-drift"))
    assert any("whiten uniform" in " ".join(line) for line in shown)
    for row, cells in ((near, default[3:5]), (far, default[5:])):
        quotient = row["excess_quotient"]
        expected = [f"{row['excess_log_ppl']:.4f}", *([f"{quotient:.2f}x"] if quotient else [])]
        assert cells == expected


@pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
def test_storages(run, corpus):
    rows, shown = measured(run, "storages", *corpus, "--ratio", "0.4", "--block", "8")
    labels = [(row["storage"], row["equal"], row["rounding"]) for row in rows[::2]]
    assert labels == [
        *((storage, None, "feedback") for storage in storages.STORAGES),
        ("bf16", "ranks", "native"),
        *((storage, "ranks", how) for storage in storages.STORAGES for how in storages.ROUNDINGS),
        *((storage, "bytes", "feedback") for storage in storages.STORAGES),
    ]
    assert {row["text"] for row in rows} == {str(corpus[2]), str(corpus[4])}
    by_label = dict(zip(labels, rows[::2], strict=True))
    native, ours = by_label["bf16", "ranks", "native"], by_label["int8", "ranks", "feedback"]
    dense = by_label["int8", None, "feedback"]
    assert (dense["ratio"], dense["excess_quotient"], dense["kl_quotient"]) == (0, None, None)
    assert native["bytes"] / 2 < dense["bytes"] < 0.53 * dense["dense_bytes"]
    assert 0 < dense["kl"] < ours["kl"]
    assert native["kl_quotient"] == 1
    assert ours["bytes"] < native["bytes"] < native["dense_bytes"]
    assert by_label["fp8", "bytes", "feedback"]["bytes"] <= 0.6 * native["dense_bytes"]
    assert ours["kl"] < by_label["int8", "ranks", "nearest"]["kl"]
    head = ["storage", "equal", "rounding", "bytes", "excess", "quotient", "±", "KL", "quotient"]
    assert shown.count(head) == 4
    for name in ("near", "far"):
        assert ["ratio", "0,", name] in shown
        assert ["ratio", "0.4,", name] in shown
    assert sum(line[1:2] in (["ranks"], ["bytes"]) for line in shown) == 2 * 13


def test_the_table_of_published_figures(run, monkeypatch):
    nothing = dict.fromkeys(published.FIELDS)
    time = {"published_ms": 2.0, "modelled_ms": 2.5, "error": 0.25}
    time |= {"errors": {"transfers": 0.25, "rows": 0.5}}
    share = {"engine": "DMA", "published_share": 0.5, "modelled_share": 0.4}
    share |= {"error": -0.2, "errors": {"transfers": -0.2, "rows": -0.8}}
    group = {"group": "predicted"}
    rows = [
        {**nothing, **group, "name": "a", "target": "trn1", **time},
        {**nothing, "group": "fitted", "name": "b", "target": "trn2", **share},
        {**nothing, **group, "name": "c", "target": "trn2", "refused": "SBUF is full"},
        {
            **nothing,
            **group,
            "name": "d",
            "target": "trn1",
            "published_ms": 24.5,
            "modelled_ms": 20.0,
        },
    ]
    monkeypatch.setattr(published, "run", lambda progress, workers: rows)
    out = run("published").out
    shown = [line.split() for line in out.splitlines()]
    assert ["a", "predicted", "trn1", "2", "2.5", "+25.0%", "+50.0%"] in shown
    assert ["b", "fitted", "trn2", "50.0%", "40.0%", "-20.0%", "-80.0%"] in shown
    assert ["d", "predicted", "trn1", "24.5", "20"] in shown
    assert "c: refused, SBUF is full" in " ".join(re.sub("predicted|trn2", "", out).split())
    assert ["predicted", "transfers", "1", "1", "25.0%", "+25%"] in shown
    assert ["fitted", "rows", "1", "1", "80.0%", "-80%"] in shown


def test_mistakes(run, dense, text, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("a b")
    of_text = ("--text", text)
    common = (((), "--text"), ((*of_text, "--block", "12"), "multiple of 8, got 12"))
    for command, mistakes in {
        "storages": (
            (("--text", tmp_path / "empty.txt"), "empty.txt"),
            ((*of_text, "--ratio", "1.5"), "ratio must be in (0, 1)"),
        ),
        "methods": (
            ((*of_text, "--text", tmp_path / "other" / text.name), "names that differ"),
            ((*of_text, "--text", tmp_path / "absent.txt"), "cannot read text"),
        ),
    }.items():
        for arguments, words in (*common, *mistakes):
            refused(run(command, dense, "--calibration", text, *arguments), words)
    short = ("methods", dense, "--calibration", tmp_path / "short.txt", "--text", text)
    refused(run(*short), "at least one block of 128 tokens")
