"""Which `nki` the kernels are written against."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from neuronmm_ops.kernels import shim


def forget_nki() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "nki"]:
        del sys.modules[name]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ModuleType]]:
    """Return a function that runs the shim's source again, with `tmp_path` on the path."""
    monkeypatch.syspath_prepend(tmp_path)
    forget_nki()

    def load() -> ModuleType:
        spec = importlib.util.spec_from_file_location("shim_again", shim.__file__)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    forget_nki()


def package(root: Path, init: str) -> None:
    (root / "nki").mkdir()
    (root / "nki" / "__init__.py").write_text(init)
    (root / "nki" / "isa.py").write_text("class nc_version: gen2, gen3, gen4 = 2, 3, 4\n")
    (root / "nki" / "language.py").write_text("def __getattr__(name): return type(name, (), {})\n")


def test_the_simulator_stands_in_where_nki_is_not_installed(load):
    loaded = load()
    assert loaded.jit.__module__ == "neuroncore.kernel"
    assert loaded.nl.__name__ == "neuroncore.language"


def test_an_installed_nki_is_taken(load, tmp_path):
    package(tmp_path, "def jit(function): return function\n")
    loaded = load()
    assert (loaded.jit.__module__, loaded.nl.__name__) == ("nki", "nki.language")
    assert loaded.ncc.__name__ == "neuroncore.collectives"  # what this one lacks


def test_collectives_of_an_installed_nki_are_taken(load, tmp_path):
    package(tmp_path, "def jit(function): return function\n")
    (tmp_path / "nki" / "collectives.py").write_text("")
    assert load().ncc.__name__ == "nki.collectives"


SIMULATE = """
import torch, neuroncore, neuronmm_ops as nm
from neuronmm_ops.kernels.xw.decode import xw_decode
with nm.use_impl("simulated"):
    print(nm.xw(torch.ones(2, 8), torch.ones(8, 8)).sum().item())
neuroncore.simulate(xw_decode, torch.ones(2, 8), torch.ones(8, 8))
"""
NKI = """
class Kernel:
    def __init__(self, function):
        self.function = function

jit = Kernel
"""


@pytest.mark.slow
def test_beside_an_installed_nki_the_op_is_simulated_and_its_own_kernel_is_refused(tmp_path):
    package(tmp_path, NKI)
    done = subprocess.run(
        [sys.executable, "-c", SIMULATE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "128.0", done.stderr
    assert "TypeError: the simulated core runs functions and kernels of" in done.stderr
    assert done.stderr.strip().endswith("simulate in an environment without it")


@pytest.mark.parametrize(
    ("init", "language", "missing"),
    [
        (NKI, "import nki._gone\n", r"nki\._gone"),
        ("import a_library_that_nki_needs\n", "", "a_library_that_nki_needs"),
    ],
)
def test_a_broken_nki_is_not_passed_over(load, tmp_path, init, language, missing):
    package(tmp_path, init)
    (tmp_path / "nki" / "language.py").write_text(language)
    with pytest.raises(ModuleNotFoundError, match=missing):
        load()
