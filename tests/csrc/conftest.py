"""The C++ library and program, built once for all workers of a run."""

import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run

STUB = Path(__file__).parents[2] / "csrc_stub"

Build = Callable[[str], Path]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Return a function that makes one target of csrc_stub/Makefile and returns its path."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "csrc"
    folder.mkdir(exist_ok=True)

    def make(name: str) -> Path:
        target = folder / name
        command = ["make", "-C", STUB, target, f"BUILD={folder}", f"PYTHON={sys.executable}"]
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            run(*command, "CXXFLAGS=-O1 -Werror")
        return target

    return make
