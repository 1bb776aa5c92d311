"""`neuronmm export nxdi`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import COMPRESS, Run, refused
from tiny import tiny_ids

from neuronmm_ops import hf
from neuronmm_ops.checkpoint import inspect_checkpoint


@pytest.fixture(scope="module")
def compressed(dense: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from neuronmm_ops.cli import main

    out = tmp_path_factory.mktemp("compressed") / "out"
    options = ("--method", "plain", "--ratio", "0.5")
    arguments = ("compress", dense, "-o", out, "--calibration", text, *COMPRESS, *options)
    assert main([str(argument) for argument in arguments]) == 0
    return out


def test_what_compress_wrote_is_exported(compressed: Path, tmp_path: Path, run: Run) -> None:
    outcome = run("export", "nxdi", compressed, "-o", tmp_path / "out", "--tp", 2, "--json")
    assert outcome.code == 0, outcome.err
    document: dict[str, Any] = json.loads(outcome.out)
    assert document["tp"] == 2
    assert document["command"].startswith("python -m neuronmm_ops.integrations.nxdi --model-type")
    exported, source = inspect_checkpoint(tmp_path / "out"), inspect_checkpoint(compressed)
    assert [layer.r for layer in exported.layers] == [layer.r for layer in source.layers]


def test_transformers_reads_the_export_as_the_checkpoint(
    compressed: Path, tmp_path: Path, run: Run
) -> None:
    config = json.loads((compressed / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0  # far from the default
    (compressed / "config.json").write_text(json.dumps(config))
    assert run("export", "nxdi", compressed, "-o", tmp_path / "out").code == 0
    found, wanted = (hf.load(path)(tiny_ids()).logits for path in (tmp_path / "out", compressed))
    assert torch.equal(found, wanted)


def test_it_says_what_to_run(compressed: Path, tmp_path: Path, run: Run) -> None:
    outcome = run("export", "nxdi", compressed, "-o", tmp_path / "out", "--tp", 8)
    lines = outcome.out.splitlines()
    assert lines[0].startswith(f"wrote {tmp_path / 'out'}: ")
    assert [line for line in lines if line.startswith("note: ")]
    assert "not tested on hardware" in lines[-2]
    assert lines[-1].endswith("--prompt 'The capital of France is'")


def test_bad_input_is_one_line(compressed: Path, dense: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    refused(run("export", "nxdi", dense, "-o", out), "is not a compressed checkpoint")
    refused(run("export", "nxdi", tmp_path / "none", "-o", out), "is no directory")
    refused(run("export", "nxdi", compressed, "-o", out, "--tp", "0"), "--tp must be at least 1")
    refused(run("export", "nxdi", compressed, "-o", compressed), "holds the input model")
    refused(run("export", "nxdi", compressed, "-o", dense), "exists")
    refused(run("export", "tpu", compressed, "-o", out), "invalid choice: 'tpu'")
    refused(run("export"), "ENGINE")
    assert not out.exists()
