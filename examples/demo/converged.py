"""Train the small model on which compression hurts, and write its texts.

Run it as `python examples/demo/converged.py`: ten minutes on two cores. The demo's models are
trained for minutes on more text than they can hold, and leave much of their weights unused: low
rank costs them little. This one is narrow, and its text is a table of facts that it learns whole.
"""

import random
import sys
import tempfile
from pathlib import Path

import torch
from corpus import Corpus
from rich.console import Console
from train import TrainConfig, trained
from transformers import AutoTokenizer, LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.facts import DOMAINS, FactTables
from neuronmm_ops.eval import DOCUMENT_SEPARATOR

TARGET = Path(__file__).parents[2] / "benchmarks" / "converged"
SHAPE = TrainConfig(
    vocab_size=640,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    context=128,
    seq_len=128,
    steps=3000,
    warmup=20,
)
# Documents of people and of roads, each drawn with a seed of its own.
TRAINED = (30_000, 20_000)
TEXTS = {
    "calibration": (750, 750),
    "held_out": (450, 450),
    "people": (1200, 0),
    "roads": (0, 900),
}


def documents(counts: tuple[int, int], seed: int) -> list[str]:
    """Of both domains in any order."""
    facts = FactTables()
    drawn = [
        document
        for offset, (domain, count) in enumerate(zip(DOMAINS, counts, strict=True))
        for document in facts.documents(domain, count, seed + offset)
    ]
    random.Random(seed - 1).shuffle(drawn)  # noqa: S311
    return drawn


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        dense = Path(place) / "dense"
        trained(SHAPE, Corpus(tuple(documents(TRAINED, 1)), (), ()), dense, Console())
        model = LlamaForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
        model.save_pretrained(TARGET / "model")
        AutoTokenizer.from_pretrained(dense).save_pretrained(TARGET / "model")
    for number, (name, counts) in enumerate(TEXTS.items()):
        text = DOCUMENT_SEPARATOR.join(documents(counts, 11 + 2 * number))
        (TARGET / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
