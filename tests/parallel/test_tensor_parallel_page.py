"""The page of tensor parallelism does what it says, on two ranks."""

import os
from pathlib import Path

import pytest
from mktestdocs import grab_code_blocks
from ranks import run
from tiny import tiny_directory

PAGE = Path(__file__).parents[2] / "docs" / "tensor-parallel.md"


def page(_: int, directory: str) -> None:
    """What `torchrun divide.py` does on a rank, in a process group that is there already."""
    os.chdir(directory)
    exec("\n".join(grab_code_blocks(PAGE.read_text(), lang="python")), {})  # noqa: S102


@pytest.mark.slow
def test_the_page_runs_on_two_ranks(tmp_path):
    tiny_directory(tmp_path / "model")
    run(page, 2, str(tmp_path))
