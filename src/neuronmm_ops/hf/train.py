"""The factors of a Transformers model in training: dtypes, parameters, and what came of it."""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from neuronmm_ops.compress.record import attached_report, low_rank_layers
from neuronmm_ops.compress.targets import preset_of
from neuronmm_ops.eval import token_perplexity
from neuronmm_ops.hf.adapters import PhaseParameters, adapted
from neuronmm_ops.hf.computing import AUTO, cast_, computing_in, dtype_of
from neuronmm_ops.hf.memory import save_memory_
from neuronmm_ops.hf.samples import samples
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.progress import Update
from neuronmm_ops.recover.config import RecoverConfig
from neuronmm_ops.recover.data import Windows
from neuronmm_ops.recover.losses import Distillation, NextToken
from neuronmm_ops.recover.rounding import round_, unround_
from neuronmm_ops.recover.state import StateFile
from neuronmm_ops.recover.training import Outcome, Training
from neuronmm_ops.storages import storage_of

# Of the time, or of the tokens of the steps: text that the dense model adds to the given.
SAMPLED_SHARE = 0.1
MOST_SAMPLES = 1 << 20  # tokens, of a time budget


@dataclass(frozen=True)
class Trained:
    """What a run did to the model.

    Attributes:
        outcome: of the training.
        improved: whether the trained factors are in place; otherwise the start's are.
        loss: held-out loss of the factors in place, merged and rounded to the model's dtype.
        held_out_tokens: that it was measured on.
        compute_dtype: in which the model was computed.
        sampling: seconds that the dense model wrote text for.
    """

    outcome: Outcome
    improved: bool
    loss: float
    held_out_tokens: int
    compute_dtype: str
    sampling: float

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers of the run as a JSON-compatible dict."""
        position = self.outcome.position
        return {
            "steps": position.step,
            "best_step": position.best_step if self.improved else 0,
            "improved": self.improved,
            "tokens": position.tokens,
            "minutes": (self.sampling + position.elapsed) / 60,
            "held_out_tokens": self.held_out_tokens,
            "held_out_ppl_before": math.exp(position.start_loss),
            "held_out_ppl_after": math.exp(self.loss),
            "rate": position.rate,
            "compute_dtype": self.compute_dtype,
        }


def train_factors(
    model: PreTrainedModel,
    dense: PreTrainedModel | None,
    ids: Tensor,
    held_out: Tensor,
    config: RecoverConfig,
    state: StateFile,
    progress: Update | None = None,
) -> Trained:
    """Train the low-rank layers in place; where that does not help, leave them as they were.

    The factors are held in fp32 while they are trained, those in a storage rounded to it for every
    product, and have the model's dtype or storage again afterwards. Dense layers
    of narrowed MLPs are trained in the same way; other dense layers stay as they are.

    Args:
        model: with low-rank layers, or narrowed MLPs.
        dense: to distill from, also on text that it writes; None for the loss of the next token.
        ids: `[T]`, to train on.
        held_out: `[B, seqlen]`.
        config: what to do.
        state: where the state is kept.
        progress: as `Training.run` calls it.

    Raises:
        CheckpointError: the state is damaged, or of another run.
        NonFiniteError: the model is broken before the first step.
        ValueError: the time budget has no room for a step.
    """
    compute, device, seqlen = _compute_dtype(model), model.device, held_out.shape[1]
    autocast = nullcontext
    if compute != torch.float32:
        autocast = partial(torch.autocast, device.type, compute)

    def held_out_loss() -> float:
        with autocast():
            return math.log(token_perplexity(model, held_out.flatten(), seqlen).ppl_token)

    objective, began = NextToken(model), monotonic()
    if dense is not None:
        cast_(dense, compute)
        objective = Distillation(model, dense, config.hidden_weight)
        ids = torch.cat([ids, _sampled(dense, ids, seqlen, config)])
    sampling = monotonic() - began
    if not config.steps:
        config = replace(config, minutes=config.minutes - sampling / 60)
    windows = Windows(ids, seqlen, max(1, config.batch_tokens // seqlen), config.seed)
    start = _factors(model)
    model.requires_grad_(False)
    with computing_in(model, compute):
        with (adapted if config.method == "lora" else _widened)(model, config) as phases:
            with autocast():
                save_memory_(model, objective, windows.of_step(0).to(device))
            training = Training(
                objective,
                held_out_loss,
                phases,
                windows,
                config,
                state,
                autocast,
                is_relative=config.method == "distill",
            )
            outcome = training.run(progress)
        for name, factor in trainable(model).items():
            if storage_of(factor.dtype) is None:
                factor.data = factor.data.to(start[name].dtype).to(compute)
        loss = held_out_loss()
        # The start in another order of its factors rounds to another loss: no step, no gain.
        improved = outcome.position.best_step > 0 and loss < outcome.position.start_loss
        if not improved:
            loss = outcome.position.start_loss
            for name, factor in trainable(model).items():
                factor.data.copy_(start[name])
    return Trained(outcome, improved, loss, held_out.numel(), name_of(compute), sampling)


def _sampled(dense: PreTrainedModel, ids: Tensor, seqlen: int, config: RecoverConfig) -> Tensor:
    """Return text of the dense model, a share of the tokens or of the time."""
    tokens, seconds = MOST_SAMPLES, 60 * SAMPLED_SHARE * config.minutes
    if config.steps:
        tokens, seconds = int(SAMPLED_SHARE * config.batch_tokens * config.steps), math.inf
    return samples(dense, ids, seqlen, tokens, seconds, config.seed)


def _compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype for the model's device; gradients leave the range of float16."""
    dtype = dtype_of(AUTO, model)
    return torch.float32 if dtype == torch.float16 else dtype


@contextmanager
def _widened(model: PreTrainedModel, config: RecoverConfig) -> Generator[list[PhaseParameters]]:
    """Give the factors, in fp32, as the parameters of one phase."""
    stored = [layer for layer in low_rank_layers(model).values() if layer.storage is not None]
    for layer in stored:
        unround_(layer)
    factors = trainable(model)
    for factor in factors.values():
        factor.data = factor.data.float()
        factor.requires_grad_(True)
    yield [factors]
    for layer in stored:
        round_(layer)


def trainable(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Return the factors of low-rank layers, and the dense weights of MLPs that were narrowed."""
    layers = low_rank_layers(model).items()
    parameters = {f"{name}.{key}": getattr(m, key) for name, m in layers for key in ("u", "v")}
    report = attached_report(model)
    narrowed = report.layers if report and report.narrowed else ()
    for layer in narrowed:
        if not layer.is_replaced and preset_of(layer.name) == "mlp":
            parameters[f"{layer.name}.weight"] = model.get_parameter(f"{layer.name}.weight")
    return parameters


def _factors(model: PreTrainedModel) -> Mapping[str, Tensor]:
    return {name: factor.detach().cpu().clone() for name, factor in trainable(model).items()}
