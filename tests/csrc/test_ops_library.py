"""The C++ ops: the Python package's schemas, values and errors, and a model without Python."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import op_calls
import pytest
import torch
from commands import run
from safetensors.torch import load_file
from tolerances import assert_close_to_oracle
from torch import Tensor

import neuronmm_ops  # noqa: F401 registers the ops
from neuronmm_ops.ops.backends.cpu import streams_by_mv

pytestmark = pytest.mark.slow  # all need the C compiler


@pytest.fixture(scope="module")
def library(build: Callable[[str], Path]) -> Path:
    return build("libneuronmm_ops.so")


@pytest.fixture(scope="module")
def recorded(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what a process that has only the C++ library computed."""
    folder = tmp_path_factory.mktemp("recorded")
    run(sys.executable, "-W", "error", op_calls.__file__, library, folder)
    return folder


def test_schemas_tags_and_errors_are_those_of_the_package(recorded):
    expected = {"schemas": op_calls.schemas(), "refusals": op_calls.refusals()}
    assert "no error" not in expected["refusals"]
    found = json.loads((recorded / "texts.json").read_text())
    assert {key: found[key] for key in expected} == expected


def test_one_row_takes_the_matmul_that_it_takes_in_the_package(recorded):
    expected = {str(d): ["aten::mv" if streams_by_mv(d) else "aten::mm"] for d in op_calls.DTYPES}
    assert json.loads((recorded / "texts.json").read_text())["products"] == expected


@pytest.mark.parametrize("dtype", op_calls.DTYPES, ids=str)
def test_values_are_those_of_the_package(recorded, dtype):
    actual = load_file(recorded / f"{dtype}.safetensors")
    expected = op_calls.results(dtype)
    assert actual.keys() == expected.keys()
    oracles = op_calls.results(dtype, Tensor.double)
    sizes = op_calls.results(dtype, lambda t: t.double().abs())
    for name, value in expected.items():
        assert_close_to_oracle(actual[name], oracles[name], value, sizes[name])


@pytest.mark.parametrize("dtype", op_calls.DTYPES, ids=str)
def test_values_of_one_byte_factors_are_those_of_the_package(recorded, dtype):
    actual = load_file(recorded / f"{dtype}-one-byte.safetensors")
    expected = op_calls.one_byte_results(dtype)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        # the same operations; bfloat16 takes another matmul, and where that rounds an
        # intermediate to the next fp8 value, the results differ by as much
        is_flipped = dtype == torch.bfloat16 and " fp8 [" in name
        share = torch.finfo(torch.float8_e4m3fn).eps if is_flipped else 4 * torch.finfo(dtype).eps
        tolerance = share * float(value.abs().max()) if value.numel() else 0
        torch.testing.assert_close(actual[name], value, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("load", ["torch.ops.load_library", "ctypes.CDLL"])
def test_a_library_loaded_second_registers_nothing_and_says_so(library, load):
    script = (
        "import ctypes, sys, torch, neuronmm_ops\n"
        f"{load}(sys.argv[1])\n"
        "x = torch.eye(3, requires_grad=True)\n"
        "print(neuronmm_ops.xuv(x, x, x).requires_grad)\n"
    )
    command = [sys.executable, "-c", script, str(library)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True\n"
    assert "already registered in this process, by the Python package" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_package_imported_second_is_an_import_error(library):
    script = (
        "import sys, torch\n"
        "torch.ops.load_library(sys.argv[1])\n"
        "try:\n"
        "    import neuronmm_ops\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "x = torch.eye(3)\n"
        "assert torch.equal(torch.ops.neuronmm.xuv(x, x, x), x)\n"
    )
    output = run(sys.executable, "-c", script, library)
    assert "already registered" in output
    assert output.count("\n") == 1


PACKAGE_A_MODEL = """
import sys
import torch
import neuronmm_ops

folder = sys.argv[1]
torch.manual_seed(0)


def one_byte(K, r, N, dtype):
    def factor(rows, columns):
        return torch.randint(-99, 100, (rows, columns)).to(dtype), torch.rand(columns) / 400

    (u, u_scale), (v, v_scale) = factor(K, r), factor(r, N)
    return neuronmm_ops.SVDLinear.from_factors(u, v, None, u_scale, v_scale)


fp8 = torch.float8_e4m3fn
mlp = neuronmm_ops.SVDMLP.from_projections(
    one_byte(48, 16, 96, fp8), one_byte(48, 16, 96, fp8), one_byte(96, 24, 48, fp8), "silu"
)
model = torch.nn.Sequential(
    neuronmm_ops.SVDLinear(64, 48, 16), neuronmm_ops.SVDMLP(48, 96, (8, 16, 24)),
    mlp, one_byte(48, 32, 48, torch.int8),
).requires_grad_(False)
x = torch.randn(5, 64)
x.numpy().tofile(f"{folder}/x")
model(x).numpy().tofile(f"{folder}/expected")
program = torch.export.export(model, (x,))
# One small file is compiled: what makes many of them, or their code, fast takes longer than it.
quick = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
torch._inductor.aoti_compile_and_package(
    program, package_path=f"{folder}/model.pt2", inductor_configs=quick
)
model.double()(x.double()).numpy().tofile(f"{folder}/oracle")
"""


def test_a_compressed_model_runs_without_python(build, tmp_path):
    program = build("run_package")
    linked = run("ldd", program)
    assert "libneuronmm_ops.so => /" in linked
    assert "libpython" not in linked

    cache = tmp_path / "cache"
    run(sys.executable, "-c", PACKAGE_A_MODEL, tmp_path, TORCHINDUCTOR_CACHE_DIR=cache)

    output = run(program, tmp_path / "model.pt2", tmp_path / "y", "5x64", tmp_path / "x")
    assert output == "[5, 48]\n"
    y, oracle, expected = (
        torch.from_numpy(np.fromfile(tmp_path / name, dtype))
        for name, dtype in (("y", np.float32), ("oracle", np.float64), ("expected", np.float32))
    )
    assert_close_to_oracle(y, oracle, expected)


def test_the_runner_says_how_it_is_called(build):
    usage = subprocess.run([build("run_package")], capture_output=True, text=True, check=False)
    assert (usage.returncode, usage.stderr.split(":")[0]) == (2, "usage")


@pytest.mark.parametrize(
    ("shape", "name", "words"),
    [
        ("2x2", "x", "input must be float32 of shape [2, 2] = 16 bytes, got another size in x;"),
        ("i64:2x2", "x", "input must be int64 of shape [2, 2] = 32 bytes, got another size in x;"),
        ("2x2", "absent", "cannot read absent; check the path"),
        ("4xabc", "x", "SHAPE must be sizes joined by x, got 4xabc; write 4x256, or i64:1x8"),
        ("3", "x", "cannot read model.pt2; check the path"),
    ],
)
def test_the_runner_refuses_in_one_line(build, tmp_path, shape, name, words):
    (tmp_path / "x").write_bytes(bytes(12))
    command = [build("run_package"), "model.pt2", "y", shape, name]
    wrong = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith(f"run_package: {words}")
    assert wrong.stderr.count("\n") == 1, wrong.stderr
