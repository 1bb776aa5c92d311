"""`neuronmm compare`: the document, the table, the plot, and one line for every mistake."""

import json
import shutil
from pathlib import Path

import pytest
from outcomes import Run, refused


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, dense: Path) -> Path:
    from neuronmm_ops import SVDConfig, hf

    out = tmp_path_factory.mktemp("small") / "small"
    hf.compress(dense, SVDConfig(ratio=0.3, block=8, method="plain"), None, out)
    return out


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronmm_ops.measure.compare.DECODE_TOKENS", 2)


def test_document_and_plot(run: Run, dense: Path, small: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("Lorem ipsum dolor sit amet. " * 9)
    texts = ("--text", text, "--text", tmp_path / "other.txt")
    plot = ("--plot", tmp_path / "out.png")
    outcome = run("compare", small, *texts, *plot, "--seqlen", "64", "--json")
    assert outcome.code == 0, outcome.err
    rows = json.loads(outcome.out)
    assert [row["dir"] for row in rows] == [str(dense), str(small)]
    assert list(rows[1]["ppl_token"]) == [str(text), str(tmp_path / "other.txt")]
    assert rows[1]["seqlen"] == 64
    assert (tmp_path / "out.png").read_bytes()[1:4] == b"PNG"


def test_table(
    run: Run, dense: Path, small: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = run("compare", small, "--text", text, "--dense", dense, "--dtype", "float32")
    assert outcome.code == 0, outcome.err
    for word in (
        "dense",
        "small",
        "text",
        "(+0.0000)",
        "perplexity (excess)",
        "prefill/s",
        "gamma",
    ):
        assert word in outcome.out
    assert "…" not in outcome.out  # nothing is cut at 80 columns
    assert "computed in float32 on cpu, threads: 1; neuronmm-ops" in outcome.out
    assert "paper defines it in words only" in outcome.out


def test_bad_arguments(run: Run, dense: Path, small: Path, text: Path, tmp_path: Path) -> None:
    named = ("--text", text)
    other = shutil.copytree(small, tmp_path / "small")
    same = shutil.copy(text, tmp_path / "text.txt")
    (tmp_path / "short").write_text("a")
    refused(run("compare", small), "--text")
    refused(run("compare", *named), "DIR")
    refused(run("compare", small, other, *named), "names that differ, got small 2 times")
    refused(run("compare", small, *named, "--text", same), "differ, got text.txt 2 times")
    refused(run("compare", dense, *named), "is not a compressed checkpoint")
    refused(run("compare", small, "--text", tmp_path / "short"), "at least 2 tokens, got 1")
    refused(run("compare", small, *named, "--dense", tmp_path / "x"), "is no directory")
    refused(run("compare", small, *named, "--seqlen", "1"), "between 2 and the model's limit")
    refused(run("compare", small, *named, "--device", "toaster"), "device must be cpu")
    refused(run("compare", small, *named, "--plot", tmp_path / "a.docx"), "a plot ends in one of")
    refused(run("compare", small, *named, "--plot", tmp_path / "no" / "a.png"), "is no directory")


def test_a_plot_that_cannot_be_written_is_seen_before_the_work(
    run: Run, small: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronmm_ops.measure.compare.run", pytest.fail)
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    refused(run("compare", small, "--text", text, "--plot", tmp_path / "a.png"), "no permission in")


def test_a_damaged_record_is_one_line(run: Run, small: Path, text: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(small, tmp_path / "copy"))
    (copy / "compression.json").write_text("[]")
    refused(run("compare", copy, "--text", text), "copy/compression.json", "must be an object")


def test_an_interrupt_is_one_line(
    run: Run, small: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("neuronmm_ops.measure.compare.paired_speed", interrupt)
    outcome = run("compare", small, "--text", text, "--plot", tmp_path / "a.png")
    assert (outcome.code, outcome.out) == (130, "")
    assert outcome.err.splitlines()[-1] == "neuronmm: interrupted"
    assert list(tmp_path.iterdir()) == []
