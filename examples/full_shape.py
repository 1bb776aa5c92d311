"""Write a model of a real model's shape with random weights: its cost is real, its text is not.

`python examples/full_shape.py llama-1b`, then `neuronmm compress llama-1b -o small ...` takes the
time and memory it would take on the trained model.
"""

import argparse
import inspect
import string
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from neuronmm_ops.models import model_shape

TOKENIZER_ENTRIES = 2048
SPECIAL_TOKENS = ("<s>", "</s>")  # begin, end


def main() -> None:
    parser = argparse.ArgumentParser(description="a model of a real shape with random weights")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", default="Llama-3.2-1B")
    options = parser.parse_args()
    make_model(options.directory, options.shape)


def make_model(
    directory: str | Path, shape: str = "Llama-3.2-1B", layers: int | None = None, seed: int = 0
) -> Path:
    """Save a Llama-architecture model with random bf16 weights, and a small tokenizer.

    Weights are drawn from N(0, 0.02²). The tokenizer knows every byte, so it encodes any text, but
    uses at most the first `TOKENIZER_ENTRIES` rows of the embedding.

    Args:
        directory: created if it does not exist.
        shape: name of a shape in the registry.
        layers: decoder layers; default the shape's.
        seed: of the weights.

    Returns:
        The directory.

    Raises:
        ValueError: the registry has no such shape.
    """
    sizes = model_shape(shape)
    directory = Path(directory)
    tokenizer = make_tokenizer(min(TOKENIZER_ENTRIES, sizes.vocab_size))
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.layers if layers is None else layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        tie_word_embeddings=sizes.tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype=torch.bfloat16,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_tokenizer(entries: int = TOKENIZER_ENTRIES) -> Any:
    """Train a byte-level BPE tokenizer of at most `entries` tokens on Python's own source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    modules: tuple[ModuleType, ...] = (argparse, inspect, string)
    tokenizer.train_from_iterator([inspect.getsource(module) for module in modules], trainer)
    ends = dict(zip(("bos_token", "eos_token"), SPECIAL_TOKENS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)


if __name__ == "__main__":
    main()
