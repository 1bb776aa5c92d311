"""The page of results, its gallery and the README's numbers say what the committed data say."""

import json
import re
import runpy
import shlex
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import run

from neuronmm_ops.cli import main
from neuronmm_ops.models import SHAPES

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "results"
DATA = sorted((ROOT / "docs" / "results").glob("*.json"))
NAMES = ("blocks", "gallery", "plots", "readme", "results_page", "selection", "sources")


@pytest.fixture
def modules(monkeypatch):
    """The example's modules."""
    monkeypatch.syspath_prepend(EXAMPLE)
    return SimpleNamespace(**{name: import_module(name) for name in NAMES})


@pytest.fixture
def sources(modules, tmp_path, monkeypatch):
    """The example's data sets, in a directory of the test, made by a clean tree."""
    monkeypatch.setattr(modules.sources, "DATA", tmp_path)
    monkeypatch.setattr(modules.sources, "_commit", lambda: 12 * "0")
    return modules.sources


def test_times_that_were_held_out_stand_with_their_range(modules):
    (run,) = modules.sources.read("published")["runs"]
    times = [
        row for row in run["document"] if (row["group"], row["measure"]) == ("held out", "time")
    ]
    assert len(times) == 16
    assert all(low <= row["modelled_ms"] < high for row in times for low, high in [row["range_ms"]])
    # VectorE binds it, and nothing that is not known could make it quicker
    at_the_low_end = {row["fact"] for row in times if row["modelled_ms"] == row["range_ms"][0]}
    assert at_the_low_end == {"depthwise convolution"}


def test_the_page_is_what_the_data_say(modules):
    assert (ROOT / "docs" / "results.md").read_text() == modules.results_page.results_page()


def test_the_gallery_is_what_the_data_say(modules):
    pages = modules.gallery.gallery()
    quality = {"divergence.md", "residuals.md"}
    assert set(pages) == {"index.md", *quality, *(f"{name}.md" for name in SHAPES)}
    committed = {path.name: path.read_text() for path in (ROOT / "docs/gallery").glob("*")}
    assert committed == pages


def test_the_blocks_of_pages_are_those_of_the_data(modules):
    for path, text in modules.blocks.filled_pages().items():
        assert path.read_text() == text, path
    lines = modules.readme.block("docs/").splitlines()
    numbers = [line for line in lines if line.startswith("- ")]
    assert numbers
    for line in numbers:
        assert ("measured" in line) != ("modelled" in line)


def test_the_quality_is_of_one_measured_model(modules):
    """No share of an earlier training, in no data set, stands beside it."""
    lines = modules.readme.block("docs/").splitlines()
    (quality,) = [line for line in lines if line.startswith("- **Quality**")]
    assert len(re.findall(r"\d\.\d\dx", quality)) == 1


def test_every_plot_is_there_and_shown(modules):
    drawn = set(modules.plots.plots())
    images = ROOT / "docs" / "images"
    assert {path.name for path in images.glob("results-*")} == drawn
    shown = (ROOT / "docs/results.md").read_text() + (ROOT / "README.md").read_text()
    assert drawn == set(re.findall(r"images/(results-[\w.-]+)", shown))
    assert all((images / name).stat().st_size < 400_000 for name in drawn)


@pytest.mark.slow
def test_plots_are_drawn_from_the_data(modules, tmp_path, monkeypatch):
    plots = modules.plots
    monkeypatch.setattr(plots, "IMAGES", tmp_path)
    (tmp_path / "results-of-old.svg").write_text("")
    paths = plots.draw()
    assert sorted(paths) == sorted(tmp_path.iterdir())
    assert all(b"<svg" in path.read_bytes()[:600] for path in paths)


def test_data_are_of_the_commands_and_say_where_they_come_from(modules):
    sources = modules.sources
    assert DATA
    for path in DATA:
        told = sources.read(path.stem)["provenance"]
        assert set(told) == {"date", "seconds", "machine", "versions", "commit"}
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", told["date"])
        assert re.fullmatch("[0-9a-f]{12}", told["commit"])


def test_a_number_that_changes_in_the_data_changes_the_pages(modules, tmp_path, monkeypatch):
    sources, gallery = modules.sources, modules.gallery
    name = "plan_Llama-3.2-1B"
    before = gallery.model_page(SHAPES["Llama-3.2-1B"])
    found = json.loads((sources.DATA / f"{name}.json").read_text())
    rows = {(row["projection"], row["M"]): row for row in found["runs"][1]["document"]}
    rows["mlp", 1]["time_ms"] = 123456.0
    (tmp_path / f"{name}.json").write_text(sources.dumped(found))
    monkeypatch.setattr(sources, "DATA", tmp_path)
    after = gallery.model_page(SHAPES["Llama-3.2-1B"])
    assert after != before
    assert "1.235e+05" in after


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no data set"),
        ("[]", "is no data set"),
        ('{"runs": [{"command": "neuronmm plan"}]}', "is of other commands than those of"),
    ],
)
def test_a_file_that_is_no_data_set_is_refused(sources, text, said):
    (sources.DATA / "cpu.json").write_text(text)
    with pytest.raises(ValueError, match=rf"{said}.*; run make results-data DATA=cpu"):
        sources.read("cpu")
    assert sources.read("generate") is None


def test_without_the_demo_its_data_sets_say_what_to_run(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"held_out\.txt is missing; run make demo"):
        sources.make(sources.datasets()["methods"])
    (tmp_path / "out/demo").mkdir(parents=True)
    (tmp_path / "out/demo/held_out.txt").write_text("é" * 2 * sources.EVALUATED_CHARACTERS)
    sources.write_held_out()
    part = (tmp_path / "out/results/held_out.txt").read_text()
    assert part == "é" * sources.EVALUATED_CHARACTERS


@pytest.mark.slow
def test_a_data_set_is_written_whole_or_not_at_all(sources, tmp_path):
    good = "neuronmm plan --model Qwen3-0.6B --tokens 1"
    bad = "neuronmm plan --model nothing --tokens 1"
    with pytest.raises(RuntimeError, match=f"{bad} failed with exit code 2: .*must be a directory"):
        sources.make(sources.Dataset("two", (good, bad), 1))
    assert list(tmp_path.iterdir()) == []
    sources.make(sources.Dataset("one", (good,), 1))
    (run,) = json.loads((tmp_path / "one.json").read_text())["runs"]
    assert run["command"] == good
    assert {row["M"] for row in run["document"]} == {1}


def test_the_front_is_what_no_point_beats(modules):
    selection = modules.selection
    numbers = [(0.1, 1, 1), (0.2, 2, 2), (0.3, 2, 3), (0.4, 1.5, 2), (0.5, 3, 9)]
    points = [selection.Tradeoff("fp8", *each) for each in numbers]
    assert [point.ratio for point in selection.front(points)] == [0.1, 0.2, 0.5]
    assert selection.front([]) == []


def test_a_page_without_its_blocks_is_refused(modules):
    block = "<!-- results: written by `make results` -->\n<!-- /results -->"
    for text in ("", block[:-1], 2 * block, block.replace("results:", "others:")):
        with pytest.raises(ValueError, match=r"README\.md must have the blocks \['results'\]"):
            modules.blocks.filled("README.md", text)


def test_a_tree_with_changes_makes_no_data(sources, monkeypatch):
    monkeypatch.setattr(sources, "_commit", lambda: "0123456789ab-dirty")
    with pytest.raises(ValueError, match="the work tree is of 0123456789ab-dirty; commit first"):
        sources.make(sources.datasets()["cpu"])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_the_gallerys_commands_are_the_programs(modules, shape, capsys):
    for line in modules.gallery.commands(shape):
        options = shlex.split(line)[1:]
        calibration = options.index("--calibration") + 1
        options[calibration] = "no such file"
        # Every option is known: what is missing is the text.
        assert main(options) == 2
        assert "no such file" in capsys.readouterr().err


def test_an_unknown_data_set_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["results", "--data", "nothing"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_a_data_set_that_was_written_does_not_refuse_the_next(modules, tmp_path, monkeypatch):
    sources = modules.sources
    data = tmp_path / "docs" / "results"
    data.mkdir(parents=True)
    files = [tmp_path / "code.py", data / "one.json"]
    git = ("git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c")
    for file in files:
        file.write_text("first")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "a")):
        run(*git, *command)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "DATA", data)
    files[1].write_text("second")
    assert re.fullmatch("[0-9a-f]{12}", sources._commit())
    files[0].write_text("second")
    assert sources._commit().endswith("-dirty")
