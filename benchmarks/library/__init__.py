"""Kernels and tests that others published, run unmodified on the simulated core."""

import ast
import io
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import neuroncore


@contextmanager
def importable(clone: Path) -> Generator[None]:
    """nki-library of a clone can be imported, as `nkilib` and as `nkilib_src.nkilib`: a copy of it.

    Its tests, as `test`, too.

    Raises:
        ValueError: there is no such source.
    """
    source = clone / "src/nkilib_src"
    if not source.is_dir():
        raise ValueError(f"{clone} must be a clone of aws-neuron/nki-library; it has no {source}")
    with TemporaryDirectory() as folder:
        copy = Path(folder, "nkilib_src")
        copytree(source, copy)
        if (clone / "test").is_dir():
            copytree(clone / "test", Path(folder, "test"))
        mend(copy / "nkilib/core/mlp/mlp.py")
        paths = [folder, str(copy)]
        sys.path[:0] = paths
        try:
            yield
        finally:
            for path in paths:
                sys.path.remove(path)


def traced(kernel: Any, *operands: Any, target: str, **options: Any) -> neuroncore.Profile:
    """The profile of a kernel that uses nki-library, which prints its memory; untold."""
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", neuroncore.NkiWarning)
        done = neuroncore.simulate(kernel, *operands, target=target, mode="trace", **options)
    return done.profile


def mend(path: Path) -> None:
    """Nki-library's d2ad3a57 has the end of a docstring twice: Python does not take the file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    try:
        ast.parse("".join(lines))
    except IndentationError as error:
        start = (error.lineno or 1) - 1
        end = next(i for i in range(start, len(lines)) if '"""' in lines[i])
        path.write_text("".join(lines[:start] + lines[end + 1 :]))
