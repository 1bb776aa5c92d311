"""Tiny models and tokenizers, made on the spot: nothing is downloaded."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 260,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
FAMILIES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,  # q, k and v have biases
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "gemma2": Gemma2Config,  # gelu_tanh
}


def tiny_model(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    tied: bool = True,
    **overrides: object,
) -> PreTrainedModel:
    """Return a seeded random causal LM of the family, in eval mode."""
    torch.manual_seed(0)
    config = FAMILIES[family](**{**SIZES, "tie_word_embeddings": tied, **overrides})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer: one token for each byte, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")  # noqa: S106


def tiny_directory(path: Path, family: str = "llama", **overrides: object) -> Path:
    """Write a tiny model and its tokenizer as a Transformers directory."""
    tiny_model(family, **overrides).save_pretrained(path)  # pyright: ignore
    tiny_tokenizer().save_pretrained(path)
    return path


def tiny_ids(batch: int = 16, length: int = 64) -> torch.Tensor:
    """Return seeded random token ids `[batch, length]`."""
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1))
