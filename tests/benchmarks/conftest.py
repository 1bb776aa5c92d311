"""The command in this process."""

import pytest
from outcomes import Run, caller

from benchmarks.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process."""
    return caller(main, capsys)
