"""The order in which factors lie in memory."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from neuronmm_ops.nn.svd_linear import SVDLinear
from neuronmm_ops.storages import FACTORS

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def relayout_(module: M) -> M:
    """Store the factors of every `SVDLinear` as a CPU multiplies a few tokens quickest; return it.

    That is along their contraction, as `nn.Linear` stores its weight, but in float32, whose
    contiguous order is the quicker one. Shapes and values stay. For inference on a CPU: FSDP2
    refuses parameters along their contraction, and other devices copy them.
    """
    for layer in (each for each in module.modules() if isinstance(each, SVDLinear)):
        for name in FACTORS:
            factor: Tensor = getattr(layer, name)
            if factor.dtype is torch.float32:
                factor.data = factor.data.contiguous()
            else:
                factor.data = factor.data.t().contiguous().t()
    return module
