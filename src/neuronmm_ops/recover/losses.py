"""What is minimized: the next token's cross entropy, or the distance from the dense model."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NextToken:
    """Mean cross entropy of the next token, in nats.

    Args:
        model: a causal LM, called as `model(input_ids=ids[B, T], use_cache=False)`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the loss `[]` of token ids `[B, T]`."""
        logits = self.model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


class Distillation:
    """Distance of a model from the dense one that it was made of.

    `KL(dense || model)` of the next token's distribution, in nats per token (Hinton et al. 2015,
    at temperature 1), plus `hidden_weight` times the squared error of the hidden states after
    every decoder layer, relative to their energy.

    Args:
        model: a causal LM, called with `input_ids`, `use_cache` and `output_hidden_states`.
        dense: called as model; never trained.
        hidden_weight: 0 leaves the hidden states out.
    """

    def __init__(self, model: nn.Module, dense: nn.Module, hidden_weight: float) -> None:
        self.model, self.dense, self.hidden_weight = model, dense, hidden_weight

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the loss `[]` of token ids `[B, T]`."""
        options: dict[str, Any] = {
            "input_ids": ids,
            "use_cache": False,
            "output_hidden_states": self.hidden_weight > 0,
        }
        with torch.no_grad():
            target = self.dense(**options)
        output = self.model(**options)
        loss = _divergence(output.logits, target.logits)
        if self.hidden_weight > 0:
            # The first are the embeddings, which are the same.
            pairs = list(zip(output.hidden_states, target.hidden_states, strict=True))[1:]
            errors = [_relative_error(f, t) for f, t in pairs]
            loss = loss + self.hidden_weight * torch.stack(errors).mean()
        return loss


def _divergence(logits: Tensor, target: Tensor) -> Tensor:
    """Return `KL(target || logits)`, the mean over all rows of `[B, T, V]`."""
    divergence: Any = _Divergence.apply
    return divergence(logits.flatten(0, 1), target.flatten(0, 1))


class _Divergence(torch.autograd.Function):
    """The divergence of rows `[R, V]`, with its gradient `(softmax(logits) - p) / R` at once.

    Plain torch keeps four matrices of that size for the backward pass, which for a large
    vocabulary is most of a step's memory; this keeps one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:  # pyright: ignore
        log_probs = F.log_softmax(logits.float(), dim=-1)
        gap = F.log_softmax(target.float(), dim=-1)
        p = gap.exp()
        # An entry that both mask with -inf has no part in the divergence.
        gap.sub_(log_probs).masked_fill_(p == 0, 0.0)
        loss = gap.mul_(p).sum(-1).mean()
        ctx.save_for_backward(log_probs.exp_().sub_(p).div_(len(p)).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return ctx.saved_tensors[0] * grad, None


def _relative_error(hidden: Tensor, target: Tensor) -> Tensor:
    wide = target.float()
    return (hidden.float() - wide).square().mean() / wide.square().mean()
