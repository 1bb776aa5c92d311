"""What commands print: lines that people read are broken between words, others are left whole."""

import pytest

from neuroncore.cli.console import _Console

SENTENCE = "a modelled time is a number, and this line is longer than forty columns"


@pytest.mark.parametrize(
    ("terminal", "is_error", "is_whole", "lines"),
    [("1", False, False, 2), ("1", False, True, 1), ("1", True, False, 1), ("0", False, False, 1)],
)
def test_lines_are_broken_where_they_are_read(
    monkeypatch, capsys, terminal, is_error, is_whole, lines
):
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    _Console(is_error).print(SENTENCE, is_whole)
    shown = capsys.readouterr()[is_error]
    assert len(shown.splitlines()) == lines
    assert " ".join(shown.split()) == SENTENCE
