"""Which `nki` the kernels are written against."""

import subprocess
import sys
from pathlib import Path

SCRIPT = "from neuronmm_ops.kernels import shim; print(shim.jit.__module__, shim.nl.__name__)"


def run(packages: Path, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": str(packages)}
    return subprocess.run([sys.executable, "-c", script], env=path, capture_output=True, text=True)


def package(root: Path, init: str) -> None:
    (root / "nki").mkdir()
    (root / "nki" / "__init__.py").write_text(init)
    (root / "nki" / "isa.py").write_text("")
    (root / "nki" / "language.py").write_text("def __getattr__(name): return type(name, (), {})\n")


def test_the_simulator_stands_in_where_nki_is_not_installed(tmp_path):
    done = run(tmp_path)
    assert done.stdout.split() == [
        "neuronmm_ops.neuroncore.kernel",
        "neuronmm_ops.neuroncore.language",
    ]


def test_an_installed_nki_is_taken(tmp_path):
    package(tmp_path, "def jit(function): return function\n")
    assert run(tmp_path).stdout.split() == ["nki", "nki.language"]


SIMULATE = """
import torch, neuronmm_ops as nm
with nm.use_impl("simulated"):
    nm.xw(torch.ones(2, 8), torch.ones(8, 8))
"""
NKI = """
class Kernel:
    def __init__(self, function):
        self.function = function

jit = Kernel
"""


def test_the_simulated_core_refuses_kernels_of_an_installed_nki(tmp_path):
    package(tmp_path, NKI)
    done = run(tmp_path, SIMULATE)
    assert "TypeError: the simulated core runs functions and kernels of" in done.stderr
    assert done.stderr.strip().endswith("simulate in an environment without it")


def test_an_nki_that_lacks_a_part_is_not_passed_over(tmp_path):
    package(tmp_path, NKI)
    (tmp_path / "nki" / "language.py").write_text("import nki._gone\n")
    done = run(tmp_path)
    assert done.returncode != 0
    assert "No module named 'nki._gone'" in done.stderr


def test_a_broken_nki_is_not_passed_over(tmp_path):
    package(tmp_path, "import a_library_that_nki_needs\n")
    done = run(tmp_path)
    assert done.returncode != 0
    assert "a_library_that_nki_needs" in done.stderr
