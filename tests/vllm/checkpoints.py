"""Tiny compressed checkpoints for vLLM, and the tokens that Transformers gives for them."""

from pathlib import Path

import torch
from tiny import tiny_model, tiny_tokenizer

from neuronmm_ops import SVDConfig, compress_, hf

# vLLM's attention for the CPU takes heads of 32 and more.
SIZES = {
    "hidden_size": 128,
    "head_dim": 32,
    "initializer_range": 0.2,  # answers differ by prompt, and their logits are far apart
    "max_position_embeddings": 4096,
    "tied": False,
}
CHAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<answer>"
PROMPTS = ["The quick brown fox", "Zwölf Boxkämpfer", "0123456789", "a", "def f(x):\n    return"]


def compressed(path: Path, family: str = "llama", targets: str = "all-linear", **sizes) -> Path:
    """Write a tiny compressed model of the family and its tokenizer."""
    model = tiny_model(family, **{**SIZES, **sizes})
    config = SVDConfig(ratio=0.4, block=8, targets=targets, method="plain", allocation="uniform")
    compress_(model, config)
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def save_tokenizer(path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)


def greedy(path: Path, prompts: list[str], tokens: int) -> list[list[int]]:
    """Transformers' own greedy tokens after each prompt, none of them an end."""
    model, tokenizer = hf.load(path, dtype=torch.float32), hf.load_tokenizer(path)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        out = model.generate(
            ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers
