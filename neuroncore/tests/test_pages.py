"""The documentation of neuroncore: its examples run and print what they show."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pages
import pytest
from instruction_runs import run as run_kernel

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl

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


def test_every_page_is_in_the_navigation():
    """As `mkdocs build --strict` wants it; this is quicker."""
    text = (ROOT / "neuroncore" / "mkdocs.yml").read_text()
    named = re.findall(r"^  - .*: ([\w-]+\.md)$", text, re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in DOCS.glob("*.md"))


def test_the_tours_finding_makes_its_kernel_faster(workplace, run):
    """By more than a half, over both DMA models; that both are right is on the page, and run."""
    for language, text in pages.blocks(DOCS / "index.md"):
        if language == "python":
            Path(text.splitlines()[0].removeprefix("# ")).write_text(text)
    kernels = ("softmax.py:softmax", "fused.py:fused")
    options = ("--arg", "x=bf16[4096,2048]", "--target", "trn2", "--trace-only", "--json")
    before, after = run("simulate", "--compare", *kernels, *options).document()["kernels"]
    assert before["time_low_ms"] > 1.5 * after["time_high_ms"]
    shown = [f"{kernel['time_ms']:.4f}" for kernel in (before, after)]
    page = (DOCS / "index.md").read_text()
    assert f"time, ms (modelled) {' '.join(shown)}" in page
    assert f"{before['time_ms'] / after['time_ms']:.2f} times as fast (modelled)" in page


def wrong_memory(x):
    tile = nl.ndarray((128, 512), nl.float32, buffer=nl.psum)
    nisa.dma_copy(tile, x)


def wrong_partition(x):
    tile = nl.ndarray((128, 512), nl.float32)
    nisa.tensor_copy(tile[16:80], tile[16:80])


def wrong_operator(x):
    tile = nl.ndarray((128, 512), nl.float32)
    nisa.tensor_scalar(tile, tile, "add", 1.0)


def too_large(x):
    nl.ndarray((129, 1), nl.float32)


def out_of_bounds(x):
    nisa.dma_copy(nl.ndarray((128, 512), nl.float32), x[:, 1:513])


@pytest.mark.parametrize(
    "kernel", [wrong_memory, wrong_partition, wrong_operator, too_large, out_of_bounds]
)
def test_what_a_kernel_is_refused_for_is_on_the_page_of_rules(kernel):
    with pytest.raises((nc.NkiValidationError, TypeError)) as refused:
        run_kernel(kernel, np.zeros((128, 512), np.float32))
    message = re.sub(r" \[\w+\.py:\d+\]$", "", str(refused.value))
    lines = re.sub(r"\\(.)", r"\1", (DOCS / "rules.md").read_text()).splitlines()
    said = [line[2:] for line in lines if line.startswith("- ")]
    patterns = [".*".join(map(re.escape, line.split("…"))) for line in said]
    found = [line for line, each in zip(said, patterns, strict=True) if re.fullmatch(each, message)]
    assert any(len(line.replace("…", "").split()) > 4 for line in found), message


def test_every_rule_of_a_run_names_its_source():
    page = (DOCS / "rules.md").read_text().split("## Of a run")[1]
    sections = page.split("\n### ")[1:]
    assert len(sections) > 15
    assert [section for section in sections if not re.search(r"Source: \S+", section)] == []
