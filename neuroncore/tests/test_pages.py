"""The documentation of neuroncore: its examples run and print what they show."""

import os
import shutil
from pathlib import Path

import pages
import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "neuroncore" / "docs"
PAGES = [ROOT / "neuroncore" / "README.md", *sorted(DOCS.glob("*.md"))]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the kernels that the pages name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples" / "kernels", tmp_path / "examples" / "kernels")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page(page, workplace):
    os.environ.pop("COLUMNS", None)
    pages.check(page)
