"""Kernels and tests that others published, run unmodified on the simulated core."""

import ast
from pathlib import Path


def mend(path: Path) -> None:
    """Nki-library's d2ad3a57 has the end of a docstring twice: Python does not take the file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    try:
        ast.parse("".join(lines))
    except IndentationError as error:
        start = (error.lineno or 1) - 1
        end = next(i for i in range(start, len(lines)) if '"""' in lines[i])
        path.write_text("".join(lines[:start] + lines[end + 1 :]))
