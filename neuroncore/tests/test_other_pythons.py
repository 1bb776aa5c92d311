"""neuroncore installs, small and without torch, into other Pythons, where there are any."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pages
import pytest
from commands import run

ROOT = Path(__file__).parents[2]
MOST_BYTES = 100_000_000
SUPPORTED = range(10, 15)


def interpreters() -> Iterator[Path]:
    """Of each supported Python but this one, on PATH or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    folders = [*os.environ["PATH"].split(os.pathsep), *pyenv.glob("3.*/bin")]
    for minor in SUPPORTED:
        found = [Path(folder) / f"python3.{minor}" for folder in folders]
        works = [path for path in found if path.is_file() and not subprocess.call(
            [path, "-c", "import venv"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )]  # fmt: skip
        if works and minor != sys.version_info.minor:
            yield works[0]


OTHERS = list(interpreters())


def test_the_versions_tested_are_those_that_are_promised():
    project = (ROOT / "neuroncore" / "pyproject.toml").read_text()
    promised = re.findall(r"Python :: 3\.(\d+)\"", project)
    assert [int(minor) for minor in promised] == list(SUPPORTED)
    assert f'requires-python = ">=3.{SUPPORTED[0]}"' in project


@pytest.mark.slow
@pytest.mark.skipif(not OTHERS, reason="there is no other Python here")
@pytest.mark.parametrize("python", [*OTHERS[:1], *OTHERS[1:][-1:]], ids=lambda path: path.name)
def test_the_first_commands_run_in_a_fresh_environment(python, tmp_path, monkeypatch):
    run(python, "-m", "venv", tmp_path / "env")
    (packages,) = (tmp_path / "env" / "lib").glob("python3.*/site-packages")
    before = size(packages)
    binaries = tmp_path / "env" / "bin"
    run(binaries / "pip", "install", "-q", "--disable-pip-version-check", ROOT / "neuroncore")
    assert size(packages) - before < MOST_BYTES
    assert not (packages / "torch").exists()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for page, names in (("run.md", ["quickstart.py"]), ("index.md", ["softmax.py", "fused.py"])):
        for language, text in pages.blocks(ROOT / "neuroncore" / "docs" / page):
            name = text.splitlines()[0].removeprefix("# ")
            if language == "python" and name in names:
                Path(name).write_text(text)
    assert run(binaries / "neuroncore", "run", "quickstart.py").startswith("131072.0")
    traced = ("softmax.py:softmax", "--arg", "x=bf16[4096,2048]", "--trace-only")
    assert "bound by      VectorE" in run(binaries / "neuroncore", "simulate", *traced)
    kernel = ("softmax.py:softmax", "--arg", "x=bf16[256,2048]", "--target", "trn2")
    assert "no findings" in run(binaries / "neuroncore", "check", *kernel)
    assert run(binaries / "neuroncore", "lint", "softmax.py", "fused.py").startswith("no findings")


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
