"""Greedy generation that refuses broken logits, from a prompt or a chat message."""

from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from neuronmm_ops.compress.batches import check_ids, position_limit
from neuronmm_ops.errors import NonFiniteError

# That a chat template adds to a prompt: those of public models add a few thousand.
MAX_CHARACTERS = 1_000_000


class FiniteLogits(LogitsProcessor):
    """Refuses NaN and Inf, which greedy search would take for the first token of the vocabulary."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores `[B, V]` as they are.

        Raises:
            NonFiniteError: one is NaN or +Inf, or a row is -Inf alone (it masks unused tokens).
        """
        # amax of a row with a NaN is NaN.
        if not torch.isfinite(scores.amax(dim=-1)).all():
            raise NonFiniteError(
                f"logits of token {input_ids.shape[1]} must be finite, got NaN or Inf; "
                "check the factors, or compute in a wider dtype"
            )
        return scores


def generate_text(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int,
    chat: bool = False,
    cache: str | None = None,
    draft: PreTrainedModel | None = None,
    processor: LogitsProcessor | None = None,
) -> tuple[str, int]:
    """Continue a prompt greedily; return the new text and its number of tokens.

    Args:
        model: a causal LM.
        tokenizer: the model's.
        prompt: text to continue; with `chat` the message of a user to answer.
        max_new_tokens: at least 1.
        chat: put the prompt into the tokenizer's chat template.
        cache: Transformers' `cache_implementation`; None is the model's own.
        draft: from `load_draft`: proposes tokens of which the model keeps its own.
        processor: of the logits, before they are checked.

    Raises:
        NonFiniteError: logits are NaN or Inf.
        ValueError: there is no chat template, the prompt is empty, has a token id without a row
            in the embedding, or is too long for the model's limit.
    """
    inputs = _chat(tokenizer, prompt) if chat else _plain(tokenizer, prompt)
    ids = inputs["input_ids"]
    length = ids.shape[1]
    if length == 0:
        raise ValueError("prompt must hold at least one token, got an empty text")
    check_ids(model, ids, "prompt")
    check_length(model, length, max_new_tokens)
    if draft is not None:
        check_length(draft, length, max_new_tokens, "draft: ")
    output: Any = model.generate(  # pyright: ignore  (typed as a module's attribute)
        **inputs.to(model.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        **({} if cache is None else {"cache_implementation": cache}),
        pad_token_id=tokenizer.eos_token_id,
        logits_processor=LogitsProcessorList([*([processor] if processor else []), FiniteLogits()]),
        assistant_model=draft,
    )
    new = output[0, length:]
    return tokenizer.decode(new, skip_special_tokens=True), len(new)


def check_length(model: PreTrainedModel, length: int, new: int, prefix: str = "") -> None:
    """Raise ValueError, after a prefix, where a prompt and new tokens do not fit the model."""
    limit = position_limit(model)
    if limit is not None and length + new > limit:
        raise ValueError(
            f"{prefix}prompt and new tokens must be at most the model's limit of {limit} tokens, "
            f"got {length} and {new}"
        )


def _plain(tokenizer: Any, prompt: str, **options: Any) -> Any:
    return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False, **options)


def _chat(tokenizer: Any, prompt: str) -> Any:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template; generate without chat")
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # a template is a program, which may raise anything
        reason = (
            str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        )
        raise ValueError(
            f"the tokenizer's chat template cannot be used: {reason}; generate without chat"
        ) from None
    if len(text) > MAX_CHARACTERS + len(prompt):
        raise ValueError(
            f"the tokenizer's chat template makes {len(text):,} characters of the prompt's "
            f"{len(prompt):,}; generate without chat"
        )
    return _plain(tokenizer, text, add_special_tokens=False)
