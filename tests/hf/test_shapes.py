"""Shapes of config.json, compared with the models that Transformers makes of it."""

import json
from dataclasses import astuple

import pytest
import torch
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from neuronmm_ops.models import DEFAULTS, DESCRIBED, resolve_shape
from neuronmm_ops.nn.fused_decoder import fuse_decoder_

LAYERS = 2


def is_fused(config):
    """Whether `fuse_decoder_` takes a model of it."""
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    try:
        fuse_decoder_(model)
    except ValueError:
        return False
    return True


@pytest.mark.slow
def test_layers_are_as_described(tmp_path):
    """Others were taken for gated MLPs: BERT's, Persimmon's, hybrids of attention and Mamba."""
    different = {}
    for kind in DESCRIBED:
        config = CONFIG_MAPPING[kind]()
        text = config.get_text_config()
        text.num_hidden_layers = LAYERS
        text.layer_types = ["full_attention"] * LAYERS
        # the defaults of some have none
        text.head_dim = getattr(text, "head_dim", None) or (
            text.hidden_size // text.num_attention_heads
        )
        config.save_pretrained(tmp_path / kind)
        path = tmp_path / kind / "config.json"
        saved = json.loads(path.read_text())
        is_tied = saved.pop("tie_word_embeddings", False)  # which older ones leave out
        path.write_text(json.dumps(saved))
        shape = resolve_shape(str(path))
        assert shape.tied == is_tied, kind
        with torch.device("meta"):
            layer = AutoModel.from_config(text).layers[-1]
        matrices = sum(each.numel() for each in layer.parameters() if each.dim() == 2)
        norms = [n for n, p in layer.named_parameters() if p.shape == (shape.head_dim,)]
        described = sum(K * N for K, N in shape.projections.values())
        found = matrices / described, len(norms) == 2, is_fused(text)
        if found != (1, shape.head_norm, shape.is_fused):
            different[kind] = found
    assert different == {}


@pytest.mark.parametrize(
    ("saved", "sizes"),
    [
        (
            {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240},
            (2560, 10240, 26, 8, 4, 256, 262208, True),
        ),
        (
            {"model_type": "llama", "vocab_size": 32064},
            (4096, 11008, 32, 32, 32, 128, 32064, False),
        ),
        (
            {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8},
            (512, 11008, 32, 8, 8, 64, 32000, False),
        ),
    ],
)
def test_sizes_that_config_json_leaves_out_are_those_of_its_class(tmp_path, saved, sizes):
    """As in Gemma 3's and LLaVA's on the Hub."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "several", "text_config": saved}))
    assert astuple(resolve_shape(str(path)))[1:9] == sizes


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_are_those_of_the_class(kind):
    config = CONFIG_MAPPING[kind]().to_dict()
    assert DEFAULTS[kind] == {name: config[name] for name in DEFAULTS[kind]}


def test_sizes_that_its_class_refuses_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": "many"}))
    with pytest.raises(ValueError, match=r"config.json: \w+ must be an integer from 1"):
        resolve_shape(str(path))


def test_a_config_json_of_a_text_model_alone_has_all_sizes(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    with pytest.raises(ValueError, match=r"num_attention_heads must be .* got None"):
        resolve_shape(str(path))
