"""Compressed Llama and Qwen3 in vLLM-Neuron's stand-ins: the loader and the numbers, on ranks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import vllm_neuron_engine
from tiny import tiny_ids, tiny_model
from tolerances import assert_close_to_oracle
from torch import Tensor, nn
from vllm_neuron_engine import NeuronConfig, engine

from neuronmm_ops import hf, swap_
from neuronmm_ops.integrations.vllm_neuron.factory import NeuronMMForCausalLM

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
PROMPT, ANSWER = 12, 3
RANKS = {"mlp.up_proj": 19, "mlp.down_proj": 13, "self_attn.o_proj": 9}
"""Ranks that neither 2 nor 4 divide; others are 16."""


def write(path: Path, family: str, layers: tuple[str, ...], **overrides: Any) -> Path:
    """Write a checkpoint with these layers of both blocks low rank."""
    model = tiny_model(family, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # so that layers count beside the residual stream
    factors = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(layers) and "layers" in name:
            r = RANKS.get(".".join(name.split(".")[-2:]), 16)
            left, values, right = torch.linalg.svd(module.weight.detach().T, full_matrices=False)
            factors[name] = ((left * values)[:, :r], right[:r])
    swap_(model, factors)
    model.save_pretrained(path)
    return path


def metadata(layers: int, tokens: int) -> dict[str, dict[str, int]]:
    """What the engine's runner says of a batch; a decode step has one token a request."""
    own = {"max_query_len": tokens, "decode_token_threshold": 1}
    return {f"layers.{i}.self_attn": own for i in range(layers)}


def served(rank: int, path: Path, config: Any, ids: Tensor) -> tuple[Tensor, Any, dict[str, Any]]:
    """Logits of a prompt and of an answer's tokens, from one rank; what was sent; its shapes."""
    found = vllm_neuron_engine.install(path)
    with torch.device("meta"):
        model: Any = NeuronMMForCausalLM.from_configs(config, NeuronConfig())
    model.load_weights(str(path), torch.device("cpu"), None)
    assert not [name for name, parameter in model.named_parameters() if parameter.is_meta]
    found.group.sent.clear()
    layers, made = config.num_hidden_layers, []
    for start, stop in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + ANSWER))):
        positions = torch.arange(start, stop)
        made.append(model(ids[start:stop], positions, metadata(layers, stop - start)))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return torch.cat(made), found.group.sent, shapes


def expected(path: Path, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Transformers' logits of the same checkpoint."""
    model = hf.load(path, dtype=dtype)
    with torch.no_grad():
        return model(ids[None]).logits[0]


@pytest.fixture(autouse=True)
def packages() -> Iterator[None]:
    yield
    vllm_neuron_engine.uninstall()


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("llama", MLP),
        ("llama", MLP + ATTENTION),
        ("qwen3", MLP + ATTENTION),
        ("llama", ("mlp.up_proj",)),
        ("llama", ("mlp.gate_proj", "self_attn.o_proj")),
        ("qwen3", ("mlp.down_proj", "self_attn.k_proj")),
    ],
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, family: str, layers: tuple[str, ...], tp: int
) -> None:
    path = write(tmp_path / "model", family, layers)
    ids = tiny_ids(1, PROMPT + ANSWER)[0]
    config = hf.load(path).config
    config.quantization_config = {}
    if tp == 1:
        results = [served(0, path, config, ids)]
    else:
        results = ranks.run(served, tp, path, config, ids)
    oracle = expected(path, ids, torch.float64)
    low = expected(path, ids, torch.float32)
    for logits, _, _ in results:
        assert_close_to_oracle(logits, oracle, low)
