"""The C and C++ libraries, built once for all workers of a run."""

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
        warnings_fail = ["CFLAGS=-O3 -Werror", "CXXFLAGS=-O1 -Werror"]
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            run(*command, *warnings_fail)
        return target

    return make


@pytest.fixture(scope="session")
def sanitized_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program of driver.c with the handler, built to stop at undefined behaviour."""
    path = tmp_path_factory.mktemp("driver") / "driver"
    sources = [STUB / f"{name}.c" for name in ("host_call", "config", "json", "compute")]
    flags = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{STUB}"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    run("cc", *flags, *sanitize, Path(__file__).with_name("driver.c"), *sources, "-o", path, "-lm")
    return path
