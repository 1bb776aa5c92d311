"""The command in this process; the settings of the repository's tests hold for these, too."""

import sys
from collections.abc import Generator
from pathlib import Path

import hypothesis_settings  # noqa: F401
import pytest
from outcomes import Run, caller
from scale_kernels import KERNELS

from neuroncore.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process."""
    return caller(main, capsys)


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels that scale a tensor."""
    path = tmp_path_factory.mktemp("kernels") / "kernels.py"
    path.write_text(KERNELS)
    return path


@pytest.fixture
def simulate(run: Run) -> Generator[Run]:
    """Run `neuroncore simulate`; afterwards no module of a kernel file is left."""
    modules = set(sys.modules)
    yield lambda *arguments: run("simulate", *arguments)
    left = set(sys.modules) - modules
    assert not [name for name in left if name.startswith("_simulated")]
