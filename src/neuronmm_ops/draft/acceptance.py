"""How many of a draft's tokens a model accepts, where the model itself goes on with a text."""

from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

SEED = 0


class Contexts(NamedTuple):
    """Token ids `[B, T]`: prompts, and the model's continuations of them."""

    greedy: Tensor
    sampled: Tensor
    prompt: int


class Acceptance(NamedTuple):
    """Shares of drafted tokens that are accepted.

    Attributes:
        greedy: both have one argmax.
        sampled: the mean of `sum(min(p, q))`, Leviathan et al. (arXiv 2211.17192), Theorem 3.5.
    """

    greedy: float
    sampled: float


@torch.no_grad()
def continued(model: PreTrainedModel, prompts: Tensor, new: int) -> Contexts:
    """Let a model continue prompts `[B, P]` by `new` tokens, past the end of text too."""

    def rows(do_sample: bool) -> Tensor:
        config = GenerationConfig(
            do_sample=do_sample, top_k=0 if do_sample else None, pad_token_id=0, max_new_tokens=new
        )
        # In place of the model's own, of which `generate` would let some in.
        with patch.object(model, "generation_config", config), torch.random.fork_rng():
            torch.manual_seed(SEED)
            return cast(Any, model).generate(prompts.to(model.device))

    return Contexts(rows(False), rows(True), prompts.shape[1])


@torch.no_grad()
def acceptance(model: PreTrainedModel, draft: PreTrainedModel, contexts: Contexts) -> Acceptance:
    """Return the shares over all tokens of the continuations."""

    def logits(each: PreTrainedModel, row: Tensor) -> Tensor:
        logits = each(input_ids=row[None], use_cache=False).logits
        return logits[0, contexts.prompt - 1 : -1].float()

    agreed = [
        (logits(model, row).argmax(-1) == logits(draft, row).argmax(-1)).double().mean()
        for row in contexts.greedy
    ]
    shared = [
        torch.minimum(logits(model, row).softmax(-1), logits(draft, row).softmax(-1)).sum(-1).mean()
        for row in contexts.sampled
    ]
    return Acceptance(float(torch.stack(agreed).mean()), float(torch.stack(shared).mean()))
