"""`neuroncore simulate`: a kernel file in, its profile out, and one line for every mistake."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from outcomes import failed
from tolerances import assert_close_to_oracle

import neuroncore as nc
from neuroncore.cli.arguments import Tensor, read_arguments
from neuroncore.dtypes import DTYPES, from_numpy

EXAMPLE = Path(__file__).parents[2] / "examples" / "kernels" / "matmul.py"
ARGUMENTS = ("--arg", "lhsT=bf16[256,512]", "--arg", "rhs=bf16[256,1024]", "--target", "trn2")
KERNELS = """\
import nki
import nki.isa as nisa
import nki.language as nl

from helpers import load

SIZE = 512

@nki.jit
def copy(x, scale=1.0, act="none"):
    print("scale", scale, "act", act)
    tile = load(x)
    nisa.tensor_scalar(tile, tile, nl.multiply, scale)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, tile)
    return out

def plain(x):
    return x

@nki.jit
def wide(x):
    tile = nl.ndarray((256, 4), x.dtype)
    return x

@nki.jit
def divides(x):
    rows = 1 // (x.shape[0] - 128)
    return x

@nki.jit
def halves(x):
    core, cores = nl.program_id(0), nl.num_programs(0)
    size = x.shape[1] // cores
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = load(x[:, core * size : (core + 1) * size])
    nisa.dma_copy(out[:, core * size : (core + 1) * size], tile)
    return out

@nki.jit
def helped(x):
    return load(None)

@nki.jit
def stops(x):
    raise SystemExit(0)
"""
HELPERS = """\
import nki.isa as nisa
import nki.language as nl

def load(x):
    tile = nl.ndarray(x.shape, x.dtype)
    nisa.dma_copy(tile, x)
    return tile
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kernels")
    (directory / "helpers.py").write_text(HELPERS)
    path = directory / "kernels.py"
    path.write_text(KERNELS)
    return path


@pytest.fixture(name="run")
def run_of_this_file(simulate):
    yield simulate
    sys.modules.pop("helpers", None)  # each file of these tests has its own


def test_the_page(run):
    outcome = run(f"{EXAMPLE}:matmul", *ARGUMENTS)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("matmul on trn2, 1 core, calibrated model, execute mode\n")
    assert "ms modelled" in outcome.out


def test_json_is_the_profile(run):
    command = (f"{EXAMPLE}:matmul", *ARGUMENTS, "--json")
    found = run(*command, "--cost-model", "documented").document()
    assert (found["kernel"], found["model"], found["lnc"]) == ("matmul", "documented", 1)
    assert found["modelled"] is True
    assert found["flops"] == 2 * 256 * 512 * 1024
    assert found["hbm_bytes"] == 2 * (256 * 512 + 256 * 1024 + 512 * 1024)
    traced, executed = (run(*command, *mode).document() for mode in (("--trace-only",), ()))
    assert (traced.pop("mode"), executed.pop("mode")) == ("trace", "execute")
    assert traced == executed


def test_the_example_is_right_and_strict():
    spec = importlib.util.spec_from_file_location("matmul_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    random = np.random.default_rng(0)
    left, right = (random.standard_normal((256, n), np.float32) for n in (512, 1024))
    with nc.as_nki():
        spec.loader.exec_module(module)
        outputs = nc.simulate(module.matmul, left, right, target="trn2").outputs
    oracle = left.T.astype(np.float64) @ right.astype(np.float64)
    assert_close_to_oracle(*map(torch.from_numpy, (outputs, oracle, left.T @ right)))
    assert nc.lint(EXAMPLE) == []


def test_files_are_written(run, tmp_path):
    trace, picture = tmp_path / "trace.json", tmp_path / "a.png"
    outcome = run(f"{EXAMPLE}:matmul", *ARGUMENTS, "--perfetto", trace, "--plot", picture)
    assert outcome.code == 0, outcome.err
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_values_prints_and_helpers_beside_the_file(run, file):
    arguments = ("--arg", "x=f32[128,4]", "--arg", "scale=2.5", "--arg", "act=silu")
    outcome = run(f"{file}:copy", *arguments)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("scale 2.5 act silu\ncopy on trn2")
    outcome = run(f"{file}:copy", *arguments, "--json")
    assert outcome.document()["kernel"] == "copy"
    assert "scale 2.5" in outcome.err
    assert run(f"{file}:plain", "--arg", "x=int8[4,4]").code == 0  # a function without nki.jit


def test_imports_of_the_simulator_by_its_own_name(run, tmp_path):
    file = tmp_path / "own.py"
    text = KERNELS.replace("from helpers", "from own_helpers")
    text = text.replace("import nki.", "import neuroncore.")
    file.write_text(text.replace("import nki\n", "import neuroncore as nki\n"))
    (tmp_path / "own_helpers.py").write_text(HELPERS.replace("nki.", "neuroncore."))
    assert run(f"{file}:copy", "--arg", "x=f32[128,4]").code == 0


def test_two_cores(run, file):
    found = run(f"{file}:halves", "--arg", "x=bf16[128,512]", "--lnc", 2, "--json").document()
    assert (found["lnc"], len(found["cores"])) == (2, 2)
    assert found["hbm_bytes"] == 2 * 128 * 512 * 2


def test_matplotlib_is_needed_to_draw_alone(run, file, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    command = (f"{file}:plain", "--arg", "x=f32[4,4]")
    assert run(*command).code == 0
    done = run(*command, "--plot", "a.png")
    assert done.code == 2
    assert done.err == "neuroncore: plots need matplotlib; run: pip install 'neuroncore[plot]'\n"


X = ("--arg", "x=f32[128,4]")


@pytest.mark.parametrize(
    ("kernel", "arguments", "words"),
    [
        ("no/such.py:copy", (), ["no/such.py is no file"]),
        ("kernels.py", (), ["FILE.py:KERNEL", "kernels.py: name"]),
        ("kernels.py:", (), ["FILE.py:KERNEL"]),
        ("kernels.py:nope", X, ["kernels.py has no kernel nope", "copy, divides, halves"]),
        ("kernels.py:SIZE", X, ["SIZE of kernels.py is no kernel but 512; it has copy"]),
        ("kernels.py:copy", (), ["kernel copy needs --arg x"]),
        ("kernels.py:copy", (*X, "--arg", "z=1"), ["has no parameter z", "x, scale, act"]),
        ("kernels.py:copy", (*X, *X), ["--arg x is given twice"]),
        ("kernels.py:copy", ("--arg", "x"), ["NAME=VALUE", "'x'"]),
        ("kernels.py:copy", ("--arg", "=1"), ["NAME=VALUE"]),
        ("kernels.py:copy", ("--arg", "x=bf17[4]"), ["dtype 'bf17' is unknown", "bf16"]),
        ("kernels.py:copy", ("--arg", "x=bf16[4,]"), ["DTYPE[SIZE,...]", "bf16[4,]"]),
        ("kernels.py:copy", ("--arg", "x=bf16[0]"), ["sizes from 1"]),
        ("kernels.py:copy", ("--arg", "x=bf16[4,-1]"), ["sizes from 1"]),
        ("kernels.py:copy", ("--arg", "x=bf16[4"), ["'bf16[4'"]),
        ("kernels.py:copy", ("--arg", "x="), ["x"]),
        ("kernels.py:copy", ("--arg", "x=(1, f)"), ["tuple of plain values"]),
        ("kernels.py:copy", ("--arg", "x=f32[99999999,99999999]"), ["limit"]),
        ("kernels.py:copy", ("--arg", "x=tfloat32[4]"), ["tfloat32", "--trace-only"]),
        ("kernels.py:copy", (*X, "--target", "trn9"), ["target must be one of", "'trn9'"]),
        (
            "kernels.py:copy",
            (*X, "--tar", "trn2"),
            ["simulate: unrecognized arguments: --tar trn2; did you mean --target?"],
        ),
        ("kernels.py:copy", (*X, "--frobnicate"), ["unrecognized arguments: --frobnicate (see"]),
        ("kernels.py:copy", (*X, "--lnc", "3"), ["--lnc"]),
        ("kernels.py:copy", (*X, "--cost-model", "guess"), ["--cost-model"]),
        ("kernels.py:copy", (*X, "--seed", "-1"), ["--seed"]),
        ("kernels.py:copy", (*X, "--perfetto", "no/a.json"), ["cannot write no/a.json"]),
        ("kernels.py:copy", (*X, "--perfetto", "."), ["cannot write ."]),
        ("kernels.py:copy", (*X, "--plot", "a.doc"), ["a.doc", "png"]),
    ],
)
def test_bad_arguments(run, file, monkeypatch, kernel, arguments, words):
    monkeypatch.chdir(file.parent)
    failed(run(kernel, *arguments), 2, *words)
    assert {path.suffix for path in file.parent.iterdir() if path.is_file()} == {".py"}


def line_of(text):
    return KERNELS[: KERNELS.index(text)].count("\n") + 1


@pytest.mark.parametrize(
    ("kernel", "word", "line"),
    [
        ("wide", "256", "(256, 4)"),
        ("divides", "ZeroDivisionError: ", "1 // ("),
        ("helped", "AttributeError: ", "load(None)"),  # the helper's line is another file's
        ("stops", "SystemExit: 0", "raise SystemExit"),
    ],
)
def test_a_kernel_that_breaks_a_rule_or_raises(run, file, kernel, word, line):
    failed(run(f"{file}:{kernel}", *X), 1, word, f"[kernels.py:{line_of(line)}]")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = (\n", ["SyntaxError: ", "line 1"]),
        ("x = 1\nimport no_such_module\n", ["ModuleNotFoundError: ", "[broken.py:2]"]),
        ("raise ValueError('two\\nlines')\n", ["ValueError: two lines [broken.py:1]"]),
    ],
)
def test_a_file_that_cannot_be_imported(run, tmp_path, source, words):
    (tmp_path / "broken.py").write_text(source)
    path, modules = list(sys.path), set(sys.modules)
    failed(run(f"{tmp_path / 'broken.py'}:kernel"), 1, *words)
    assert sys.path == path
    assert not [name for name in set(sys.modules) - modules if "broken" in name or name == "nki"]


def test_debug_shows_the_traceback(run, file):
    with pytest.raises(Exception, match="ZeroDivisionError") as raised:
        run(f"{file}:divides", *X, "--debug")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_a_defect_of_the_simulator_is_not_blamed_on_the_kernel(run, file, monkeypatch):
    def fail(*_: object) -> None:
        raise IndexError("oops")

    monkeypatch.setattr("neuroncore.kernel.schedule", fail)
    failed(run(f"{file}:plain", *X), 1, "internal error: IndexError: oops", "--debug")


def test_the_help_says_that_it_runs_the_file(run):
    outcome = run("--help")
    assert "runs the code of that file" in " ".join(outcome.out.split())


VALUES = [
    ("3", 3), ("-3", -3), ("1e-6", 1e-6), ("inf", float("inf")), ("true", True), ("False", False),
    ("none", None), ("silu", "silu"), ("'3'", "3"), ('"a b"', "a b"), ("(128, 512)", (128, 512)),
    ("a=b", "a=b"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_compile_time_values(text, value):
    name, found = read_arguments(f"p={text}")[0]
    assert (name, found) == ("p", value)
    assert type(found) is type(value)


@pytest.mark.parametrize("name", sorted(set(DTYPES) - {n for n in DTYPES if n.endswith("_x4")}))
def test_every_dtype_has_values(name):
    tensor = read_arguments(f"x={name}[64, 8]")[0][1]
    assert isinstance(tensor, Tensor)
    assert (tensor.shape, tensor.dtype) == ((64, 8), name)
    if name == "tfloat32":
        return
    values, again = (tensor.values(np.random.default_rng(0)) for _ in range(2))
    assert from_numpy(values.dtype) == name
    assert values.shape == (64, 8)
    numbers = values.astype(np.float32)
    np.testing.assert_array_equal(numbers, again.astype(np.float32))
    assert np.isfinite(numbers).all()
    assert len(np.unique(numbers)) > (1 if name == "bool_" else 5)


@pytest.mark.parametrize(
    ("short", "name"),
    [("bf16", "bfloat16"), ("fp32", "float32"), ("fp8", "float8_e4m3"), ("bool", "bool_")],
)
def test_short_names_of_dtypes(short, name):
    assert read_arguments(f"x={short}[2]")[0][1].dtype == name
