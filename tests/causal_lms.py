"""Tiny causal LMs of families that differ in what their layers take and return."""

from typing import Any

import torch
import transformers as t
from tiny import SIZES, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 260}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 260, "n_positions": 128}
OPT = {**SMALL, "ffn_dim": 128, "max_position_embeddings": 128}
# Alternating attention, with a window that is shorter than the input.
WINDOWS = {"num_hidden_layers": 4, "sliding_window": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3TextConfig", {**SIZES, **WINDOWS, "sliding_window_pattern": 2}),
    "phi3": ("Phi3Config", SIZES),
    "gpt2": ("GPT2Config", GPT2),
    "opt": ("OPTConfig", OPT),
    # Its embedding is narrower than the hidden states.
    "opt, projected": ("OPTConfig", {**OPT, "word_embed_proj_dim": 32}),
    "mixtral": ("MixtralConfig", {**SIZES, "num_local_experts": 2}),
    # Their layers return tuples, the last one's a list.
    "falcon": ("FalconConfig", SMALL),
    "bloom": ("BloomConfig", {**SMALL, "n_layer": 3, "n_head": 4}),
    "openai-gpt": ("OpenAIGPTConfig", GPT2),
}
TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, untied": {"tied": False},
    "llama, eager": {"attn_implementation": "eager"},
    "qwen3": {},
    "gemma2": WINDOWS,
}
MODELS = (*TINY, *FAMILIES)


def family_model(kind: str) -> PreTrainedModel:
    """Return a seeded random causal LM in eval mode."""
    if kind in TINY:
        return tiny_model(kind.partition(",")[0], **TINY[kind])
    torch.manual_seed(0)
    name, options = FAMILIES[kind]
    return AutoModelForCausalLM.from_config(getattr(t, name)(**options)).eval()
