"""Progress of long work: lines where nobody watches a terminal, bars where somebody does."""

import itertools

import pytest

from neuronmm_ops import progress
from neuronmm_ops.progress import progress_bars


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(
    ("updates", "lines"),
    [
        pytest.param(
            [("train", range(1, 6), 5, "loss {}")],
            ["train 3/5, loss 7, 6 s, 4 s left", "train 5/5, loss 5, 10 s"],
            id="a line every few seconds",
        ),
        pytest.param(
            [("calibrate", range(1, 5), 4), ("factorize", range(1, 5), 4)],
            [
                *("calibrate 3/4, 6 s, 2 s left", "calibrate 4/4, 8 s"),
                *("factorize 3/4, 6 s, 2 s left", "factorize 4/4, 8 s"),
            ],
            id="each stage has its own time",
        ),
        pytest.param(
            [("measure", range(1, 4), 6), ("recover", range(1, 7), 6), ("measure", range(4, 7), 6)],
            [
                *("measure 3/6, 6 s, 6 s left", "recover 3/6, 6 s, 6 s left"),
                *("recover 6/6, 12 s", "measure 6/6, 12 s"),
            ],
            id="a stage goes on after another",
        ),
        pytest.param(
            [("calibrate", range(1, 4), 4)] * 2,
            ["calibrate 3/4, 6 s, 2 s left"] * 2,
            id="a stage whose units fall begins anew",
        ),
        pytest.param(
            [("recover", range(301, 304), 600)],
            ["recover 303/600, 6 s, 594 s left"],
            id="units of an earlier run are not of this one's pace",
        ),
        pytest.param(
            [("load", range(2), 1), ("save", range(2), 1)],
            ["save 0/1, 0 s", "save 1/1, 2 s"],
            id="what comes before a stage's first unit is not its time",
        ),
    ],
)
def test_without_a_terminal_lines(updates, lines, capsys, monkeypatch):
    """Two seconds pass whenever the time is asked for."""
    clock = itertools.count(step=2.0)
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    with progress_bars() as update:
        for stage, units, total, *note in updates:
            for done in units:
                update(stage, done, total, *[words.format(10 - done) for words in note])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == lines


def test_short_work_prints_nothing(capsys):
    with progress_bars() as update:
        update("evaluate", 1, 1)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_a_bar(terminal, capsys):
    with progress_bars() as update:
        update("model [0]", 1, 2, "loss 3")
    out, err = capsys.readouterr()
    assert out == ""
    assert all(text in err for text in ("model [0]", "1/2", "loss 3"))


def test_a_bar_whose_units_fall_begins_anew(terminal, capsys):
    with progress_bars() as update:
        update("calibrate", 4, 4)
        update("calibrate", 1, 4, "second pass")
    last = capsys.readouterr().err.split("calibrate")[-1]
    assert "1/4" in last
    assert "-:--:--" in last  # not the 0:00:00 of what is finished
