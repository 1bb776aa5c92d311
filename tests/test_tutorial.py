"""The tutorial: its notebook says and does the same, and its commands run on what it makes."""

import re
import shlex
from pathlib import Path

import nbformat
import pytest
from mktestdocs import grab_code_blocks
from nbclient import NotebookClient
from tiny import tiny_directory
from tutorial.__main__ import NOTEBOOK, PAGE, notebook_of

from neuronmm_ops.cli import main
from neuronmm_ops.measure import generate


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the notebook has been run."""
    root = tmp_path_factory.mktemp("tutorial")
    tiny_directory(root / "model")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": root}}).execute()
    nbformat.write(notebook, root / "run.ipynb")
    return root


def test_the_notebook_is_made_of_the_page():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert notebook == notebook_of(PAGE.read_text()), "run: python examples/tutorial"
    assert [cell.outputs for cell in notebook.cells if cell.cell_type == "code"] == [[]] * 5


def test_a_notebook_holds_all_of_its_page():
    blocks = "```python\nx = 1\n\ny = 2\n```\n\n```python\nx\n```\n"
    page = f"# T\n\nSay:\n\n```bash\nls\n```\n\n{blocks}End.\n"
    notebook = notebook_of(page)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        ("markdown", "# T\n\nSay:\n\n```bash\nls\n```"),
        ("code", "x = 1\n\ny = 2"),
        ("code", "x"),
        ("markdown", "End."),
    ]


@pytest.mark.slow
def test_the_notebook_runs_and_draws(place):
    assert (place / "tutorial.png").read_bytes().startswith(b"\x89PNG")
    notebook = nbformat.read(place / "run.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    removed = [float(share) for share in re.findall(r"small-\S+: (\S+)% of the layers'", printed)]
    assert len(removed) == 3
    for share, asked in zip(removed, (10, 20, 40), strict=True):
        assert asked - 0.1 <= share <= asked + 10  # the budget is met within a block
    speeds = [
        float(value.replace(",", "")) for value in re.findall(r"(\S+) tokens/s, modelled", printed)
    ]
    assert len(speeds) == 4
    bars = [text for output in outputs if (text := output.get("data", {}).get("text/plain", ""))]
    assert any(re.fullmatch(r"speed small-\S+ 3/3", text) for text in bars), bars
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_the_commands_run_on_what_the_notebook_made(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr(generate, "in_own_process", lambda what, function, *a: function(*a))
    shown = {}
    for block in grab_code_blocks(PAGE.read_text(), lang="bash"):
        for line in block.splitlines():
            program, *arguments = shlex.split(line)
            if program == "neuronmm":
                assert main(arguments) == 0, capsys.readouterr().err
                shown[line] = capsys.readouterr().out
            else:
                assert program in ("pip", "hf")  # they need a network
    assert len(shown) == 3
    assert all(shown.values())
