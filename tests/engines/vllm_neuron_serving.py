"""What a rank of the stand-in engine does with a compressed checkpoint. Imports no Transformers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import vllm_neuron_engine
from torch import Tensor
from vllm_neuron_engine import NeuronConfig

from neuronmm_ops.engines.vllm_neuron.factory import NeuronMMForCausalLM

PROMPT, ANSWER = 12, 3


class Served(NamedTuple):
    """Of one rank: logits `[tokens, vocabulary]`, what it exchanged, its parameters' shapes."""

    logits: Tensor
    sent: list[tuple[str, tuple[int, ...]]]
    shapes: dict[str, tuple[int, ...]]


def config_of(path: Path) -> Any:
    """The config as the server has it: the record is overridden."""
    config = SimpleNamespace(**json.loads((path / "config.json").read_text()))
    config.dtype = getattr(torch, config.dtype)
    config.quantization_config = {}
    return config


def load(path: Path, config: Any, neuron_config: Any = None) -> Any:
    """Make the model on the meta device and fill it, as the engine's runner does."""
    with torch.device("meta"):
        model: Any = NeuronMMForCausalLM.from_configs(config, neuron_config or NeuronConfig())
    model.load_weights(str(path), torch.device("cpu"), None)
    assert not [name for name, parameter in model.named_parameters() if parameter.is_meta]
    return model


def metadata(layers: int, tokens: int) -> dict[str, dict[str, int]]:
    """What the engine's runner says of a batch; a decode step has one token a request."""
    own = {"max_query_len": tokens, "decode_token_threshold": 1}
    return {f"layers.{i}.self_attn": own for i in range(layers)}


def logits_of(model: Any, config: Any, ids: Tensor) -> Tensor:
    """Serve a prompt and an answer's tokens, one by one."""
    made = []
    for start, stop in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + ANSWER))):
        known = metadata(config.num_hidden_layers, stop - start)
        made.append(model(ids[start:stop], torch.arange(start, stop), known))
    return torch.cat(made)


def served(rank: int, paths: list[Path], ids: Tensor) -> list[Served]:
    """Serve each checkpoint."""
    return [_served(path, ids) for path in paths]


def _served(path: Path, ids: Tensor) -> Served:
    found, config = vllm_neuron_engine.install(path), config_of(path)
    model = load(path, config)
    found.group.sent.clear()
    logits = logits_of(model, config, ids)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return Served(logits, found.group.sent, shapes)
