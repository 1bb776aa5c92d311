"""The wheel: what is in it, what it asks for, and that it works in a clean environment."""

import json
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
import stand_ins
from commands import run
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
# What the default package index has under these names: empty placeholders.
PLACEHOLDERS = {"nki": "0.0.1", "neuronx-cc": "1.0.post1", "torch-neuronx": "1.0"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of neuroncore."""
    return built(ROOT / "neuroncore", tmp_path_factory.mktemp("dist"))


def built(root: Path, out: Path) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--outdir", out, root)
    (path,) = out.glob("*.whl")
    return path


@pytest.mark.slow
def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "neuronmm_ops/py.typed" in names
    assert "neuronmm_ops/ops/register.py" in names
    papers = "neuronmm_ops/reproduce/papers"
    assert {f"{papers}/demo.toml", f"{papers}/tasks/demo_ends.yaml"} <= set(names)
    assert "neuronmm_ops/reproduce/published.json" in names
    assert "neuronmm_ops/device/predictions.json" in names
    demo = ROOT / "src" / "neuronmm_ops" / "demo"
    shipped = [file for file in demo.rglob("*") if file.suffix in (".safetensors", ".json", ".txt")]
    assert {str(file.relative_to(ROOT / "src")) for file in shipped} <= set(names)
    assert sum(file.stat().st_size for file in shipped) < 3_000_000, "a clone should stay small"
    assert any(name.endswith("licenses/src/neuronmm_ops/demo/LICENSE-PYTHON.txt") for name in names)
    files = (ROOT / "src" / "neuronmm_ops" / "engines").rglob("*.py")
    assert {str(file.relative_to(ROOT / "src")) for file in files} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert all(name.split("/")[0].startswith("neuronmm_ops") for name in names)


@pytest.mark.slow
def test_contents_of_neuroncore(simulator, tmp_path):
    names = zipfile.ZipFile(simulator).namelist()
    page = "neuroncore/profile/page"
    assert {f"{page}/page.html", f"{page}/page.css", f"{page}/canvas.js"} <= set(names)
    assert {"neuroncore/py.typed", "neuroncore/hardware.py"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert all(name.split("/")[0].startswith("neuroncore") for name in names)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", tmp_path, ROOT / "neuroncore")


@pytest.mark.slow
def test_the_source_distribution_holds_what_its_tests_read(tmp_path):
    run(sys.executable, "-m", "build", "--sdist", "--outdir", tmp_path, ROOT)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        *("CITATION.cff", "SECURITY.md", "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt"),
        *(".github/workflows/ci.yml", ".github/ISSUE_TEMPLATE/bug.yml", "mkdocs.yml"),
        *("tests/versions/environment.py", "docs/index.md", "examples/results/__main__.py"),
        "benchmarks/__main__.py",
    } <= names


@pytest.mark.slow
def test_entry_points_are_functions_of_the_wheel(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    entries = ConfigParser()
    entries.read_string(archive.read(name).decode())
    assert entries["vllm.general_plugins"]
    for value in entries["vllm.general_plugins"].values():
        module, _, function = value.partition(":")
        source = archive.read(module.replace(".", "/") + "/__init__.py").decode()
        assert f"def {function}() -> None:" in source


def test_every_extra_that_is_named_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {
        extra
        for file in files
        for found in re.findall(r"neuronmm-ops\[([\w,]+)\]", file.read_text(encoding="utf-8"))
        for extra in found.split(",")
    }
    assert {"hf", "eval"} <= named <= extras.keys()


def test_placeholders_are_no_plain_dependency_and_never_satisfy_the_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain = {Requirement(text).name for text in project["dependencies"]}
    assert not plain & set(PLACEHOLDERS)
    extra = {r.name: r for r in map(Requirement, project["optional-dependencies"]["neuron"])}
    assert set(extra) == set(PLACEHOLDERS)
    for name, version in PLACEHOLDERS.items():
        assert not extra[name].specifier.contains(version, prereleases=True), name
    tested = [f"0.{minor}.0" for minor in range(10) if f"0.{minor}.0" in extra["nki"].specifier]
    assert [version[:3] for version in tested] == [k for k in stand_ins.BRIDGES if k != "0.2"]


@pytest.mark.slow
def test_installed_into_a_clean_environment(wheel, simulator, tmp_path):
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    # --no-compile: compiling all of torch takes longer than the rest of this file.
    options = ["--quiet", "--no-compile", "-c", ROOT / "constraints.txt"]
    run(*pip, "install", *options, simulator)
    script = "import neuroncore.cli, sys; print({'torch', 'numpy'} & set(sys.modules))"
    assert run(python, "-W", "error", "-c", script).strip() == "set()"
    simulate = [tmp_path / "env" / "bin" / "neuroncore", "simulate", "--json", "--trace-only"]
    kernel = [f"{ROOT}/examples/kernels/matmul.py:matmul", "--arg", "lhsT=bf16[128,512]"]
    profile = json.loads(run(*simulate, *kernel, "--arg", "rhs=bf16[128,1024]"))
    assert profile["time_ms"] > 0, "the simulator works where torch is not installed"
    run(*pip, "install", *options, wheel)

    script = "import neuronmm_ops as nm, torch; x = torch.eye(3); print(nm.xuv(x, x, x).sum())"
    assert run(python, "-W", "error", "-c", script).strip() == "tensor(3.)"
    document = json.loads(run(tmp_path / "env" / "bin" / "neuronmm", "doctor", "--json"))
    assert document["versions"]["transformers"] is None
    plugins = {engine["name"]: engine["plugin"] for engine in document["engines"]}
    assert plugins["vllm"] is plugins["vllm-neuron"] is True, "the wheel has the entry points"

    command = [tmp_path / "env" / "bin" / "neuronmm", "eval", ".", "--text", "x"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "pip install 'neuronmm-ops[hf]'" in result.stderr
