"""Tiny compressed checkpoints for vLLM's server, and Transformers' answers to their prompts."""

from pathlib import Path

from lowrank import greedy, low_rank
from tiny import tiny_tokenizer

from neuronmm_ops import hf

# Room for an answer that takes a minute: the rank that is left may go on for ten seconds.
CONTEXT = 32768
CHAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<answer>"
PROMPTS = ["The quick brown fox", "Zwölf Boxkämpfer", "0123456789", "a", "def f(x):\n    return"]


def served(path: Path, family: str = "llama") -> Path:
    """Write a model of the family with every Linear low-rank, and a tokenizer that can chat."""
    low_rank(path, family, max_position_embeddings=CONTEXT)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    return path


def answers(path: Path, prompts: list[str], tokens: int) -> list[list[int]]:
    """Return Transformers' own greedy tokens after each prompt."""
    model, tokenizer = hf.load(path), hf.load_tokenizer(path)
    return greedy(model, [tokenizer(prompt)["input_ids"] for prompt in prompts], tokens)
