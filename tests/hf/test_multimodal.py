"""Models that read images or sound, too: text compresses their decoder and nothing else."""

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from multimodal import MULTIMODAL
from stored import assert_same_bits, config_of, edit_config, tensors_of
from tiny import tiny_ids, tiny_tokenizer

from neuronmm_ops import CheckpointError, SVDConfig, SVDLinear, compress_, hf
from neuronmm_ops.compress.targets import select_targets, text_modules
from neuronmm_ops.draft.layers import depths, keep_
from neuronmm_ops.hf.dense import export_dense
from neuronmm_ops.models import shape_from_config

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::neuronmm_ops.{name}")
    for name in ("CalibrationWarning", "CompressionWarning")
]


def directory_of(path: Path, kind: str) -> Path:
    torch.manual_seed(0)
    MULTIMODAL[kind]().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    (path / "preprocessor_config.json").write_text('{"size": 28}')
    return path


ASKS_TEXT_FOR_IMAGES = pytest.mark.xfail(
    version("transformers") == "5.24.0", reason="its Llama 4 asks its text model for image_outputs"
)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[ASKS_TEXT_FOR_IMAGES] * (k == "llama4")) for k in MULTIMODAL]
)
def test_text_compresses_the_decoder_alone(kind, tmp_path):
    source = directory_of(tmp_path / "dense", kind)
    report = small.compress(source, tmp_path / "out")
    dense, loaded = hf.load(source), hf.load(tmp_path / "out")
    assert type(loaded) is type(dense) is type(MULTIMODAL[kind]())
    read = text_modules(dense)
    outside = {name for name, module in dense.named_modules() if module not in read}
    low_rank = {name for name, m in loaded.named_modules() if isinstance(m, SVDLinear)}
    assert low_rank == {layer.name for layer in report.layers if layer.is_replaced}
    assert low_rank
    assert outside.isdisjoint(low_rank)
    kept = [name for name in dense.state_dict() if name.rpartition(".")[0] in outside]
    assert len(kept) > 10
    states = dense.state_dict(), loaded.state_dict()
    assert_same_bits(*[{name: state[name] for name in kept} for state in states])
    unread = [left for left in report.left_dense if left.name.rpartition(".")[0] in outside]
    assert {left.reason for left in unread} <= {"text does not pass it"}
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == '{"size": 28}'


def test_layers_that_attend_to_images_stay_dense(tmp_path):
    source = directory_of(tmp_path / "dense", "mllama")
    small.compress(source, tmp_path / "out", SVDConfig(ratio=0.3, block=8, targets="all-linear"))
    loaded = hf.load(tmp_path / "out")
    low_rank = {name for name, m in loaded.named_modules() if isinstance(m, SVDLinear)}
    layers = {name.partition("layers.")[2].partition(".")[0] for name in low_rank}
    assert layers == {"0", "2"}  # the others, 1 and 3, have cross-attention and an MLP
    assert depths(hf.load(source)) == [4]
    with pytest.raises(ValueError, match=r"got cross_attention_layers \[1, 3\]"):
        shape_from_config(source)


@pytest.mark.parametrize("kind", ["gemma3", "mllama", "qwen3_vl", "mistral3", "llava"])
def test_streaming_is_the_same(kind, tmp_path):
    source = directory_of(tmp_path / "dense", kind)
    small.compress(source, tmp_path / "out")
    small.compress(source, tmp_path / "streamed", stream=True)
    written, known = tensors_of(tmp_path / "streamed"), tensors_of(tmp_path / "out")
    assert written.keys() == known.keys()
    for name, tensor in known.items():
        torch.testing.assert_close(written[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_compressed_model_reads_images(tmp_path):
    source = directory_of(tmp_path / "dense", "llava")
    small.compress(source, tmp_path / "out")
    export_dense(tmp_path / "out", tmp_path / "multiplied")
    ids, pixels = tiny_ids(1, 12), torch.randn(1, 3, 28, 28)
    ids[:, 2:6] = 5
    logits: list[torch.Tensor] = []
    for name in ("out", "multiplied", "dense"):
        model: Any = hf.load(tmp_path / name)
        model.config.image_token_id = 5
        with torch.no_grad():
            logits.append(model(input_ids=ids, pixel_values=pixels).logits)
            assert not torch.equal(model(input_ids=ids, pixel_values=-pixels).logits, logits[-1])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits[1], logits[2])
    assert (tmp_path / "multiplied" / "preprocessor_config.json").exists()


def test_batches_with_images_reach_the_tower():
    torch.manual_seed(0)
    model = MULTIMODAL["gemma3"]().eval()
    tower = "model.vision_tower.encoder.layers.0.mlp.fc1"
    config = SVDConfig(targets=tower, block=8, method="plain")
    assert list(select_targets(model, config).linears) == [tower]
    with pytest.raises(ValueError, match="match only modules that text does not pass, such as"):
        compress_(model, replace(config, method="whiten"), [tiny_ids(1, 12)])
    compress_(model, config)
    assert isinstance(model.get_submodule(tower), SVDLinear)


def test_a_kind_without_a_language_model_is_refused(tmp_path):
    source = directory_of(tmp_path / "dense", "llava")
    edit_config(source, lambda config: config.update(model_type="clip"))
    with pytest.raises(CheckpointError, match="no language model of the model_type clip") as error:
        hf.load(source)
    assert len(str(error.value)) < 250


def test_a_draft_has_some_of_the_decoders_layers(tmp_path):
    model = hf.load(directory_of(tmp_path / "dense", "qwen3_vl"))
    assert depths(model) == [2, 1]
    keep_(model, [1])
    model.save_pretrained(tmp_path / "draft")
    loaded = hf.load(tmp_path / "draft")
    assert loaded.config.text_config.num_hidden_layers == 1
    with torch.no_grad():
        pair = [m(input_ids=tiny_ids(1, 12)).logits for m in (model, loaded)]
    torch.testing.assert_close(*pair)


def test_the_shape_is_the_decoders(tmp_path):
    shape = shape_from_config(directory_of(tmp_path / "dense", "qwen3_vl"))
    assert (shape.hidden_size, shape.layers, shape.heads, shape.kv_heads) == (64, 2, 4, 2)
    assert shape.head_norm
    linear = directory_of(tmp_path / "linear", "qwen3_5")
    assert "linear_attention" in json.dumps(config_of(linear))
    with pytest.raises(ValueError, match="got layer_types 'linear_attention'"):
        shape_from_config(linear)
