"""`neuronmm export`."""

import json
import shutil
import sys

import pytest
import torch
from outcomes import refused
from tiny import tiny_ids

from neuronmm_ops import hf
from neuronmm_ops.checkpoint import inspect_checkpoint


def test_what_compress_wrote_is_exported(small, tmp_path, run):
    command = ("export", "nxdi", small, "-o", tmp_path / "out", "--tp", 2)
    document = run(*command, "--json").document()
    assert document["tp"] == 2
    assert document["command"].startswith("python -m neuronmm_ops.engines.nxdi --model-type")
    exported, source = inspect_checkpoint(tmp_path / "out"), inspect_checkpoint(small)
    assert [layer.r for layer in exported.layers] == [layer.r for layer in source.layers]


def test_transformers_reads_the_export_as_the_checkpoint(small, tmp_path, run):
    source = shutil.copytree(small, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0  # far from the default
    (source / "config.json").write_text(json.dumps(config))
    run("export", "nxdi", source, "-o", tmp_path / "out").page()
    found, wanted = (hf.load(path)(tiny_ids()).logits for path in (tmp_path / "out", source))
    assert torch.equal(found, wanted)


def test_it_says_what_to_run(small, tmp_path, run):
    lines = run("export", "nxdi", small, "-o", tmp_path / "out", "--tp", 8).page().splitlines()
    assert lines[0].startswith(f"wrote {tmp_path / 'out'}: ")
    assert [line for line in lines if line.startswith("note: ")]
    assert "not tested on hardware" in lines[-2]
    assert lines[-1].endswith("--prompt 'The capital of France is'")


def test_factors_multiplied_out(small, tmp_path, run):
    page = run("export", "dense", small, "-o", tmp_path / "out").page()
    assert page.startswith(f"wrote {tmp_path / 'out'}: ")
    assert "layers multiplied out" in page
    again = run("export", "dense", tmp_path / "out", "-o", tmp_path / "other")
    refused(again, "is not compressed; copy it as it is")


@pytest.mark.slow
def test_a_graph_of_onnx(small, tmp_path, run):
    pytest.importorskip("onnxscript")
    page = run("export", "onnx", small, "-o", tmp_path / "out").page()
    assert page.startswith(f"wrote {tmp_path / 'out'}/model.onnx: ")
    assert "opset 20" in page
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        *("model.onnx", "model.onnx.data", "config.json", "tokenizer.json")
    }


def test_a_graph_needs_its_packages(small, tmp_path, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    failed = run("export", "onnx", small, "-o", tmp_path / "out")
    refused(failed, "onnxscript", "pip install 'neuronmm-ops[onnx]'")
    assert not (tmp_path / "out").exists()
