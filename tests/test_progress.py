"""Progress of long work: lines where nobody watches a terminal, bars where somebody does."""

import itertools

import pytest

from neuronmm_ops import progress
from neuronmm_ops.progress import progress_bars


@pytest.fixture
def two_seconds_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two seconds pass whenever the time is asked for."""
    clock = itertools.count(step=2.0)
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))


@pytest.mark.usefixtures("two_seconds_a_call")
def test_without_a_terminal_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars() as update:
        for done in range(1, 6):
            update("train", done, 5, f"loss {10 - done}")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["train 3/5, loss 7, 6 s, 4 s left", "train 5/5, loss 5, 10 s"]


@pytest.mark.usefixtures("two_seconds_a_call")
def test_each_stage_has_its_own_time(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars() as update:
        for stage in ("calibrate", "factorize"):
            for done in range(1, 5):
                update(stage, done, 4)
    assert capsys.readouterr().err.splitlines() == [
        "calibrate 3/4, 6 s, 2 s left",
        "calibrate 4/4, 8 s",
        "factorize 3/4, 6 s, 2 s left",
        "factorize 4/4, 8 s",
    ]


@pytest.mark.usefixtures("two_seconds_a_call")
def test_a_stage_goes_on_after_another_with_its_own_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_bars() as update:
        for done in range(1, 4):
            update("measure", done, 6)
        for done in range(1, 7):
            update("recover", done, 6)
        for done in range(4, 7):
            update("measure", done, 6)
    assert capsys.readouterr().err.splitlines() == [
        "measure 3/6, 6 s, 6 s left",
        "recover 3/6, 6 s, 6 s left",
        "recover 6/6, 12 s",
        "measure 6/6, 12 s",
    ]


@pytest.mark.usefixtures("two_seconds_a_call")
def test_a_stage_whose_units_fall_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars() as update:
        for _ in range(2):
            for done in range(1, 4):
                update("calibrate", done, 4)
    assert capsys.readouterr().err.splitlines() == ["calibrate 3/4, 6 s, 2 s left"] * 2


@pytest.mark.usefixtures("two_seconds_a_call")
def test_units_of_an_earlier_run_are_not_of_this_one_s_pace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_bars() as update:
        for done in range(301, 304):
            update("recover", done, 600)
    assert capsys.readouterr().err.splitlines() == ["recover 303/600, 6 s, 594 s left"]


@pytest.mark.usefixtures("two_seconds_a_call")
def test_what_comes_before_a_stage_s_first_unit_is_not_its_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_bars() as update:
        update("load", 0, 1)
        update("load", 1, 1)
        update("save", 0, 1)
        update("save", 1, 1)
    assert capsys.readouterr().err.splitlines() == ["save 0/1, 0 s", "save 1/1, 2 s"]


def test_short_work_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars() as update:
        update("evaluate", 1, 1)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bars() as update:
        update("model [0]", 1, 2, "loss 3")
    out, err = capsys.readouterr()
    assert out == ""
    assert all(text in err for text in ("model [0]", "1/2", "loss 3"))


def test_a_bar_whose_units_fall_begins_anew(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bars() as update:
        update("calibrate", 4, 4)
        update("calibrate", 1, 4, "second pass")
    last = capsys.readouterr().err.split("calibrate")[-1]
    assert "1/4" in last
    assert "-:--:--" in last  # not the 0:00:00 of what is finished
