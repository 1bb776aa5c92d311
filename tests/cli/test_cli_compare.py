"""`neuronmm compare`: the document, the table and the plot."""

import shutil
from pathlib import Path

import pytest
from outcomes import interrupt, refused


@pytest.fixture
def compare(run, text, monkeypatch):
    """Compares with few tokens, on the text."""
    monkeypatch.setattr("neuronmm_ops.measure.compare.DECODE_TOKENS", 2)
    return lambda *arguments: run("compare", *arguments, "--text", text)


def test_document_and_plot(compare, dense, small, text, tmp_path):
    (tmp_path / "other.txt").write_text("Lorem ipsum dolor sit amet. " * 9)
    options = ("--text", tmp_path / "other.txt", "--plot", tmp_path / "out.png", "--seqlen", "64")
    rows = compare(small, *options, "--json").document()
    assert [row["dir"] for row in rows] == [str(dense), str(small)]
    assert list(rows[1]["ppl_token"]) == [str(tmp_path / "other.txt"), str(text)]
    assert rows[1]["seqlen"] == 64
    assert (tmp_path / "out.png").read_bytes()[1:4] == b"PNG"


def test_table(compare, dense, small, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = compare(small, "--dense", dense, "--dtype", "float32").page()
    words = ("dense", "small", "text", "(+0.0000)", "perplexity (excess)", "prefill/s", "gamma")
    notes = ("computed in float32 on cpu, threads: 1; neuronmm-ops", "defines it in words only")
    for each in (*words, *notes):
        assert each in page
    assert "…" not in page  # nothing is cut at 80 columns


def test_a_plot_that_cannot_be_written_is_seen_before_the_work(
    compare, small, tmp_path, monkeypatch
):
    monkeypatch.setattr("neuronmm_ops.measure.compare.run", pytest.fail)
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    refused(compare(small, "--plot", tmp_path / "a.png"), "no permission in")


def test_a_damaged_record_is_one_line(compare, small, tmp_path):
    copy = shutil.copytree(small, tmp_path / "copy")
    (copy / "compression.json").write_text("[]")
    refused(compare(copy), "copy/compression.json", "must be an object")


def test_an_interrupt_is_one_line(compare, small, tmp_path, monkeypatch):
    monkeypatch.setattr("neuronmm_ops.measure.compare.paired_speed", interrupt)
    compare(small, "--plot", tmp_path / "a.png").interrupted()
    assert list(tmp_path.iterdir()) == []
