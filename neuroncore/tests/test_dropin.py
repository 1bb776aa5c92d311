"""Files that `import nki`, unchanged: scripts, packages, notebooks and tests of others."""

import importlib
import os
import subprocess
import sys
import types

import numpy as np
import pytest
from outcomes import failed

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl

KERNEL = """\
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

@nki.jit
def add(a, b):
    x, y = nl.load(a), nl.load(b)
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, value=nl.add(x, y))
    return out
"""
SCRIPT = (
    KERNEL
    + """
import sys, helper
a = np.ones((128, 512), np.float32)
for _ in range(2):
    np.testing.assert_array_equal(nki.simulate(add)(a, a), add(a, 1 * a))
print(sys.argv[1:], __name__, helper.VALUE)
sys.exit({"text": "stopped", "none": None}.get(sys.argv[1], 3))
"""
)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper.py").write_text("VALUE = 5\n")
    path = tmp_path / "quick.py"
    path.write_text(SCRIPT)
    yield path
    sys.modules.pop("helper", None)


@pytest.mark.parametrize(("argument", "code"), [("none", 0), ("text", 1), ("--json", 3)])
def test_a_script_runs_as_python_would_run_it(run, script, argument, code):
    before = list(sys.argv), list(sys.path)
    outcome = run("run", script, argument)
    assert outcome.code == code
    assert outcome.out == f"['{argument}'] __main__ 5\n"
    assert ("stopped" in outcome.err) == (argument == "text")
    assert "add on trn2: " in outcome.err
    assert "ms (modelled), bound by latency; 4 times" in outcome.err
    assert (sys.argv, sys.path) == before
    assert "nki" not in sys.modules
    outcome = run("run", "--json", script, "none")
    document = outcome.document()
    assert (document["modelled"], len(document["launches"])) == (True, 4)
    assert document["launches"][0]["time_ms"] > 0


def test_python_m_runs_scripts_and_commands(script):
    command = [sys.executable, "-m", "neuroncore"]
    done = subprocess.run([*command, str(script), "x"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "['x'] __main__ 5\n")
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"neuroncore {nc.__version__}\n"


@pytest.mark.parametrize(
    ("name", "text", "code", "words"),
    [
        ("a.py", "from torch_xla import launch\n", 1, ["torch_xla", "device alone", "a.py:1"]),
        ("a.py", "import torch_xla.runtime\n", 1, ["torch_xla", "device alone", "a.py:1"]),
        ("a.py", "import helper_that_is_not\n", 1, ["No module named", "a.py:1"]),
        ("a.py", "\0", 1, ["null bytes"]),
        ("a.ipynb", "{}", 2, ["notebook", "neuroncore.install()"]),
        ("a.neff", "", 2, ["compiled kernel", "source"]),
    ],
)
def test_files_that_cannot_run(run, tmp_path, name, text, code, words):
    (tmp_path / name).write_text(text)
    failed(run("run", tmp_path / name), code, *words)
    failed(run("simulate", f"{tmp_path / name}:kernel"), code, *words)


DRIVER = """
import torch, torch_neuronx, torch_xla, torch_xla.core.xla_model as xm
from adding import add
x = torch.ones((4, 3), dtype=torch.float16, device=torch_xla.device()).to(xm.xla_device())
print(torch_neuronx.trace(add, (x, x))(x, x).sum().item(), end="")
torch_xla.sync(wait=True)
xm.mark_step()
"""


def test_a_driver_of_torch_xla_runs_on_the_cpu(run, tmp_path):
    (tmp_path / "adding.py").write_text(KERNEL)
    (tmp_path / "driver.py").write_text(DRIVER)
    outcome = run("run", tmp_path / "driver.py")
    sys.modules.pop("adding", None)
    assert (outcome.code, outcome.out) == (0, "24.0")
    assert not {"torch_xla", "torch_neuronx"} & set(sys.modules)


def test_dtypes_have_a_module():
    with nc.as_nki() as nki:
        assert importlib.import_module("nki.dtype").float8_e4m3 is nki.dtype.float8_e4m3


def test_a_file_without_a_name_lists_its_kernels(run, script, tmp_path):
    failed(run("simulate", script), 2, "quick.py: name a kernel of it", "KERNEL: add")
    (tmp_path / "none.py").write_text("x = 1\n")
    failed(run("simulate", tmp_path / "none.py"), 2, "none.py: it has no function under @nki.jit")
    failed(run("run", tmp_path / "gone.py"), 2, "gone.py is no file")


def test_installed_until_the_process_ends():
    package = nc.install()
    try:
        assert nc.install() is package is importlib.import_module("nki")
        with nc.as_nki() as inside:
            assert inside is package
        assert importlib.util.find_spec("nki") is package.__spec__
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "nki"]:
            del sys.modules[name]
    with nc.as_nki() as nki:
        assert nki is package
    assert "nki" not in sys.modules


def kernel():
    names = {}
    with nc.as_nki():
        exec(KERNEL, names)  # noqa: S102 - our own text
    return names["nki"], names["add"]


def test_benchmark_and_profile_answer_with_modelled_times(capsys, tmp_path):
    nki, add = kernel()
    a = np.ones((128, 512), np.float32)
    time_us = nc.simulate(add, a, a, target="trn2").profile.time_ms * 1e3
    measured = nki.benchmark(warmup=5, iters=10, save_neff_name="file.neff")(add)
    with pytest.warns(nc.NkiWarning, match="core_barrier"):
        assert (measured[2](a, a) == 2).all()
    latency = measured.benchmark_result.nc_latency
    assert latency.get_latency_percentile(50) == latency.get_latency_percentile(99) > 0
    assert (measured.lnc, measured[2].lnc) == (1, 2)
    nki.benchmark(add.func)(a, a)
    assert f"nki.benchmark: add takes {time_us:.2f} us (modelled" in capsys.readouterr().out
    profiled = nki.profile(working_directory=tmp_path / "out", save_neff_name="x")(add)
    assert (profiled(a, a) == 2).all()
    assert "every time is modelled\nadd on trn2" in capsys.readouterr().out
    assert (tmp_path / "out" / "add.html").is_file()


class Array:
    """As jax's: read-only values, which NumPy gets by the array protocol."""

    __module__ = "jaxlib._jax"

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return self.values


def test_arrays_of_jax_come_back_as_such(monkeypatch):
    jax = types.SimpleNamespace(numpy=types.SimpleNamespace(asarray=Array))
    monkeypatch.setitem(sys.modules, "jax", jax)
    values = np.ones((128, 4), np.float32)
    values.flags.writeable = False
    result = kernel()[1](Array(values), Array(values))
    assert isinstance(result, Array)
    assert (result.values == 2).all()


@pytest.mark.slow
def test_pytest_loads_it_before_a_conftest(tmp_path):
    (tmp_path / "conftest.py").write_text("import nki\n")
    (tmp_path / "test_add.py").write_text(
        KERNEL
        + "def test():\n    a = np.ones((4, 8), np.float32)\n    assert (add(a, a) == 2).all()\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "neuroncore", "--rootdir", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


# --- kernels in packages


@pytest.fixture
def packages(tmp_path):
    """A package of two folders, in two versions that differ in a factor."""
    for version, factor in (("old", 2), ("new", 3)):
        inner = tmp_path / version / "pack" / "inner"
        inner.mkdir(parents=True)
        for folder in (inner, inner.parent):
            (folder / "__init__.py").write_text("")
        (inner.parent / "factors.py").write_text(f"FACTOR = {factor}.0\n")
        (inner / "kernels.py").write_text(
            "from ..factors import FACTOR\n" + KERNEL + "\n"
            "BIAS = 1.0\n"
            "@nki.jit\n"
            "def scale(x):\n"
            "    tile = nl.load(x)\n"
            "    nisa.tensor_scalar(tile, tile, nl.multiply, FACTOR, op1=nl.add, operand1=BIAS)\n"
            "    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)\n"
            "    nisa.dma_copy(out, tile)\n"
            "    return out\n"
            "class Wrapper:\n"
            "    def __init__(self, kernel):\n"
            "        self.kernel = kernel\n"
            "wrapped, grid = Wrapper(scale), scale[2]\n"
            "def old(x):\n    return 2 * x + 1\n"
            "def new(x):\n    return 3 * x + 1\n"
        )
    return tmp_path


@pytest.mark.parametrize("name", ["scale", "wrapped", "grid"])
def test_a_kernel_of_a_package(run, packages, monkeypatch, name):
    monkeypatch.chdir(packages / "old")
    for place in ("pack.inner.kernels", "pack/inner/kernels.py"):
        outcome = run("simulate", f"{place}:{name}", "--arg", "x=f32[4,8]", "--json",
                      "--reference", "pack.inner.kernels:old")  # fmt: skip
        assert outcome.document()["lnc"] == (2 if name == "grid" else 1)
    assert not [n for n in sys.modules if n.partition(".")[0] == "pack"]
    assert os.getcwd() not in sys.path
    failed(run("simulate", "pack.gone:scale"), 2, "pack.gone is no file")


def test_packages_of_one_name_beside_each_other(run, packages):
    places = [f"{packages}/{version}/pack/inner/kernels.py" for version in ("old", "new")]
    for version, place in zip(("old", "new"), places, strict=True):
        outcome = run("simulate", f"{place}:scale", "--arg", "x=f32[4,8]",
                      "--reference", f"{place}:{version}")  # fmt: skip
        assert outcome.code == 0, outcome.err
    compared = [f"{place}:scale" for place in places]
    outcome = run("simulate", "--compare", *compared, "--arg", "x=f32[4,8]",
                  "--reference", f"{places[0]}:old", "--json")  # fmt: skip
    agreed = [k["agreement"][0]["agrees"] for k in outcome.document()["kernels"]]
    assert agreed == [True, False]
    outcome = run("simulate", compared[0], "--arg", "x=f32[4,8]", "--sweep", "BIAS=1,5",
                  "--reference", f"{places[0]}:old", "--json")  # fmt: skip
    agreed = [point["agreement"][0]["agrees"] for point in outcome.document()["points"]]
    assert sorted(agreed) == [False, True]


@pytest.mark.parametrize("lnc", [1, 2])
def test_a_frameworks_simulator_is_this_one(lnc):
    """As vLLM-Neuron calls it: the function below the decorator, arguments by name."""

    def scaled(x, factor):
        rows = x.shape[0] // nl.num_programs(0)
        own = nl.ds(nl.program_id(0) * rows, rows)
        tile = nl.ndarray((rows, x.shape[1]), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(tile, x[own])
        nisa.tensor_scalar(tile, tile, nl.multiply, factor)
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out[own], tile)
        return out

    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    with nc.as_nki():
        from nki.simulator import simulate_kernel

        for kernel in (scaled, nc.jit(scaled)):
            assert (simulate_kernel(kernel, (), {"x": x, "factor": 3.0}, lnc=lnc) == 3 * x).all()
