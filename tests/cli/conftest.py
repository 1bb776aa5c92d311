"""The command in this process, and a checkpoint that it reads."""

import math
from pathlib import Path

import pytest
from fleet import run_fleet
from outcomes import Outcome, Run, caller

from neuronmm_ops import progress
from neuronmm_ops.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process; it prints no progress, however slow the machine is."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", math.inf)
    return caller(main, capsys)


@pytest.fixture(scope="session")
def small(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`dense`, compressed; nobody changes it."""
    from neuronmm_ops import SVDConfig, hf

    out = tmp_path_factory.mktemp("compressed") / "small"
    hf.compress(dense, SVDConfig(ratio=0.3, block=8, method="plain"), None, out)
    return out


@pytest.fixture
def forked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run code and a command's arguments in a process that may be killed."""
    alone = "import os\n[os.environ.pop(name) for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')]\n"

    def call(code: str, *arguments: object) -> Outcome:
        (outcome,) = run_fleet(tmp_path_factory.mktemp("fork"), 1, alone + code, *arguments)
        return Outcome(*outcome)

    return call
