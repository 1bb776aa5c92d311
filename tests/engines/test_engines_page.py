"""What docs/engines.md says to run."""

import re
from pathlib import Path

import torch
from tiny import tiny_ids, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from neuronmm_ops import swap_
from neuronmm_ops.cli import main


def test_the_dense_checkpoint_computes_what_the_compressed_one_does(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^neuronmm (export dense .*)$", page, re.MULTILINE)
    model, ids = tiny_model(), tiny_ids(1, 9)
    name = "model.layers.0.mlp.up_proj"
    swap_(model, {name: (torch.randn(64, 8), torch.randn(8, 176) / 8)})
    model.save_pretrained(tmp_path / "small")
    tiny_tokenizer().save_pretrained(tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    dense = AutoModelForCausalLM.from_pretrained("small-dense")
    assert type(dense.get_submodule(name)) is torch.nn.Linear
    assert "quantization_config" not in Path("small-dense", "config.json").read_text()
    torch.testing.assert_close(dense(ids).logits, model(ids).logits)
