"""Write a Llama with random weights and a vocabulary of words, to measure a server's speed with.

`python examples/serving/random_model.py out/serving/dense`, then compress it, serve both, and run
`load_test.py` on their addresses.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description="write a Llama with random weights")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--intermediate", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, dtype=getattr(torch, options.dtype))  # pyright: ignore
    model.save_pretrained(options.directory)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(options.directory)


if __name__ == "__main__":
    main()
