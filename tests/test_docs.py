"""Every Python block of the documentation runs, and so does every command line of cli.md."""

import itertools
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from commands import one_worker, run
from mktestdocs import check_md_file, grab_code_blocks
from outcomes import shorten_held_out
from tiny import tiny_directory

import neuroncore.cli
from neuronmm_ops.cli import main

ROOT = Path(__file__).parents[1]
OURS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SIMULATORS = [
    ROOT / "neuroncore" / "README.md",
    *sorted((ROOT / "neuroncore" / "docs").glob("*.md")),
]
"""Of neuroncore, whose tests run them."""
PAGES = [*OURS, *SIMULATORS]
DOCUMENTS = [*PAGES, ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md"]
MAINS = {"neuronmm": main, "neuroncore": neuroncore.cli.main}
TEXT = "The quick brown fox jumps over the lazy dog. 0123456789\n" * 400


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files that the pages name."""
    monkeypatch.chdir(tmp_path)
    for name, value in one_worker().items():
        monkeypatch.setenv(name, value)
    tiny_directory(tmp_path / "model")
    for file in ("calibration.txt", "held_out.txt"):
        (tmp_path / file).write_text(TEXT)
    (paper,) = grab_code_blocks((ROOT / "docs" / "reproduce.md").read_text(), lang="toml")
    (tmp_path / "paper.toml").write_text(paper)
    shutil.copytree(ROOT / "examples" / "kernels", tmp_path / "examples" / "kernels")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", OURS, ids=lambda page: page.name)
def test_python_blocks(page, workplace):
    check_md_file(page, memory=True)


@pytest.mark.slow
def test_command_lines(workplace, capsys, monkeypatch):
    shorten_held_out(workplace / "texts", monkeypatch)
    seconds = itertools.count(step=0.2)  # a recovery of 6 s is 30 looks at the clock
    monkeypatch.setattr("neuronmm_ops.recover.training.monotonic", lambda: next(seconds))
    lines = [
        line
        for block in grab_code_blocks((ROOT / "docs" / "cli.md").read_text(), lang="bash")
        for line in block.splitlines()
        if line.startswith(tuple(MAINS)) and not line.startswith("neuronmm compile")  # needs NKI
    ]
    assert len(lines) == 24
    for line in lines:
        command, *arguments = shlex.split(line)
        assert MAINS[command](arguments) == 0, capsys.readouterr().err


def test_readme_begins_with_install_and_a_result():
    install, clone = grab_code_blocks((ROOT / "README.md").read_text(), lang="bash")[:2]
    repository, pip, result = install.splitlines()
    assert repository.startswith("REPO=git+https://")
    simulator = '"neuroncore @ $REPO#subdirectory=neuroncore"'
    assert pip.startswith(f'pip install {simulator} "neuronmm-ops[hf] @ $REPO" --extra-index-url')
    assert result == "neuronmm demo --quick"
    commands = [line.split("#")[0].strip() for line in clone.splitlines()]
    assert commands[0].startswith("git clone")
    assert commands[1:] == ["make demo", "make test"]


def test_readme_example_is_ten_lines():
    (block,) = grab_code_blocks((ROOT / "README.md").read_text(), lang="python")
    statements = [line for line in block.splitlines() if line and not line.startswith("import")]
    assert len([line for line in statements if not line.startswith("from")]) <= 10


UNKNOWN = re.compile("DMA models|is not known")
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


def test_speedups_over_neuronmm_are_ranges_over_what_is_not_known():
    lines = [line for page in DOCUMENTS for line in compared_with_neuronmm(page.read_text())]
    assert lines
    assert [line for line in lines if not UNKNOWN.search(line)] == []
    assert [line for line in lines if not RANGE.search(line)] == []


@pytest.mark.parametrize(
    "text",
    [
        "NeuronMM's kernel: 1.7x",
        "## Published kernels\n| op | faster |\n| --- | --- |\n| a | 2.1x |",
    ],
)
def test_a_speedup_without_its_range_is_found(text):
    (line,) = compared_with_neuronmm(text)
    assert not UNKNOWN.search(line)
    assert not RANGE.search(line)


UNIT = r"(?:x|%|ns|us|ms|s|[KMG]i?B|tok(?:ens)?/s)"
NUMBER = rf"[-~]?\d[\d.,]*(?: ?{UNIT})?"
NUMBERS = re.compile(rf"{NUMBER}(?:(?:-| to | ?± ?| / | ?\()(?:{NUMBER})\)?)* ?\*?")
MEASURE = re.compile(rf"\b{UNIT}\b|perplexity|excess|speed-?up|share", re.IGNORECASE)
SETTINGS = {
    ("trainium.md", "Which path")  # versions
}
"""Tables with numbers that nobody measured or modelled, by page and heading."""


def typed_tables(page: str, text: str) -> Iterator[str]:
    """Headings of tables of numbers that no data set writes."""
    text = re.sub(r"<!-- ([a-z-]+): written by .*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        for table in re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE):
            head, _, *rows = (
                [c.strip() for c in row.strip("|").split("|")] for row in table.splitlines()
            )
            cells = [cell for row in rows for cell in row if NUMBERS.fullmatch(cell)]
            is_measure = bool(MEASURE.search(" ".join(head)))
            numbers = [c for c in cells if is_measure or re.search(rf"[.±]|\d ?{UNIT}", c)]
            if numbers and (page, heading) not in SETTINGS:
                yield f"{page}: {heading}"


def test_tables_of_numbers_are_written_from_data():
    generated = ("results.md", "cli.md")
    pages = [page for page in PAGES if page.name not in generated]
    assert [each for page in pages for each in typed_tables(page.name, page.read_text())] == []


@pytest.mark.parametrize(
    "row", ["1.25 | 3", "97 % (74) | 2", "1.09-1.83x (0.98 to 2.62) | ", "12 ms | 8"]
)
def test_a_typed_table_of_numbers_is_found(row):
    table = f"## Speed\n| op | tokens |\n| --- | --- |\n| {row} |\n"
    assert list(typed_tables("kernels.md", table)) == ["kernels.md: Speed"]
    block = f"<!-- speed: written by `make results` -->\n{table}<!-- /speed -->\n"
    assert list(typed_tables("kernels.md", block)) == []


DATED = re.compile(r"\b(so-manieth|likewise|beside|wherefore|thereof)\b", re.IGNORECASE)


def test_the_documentation_is_plain():
    texts = {page.name: page.read_text() for page in PAGES}
    prose = {name: re.sub(r"```.*?```", "", text, flags=re.DOTALL) for name, text in texts.items()}
    assert {name: DATED.findall(text) for name, text in prose.items() if DATED.search(text)} == {}


def test_the_sources_are_plain():
    folders = [ROOT / folder for folder in ("src", "neuroncore/src", "benchmarks", "examples")]
    texts = {path: path.read_text() for folder in folders for path in folder.rglob("*.py")}
    assert {path: DATED.findall(text) for path, text in texts.items() if DATED.search(text)} == {}


LINK = re.compile(r"\]\(([\w./-]*\.md)?(?:#([\w-]+))?\)")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as mkdocs and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: f"{page.parent.name}-{page.name}")
def test_links_lead_to_a_page_and_its_heading(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for path, anchor in LINK.findall(text):
        target = page.parent / path if path else page
        assert target.is_file(), path
        assert not anchor or anchor in anchors(target), (path, anchor)


def test_make_help_lists_every_target():
    assert shutil.which("make")
    text = (ROOT / "Makefile").read_text()
    targets = text.split(".PHONY:")[1].splitlines()[0].split()
    assert all(f"\n{target}:" in text for target in targets)


def test_a_kernel_writer_finds_a_door():
    (config,) = re.findall(r"^nav:\n((?:  .*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    navigation = yaml.safe_load(config)
    assert len(navigation) <= 8
    (pages,) = (door["Write kernels"] for door in navigation if "Write kernels" in door)
    assert {"kernels.md", "how-it-works.md"} <= {path for page in pages for path in page.values()}


def test_trainiums_page_sends_to_the_engines():
    text = (ROOT / "docs" / "trainium.md").read_text().split("\n## Serving stacks\n")[1]
    links = re.findall(r"\]\(([\w-]+\.md)\)", text.split("\n## ")[0])
    assert {"engines.md", "nxdi.md", "vllm-neuron.md", "tensor-parallel.md"} <= set(links)


def test_the_first_page_shows_a_result():
    page = (ROOT / "docs" / "index.md").read_text()
    assert page.index("written by `make results`") < page.index("\n## ")


def test_every_file_that_a_page_names_is_there():
    named = {
        name for page in DOCUMENTS for name in re.findall(r"`(\w[\w/]*/\w+\.py)`", page.read_text())
    }
    # Of AWS's library, and what the page has its reader write.
    named -= {"core/mlp/mlp.py", "ops/definitions/adapter.py"}
    # The rooms of the house: `bench/  ..., timing.py: paired timing`.
    rooms = r"^    (\w+)/ (.*\n(?: {8,}.*\n)*)"
    named |= {
        f"{room}/**/{name}"
        for room, text in re.findall(rooms, (ROOT / "DESIGN.md").read_text(), re.MULTILINE)
        for name in re.findall(r"\b\w+\.py\b", text)
    }
    roots = (ROOT / "src", ROOT / "neuroncore" / "src")
    places = [(ROOT, ""), *((root, "**/") for root in roots)]
    found = {name for name in named for root, any_ in places if any(root.glob(any_ + name))}
    assert found == named != set()


def test_the_trees_of_the_design_are_those_of_the_repository():
    blocks = re.findall(r"^```\n(.*?)^```", (ROOT / "DESIGN.md").read_text(), re.S | re.M)
    named = {name for text in blocks for name in re.findall(r"[\w/]+(?:/|\.py)(?!\w)", text)}
    assert {"svd_mlp/", "kernels/", "models.py", "neuronmm_ops_command.py"} <= named
    paths = [
        p for top in ("src", "neuroncore", "benchmarks", "csrc_stub") for p in tree(ROOT / top)
    ]
    assert [name for name in sorted(named) if not ends(paths, name.strip("/"))] == []


def tree(top: Path) -> list[str]:
    return [path.as_posix() for path in (top, *top.rglob("*"))]


def ends(paths: list[str], name: str) -> bool:
    return any(path.endswith(f"/{name}") for path in paths)


def test_a_link_to_the_other_site_becomes_its_address_and_is_checked():
    hook = runpy.run_path(str(ROOT / "docs" / "hooks" / "sites.py"))["on_page_markdown"]

    def written(page: str, markdown: str) -> str:
        file = SimpleNamespace(abs_src_path=str(ROOT / page))
        return hook(markdown, page=SimpleNamespace(file=file))

    link = "[`a`](../neuroncore/docs/modelled.md#what-is-not)"
    assert written("docs/ops.md", link) == '<a href="../neuroncore/modelled/#what-is-not">`a`</a>'
    assert written("docs/index.md", link).startswith('<a href="neuroncore/modelled/#')
    back = "[b](../../docs/index.md)"
    assert written("neuroncore/docs/run.md", back) == '<a href="../../">b</a>'
    assert written("docs/ops.md", "[c](kernels.md)") == "[c](kernels.md)"
    with pytest.raises(ValueError, match=r"docs/ops\.md links to \.\./neuroncore/docs/no\.md"):
        written("docs/ops.md", "[d](../neuroncore/docs/no.md)")


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
TOO_WIDE = """<script>addEventListener("load", () => {
  const column = document.querySelector(".md-content__inner").getBoundingClientRect().right;
  const isWide = (block) => block.scrollWidth > block.clientWidth + 1
    || block.getBoundingClientRect().right > column + 1;
  const blocks = [...document.querySelectorAll("pre > code, .md-typeset table")];
  document.body.dataset.wide = `${blocks.filter(isWide).length} of ${blocks.length}`;
})</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_on_a_laptop_no_block_is_wider_than_its_column(tmp_path):
    site = tmp_path / "site"
    for folder, to in ((ROOT, site), (ROOT / "neuroncore", site / "neuroncore")):
        run(sys.executable, "-m", "mkdocs", "build", "-q", "-f", folder / "mkdocs.yml", "-d", to)
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    options += (f"--user-data-dir={tmp_path / 'user'}", "--window-size=1440,900", "--dump-dom")
    for name in ("kernels", "cli", "results", "neuroncore", "neuroncore/rules"):
        page = site / name / "index.html"
        page.write_text(page.read_text() + TOO_WIDE)
        shown = run(CHROMIUM, *options, page.as_uri())
        assert re.search(r'data-wide="0 of [1-9]', shown), (
            name,
            re.findall("data-wide=.*?>", shown),
        )
