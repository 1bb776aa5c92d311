"""Token perplexity over non-overlapping blocks, as the low-rank literature reports it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronmm_ops.compress.batches import check_ids, position_limit
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.running import eval_mode
from neuronmm_ops.errors import NonFiniteError

__all__ = ["PerplexityResult", "encode_documents", "token_perplexity"]

DOCUMENT_SEPARATOR = "\n\n"
DEFAULT_SEQLEN = 2048


@dataclass(frozen=True)
class PerplexityResult:
    """Token perplexity of a text.

    Attributes:
        ppl_token: exp of the mean negative log-likelihood per predicted token.
        tokens: number of predicted tokens.
        seqlen: length of the blocks, in tokens.
    """

    ppl_token: float
    tokens: int
    seqlen: int


def encode_documents(tokenizer: Any, documents: Sequence[str]) -> Tensor:
    """Tokenize documents joined by two newlines, without special tokens: token ids `[T]`.

    Args:
        tokenizer: a Transformers tokenizer.
        documents: texts, in order.
    """
    text = DOCUMENT_SEPARATOR.join(documents)
    # verbose=False: no warning where the text is longer than the model's context.
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def block_length(model: nn.Module, seqlen: int | None, least: int = 1) -> int:
    """Return `seqlen`, for None the smaller of 2048 and the longest input of the model's config.

    Raises:
        ValueError: it is outside `least`..the model's limit.
    """
    limit = position_limit(model)
    if seqlen is None:
        return min(DEFAULT_SEQLEN, limit or DEFAULT_SEQLEN)
    if seqlen < least or (limit is not None and seqlen > limit):
        allowed = f"at least {least}"
        if limit is not None:
            allowed = f"between {least} and the model's limit of {limit} tokens"
        raise ValueError(f"seqlen must be {allowed}, got {seqlen}")
    return seqlen


@torch.inference_mode()
def token_perplexity(
    model: nn.Module,
    token_ids: Tensor,
    seqlen: int | None = None,
    progress: Progress | None = None,
) -> PerplexityResult:
    """Measure token perplexity over non-overlapping blocks, each predicted from its own start.

    The mean is over tokens, so that a shorter last block weighs what it holds. A block of n tokens
    predicts n - 1. Log-likelihoods are computed in fp32 and summed in fp64.

    Args:
        model: a causal LM, called as `model(ids[1, n])`, whose result has `.logits [1, n, V]`.
        token_ids: `[T]`.
        seqlen: block length in tokens; default the smaller of 2048 and the model's limit.
        progress: called with ("evaluate", blocks done, blocks in all).

    Raises:
        NonFiniteError: logits are NaN or Inf (the block is named), or the result overflows.
        ValueError: fewer than two tokens, a token id without a row in the embedding, or seqlen
            outside 2..the model's limit.
    """
    seqlen = block_length(model, seqlen, least=2)
    if token_ids.dim() != 1 or token_ids.numel() < 2:
        raise ValueError(
            f"token_ids must be [T] with at least 2 tokens, got shape {list(token_ids.shape)}; "
            "use a longer text"
        )
    check_ids(model, token_ids, "text")
    device = next(model.parameters()).device
    blocks = [block for block in token_ids.split(seqlen) if block.numel() >= 2]
    nll, tokens = 0.0, 0
    with eval_mode(model):
        for index, block in enumerate(blocks):
            nll += _block_nll(model, block.to(device), index)
            tokens += block.numel() - 1
            if progress:
                progress("evaluate", index + 1, len(blocks))
    try:
        perplexity = math.exp(nll / tokens)
    except OverflowError:
        raise NonFiniteError(
            f"perplexity must be finite, got exp({nll / tokens:.0f}); the factors are broken"
        ) from None
    return PerplexityResult(perplexity, tokens, seqlen)


def _block_nll(model: nn.Module, block: Tensor, index: int) -> float:
    logits = model(block[None]).logits[0, :-1].float()
    losses = F.cross_entropy(logits, block[1:], reduction="none")
    # NaN or +Inf in a row makes its loss NaN, -Inf only where it is the true token's logit: models
    # mask unused vocabulary with it.
    if not torch.isfinite(losses).all():
        raise NonFiniteError(
            f"logits of block {index} must be finite, got NaN or Inf; "
            "a block is never skipped: check the factors, or evaluate in a wider dtype"
        )
    return float(losses.double().sum())
