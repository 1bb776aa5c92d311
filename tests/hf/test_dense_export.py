"""hf.export_dense: an ordinary checkpoint that computes what the compressed one does."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hf.small import CONFIG, compress
from tiny import tiny_directory, tiny_ids, tiny_model
from transformers import AutoModelForCausalLM, GPT2Config

from neuronmm_ops import hf, swap_
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.manifest import verify
from neuronmm_ops.nn import dense_linears
from neuronmm_ops.storages import STORAGES

pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
ALONE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])
assert not [name for name in sys.modules if name.startswith("neuronmm")]
"""


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("storage", [None, *STORAGES])
def test_it_computes_what_the_checkpoint_does(family, storage, tmp_path):
    source, output = tmp_path / "small", tmp_path / "same"
    config = replace(CONFIG, storage=storage)
    compress(tiny_directory(tmp_path / "dense", family), source, config)
    found = hf.export_dense(source, output)
    verify(output)
    compressed = hf.load(source, dtype=torch.float32)
    same = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    assert type(same) is type(compressed)
    assert found["layers"] > 0
    assert getattr(same.config, "quantization_config", None) is None
    with torch.no_grad():
        wanted = compressed(tiny_ids()).logits
        torch.testing.assert_close(same(tiny_ids()).logits, wanted, rtol=1e-3, atol=1e-4)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("kind", [{}, {"rope_type": "llama3", **LLAMA3}])
def test_transformers_4_finds_the_rotation(kind, tmp_path):
    """It knows no `rope_parameters`, and would take theta 10000 without a word."""
    rope = {"rope_type": "default", "rope_theta": 500_000.0, **kind}
    if kind:
        rope["original_max_position_embeddings"] = 64
    model = tiny_model(rope_parameters=rope)
    swap_(model, {"model.layers.0.mlp.up_proj": (torch.randn(64, 8), torch.randn(8, 176) / 8)})
    model.save_pretrained(tmp_path / "small")
    hf.export_dense(tmp_path / "small", tmp_path / "same")
    config = json.loads((tmp_path / "same" / "config.json").read_text())
    assert config["rope_theta"] == 500_000.0
    older = config.get("rope_scaling")
    assert (older or {}).get("rope_type") == kind.get("rope_type")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "same")
    assert again.config.rope_parameters == rope
    torch.testing.assert_close(again(tiny_ids(1, 9)).logits, model(tiny_ids(1, 9)).logits)


def test_a_weight_that_its_module_holds_transposed(tmp_path):
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 260, "n_positions": 64}
    model = AutoModelForCausalLM.from_config(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    names = [name for name in dense_linears(model) if name != "lm_head"]
    linears = {name: dense_linears(model)[name] for name in names}
    factors = {
        n: (torch.randn(m.in_features, 4), torch.randn(4, m.out_features) / 8)
        for n, m in linears.items()
    }
    swap_(model, factors)
    model.save_pretrained(tmp_path / "small")
    hf.export_dense(tmp_path / "small", tmp_path / "same")
    same = AutoModelForCausalLM.from_pretrained(tmp_path / "same")
    ids = tiny_ids(1, 20)
    torch.testing.assert_close(same(ids).logits, model.eval()(ids).logits, rtol=1e-3, atol=1e-4)


def test_it_loads_without_this_package(tmp_path):
    compress(tiny_directory(tmp_path / "dense"), tmp_path / "small")
    hf.export_dense(tmp_path / "small", tmp_path / "same")
    torch.save(tiny_ids(), tmp_path / "ids")
    given = [str(tmp_path / name) for name in ("same", "ids", "logits")]
    subprocess.run([sys.executable, "-c", ALONE, *given], check=True)
    with torch.no_grad():
        wanted = hf.load(tmp_path / "small", dtype=torch.float32)(tiny_ids()).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits"), wanted, rtol=1e-3, atol=1e-4)


def test_what_is_refused(tmp_path):
    dense = tiny_directory(tmp_path / "dense")
    with pytest.raises(CheckpointError, match="is not compressed; copy it as it is"):
        hf.export_dense(dense, tmp_path / "out")
    compress(dense, tmp_path / "small")
    for taken in ("dense", "small"):
        with pytest.raises(FileExistsError, match="exists"):
            hf.export_dense(tmp_path / "small", tmp_path / taken)
    assert not (tmp_path / "out").exists()
