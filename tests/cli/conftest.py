"""A tiny model, a text, and the command in this process."""

import math
from pathlib import Path

import pytest
from outcomes import TEXT, Run, caller
from tiny import tiny_directory

from neuronmm_ops import progress
from neuronmm_ops.cli import main


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("model") / "dense")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process; it prints no progress, however slow the machine is."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", math.inf)
    return caller(main, capsys)
