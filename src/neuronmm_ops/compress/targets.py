"""The Linears of a model that a config's targets select."""

import re
from typing import NamedTuple

from torch import nn

from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.nn.swap import shared_weights

# Last name components in Transformers' decoders and encoders.
PRESETS: dict[str, frozenset[str]] = {
    "mlp": frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2"}),
    "attention": frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj"}),
}
ALL_LINEAR = "all-linear"


class Selection(NamedTuple):
    """The Linears to compress, by name, and those that match a target but must stay dense."""

    linears: dict[str, nn.Linear]
    kept: dict[str, tuple[nn.Linear, str]]  # with the reason


def select_targets(model: nn.Module, config: SVDConfig) -> Selection:
    """Find the Linears that `config.targets` selects; raise ValueError where there is none.

    The output head is taken only where it is named, and a Linear that shares its weight with
    another module (a tied head) never.
    """
    shared = shared_weights(model)
    head = output_head(model)
    linears: dict[str, nn.Linear] = {}
    kept: dict[str, tuple[nn.Linear, str]] = {}
    candidates = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
    for name, linear in candidates.items():
        matched = [target for target in config.target_list if _matches(target, name)]
        is_named = any(target in (name, name.rpartition(".")[2]) for target in matched)
        if not matched or (linear is head and not is_named):
            continue
        if name in shared:
            kept[name] = linear, f"shares its weight with {shared[name]}"
        else:
            linears[name] = linear
    if not linears:
        raise ValueError(_nothing_matches(config, candidates, kept))
    return Selection(linears, kept)


def _matches(target: str, name: str) -> bool:
    leaf = name.rpartition(".")[2]
    if target == ALL_LINEAR:
        return True
    if target in PRESETS:
        return leaf in PRESETS[target]
    return target in (name, leaf) or re.fullmatch(target, name) is not None


def output_head(model: nn.Module) -> nn.Module | None:
    """Return Transformers' output embedding, or whatever is called lm_head, or None."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else getattr(model, "lm_head", None)
    return head if isinstance(head, nn.Module) else None


def _nothing_matches(
    config: SVDConfig,
    candidates: dict[str, nn.Linear],
    kept: dict[str, tuple[nn.Linear, str]],
) -> str:
    targets = ", ".join(config.target_list)
    if kept:
        name, (_, reason) = next(iter(kept.items()))
        return f"targets {targets} match only shared weights: {name} {reason}"
    leaves = sorted({name.rpartition(".")[2] for name in candidates})
    found = (
        f"its nn.Linears are called {', '.join(leaves[:12])}" if leaves else "it has no nn.Linear"
    )
    return f"targets {targets} match no nn.Linear of the model; {found}"
