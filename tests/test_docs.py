"""Every Python block of the documentation runs, and so does every `neuronmm` line."""

import re
import shlex
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from mktestdocs import check_md_file, grab_code_blocks
from tiny import tiny_directory

from neuronmm_ops.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "The quick brown fox jumps over the lazy dog. 0123456789\n" * 400


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files that the pages name."""
    monkeypatch.chdir(tmp_path)
    # As torchrun starts one worker.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    tiny_directory(tmp_path / "model")
    for file in ("calibration.txt", "held_out.txt"):
        (tmp_path / file).write_text(TEXT)
    (paper,) = grab_code_blocks((ROOT / "docs" / "reproduce.md").read_text(), lang="toml")
    (tmp_path / "paper.toml").write_text(paper)
    shutil.copytree(ROOT / "examples" / "kernels", tmp_path / "examples" / "kernels")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks(page: Path, workplace: Path) -> None:
    check_md_file(page, memory=True)


@pytest.mark.slow
def test_command_lines(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        line
        for block in grab_code_blocks((ROOT / "docs" / "cli.md").read_text(), lang="bash")
        for line in block.splitlines()
        if line.startswith("neuronmm ")
    ]
    assert len(lines) == 18
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err


def test_readme_begins_with_install_and_a_result() -> None:
    install, clone = grab_code_blocks((ROOT / "README.md").read_text(), lang="bash")[:2]
    pip, result = install.splitlines()
    assert pip.startswith('pip install "neuronmm-ops[hf] @ git+https://')
    assert result == "neuronmm demo --quick"
    commands = [line.split("#")[0].strip() for line in clone.splitlines()]
    assert commands[0].startswith("git clone")
    assert commands[1:] == ["make demo", "make test"]


def test_readme_example_is_ten_lines() -> None:
    (block,) = grab_code_blocks((ROOT / "README.md").read_text(), lang="python")
    statements = [line for line in block.splitlines() if line and not line.startswith("import")]
    assert len([line for line in statements if not line.startswith("from")]) <= 10


RANGE = re.compile(r"\d\.\d+ ?(-|to) ?\d+\.\d+x|\d\.\d+x to \d+\.\d+x")


def compared_with_neuronmm(text: str) -> Iterator[str]:
    """Lines with a figure such as 1.70x that a line or its heading says is over NeuronMM's kernels.

    A table's row comes with the table's header.
    """
    heading = header = ""
    for line in text.splitlines():
        heading = line if line.startswith("#") else heading
        if not line.startswith("|"):
            header = ""
        elif not header:
            header = line
        if re.search(r"\d\.\d+x", line) and re.search("NeuronMM|[Pp]ublished", heading + line):
            yield header + line


def test_speedups_over_neuronmm_are_ranges_over_the_dma_models() -> None:
    pages = [*PAGES, ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md"]
    lines = [line for page in pages for line in compared_with_neuronmm(page.read_text())]
    assert len(lines) >= 8
    assert [line for line in lines if "DMA models" not in line] == []
    assert [line for line in lines if not RANGE.search(line)] == []


@pytest.mark.parametrize(
    "text",
    [
        "NeuronMM's kernel: 1.7x",
        "## Published kernels\n| op | faster |\n| --- | --- |\n| a | 2.1x |",
    ],
)
def test_a_speedup_without_its_range_is_found(text: str) -> None:
    (line,) = compared_with_neuronmm(text)
    assert "DMA models" not in line
    assert not RANGE.search(line)


def test_make_help_lists_every_target() -> None:
    assert shutil.which("make")
    text = (ROOT / "Makefile").read_text()
    targets = text.split(".PHONY:")[1].splitlines()[0].split()
    assert all(f"\n{target}:" in text for target in targets)
