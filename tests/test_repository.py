"""What the public repository is described by: CI, forms, the citation, one address."""

import re
import shlex
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def jobs() -> dict[str, Any]:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    return workflow["jobs"]


def test_no_two_test_modules_of_a_run_have_one_name():
    """pytest stops at the second: their folders are no packages. XLA's run is another."""
    found = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "neuroncore/tests").rglob("test_*.py")]
    names = Counter(path.name for path in found if path.parent.name not in ("xla", "vllm"))
    assert [name for name, times in names.items() if times > 1] == []


def test_ci_calls_targets_of_the_makefile():
    matrices = [job["strategy"]["matrix"] for job in jobs().values()]
    called = [target for matrix in matrices for target in matrix.get("target", [])]
    called += [entry["target"] for matrix in matrices for entry in matrix.get("include", [])]
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    assert {word for target in called for word in target.split()} <= targets
    tested = re.search(r"^test: (.*?) *##", makefile, re.MULTILINE)[1].split()
    assert {*tested, "test-avx2", "floors", "ceilings"} <= {w for t in called for w in t.split()}


def test_ci_runs_the_pythons_that_are_declared():
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    included = jobs()["versions"]["strategy"]["matrix"]["include"]
    assert sorted({entry["python"] for entry in included}) == declared
    assert PROJECT["requires-python"] == f">={declared[0]}"
    assert included[0] == {"target": "floors", "python": declared[0]}


def test_actions_are_named_by_tag():
    for job in jobs().values():
        uses = [step["uses"] for step in job["steps"] if "uses" in step]
        assert uses
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+", name) for name in uses)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_asks_something(path):
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert form["contact_links"][0]["url"].startswith(PROJECT["urls"]["Homepage"])
        return
    assert {"name", "description", "body"} <= set(form)
    identifiers = [field["id"] for field in form["body"]]
    assert len(identifiers) == len(set(identifiers)) > 1
    assert all(field["attributes"]["label"] for field in form["body"])


def test_the_citation_is_that_of_the_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert str(citation["version"]) == PROJECT["version"]
    assert citation["repository-code"] == PROJECT["urls"]["Homepage"]
    assert PROJECT["license"].startswith(citation["license"])
    (paper,) = citation["references"]
    assert paper["url"].endswith("2510.25977")


def test_the_address_is_one():
    address = PROJECT["urls"]["Homepage"]
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "CITATION.cff", *FORMS]
    found = {
        url
        for path in texts
        for url in re.findall(r"https://github\.com/[\w-]+/neuronmm-ops\b", path.read_text())
    }
    assert found == {address}


def test_a_release_is_described():
    assert f"\n## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    assert PROJECT["authors"][0]["name"]
    assert "How to report" in (ROOT / "SECURITY.md").read_text()


def test_pages_install_from_where_the_packages_are():
    """Neither is on an index: a first command takes both from the address, or from a clone."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "neuroncore").rglob("*.md"),
    ]
    text = "".join(path.read_text() for path in pages).replace("\\\n", " ")
    lines = re.findall(r"pip install ([^`\n]*)", text)
    words = [shlex.split(line, comments=True) for line in lines]
    assert ["./neuroncore", ".[eval]"] in words
    from_index = {"neuroncore", "neuronmm-ops", "neuronmm-ops[hf]"}
    assert [line for line in words if from_index & set(line)] == []


def test_the_base_is_small_and_plots_have_an_extra():
    packages = {re.match(r"[\w-]+", text)[0] for text in PROJECT["dependencies"]}
    assert packages == {"neuroncore", "numpy", "rich", "safetensors", "torch"}
    assert PROJECT["optional-dependencies"]["plot"] == ["matplotlib>=3.9"]
