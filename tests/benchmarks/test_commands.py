"""`python benchmarks`: options, tables and mistakes."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
from outcomes import TEXT, Run, refused

from benchmarks import methods, published, storages


def test_overhead_of_xla_needs_torch_xla(run: Run) -> None:
    refused(run("overhead", "--xla"), "torch_xla is not installed", "neuronmm-ops[xla]")


@pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
def test_methods(run: Run, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [tmp_path / name for name in ("near.txt", "far.txt")]
    for path in texts:
        path.write_text(TEXT[:1500])
    whole = methods.run
    few = partial(methods.candidates_at, (0.4, 0.6), candidates=methods.CANDIDATES[:2])
    monkeypatch.setattr(methods, "candidates_at", few)
    monkeypatch.setattr(
        methods, "run", lambda *a, **options: whole(*a, samples=16, seqlen=64, **options)
    )
    arguments = ("methods", dense, "--text", texts[0], "--text", texts[1])
    arguments = (*arguments, "--calibration", texts[0], "--dtype", "bfloat16")
    outcome = run(*arguments, "--json")
    assert outcome.code == 0, outcome.err
    rows = json.loads(outcome.out)
    methods_of_a_ratio = ["whiten", "whiten", "kfac", "kfac"]
    assert [row["method"] for row in rows] == ["dense", "dense", *methods_of_a_ratio * 2]
    assert {row["text"] for row in rows} == {str(path) for path in texts}
    assert {row["compute_dtype"] for row in rows} == {"bfloat16"}
    assert all(row["ppl_token"] > 1 for row in rows)

    shown = [line.split() for line in run(*arguments).out.splitlines()]
    assert ["ratio", "effective", "method", "near", "far"] in shown
    (default,) = (line for line in shown if line[:1] == ["0.6"] and "kfac" in line)
    near, far = (row for row in rows if (row["ratio"], row["method"]) == (0.6, "kfac"))
    assert any("whiten uniform" in " ".join(line) for line in shown)
    for row, cells in ((near, default[3:5]), (far, default[5:])):
        quotient = row["excess_quotient"]
        expected = [f"{row['excess_log_ppl']:.4f}", *([f"{quotient:.2f}x"] if quotient else [])]
        assert cells == expected


@pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
def test_storages(run: Run, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [tmp_path / name for name in ("near.txt", "far.txt")]
    for path in texts:
        path.write_text(TEXT[:1500])
    whole = storages.run
    monkeypatch.setattr(
        storages, "run", lambda *a, **options: whole(*a, samples=16, seqlen=64, **options)
    )
    arguments = ("storages", dense, "--text", texts[0], "--text", texts[1])
    arguments = (*arguments, "--calibration", texts[0], "--ratio", "0.4", "--block", "8")
    outcome = run(*arguments, "--json")
    assert outcome.code == 0, outcome.err
    rows = json.loads(outcome.out)
    labels = [(row["storage"], row["equal"], row["rounding"]) for row in rows[::2]]
    assert labels == [
        ("bf16", "ranks", "native"),
        *((storage, "ranks", how) for storage in ("fp8", "int8") for how in storages.ROUNDINGS),
        *((storage, "bytes", "feedback") for storage in ("fp8", "int8")),
    ]
    assert {row["text"] for row in rows} == {str(path) for path in texts}
    by_label = dict(zip(labels, rows[::2], strict=True))
    native, ours = by_label[labels[0]], by_label["int8", "ranks", "feedback"]
    assert native["kl_quotient"] == 1
    assert ours["bytes"] < native["bytes"] < native["dense_bytes"]
    assert by_label["fp8", "bytes", "feedback"]["bytes"] <= 0.6 * native["dense_bytes"]
    assert ours["kl"] < by_label["int8", "ranks", "nearest"]["kl"]
    shown = [line.split() for line in run(*arguments).out.splitlines()]
    labels = ["storage", "equal", "rounding", "bytes"]
    assert shown.count([*labels, "excess", "quotient", "±", "KL"]) == 2
    for name in ("near", "far"):
        assert ["ratio", "0.4,", name] in shown
    assert sum(line[1:2] in (["ranks"], ["bytes"]) for line in shown) == 2 * 9


def test_mistakes_of_storages(run: Run, dense: Path, text: Path, tmp_path: Path) -> None:
    arguments = ("storages", dense, "--calibration", text)
    refused(run(*arguments), "--text")
    (tmp_path / "empty.txt").write_text("")
    refused(run(*arguments, "--text", tmp_path / "empty.txt"), "empty.txt")
    refused(run(*arguments, "--text", text, "--block", "12"), "multiple of 8, got 12")
    refused(run(*arguments, "--text", text, "--ratio", "1.5"), "ratio must be in (0, 1)")


def test_the_table_of_published_figures(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_mistakes_of_methods(run: Run, dense: Path, text: Path, tmp_path: Path) -> None:
    arguments = ("methods", dense, "--calibration", text, "--text", text)
    refused(run(*arguments, "--text", tmp_path / "other" / text.name), "names that differ")
    refused(run(*arguments, "--text", tmp_path / "absent.txt"), "cannot read text")
    refused(run("methods", dense, "--calibration", text), "--text")
    (tmp_path / "short.txt").write_text("a b")
    short = ("methods", dense, "--calibration", tmp_path / "short.txt", "--text", text)
    refused(run(*short), "at least one block of 128 tokens")
    refused(run(*arguments, "--block", "12"), "multiple of 8, got 12")
