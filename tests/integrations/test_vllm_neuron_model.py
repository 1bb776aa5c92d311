"""Compressed Llama and Qwen3 in vLLM-Neuron's stand-ins: the loader and the numbers, on ranks."""

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
from vllm_neuron_serving import ANSWER, PROMPT, Served, served

from neuronmm_ops import hf, swap_

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
IDS = tiny_ids(1, PROMPT + ANSWER)[0]
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


def expected(path: Path, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Transformers' logits of the same checkpoint."""
    model = hf.load(path, dtype=dtype)
    with torch.no_grad():
        return model(ids[None]).logits[0]


@pytest.fixture(autouse=True)
def packages() -> Iterator[None]:
    yield
    vllm_neuron_engine.uninstall()


CASES = (
    ("llama", MLP),
    ("llama", MLP + ATTENTION),
    ("qwen3", MLP + ATTENTION),
    ("llama", ("mlp.up_proj",)),
    ("llama", ("mlp.gate_proj", "self_attn.o_proj")),
    ("qwen3", ("mlp.down_proj", "self_attn.k_proj")),
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return [write(root / str(i), *case) for i, case in enumerate(CASES)]


def check(paths: list[Path], results: list[list[Served]]) -> None:
    """Compare every rank's logits with those of Transformers, by an oracle in fp64."""
    for i, path in enumerate(paths):
        oracle, low = expected(path, IDS, torch.float64), expected(path, IDS, torch.float32)
        for of_rank in results:
            assert_close_to_oracle(of_rank[i].logits, oracle, low)


def test_logits_are_those_of_transformers(checkpoints: list[Path]) -> None:
    check(checkpoints, [served(0, checkpoints, IDS)])


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_logits_of_ranks_are_those_of_transformers(checkpoints: list[Path], tp: int) -> None:
    check(checkpoints, ranks.run(served, tp, checkpoints, IDS))
