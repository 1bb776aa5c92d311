"""Low-rank checkpoints as others lay them out."""

import torch
from safetensors.torch import save_file
from tiny import tiny_model, tiny_tokenizer

from neuronmm_ops import swap_


def drawn(model, names, rank=8):
    """Factors of the Linears whose names end so."""
    made = torch.Generator().manual_seed(0)
    linears = {n: m for n, m in model.named_modules() if n.endswith(names)}
    return {
        n: (
            torch.randn(m.in_features, rank, generator=made) / 8,
            torch.randn(rank, m.out_features, generator=made) / 3,
        )
        for n, m in linears.items()
    }


def published(path, family, endings, module=True, swapped=False, names=("_proj",), square=True):
    """Write a checkpoint in a layout; return the model that it stands for.

    `swapped`: the first name is that of the factor which is applied first; `square`: also where a
    Linear has as many outputs as inputs.
    """
    model = tiny_model(family)
    model.config.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    factors = drawn(model, names)
    if not square:
        factors = {n: (u, v) for n, (u, v) in factors.items() if u.shape[0] != v.shape[1]}
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {n: t.clone() for n, t in model.state_dict().items() if n not in tied}
    for name, (u, v) in factors.items():
        del tensors[f"{name}.weight"]
        start = name.removesuffix("_proj") if endings[0].startswith("_") else name
        first, second = endings if swapped else endings[::-1]
        way = (lambda t: t.t().contiguous()) if module else (lambda t: t)
        tensors[start + first + ".weight" * module] = way(u)
        tensors[start + second + ".weight" * module] = way(v)
        if f"{name}.bias" in tensors:
            tensors[f"{start}{second}.bias"] = tensors.pop(f"{name}.bias")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    swap_(model, factors)
    return model
