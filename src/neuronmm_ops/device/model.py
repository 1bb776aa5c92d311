"""The demo model end to end: a prompt, then one token after the other, by a static cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from neuronmm_ops.compress import SVDConfig, compress_
from neuronmm_ops.demo import HELD_OUT, MODEL
from neuronmm_ops.extras import transformers_models
from neuronmm_ops.nn.decode_cache import cache_name

PROMPT, NEW = 128, 8
PHASES = {"prefill": slice(0, 1), "decode": slice(1, None)}
"""Passes of `pieces`."""
CONFIG = SVDConfig(ratio=0.2, block=16, method="plain", allocation="uniform")
"""It needs no calibration."""


def compressed() -> Any:
    """The model with low-rank MLPs, in bfloat16, the same in every run on a machine.

    Raises:
        ImportError: Transformers is not installed.
    """
    model = transformers_models().load_computing(MODEL, "float32")
    compress_(model, CONFIG)
    return model.to(torch.bfloat16).eval()  # pyright: ignore  (typed as a module's attribute)


def pieces() -> tuple[Tensor, ...]:
    """Token ids of a text: [1, PROMPT], then NEW times [1, 1].

    Those that follow are the text's, not the model's: a wrong token changes no later pass.
    """
    from neuronmm_ops import hf

    text = hf.read_text(HELD_OUT)[: 8 * (PROMPT + NEW)]  # a token has about four
    ids = hf.load_tokenizer(MODEL)(text, return_tensors="pt").input_ids
    return ids[:, : PROMPT + NEW].split([PROMPT] + [1] * NEW, dim=1)


def static_cache(model: Any) -> Any:
    """A cache that lies on the model's device from the start, so that filling it is one shape."""
    from transformers import StaticCache

    config = model.config
    cache = StaticCache(config=config, max_cache_len=PROMPT + NEW)
    sizes = config.num_key_value_heads, config.head_dim
    cache.early_initialization(1, *sizes, model.dtype, model.device)
    return cache


def passes(call: Any, cache: Any, ids: Iterable[Tensor]) -> Iterator[Tensor]:
    """Logits [1, V] after each piece, on the CPU.

    Args:
        call: the model, or what it was compiled to.
        cache: `static_cache`; what was in it is forgotten.
        ids: `pieces` on the model's device.
    """
    cache.reset()
    for piece in ids:
        with torch.no_grad():
            logits = call(piece, **{cache_name(call): cache}, logits_to_keep=1).logits
        yield logits[:, -1].cpu()


def reference(model: Any, ids: Iterable[Tensor]) -> Tensor:
    """Logits [passes, V] of the model where it is, in its dtype."""
    return torch.cat(list(passes(model, static_cache(model), ids)))


def first_other(actual: Tensor, exact: Tensor) -> str:
    """The first pass [passes, V] with another greedy token, in words; empty where there is none."""
    tokens = zip(actual.argmax(-1).tolist(), exact.argmax(-1).tolist(), strict=True)
    for number, (token, other) in enumerate(tokens, 1):
        if token != other:
            return f"token {number} of {len(exact)} is {token}, on the CPU in float32 {other}"
    return ""
