"""Weights that make losses of different matrices comparable."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from neuronmm_ops.compress import workers
from neuronmm_ops.compress.batches import Batch, single_rows
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.gradients import next_token_loss
from neuronmm_ops.compress.nested import Nested
from neuronmm_ops.compress.running import eval_mode, fast_products
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.nn.dense_linear import DenseLinear, as_dense_linear

# A probe's tokens: each matrix is probed once, all in the time of so many tokens each.
PROBE_TOKENS = 4096


def weights_of(
    model: nn.Module,
    config: SVDConfig,
    linears: Mapping[str, DenseLinear],
    candidates: Mapping[str, Nested],
    gradients: Mapping[str, Tensor],
    batches: Sequence[Batch],
    progress: Progress | None = None,
) -> dict[str, float]:
    """Return by what the losses of each matrix are to be multiplied.

    Args:
        model: still dense.
        config: whose `weighs_by` says how.
        linears: by name.
        candidates: the factors of each, and what their ranks lose.
        gradients: `scale` of each, for weights by gradient.
        batches: of calibration, for weights by perplexity.
        progress: told of the probes.
    """
    if config.weighs_by is None:
        return dict.fromkeys(candidates, 1.0)
    if config.weighs_by == "gradient":
        return {name: float(gradients[name]) for name in candidates}
    if config.weighs_by == "error":
        energies = {name: float(nested.spectrum.sum()) for name, nested in candidates.items()}
        return {name: 1 / energy if energy > 0 else 0.0 for name, energy in energies.items()}
    probed = {
        name: config.rank(linears[name].in_features, linears[name].out_features) or config.block
        for name in candidates
    }
    factors = {
        n: candidates[n].truncate(rank) for n, rank in probed.items() if candidates[n].is_here
    }
    added = workers.gather_names(probe(model, factors, batches, progress))
    # A matrix whose loss did not grow measurably weighs as little as the least that was measured.
    least = min((value for value in added.values() if value > 0), default=1.0)
    weights: dict[str, float] = {}
    for name, nested in candidates.items():
        lost = float(nested.spectrum[probed[name] :].sum())
        weights[name] = max(added[name], least) / lost if lost > 0 else 0.0
    return weights


@torch.no_grad()
def probe(
    model: nn.Module,
    factors: Mapping[str, tuple[Tensor, Tensor]],
    batches: Sequence[Batch],
    progress: Progress | None = None,
) -> dict[str, float]:
    """Measure what one matrix at a time, replaced by its factors, adds to the loss per token.

    Args:
        model: a causal language model, left as it was.
        factors: name of the Linear to `(u[K, r], v[r, N])`.
        batches: token ids, as for `collect_moments`; at most `PROBE_TOKENS` tokens are run.
        progress: told `("probe", matrices done, matrices in all)`.

    Raises:
        NonFiniteError: the loss is NaN or Inf.
        ValueError: the model has no logits, or the batches no token ids.
    """
    rows = [row for _, row in single_rows(batches, PROBE_TOKENS)]
    added: dict[str, float] = {}
    with eval_mode(model), fast_products(model):
        dense = _mean_loss(model, rows)
        for name, (u, v) in factors.items():
            linear = as_dense_linear(model.get_submodule(name))
            weight = linear.weight
            with linear.computing(u.to(weight) @ v.to(weight)):
                added[name] = _mean_loss(model, rows) - dense
            if progress:
                progress("probe", len(added), len(factors))
    return added


def _mean_loss(model: nn.Module, rows: Sequence[Batch]) -> float:
    total, tokens = 0.0, 0
    for row in rows:
        loss, count = next_token_loss(model, row)
        total, tokens = total + float(loss), tokens + count
    if not torch.isfinite(torch.tensor(total)):
        raise NonFiniteError(f"the calibration loss must be finite, got {total}; check the weights")
    return total / max(1, tokens)
