"""`neuronmm compile` with a stand-in of NKI's driver: every kernel, and every way to end."""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import nki_driver
import pytest
import stand_ins
from outcomes import SCRIPT, caller, process, refused
from tiny_model import write_tiny

from neuronmm_ops import SVDConfig
from neuronmm_ops.cli import main
from neuronmm_ops.compress.record import record_of
from neuronmm_ops.compress.report import CompressionReport, LayerReport
from neuronmm_ops.estimate.subject import Options
from neuronmm_ops.kernels.rms_norm.prefill import rms_norm
from neuronmm_ops.models import resolve_shape
from neuronmm_ops.precompile import launches
from neuronmm_ops.precompile import run as precompile

ROOT = Path(__file__).parents[2]
ROW = {
    "components": ["norm"],
    "tokens": [1],
    "module": rms_norm.func.__module__,
    "kernel": "rms_norm",
    "lnc": 1,
    "target": "trn2",
    "operands": [[[1, 256], "bfloat16"], None, [[256], "bfloat16"]],
    "arguments": {"parts": 2},
}


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Iterator[stand_ins.NeuronMachine]:
    with stand_ins.neuron_machine(tmp_path / "packages", monkeypatch) as found:
        found.root.mkdir()
        yield found


@pytest.fixture
def compiler(machine):
    machine.package("nki", "0.7.0", nki_driver.FILES)
    machine.package("neuronx_cc", "2.28.7631.0", nki_driver.COMPILER)
    return machine


@pytest.fixture
def compile_one(compiler, monkeypatch, tmp_path, capsys):
    """Compile `ROW` alone."""
    monkeypatch.setattr(launches, "launches_of", lambda *arguments: [dict(ROW)])
    call = caller(main, capsys)
    return lambda *options: call("compile", "-o", tmp_path / "out", *options)


@pytest.mark.slow
def test_every_kernel_of_a_model(compiler, tmp_path):
    compiler.environment(
        STAND_IN_DRIVER="lm_head_decode=NCC_EXTP004", NKI_SIMULATOR="1", PYTHONPATH=_path(compiler)
    )
    options = ("--tokens", "1,300", "--target", "trn2", "--lnc", "2", "--storage", "int8")
    command = (*SCRIPT, "compile", "--model", write_tiny(tmp_path), "-o", tmp_path / "out")
    document = process(*command, *options, "--json").document(code=1)
    assert json.loads((tmp_path / "out" / "compile.json").read_text()) == document
    assert document["versions"] == {"nki": "0.7.0", "neuronx-cc": "2.28.7631.0"}
    rows = document["kernels"]
    ops = {(row["kernel"].removesuffix("_decode"), *row["tokens"]) for row in rows}
    every = {(op, M) for op in ("rms_norm", "xw", "attention", "svd_mlp") for M in (1, 300)}
    rest = {("rms_norm", 1, 300), ("rope", 300), ("lm_head", 1, 300), ("decoder_layer", 1)}
    assert ops == every | rest
    assert {row["lnc"] for row in rows} == {2}
    (head,) = [row for row in rows if row["verdict"] == "refused"]
    assert (head["kernel"], head["code"]) == ("lm_head_decode", "NCC_EXTP004")
    assert head["remedy"] == "use fewer --tokens"
    for row in rows:
        if row is not head:
            name, tensors, _ = json.loads((tmp_path / "out" / row["file"]).read_text())
            assert name == row["kernel"]
            assert len(tensors) == json.dumps(row["operands"]).count(', "')  # that have a dtype


def _path(machine: stand_ins.NeuronMachine) -> str:
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(machine.root), str(ROOT / "tests"), *given.split(os.pathsep)])


def test_a_compressed_directory_has_its_own_ranks(tmp_path):
    options = Options(target="trn2")
    write_tiny(tmp_path)
    found = {0: 24, 1: 40}
    shape = resolve_shape(str(tmp_path))
    layers = [
        LayerReport(
            *(f"model.layers.{n}.mlp.{name}", *shape.projections[name], r, False, None, 0.0, 1, 1),
            storage="int8",
        )
        for n, r in found.items()
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    _record(tmp_path, layers)
    rows = launches.launches_of(str(tmp_path), [1], options)
    mlps = [row["operands"] for row in rows if row["components"] == ["mlp"]]
    assert [operands[1] for operands in mlps] == [[[256, r], "int8"] for r in found.values()]
    assert len([row for row in rows if row["components"] == ["qkv"]]) == 1
    layer_kernels = [row for row in rows if row["components"] == ["decoder_layer"]]
    assert len(layer_kernels) == len(found)  # a launch of one layer of each kind
    for row, r in zip(layer_kernels, found.values(), strict=True):
        matrices = row["operands"][7]
        assert matrices[-2] == [[matrices[-2][0][0], r], "int8"]
    _record(tmp_path, layers[:2])  # down stays as it is, so no launch has all three
    rows = launches.launches_of(str(tmp_path), [1], options)
    kernels = {row["kernel"].removesuffix("_decode") for row in rows if "mlp" in row["components"]}
    assert {"xuv", "gated_product", "xw"} <= kernels
    assert "decoder_layer_decode" not in [row["kernel"] for row in rows]  # up is stored, down not
    with pytest.raises(ValueError, match="leave out storage"):
        launches.launches_of(str(tmp_path), [1], Options(target="trn2", storage="fp8"))


def _record(directory: Path, layers: list[LayerReport]) -> None:
    report = CompressionReport(SVDConfig(), tuple(layers), None, {})
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": record_of(report)}
    path.write_text(json.dumps(config))


@pytest.mark.slow
def test_what_is_compiled_is_kept_and_what_is_refused_is_tried_again(
    compile_one, compiler, tmp_path
):
    for ending, code in (("NCC_EOOM001", 1), ("", 0), ("NCC_EOOM001", 0)):
        compiler.environment(STAND_IN_DRIVER=f"rms_norm={ending}")
        (row,) = compile_one("--json").document(code)["kernels"]
        assert row["verdict"] == ("refused" if code else "compiled")
    folder = (tmp_path / "out" / row["file"]).parent
    assert {"kernel.neff", "backend_config.b64", "log.txt"} <= {p.name for p in folder.iterdir()}
    assert "1 compiled, 0 refused" in compile_one().page()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("NCC_EXTP004", "NCC_EXTP004", "Too many instructions; use fewer --tokens"),
        ("NCC_EXXX999", "NCC_EXXX999", "Too many instructions; report it with log.txt"),
        ("killed", "SIGKILL", "tracing rms_norm; use a machine with more memory"),
        ("hang", "timeout", "use a longer --timeout"),
    ],
)
def test_a_refusal_is_a_row_with_a_remedy(compile_one, compiler, tmp_path, ending, code, words):
    compiler.environment(STAND_IN_DRIVER=f"rms_norm={ending}")
    outcome = compile_one("--timeout", 8 if ending == "hang" else 60)
    assert outcome.code == 1
    assert words in outcome.out
    assert re.search(rf"refused +\S+ +{code}", outcome.out)
    assert "0 compiled, 1 refused" in outcome.out
    (folder,) = [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    end = time.monotonic() + 20
    while str(folder) in [_directory(process) for process in Path("/proc").glob("[0-9]*")]:
        assert time.monotonic() < end, "its processes outlive it"


def _directory(process: Path) -> str:
    try:
        return os.readlink(process / "cwd")
    except OSError:
        return ""


@pytest.mark.slow
def test_another_driver_is_refused(compile_one, compiler):
    (compiler.root / "nki" / "framework" / "compiled.py").write_text("")
    refused(compile_one(), "nki 0.7.0 must have the driver of 0.6 and 0.7", "nki==0.7.*")


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        ({}, "missing: nki, neuronx-cc;"),
        ({"nki": "0.7.0"}, "missing: neuronx-cc;"),
        ({"nki": "0.0.1", "neuronx_cc": "1.0.post1"}, "missing: nki, neuronx-cc;"),
        ({"nki": "0.1.0"}, "nki must be 0.3 or later"),
    ],
)
def test_without_the_packages_one_line_says_what_to_install(
    machine, capsys, tmp_path, packages, words
):
    for name, version in packages.items():
        machine.package(name, version, nki_driver.FILES if version == "0.7.0" else {})
    line = "0.7" if "later" in words else "pip install 'nki==0.7.*' 'neuronx-cc==2.28.*' --extra"
    refused(caller(main, capsys)("compile", "-o", tmp_path / "out"), words, line)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["0", "soon"])
def test_a_timeout_is_a_number(compile_one, value):
    refused(compile_one("--timeout", value), "--timeout must be")


def test_every_code_is_explained():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    codes = [code for code in precompile.REMEDIES if code[-1].isdigit()]
    assert [code for code in codes if code not in page] == []
