"""Train the small model that the package ships for `neuronmm demo`, and cut its two texts.

Run it as `python examples/demo/shipped.py`: a quarter of an hour on two cores. The text is that of
`make demo`, the documentation inside this Python; its licence lies next to the result.
"""

import shutil
import sysconfig
import tempfile
from pathlib import Path

import torch
from corpus import load_corpus
from rich.console import Console
from train import TrainConfig, trained
from transformers import AutoTokenizer, LlamaForCausalLM

from neuronmm_ops.eval import DOCUMENT_SEPARATOR

TARGET = Path(__file__).parents[2] / "src" / "neuronmm_ops" / "demo"
SHAPE = TrainConfig(
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    context=256,
    steps=1000,
)
# All files together stay below 3 MB: more than a clone should not cost.
CALIBRATION_CHARS = 250_000
HELD_OUT_CHARS = 120_000


def main() -> None:
    corpus = load_corpus()
    with tempfile.TemporaryDirectory() as place:
        trained(SHAPE, corpus, Path(place) / "dense", Console())
        model = LlamaForCausalLM.from_pretrained(Path(place) / "dense", dtype=torch.bfloat16)
        model.save_pretrained(TARGET / "model")
        AutoTokenizer.from_pretrained(Path(place) / "dense").save_pretrained(TARGET / "model")
    for name, documents, chars in (
        ("calibration", corpus.calibration, CALIBRATION_CHARS),
        ("held_out", corpus.held_out, HELD_OUT_CHARS),
    ):
        text = DOCUMENT_SEPARATOR.join(documents)[:chars]
        (TARGET / f"{name}.txt").write_text(text, encoding="utf-8")
    licence = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    shutil.copyfile(licence, TARGET / "LICENSE-PYTHON.txt")


if __name__ == "__main__":
    main()
