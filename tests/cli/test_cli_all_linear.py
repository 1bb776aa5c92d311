"""`--targets all-linear` from compression to text: attention's projections are as welcome."""

import json
from pathlib import Path

import pytest
from outcomes import COMPRESS, Run
from tiny import tiny_directory

from neuronmm_ops import hf
from neuronmm_ops.nn.svd_qkv import PROJECTIONS

DTYPE = ("--dtype", "float32")
KINDS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", ("--ratio", "0.3", "--allocation", "uniform")),
        ("qwen3", ("--ratio", "0.6", "--storage", "fp8")),
    ],
)
def test_from_compression_to_text(
    family: str, options: tuple[str, ...], run: Run, text: Path, tmp_path: Path
) -> None:
    dense, out = tiny_directory(tmp_path / "dense", family), tmp_path / "out"
    common = ("--targets", "all-linear", "--calibration", text, *COMPRESS)
    compressed = run("compress", dense, "-o", out, *common, *options)
    assert compressed.code == 0, compressed.err

    document = json.loads(run("inspect", out, "--json").out)
    layers = document["layers"]
    assert {layer["name"].rpartition(".")[2] for layer in layers} == KINDS
    assert len(layers) == 2 * len(KINDS)
    assert not document["left_dense"]
    if "uniform" not in options:
        assert document["effective_ratio"] >= 0.6  # one budget, met as a whole
    ranks = {layer["name"]: layer["r"] for layer in layers}
    model = hf.load(str(out))
    for n in range(2):
        name = f"model.layers.{n}.self_attn"
        hooks = model.get_submodule(name)._forward_pre_hooks
        assert len(hooks) == all(ranks[f"{name}.{p}"] for p in PROJECTIONS)
        assert hooks or "uniform" not in options
    evaluated = run("eval", out, "--text", text, "--seqlen", "64", "--json", *DTYPE)
    assert evaluated.code == 0, evaluated.err
    assert json.loads(evaluated.out)["ppl_token"] > 1
    generated = run("generate", out, "--prompt", "The quick", "--new-tokens", "3", *DTYPE)
    assert generated.code == 0, generated.err
    planned = run("plan", "--model", out, "--tokens", "1", "--json")
    assert {row["projection"] for row in json.loads(planned.out)} >= KINDS
