"""Sources for `lint` to read, and where its findings are."""

from pathlib import Path

from neuroncore.checks.lint import LintError


def write(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "kernels.py"
    path.write_text(source, encoding="utf-8")
    return path


def places(found: list[LintError]) -> list[tuple[str, int, int]]:
    return [(error.rule, error.line, error.column) for error in found]
