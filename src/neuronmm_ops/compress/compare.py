"""Two ways to the same number of parameters, and which of them is nearer to the dense model.

Losses of single matrices, added up, may mislead: where much is removed from a model that spares
nothing, uniform ranks may do better than ranks of one budget. What a model predicts says so.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronmm_ops.compress.calibrate import Progress, eval_mode, fast_products
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.pipeline import compress_
from neuronmm_ops.errors import NonFiniteError

# One calibration block in so many is kept apart to compare by.
EVERY = 8


def with_uniform_whitening(config: SVDConfig) -> tuple[SVDConfig, SVDConfig]:
    """Return the config, and SVD-LLM's that removes as much or more: its ranks round down.

    Raises:
        ValueError: the budget is not of parameters.
    """
    uniform = {"method": "whiten", "allocation": "uniform", "importance": None, "alpha": 0.0}
    return config, replace(config, **uniform)


def nearest(
    model: nn.Module,
    configs: Sequence[SVDConfig],
    batches: Sequence[Tensor],
    progress: Progress | None = None,
) -> tuple[SVDConfig, list[float]]:
    """Return the config whose compressed model predicts most as the dense one does.

    Each compresses a copy of the model with seven of eight calibration blocks; the divergence is
    measured on the others. Takes the memory of two models.

    Args:
        model: a causal language model, left as it was.
        configs: to compare; of equals the first is taken.
        batches: token ids `[B, T]`.
        progress: told `("compare", configs done, configs in all)`.

    Returns:
        The config, and every config's mean divergence in nats a token.

    Raises:
        ValueError: there are fewer than two blocks.
        NonFiniteError: a divergence is NaN or Inf.
    """
    blocks = [block for batch in batches for block in batch.split(1)]
    if len(blocks) < 2:
        raise ValueError(f"to compare takes at least 2 calibration blocks, got {len(blocks)}")
    step = min(EVERY, len(blocks))
    apart = blocks[step - 1 :: step]
    rest = [block for index, block in enumerate(blocks, start=1) if index % step]
    found: list[float] = []
    for config in configs:
        candidate = copy.deepcopy(model)
        compress_(candidate, config, rest)
        found.append(divergence(model, candidate, apart))
        if progress:
            progress("compare", len(found), len(configs))
    return configs[found.index(min(found))], found


@torch.no_grad()
def divergence(model: nn.Module, other: nn.Module, blocks: Sequence[Tensor]) -> float:
    """Return the mean divergence of the model's predictions from another's, in nats a token.

    Raises:
        NonFiniteError: it is NaN or Inf.
    """
    total, tokens = 0.0, 0
    for block in blocks:
        with eval_mode(model), eval_mode(other), fast_products(model):
            dense, found = (F.log_softmax(m(block).logits.float(), -1) for m in (model, other))
        total += float(F.kl_div(found, dense, reduction="sum", log_target=True))
        tokens += block.numel()
    if not torch.isfinite(torch.tensor(total)):
        raise NonFiniteError(f"the divergence must be finite, got {total}; check the weights")
    return total / tokens
