"""Weights as vLLM's matmuls for a CPU read them: packed once, after loading."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.platforms import current_platform


def packs() -> bool:
    """Say whether vLLM has matmuls of packed weights here.

    For a few rows they take half the time of torch's, and so of the ops, whose weights are as they
    were loaded.
    """
    return current_platform.is_cpu()


def packed(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the product `[..., N]` with a weight `[N, K]`, which need not be kept."""
    holder: Any = nn.Module()
    holder.weight = nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(holder, remove_weight=True)
    return lambda x: holder.cpu_linear(x, holder.weight, None)
