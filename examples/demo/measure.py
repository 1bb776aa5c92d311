"""What the demo measures of a model: perplexity by the library, speed and a text sample here."""

import statistics
import time
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

DECODE_PROMPT = 64


@dataclass(frozen=True)
class Speed:
    """Tokens per second, batch 1: the medians of one model's runs."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class PairedSpeed:
    """Two models timed in turn, so that a change of the machine's speed affects both."""

    dense: Speed
    compressed: Speed
    prefill_speedup: float
    """Median over the rounds of the ratio within a round, steadier than the medians' ratio."""
    decode_speedup: float


def paired_speed(
    dense: LlamaForCausalLM,
    compressed: LlamaForCausalLM,
    tokens: torch.Tensor,
    *,
    decode_tokens: int,
    rounds: int,
) -> PairedSpeed:
    """Time prefill of all of `tokens` `[T]` and greedy decode after its first few, interleaved."""
    prompt = tokens[None, : min(DECODE_PROMPT, len(tokens) - decode_tokens)]
    models = (dense, compressed)
    for model in models:  # warm-up: weight packing and allocator growth are paid once
        _prefill_s(model, tokens[None])
        _decode_s(model, prompt, 4)
    prefill = []
    decode = []
    for index in range(rounds):
        # The order alternates, so that neither model always runs on caches that the other filled.
        order = (0, 1) if index % 2 == 0 else (1, 0)
        prefill_s = {i: _prefill_s(models[i], tokens[None]) for i in order}
        decode_s = {i: _decode_s(models[i], prompt, decode_tokens) for i in order}
        prefill.append((prefill_s[0], prefill_s[1]))
        decode.append((decode_s[0], decode_s[1]))

    def speed(i: int) -> Speed:
        return Speed(
            prefill=len(tokens) / statistics.median(pair[i] for pair in prefill),
            decode=decode_tokens / statistics.median(pair[i] for pair in decode),
        )

    return PairedSpeed(
        dense=speed(0),
        compressed=speed(1),
        prefill_speedup=statistics.median(a / b for a, b in prefill),
        decode_speedup=statistics.median(a / b for a, b in decode),
    )


def sample_text(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, *, new_tokens: int
) -> str:
    """A continuation of the prompt, sampled with the same seed for every model."""
    torch.manual_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        # The stubs of Transformers 5 do not know that a Llama can generate.
        output = cast(Any, model).generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=new_tokens,
            do_sample=True,
            temperature=0.7,
            top_k=20,
            pad_token_id=tokenizer.eos_token_id,
        )
    new = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


@torch.inference_mode()
def _prefill_s(model: LlamaForCausalLM, inputs: torch.Tensor) -> float:
    start = time.perf_counter()
    # Only the last token's logits, as when generating: the head is not what is compressed.
    model(input_ids=inputs, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start


@torch.inference_mode()
def _decode_s(model: LlamaForCausalLM, prompt: torch.Tensor, new_tokens: int) -> float:
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits
    start = time.perf_counter()
    for _ in range(new_tokens):
        token = logits[:, -1:].argmax(-1)
        logits = model(input_ids=token, past_key_values=cache).logits
    return time.perf_counter() - start
