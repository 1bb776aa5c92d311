"""A model with layers left out, as an ordinary Transformers model with fewer layers."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from neuronmm_ops.compress.targets import text_decoder


def depths(model: PreTrainedModel) -> list[int]:
    """Return how many layers a draft may have: all, half and a quarter; all where it must."""
    layers = _layers(model)
    if layers is None:
        return [int(model.config.get_text_config().num_hidden_layers)]
    return sorted({max(1, round(len(layers) / part)) for part in (1, 2, 4)}, reverse=True)


@torch.no_grad()
def influences(model: PreTrainedModel, ids: Tensor) -> list[float]:
    """Return how far each layer turns its input: 1 less the mean cosine of input and output.

    Block influence, ShortGPT (Men et al., arXiv 2403.03853), Eq. 1.

    Args:
        model: a causal LM.
        ids: `[B, T]`.
    """
    states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    return [
        1 - float(F.cosine_similarity(before.float(), after.float(), dim=-1).mean())
        for before, after in pairwise(states)
    ]


def keep_(model: PreTrainedModel, kept: Sequence[int]) -> None:
    """Leave out every layer but those of these numbers; lists of the config lose the same ones."""
    layers, config = _layers(model), model.config.get_text_config()
    if layers is None or len(kept) == len(layers):
        return
    count = len(layers)
    for number in sorted(set(range(count)) - set(kept), reverse=True):
        del layers[number]
    for number, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.__dict__["layer_idx"] = number
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(config, name, [value[number] for number in kept])
    config.num_hidden_layers = len(kept)


def _layers(model: PreTrainedModel) -> nn.ModuleList | None:
    base: Any = text_decoder(model).base_model
    layers, config = getattr(base, "layers", None), model.config.get_text_config()
    is_numbered = hasattr(config, "cross_attention_layers")  # by the numbers that they would lose
    if is_numbered or not isinstance(layers, nn.ModuleList):
        return None
    return layers if len(layers) == config.num_hidden_layers else None
