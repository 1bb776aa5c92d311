"""Several ways to the same cost, and which of them is nearest to the dense model.

Losses of single matrices, added up, may mislead: where much is removed from a model that spares
nothing, uniform ranks may do better than ranks of one budget, or one storage than many. What a
model predicts says so.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronmm_ops.compress.allocate import NoAllocationError
from neuronmm_ops.compress.budget import is_within
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.mixed import storages_of
from neuronmm_ops.compress.pipeline import compress_
from neuronmm_ops.compress.running import eval_mode, fast_products
from neuronmm_ops.compress.targets import select_targets
from neuronmm_ops.compress.width import compared
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.storages import STORAGES

# One calibration block in so many is kept apart to compare by.
EVERY = 8


def candidates(
    model: nn.Module, config: SVDConfig, dtypes: Mapping[str, torch.dtype]
) -> list[SVDConfig]:
    """Return the config, and others that cost no more.

    Narrower MLPs for shares of it; of methods `kfac` and `kfac-drift` the other; of storage `auto`,
    each storage that is within the budget with all matrices dense; and uniform whitening,
    SVD-LLM's, whose ranks round down.

    Args:
        model: dense.
        config: what was asked for.
        dtypes: of the Linears' weights as they will be stored.
    """
    configs, linears = [config], select_targets(model, config, only_text=True).linears
    if not config.prune_share:
        configs += compared(model, config, dtypes)
    other = {"kfac": "kfac-drift", "kfac-drift": "kfac"}.get(config.method)
    if other and config.allocation == "greedy":
        configs.append(replace(config, method=other))
    free = {
        "budget": "parameters",
        "target": None,
        "tokens": 1,
        "lnc": 1,
        "tp": 1,
        "prune_share": 0.0,
    }
    plain = replace(config, **free, storage=config.one_byte)
    if config.is_mixed:
        fitting = set.intersection(
            *(set(storages_of(each.in_features, each.out_features)) for each in linears.values())
        )
        whole = [replace(plain, ratio=0, storage=name) for name in STORAGES if name in fitting]
        configs += [each for each in whole if is_within(config, each, linears, dtypes)]
    uniform = replace(plain, method="whiten", allocation="uniform", importance=None, alpha=0.0)
    if config.budget == "parameters":
        return [*configs, uniform]
    steps = [config.ratio + step / 20 for step in range(20)]
    ratios = (replace(uniform, ratio=ratio) for ratio in steps if ratio < 1)
    within = (each for each in ratios if is_within(config, each, linears, dtypes))
    return [*configs, *islice(within, 1)]


def nearest(
    model: nn.Module,
    configs: Sequence[SVDConfig],
    batches: Sequence[Tensor],
    progress: Progress | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> tuple[SVDConfig, list[float]]:
    """Return the config whose compressed model predicts most as the dense one does.

    Each compresses a copy of the model with seven of eight calibration blocks; the divergence is
    measured on the others. Takes the memory of two models, and of their MLPs where these are
    narrowed.

    Args:
        model: a causal language model, left as it was.
        configs: to compare; of equals the first is taken.
        batches: token ids `[B, T]`.
        progress: told `("compare", configs done, configs in all)`.
        dtypes: as of `compress_`.

    Returns:
        The config, and every config's mean divergence in nats a token; infinite where no
        allocation meets the budget.

    Raises:
        ValueError: there are fewer than two blocks.
        NoAllocationError: none meets its budget.
        NonFiniteError: a divergence is NaN or Inf.
    """
    blocks = [block for batch in batches for block in batch.split(1)]
    if len(blocks) < 2:
        raise ValueError(f"to compare takes at least 2 calibration blocks, got {len(blocks)}")
    step = min(EVERY, len(blocks))
    apart = blocks[step - 1 :: step]
    rest = [block for index, block in enumerate(blocks, start=1) if index % step]
    divergences: list[float] = []
    for config in configs:
        candidate = copy.deepcopy(model)
        try:
            compress_(candidate, config, rest, dtypes=dtypes)
        except NoAllocationError:
            divergences.append(math.inf)
            if len(divergences) == len(configs) and min(divergences) == math.inf:
                raise
        else:
            divergences.append(divergence(model, candidate, apart))
        if progress:
            progress("compare", len(divergences), len(configs))
    return configs[divergences.index(min(divergences))], divergences


def described(configs: Sequence[SVDConfig], divergences: Sequence[float]) -> str:
    """Return what was compared in a line, with each divergence; the nearest is marked."""
    least = divergences.index(min(divergences))
    return "; ".join(
        f"{config.method} {config.allocation} {config.storage or 'without storage'}"
        + (f" narrower {config.prune_share:g}" if config.prune_share else "")
        + f" {divergence:.3g}"
        + (" (taken)" if index == least else "")
        for index, (config, divergence) in enumerate(zip(configs, divergences, strict=True))
    )


@torch.no_grad()
def divergence(model: nn.Module, other: nn.Module, blocks: Sequence[Tensor]) -> float:
    """Return the mean divergence of the model's predictions from another's, in nats a token.

    Raises:
        NonFiniteError: it is NaN or Inf.
    """
    total, tokens = 0.0, 0
    for block in blocks:
        with eval_mode(model), eval_mode(other), fast_products(model):
            dense, log_probs = (F.log_softmax(m(block).logits.float(), -1) for m in (model, other))
        total += float(F.kl_div(log_probs, dense, reduction="sum", log_target=True))
        tokens += block.numel()
    if not torch.isfinite(torch.tensor(total)):
        raise NonFiniteError(f"the divergence must be finite, got {total}; check the weights")
    return total / tokens
