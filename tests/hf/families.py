"""Tiny models of every family in docs/compress.md, by `model_type`."""

from typing import Any

import torch
from tiny import SIZES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

# Where a family needs more sizes than SIZES, others, or not one of them (None).
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_SMALL_EXPERTS = {**_EXPERTS, "moe_intermediate_size": 64}
_SHARED_EXPERT = {**_SMALL_EXPERTS, "shared_expert_intermediate_size": 64}
_DEEPSEEK = {
    **_LATENT,
    **_SMALL_EXPERTS,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
SIZES_OF: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "falcon": {"head_dim": None},
    "falcon_h1": {
        "mamba_chunk_size": 16,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    },
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "xglm": {"pad_token_id": 1},
    "mpt": {"expansion_ratio": 2},
    "lfm2": {"layer_types": ["full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "ctrl": {"dff": 128},
    "minicpm3": _LATENT,
    "youtu": _LATENT,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "mixtral": _EXPERTS,
    "gpt_oss": _EXPERTS,
    "olmoe": _EXPERTS,
    "phimoe": _EXPERTS,
    "granitemoe": _EXPERTS,
    "qwen2_moe": _SHARED_EXPERT,
    "qwen3_moe": _SMALL_EXPERTS,
    "qwen3_next": {**_SHARED_EXPERT, **_MIXED},
    "qwen3_5_text": _MIXED,
}


def tiny_family(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a seeded random causal LM of the family, with random biases, in eval mode."""
    torch.manual_seed(0)
    sizes = {**SIZES, **SIZES_OF.get(kind, {})}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    config = AutoConfig.for_model(kind, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model
