"""The record in the config: any later `save_pretrained` writes a checkpoint that can be loaded."""

import subprocess
import sys

import pytest
import torch
from small import compressed
from stored import assert_same_bits, config_of
from tiny import tiny_ids, tiny_model
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from neuronmm_ops import SVDConfig, SVDLinear, compress_, factorize, hf, swap_
from neuronmm_ops.checkpoint import inspect_checkpoint

ATTENTION = tuple(f"model.layers.{i}.self_attn.q_proj" for i in (0, 1))


def compress(model, targets="mlp"):
    config = SVDConfig(ratio=0.3, block=8, targets=targets, method="plain", allocation="uniform")
    compress_(model, config)


def swap(model, *names):
    weights = {name: model.get_submodule(name).weight for name in names}
    swap_(model, {n: factorize(w, "plain").truncate(8) for n, w in weights.items()})


def restored(model, directory):
    """Return what is loaded from the directory, which is the model."""
    found = hf.load(directory)
    assert_same_bits(found.state_dict(), model.state_dict())
    return found


def test_save_pretrained_after_compressing_the_whole_model_or_its_body(tmp_path):
    for name, part in (("whole", lambda model: model), ("body", lambda model: model.model)):
        model = tiny_model()
        compress(part(model))
        model.save_pretrained(tmp_path / name)
        hf.save(model, tmp_path / f"{name}, saved")
        restored(model, tmp_path / name)
        restored(model, tmp_path / f"{name}, saved")


def test_save_pretrained_and_save_after_swapping(tmp_path):
    model = tiny_model()
    swap(model, *ATTENTION)
    model.save_pretrained(tmp_path / "plain")
    hf.save(model, tmp_path / "saved")
    for name in ("plain", "saved"):
        restored(model, tmp_path / name)
        record = config_of(tmp_path / name)["quantization_config"]
        assert record["svd_config"] is None
        assert [layer["loss"] for layer in record["layers"]] == [None, None]
        assert record["ratio"] == record["effective_ratio"]


def test_runs_add_up(tmp_path):
    model = tiny_model()
    dense = sum(parameter.numel() for parameter in model.parameters())
    swap(model, ATTENTION[0])
    compress(model)
    swap(model, ATTENTION[1])
    compress(model, "all-linear")
    hf.save(model, tmp_path / "out")
    found = restored(model, tmp_path / "out")
    assert sum(isinstance(module, SVDLinear) for module in found.modules()) == 14
    # The size of the model is that of the dense one, however many runs there were.
    report = inspect_checkpoint(tmp_path / "out")
    left = sum(parameter.numel() for parameter in model.parameters())
    assert report.model_parameters == dense
    assert report.model_ratio == pytest.approx(1 - left / dense)


def test_a_layer_that_was_made_dense_again_is_no_longer_recorded(tmp_path):
    model, _ = compressed()
    mlp = model.model.layers[0].mlp
    mlp.gate_proj = mlp.gate_proj.to_linear()
    hf.save(model, tmp_path / "out")
    found = restored(model, tmp_path / "out")
    assert type(found.model.layers[0].mlp.gate_proj) is nn.Linear
    # A loaded model can be cast.
    assert found.half().dtype == torch.float16
    assert found.float().dtype == torch.float32


def test_a_dense_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="records no compressed layer; see compress_"):
        hf.save(tiny_model(), tmp_path / "out")


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_trainer_trains_a_loaded_model_and_writes_one_that_loads(tmp_path):
    hf.save(compressed()[0], tmp_path / "out")
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=2, save_steps=2, report_to=[], use_cpu=True
    )
    loaded = hf.load(tmp_path / "out")
    weight = loaded.get_submodule(ATTENTION[0]).weight
    factor = loaded.model.layers[0].mlp.gate_proj.u
    before = weight.clone(), factor.clone()
    rows = [{"input_ids": ids, "labels": ids} for ids in tiny_ids(4, 16)]
    Trainer(loaded, arguments, train_dataset=rows, callbacks=[TrainerCallback()]).train()
    assert not torch.equal(before[0], weight)
    assert not torch.equal(before[1], factor)
    restored(loaded, tmp_path / "run" / "checkpoint-2")


UNAWARE = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1])
"""


@pytest.mark.slow
def test_a_loader_that_does_not_know_the_factors_raises(tmp_path):
    compressed()[0].save_pretrained(tmp_path / "out")
    unaware = subprocess.run(
        [sys.executable, "-c", UNAWARE, tmp_path / "out"], capture_output=True, text=True
    )
    assert unaware.returncode != 0
    assert "mlp.gate_proj.weight" in unaware.stdout + unaware.stderr
