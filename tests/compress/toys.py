"""Tiny models to compress: random Transformers models, and plain modules."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "Llama": {"tie_word_embeddings": False},
    "Qwen2": {"tie_word_embeddings": False},  # has biases in q, k and v
    "Qwen3": {"tie_word_embeddings": True, "head_dim": 8},
    "Mistral": {"tie_word_embeddings": False},
    "Gemma2": {"tie_word_embeddings": True, "head_dim": 8, "query_pre_attn_scalar": 8},
}


def causal_lm(family: str = "Llama", **options: Any) -> nn.Module:
    """Build a model of the family with random weights, in eval mode."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **options})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def token_batches(count: int = 4, length: int = 32, rows: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (rows, length), generator=generator) for _ in range(count)]


class GatedMLP(nn.Module):
    """Gate and up are given the same tensor."""

    def __init__(self, K: int = 8, inner: int = 16, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(K, inner, bias=bias)
        self.up_proj = nn.Linear(K, inner, bias=bias)
        self.down_proj = nn.Linear(inner, K, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    actual = actual.detach()
    return float((actual - expected).norm() / expected.norm())
