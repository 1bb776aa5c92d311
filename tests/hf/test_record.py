"""The record in the config: any later `save_pretrained` writes a checkpoint that can be loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_ids, tiny_model
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from neuronmm_ops import SVDConfig, SVDLinear, compress_, factorize, hf, swap_
from neuronmm_ops.checkpoint import inspect_checkpoint

ATTENTION = tuple(f"model.layers.{i}.self_attn.q_proj" for i in (0, 1))


def _compress(model: nn.Module, targets: str = "mlp") -> None:
    compress_(
        model, SVDConfig(ratio=0.3, block=8, targets=targets, method="plain", allocation="uniform")
    )


def _swap(model: PreTrainedModel, *names: str) -> None:
    weights = {name: model.get_submodule(name).weight for name in names}
    swap_(model, {n: factorize(w, "plain").truncate(8) for n, w in weights.items()})  # pyright: ignore


def _assert_same(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    restored = hf.load(directory)
    expected, actual = model.state_dict(), restored.state_dict()
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert torch.equal(value, actual[name]), name
    return restored


def test_save_pretrained_after_compressing(tmp_path: Path) -> None:
    model = tiny_model()
    _compress(model)
    model.save_pretrained(tmp_path / "out")
    _assert_same(model, tmp_path / "out")


def test_save_pretrained_and_save_after_swapping(tmp_path: Path) -> None:
    model = tiny_model()
    _swap(model, *ATTENTION)
    model.save_pretrained(tmp_path / "plain")
    hf.save(model, tmp_path / "saved")
    for name in ("plain", "saved"):
        _assert_same(model, tmp_path / name)
        record = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        assert record["svd_config"] is None
        assert [layer["loss"] for layer in record["layers"]] == [None, None]
        assert record["ratio"] == record["effective_ratio"]


def test_runs_add_up(tmp_path: Path) -> None:
    model = tiny_model()
    _swap(model, ATTENTION[0])
    _compress(model)
    _swap(model, ATTENTION[1])
    _compress(model, "all-linear")
    hf.save(model, tmp_path / "out")
    restored = _assert_same(model, tmp_path / "out")
    assert sum(isinstance(module, SVDLinear) for module in restored.modules()) == 14


def test_the_size_of_the_model_is_that_of_the_dense_one_however_many_runs(tmp_path: Path) -> None:
    model = tiny_model()
    dense = sum(parameter.numel() for parameter in model.parameters())
    _swap(model, *ATTENTION)
    _compress(model)
    model.save_pretrained(tmp_path / "out")
    report = inspect_checkpoint(tmp_path / "out")
    left = sum(parameter.numel() for parameter in model.parameters())
    assert report.model_parameters == dense
    assert report.model_ratio == pytest.approx(1 - left / dense)


def test_the_body_alone_may_be_compressed(tmp_path: Path) -> None:
    model = tiny_model()
    _compress(model.model)
    model.save_pretrained(tmp_path / "plain")
    hf.save(model, tmp_path / "saved")
    _assert_same(model, tmp_path / "plain")
    _assert_same(model, tmp_path / "saved")


def test_a_layer_that_was_made_dense_again_is_no_longer_recorded(tmp_path: Path) -> None:
    model = tiny_model()
    _compress(model)
    mlp = model.model.layers[0].mlp
    mlp.gate_proj = mlp.gate_proj.to_linear()
    hf.save(model, tmp_path / "out")
    restored = _assert_same(model, tmp_path / "out")
    assert type(restored.model.layers[0].mlp.gate_proj) is nn.Linear


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="records no low-rank layer; see compress_"):
        hf.save(tiny_model(), tmp_path / "out")


def test_a_loaded_model_can_be_cast(tmp_path: Path) -> None:
    model = tiny_model()
    _compress(model)
    hf.save(model, tmp_path / "out")
    restored = hf.load(tmp_path / "out")
    assert restored.half().dtype == torch.float16
    assert restored.float().dtype == torch.float32


class _Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": tiny_ids(4, 16)[index], "labels": tiny_ids(4, 16)[index]}


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_trainer_trains_a_loaded_model_and_writes_one_that_loads(tmp_path: Path) -> None:
    model = tiny_model()
    _compress(model)
    hf.save(model, tmp_path / "out")
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=2, save_steps=2, report_to=[], use_cpu=True
    )
    loaded = hf.load(tmp_path / "out")
    before = loaded.get_submodule(ATTENTION[0]).weight.clone()  # pyright: ignore
    factor = loaded.model.layers[0].mlp.gate_proj.u.detach().clone()
    Trainer(loaded, arguments, train_dataset=_Rows(), callbacks=[TrainerCallback()]).train()
    assert not torch.equal(before, loaded.get_submodule(ATTENTION[0]).weight)  # pyright: ignore
    assert not torch.equal(factor, loaded.model.layers[0].mlp.gate_proj.u)
    _assert_same(loaded, tmp_path / "run" / "checkpoint-2")


UNAWARE = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1])
"""


@pytest.mark.slow
def test_a_loader_that_does_not_know_the_factors_raises(tmp_path: Path) -> None:
    model = tiny_model()
    _compress(model)
    model.save_pretrained(tmp_path / "out")
    unaware = subprocess.run(
        [sys.executable, "-c", UNAWARE, tmp_path / "out"], capture_output=True, text=True
    )
    assert unaware.returncode != 0
    assert "mlp.gate_proj.weight" in unaware.stdout + unaware.stderr
