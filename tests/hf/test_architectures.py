"""Architectures whose tensors Transformers renames, or whose code reads a Linear's weight."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as t
from multimodal import MULTIMODAL, VISION
from stored import assert_same_bits
from tiny import SIZES, tiny_ids
from transformers import PreTrainedModel

from neuronmm_ops import SVDConfig, SVDLinear, compress_, hf
from neuronmm_ops.checkpoint import inspect_checkpoint

MIXED = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 260}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 260, "state_size": 8}
MAMBA2 = {**MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16}

RENAMED: dict[str, Callable[[], PreTrainedModel]] = {
    **MULTIMODAL,
    "laguna": lambda: t.LagunaForCausalLM(t.LagunaConfig(**MIXED)),  # shared experts alone
    "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**VISION)),
}
READING_WEIGHTS: dict[str, Callable[[], PreTrainedModel]] = {
    "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**T5)),
    "mamba": lambda: t.MambaForCausalLM(t.MambaConfig(**MAMBA)),
    "mamba2": lambda: t.Mamba2ForCausalLM(t.Mamba2Config(**MAMBA2)),
    "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**SIZES, num_local_experts=2)),
}
STORED = pytest.mark.parametrize("storage", [None, "fp8"])


def _round_trip(
    model: PreTrainedModel, directory: Path, storage: str | None = None
) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = SVDConfig(block=8, targets="all-linear", method="plain", storage=storage)
        compress_(model, config)
        hf.save(model, directory)
        restored = type(model).from_pretrained(directory)
    assert_same_bits(restored.state_dict(), model.state_dict())
    assert any(isinstance(module, SVDLinear) for module in restored.modules())
    return restored


@STORED
@pytest.mark.parametrize("kind", RENAMED)
def test_renamed_tensors_come_back(kind, storage, tmp_path):
    torch.manual_seed(0)
    model = RENAMED[kind]().eval()
    _round_trip(model, tmp_path / "out", storage)
    layers = inspect_checkpoint(tmp_path / "out").layers
    low_rank = {name for name, m in model.named_modules() if isinstance(m, SVDLinear)}
    assert {layer.name for layer in layers if layer.r} == low_rank


@STORED
@pytest.mark.parametrize("kind", READING_WEIGHTS)
def test_models_that_ask_for_a_weight_run_after_loading(kind, storage, tmp_path):
    torch.manual_seed(0)
    model = READING_WEIGHTS[kind]().eval()
    inputs = {"input_ids": tiny_ids(1, 12)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tiny_ids(1, 8)
    restored = _round_trip(model, tmp_path / "out", storage).eval()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, restored(**inputs).logits)


@pytest.mark.skipif(not hasattr(t, "HrmTextConfig"), reason="an older Transformers")
@pytest.mark.parametrize("save", [hf.save, t.PreTrainedModel.save_pretrained])
def test_one_half_of_a_stored_matrix_is_compressed(save, tmp_path):
    sizes = {**SIZES, "num_key_value_heads": None}
    model = t.AutoModelForCausalLM.from_config(t.HrmTextConfig(**sizes)).eval()
    compress_(model, SVDConfig(ratio=0.3, block=8, targets=r".*mlp\.up_proj", method="plain"))
    save(model, tmp_path / "out")
    loaded = hf.load(tmp_path / "out")
    assert_same_bits(loaded.state_dict(), model.state_dict())
