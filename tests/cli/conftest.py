"""A tiny model, a text, and the command in this process."""

import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from outcomes import TEXT, Outcome, Run
from scale_kernels import KERNELS
from tiny import tiny_directory

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
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels that scale a tensor."""
    path = tmp_path_factory.mktemp("kernels") / "kernels.py"
    path.write_text(KERNELS)
    return path


@pytest.fixture
def simulate(run: Run) -> Generator[Run]:
    """Run `neuronmm simulate`; afterwards no module of a kernel file is left."""
    modules = set(sys.modules)
    yield lambda *arguments: run("simulate", *arguments)
    left = set(sys.modules) - modules
    assert not [name for name in left if name.startswith("_simulated")]
