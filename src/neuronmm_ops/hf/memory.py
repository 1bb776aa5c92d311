"""Gradient checkpointing, where a training step would not fit the device's memory."""

from collections.abc import Callable, Collection
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

PROBE_TOKENS = 64
# The rest is for gradients, AdamW's moments, and copies within a layer.
USABLE = 0.5


def save_memory_(
    model: PreTrainedModel, objective: Callable[[Tensor], Tensor], ids: Tensor
) -> bool:
    """Turn on gradient checkpointing where a pass over `ids` `[B, T]` needs it; say whether.

    What a short pass keeps for its backward is counted, and taken in proportion to the tokens.
    """
    if not model.supports_gradient_checkpointing:
        return False
    probe = ids[:1, :PROBE_TOKENS]
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    needed = saved_bytes(lambda: objective(probe), parameters) * ids.numel() / probe.numel()
    if needed <= USABLE * _free_bytes(ids.device):
        return False
    # Transformers has renamed the method, and warns where the old name is called.
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # it recomputes in training only; its children stay as they are
    return True


def saved_bytes(forward: Callable[[], object], own: Collection[int]) -> int:
    """Return the bytes that a forward pass keeps for its backward, each storage counted once.

    Storages at the addresses `own`, the model's parameters', are there anyway.
    """
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # or an address would be counted for two storages

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        forward()
    return sum(size for address, size in sizes.items() if address not in own)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
