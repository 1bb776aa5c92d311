"""The state dict of a divided model as one process would have it."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from neuronmm_ops.storages import storage_of


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state dict with every DTensor whole, on every rank.

    As torch's `get_model_state_dict` with `full_state_dict=True`, and for factors in fp8 also where
    a backend sends no fp8, as gloo. All ranks of the mesh must call it.

    Args:
        model: whose layers may be divided.

    Returns:
        Plain tensors by the names of `model.state_dict()`, which an undivided model loads.
    """
    return {name: whole_tensor(tensor) for name, tensor in model.state_dict().items()}


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor whole on every rank, all of which must call, and another tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    if storage_of(tensor.dtype) is None:
        return tensor.full_tensor()
    sent = cast(DTensor, tensor.view(torch.uint8))
    return sent.full_tensor().view(tensor.dtype)
