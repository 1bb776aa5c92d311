"""Tiny low-rank models that vLLM's CPU attention takes, and the tokens Transformers gives."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from quantized import nearest, quantized
from safetensors.torch import save_file
from tiny import FAMILIES, tiny_model, tiny_tokenizer
from torch import nn
from transformers import MixtralConfig, Phi3Config

from neuronmm_ops import SVDLinear, set_compute_, swap_

# vLLM's attention for the CPU takes heads of 32 and more.
SIZES = {
    "hidden_size": 128,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "initializer_range": 0.2,  # the tokens differ by prompt
}
# Members of a fused layer have ranks of their own, and no two ranks divide them.
RANKS = {
    "q_proj": 41,
    "k_proj": 23,
    "v_proj": 17,
    "o_proj": 45,
    "gate_proj": 33,
    "up_proj": 57,
    "down_proj": 63,
    "qkv_proj": 51,
    "gate_up_proj": 59,
}
# Their qkv and gate_up are one matrix in the checkpoint; its experts stay dense.
FAMILIES |= {"phi3": Phi3Config, "mixtral": MixtralConfig}
PROMPTS = [[1, 2, 3, 4, 5], [70, 80, 90], list(range(30, 60)), [7], [255, 0, 128, 64] * 8]
TOKENS = 16


def low_rank(
    path: Path,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    ranks: Mapping[str, int] = RANKS,
    storage: str | None = None,
    dense: str | None = None,
    compute: str = "x",
    **sizes: Any,
) -> Any:
    """Write a tiny compressed model as a Transformers directory, and return it.

    Args:
        path: of the directory.
        family: a key of `tiny.FAMILIES`.
        dtype: of the parameters.
        ranks: of the layers, by the last part of their names; others stay dense.
        storage: of the factors.
        dense: storage of the layers of `RANKS` that `ranks` leaves dense.
        compute: as in `set_compute_`.
        sizes: other than `SIZES`.
    """
    tied = family == "gemma2"  # vLLM's has no head of its own
    model = tiny_model(family, dtype, **{**SIZES, "tied": tied, **sizes})
    for name, parameter in model.named_parameters():  # they are 0 and 1 in new models
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    factors = {}
    for name, module in model.named_modules():
        rank = ranks.get(name.rpartition(".")[2])
        if rank is not None:
            layer = SVDLinear.from_linear(module, min(rank, *module.weight.shape))
            u, v = layer.u.detach(), layer.v.detach()
            factors[name] = (u, v) if storage is None else quantized(u, v, storage)
        elif dense is not None and name.rpartition(".")[2] in RANKS:
            factors[name] = nearest(module.weight.detach().t(), dense)
    swap_(model, factors)
    if compute != "x":
        set_compute_(model, compute)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return model


def adapted_(path: Path, model: Any, rank: int = 8) -> Any:
    """Write a random LoRA adapter of all low-rank layers, and let the model add it."""
    tensors, alpha = {}, 2 * rank
    for name, module in model.named_modules():
        if isinstance(module, SVDLinear):
            a = torch.randn(rank, module.in_features) / module.in_features**0.5
            b = torch.randn(module.out_features, rank) / rank
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            delta = alpha / rank * b @ a
            module.register_forward_hook(lambda _, args, out, w=delta: out + args[0] @ w.t())
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    names = sorted({key.split(".")[-3] for key in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": names}
    (path / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    return model


@torch.no_grad()
def greedy(model: Any, prompts: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[list[int]]:
    """Return Transformers' own greedy tokens after each prompt."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # generate would mask tokens equal to the pad's
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def written(
    folder: Path, checkpoints: Mapping[str, Mapping[str, Any]], **run: Any
) -> tuple[dict[str, dict[str, Any]], dict[str, list[list[int]]]]:
    """Write a checkpoint of each name; return vLLM's options for it, and Transformers' tokens."""
    expected = {
        name: greedy(low_rank(folder / name, **options), PROMPTS)
        for name, options in checkpoints.items()
    }
    return {name: {"model": folder / name, **run} for name in checkpoints}, expected
