"""Write a Llama with random weights, dense and low-rank, to measure a server's speed with.

`python examples/serving/random_models.py out/serving` writes `out/serving/dense` and, of the same
shape with every Linear low-rank, `out/serving/low_rank`. Serve both, and run `load_test.py` on
their addresses. The factors are random, too: the models answer different nonsense at the speed of
real ones.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from neuronmm_ops import swap_
from neuronmm_ops.rank import aligned_rank

VOCABULARY = 4096
STD = 0.05  # the logits of neighbouring tokens are then far apart


def main() -> None:
    parser = argparse.ArgumentParser(description="write a Llama with random weights, twice")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--ratio", type=float, default=0.5, help="of parameters to remove")
    parser.add_argument("--block", type=int, default=128, help="ranks are multiples of it")
    options = parser.parse_args()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=2048,
        initializer_range=STD,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config)  # pyright: ignore
    save(model, options.directory / "dense")
    factors = {
        name: random_pair(linear.in_features, linear.out_features, options.ratio, options.block)
        for name, linear in model.model.named_modules(prefix="model")
        if isinstance(linear, nn.Linear)
    }
    swap_(model, factors)
    save(model, options.directory / "low_rank")


def random_pair(K: int, N: int, ratio: float, block: int) -> tuple[Tensor, Tensor]:
    """Return factors `u[K, r]` and `v[r, N]` whose product's entries have a deviation of `STD`."""
    r = aligned_rank(K, N, ratio, block)
    if r is None:
        raise SystemExit(
            f"a [{K}, {N}] matrix has no rank that pays at {ratio}; take a small block"
        )
    return torch.randn(K, r) * STD, torch.randn(r, N) * r**-0.5


def save(model: LlamaForCausalLM, directory: Path) -> None:
    """Save a model with a tokenizer that knows the words w0, w1 and so on."""
    model.save_pretrained(directory)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


if __name__ == "__main__":
    main()
