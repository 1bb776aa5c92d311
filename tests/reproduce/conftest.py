"""The command in this process."""

import math

import pytest
from outcomes import Run, caller

from benchmarks.cli import main
from neuronmm_ops import progress


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process; it prints no progress, however slow the machine is."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", math.inf)
    return caller(main, capsys)
