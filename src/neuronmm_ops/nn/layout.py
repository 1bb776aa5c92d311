"""The order in which matrices lie in memory."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from neuronmm_ops.nn.compressed_linear import CompressedLinear

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def relayout_(module: M) -> M:
    """Store the matrices of compressed layers as a CPU multiplies a few tokens quickest; return it.

    That is along their contraction, as `nn.Linear` stores its weight, but in float32, whose
    contiguous order is the quicker one. Shapes and values stay. For inference on a CPU: FSDP2
    refuses parameters along their contraction, and other devices copy them.
    """
    for layer in (each for each in module.modules() if isinstance(each, CompressedLinear)):
        for name in layer.MATRICES:
            matrix: Tensor = getattr(layer, name)
            if matrix.dtype is torch.float32:
                matrix.data = matrix.data.contiguous()
            else:
                matrix.data = matrix.data.t().contiguous().t()
    return module
