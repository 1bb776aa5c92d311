"""What the demo shows of a model in addition to its perplexity and speed: a text sample."""

from typing import Any, cast

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


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
