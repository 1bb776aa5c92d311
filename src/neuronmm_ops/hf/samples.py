"""Text that a model writes: what it was trained on and a short text does not hold comes up in it.

Data-free distillation, as LLM-QAT's (Liu et al., arXiv 2305.17888).
"""

import math
from time import monotonic
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from neuronmm_ops.errors import NonFiniteError

PROMPT_TOKENS = 4
ROWS = 32  # at once


@torch.no_grad()
def samples(
    dense: PreTrainedModel, ids: Tensor, seqlen: int, tokens: int, seconds: float, seed: int
) -> Tensor:
    """Return rows that a model writes, each after a few tokens of a text, one after the other.

    Args:
        dense: a causal LM.
        ids: `[T]`, to begin rows with.
        seqlen: tokens of a row.
        tokens: of which whole rows are returned, rounded up.
        seconds: rows that are not done by then are left out; inf for no limit.
        seed: of the draws.

    Raises:
        NonFiniteError: the logits are NaN or Inf.
    """
    first = dense(input_ids=ids[None, :PROMPT_TOKENS].to(dense.device), use_cache=False).logits
    if not torch.isfinite(first).all():
        raise NonFiniteError("the dense model's logits must be finite, got NaN or Inf")
    config = GenerationConfig(do_sample=True, top_k=0, max_length=seqlen, pad_token_id=0)
    due, missing, done = monotonic() + seconds, -(-tokens // seqlen), [ids[:0]]
    # In place of the model's own, of which `generate(generation_config=...)` would let some in.
    with patch.object(dense, "generation_config", config), torch.random.fork_rng(_gpus(dense)):
        torch.manual_seed(seed)
        while missing > 0 and (left := due - monotonic()) > 0:
            starts = torch.randint(len(ids) - PROMPT_TOKENS + 1, (min(ROWS, missing), 1))
            prompts = ids[starts + torch.arange(PROMPT_TOKENS)].to(dense.device)
            config.max_time = left if left < math.inf else None
            # The stubs of Transformers do not know that every causal LM can generate.
            rows = cast(Any, dense).generate(prompts)
            if rows.shape[1] < seqlen:
                break
            done.append(rows.flatten().to(ids.device))
            missing -= len(rows)
    return torch.cat(done)


def _gpus(model: PreTrainedModel) -> list[torch.device]:
    return [] if model.device.type == "cpu" else [model.device]
