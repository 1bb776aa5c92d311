"""Texts to calibrate and to train on: files, and the data sets that the papers take.

Those of SVD-LLM (AIoT-MLSys-Lab/SVD-LLM, utils/data_utils.py and utils/LoRA.py): WikiText-2's
training split joined by two newlines, and alpaca-cleaned in Alpaca's template.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuronmm_ops.eval.corpora import Document, documents_of
from neuronmm_ops.eval.perplexity import DOCUMENT_SEPARATOR
from neuronmm_ops.eval.protocols import Corpus

_INTRODUCTION = (
    "Below is an instruction that describes a task{}. "
    "Write a response that appropriately completes the request.\n\n"
)


@dataclass(frozen=True)
class TrainingText:
    """A data set on the hub, and what one of its rows reads like."""

    corpus: Corpus
    document: Document


def _alpaca(row: Mapping[str, Any]) -> str:
    """Fill Alpaca's template (tatsu-lab/stanford_alpaca, train.py)."""
    context = str(row["input"])
    parts = [("Instruction", row["instruction"]), ("Response", row["output"])]
    if context:
        parts.insert(1, ("Input", context))
    with_input = ", paired with an input that provides further context" if context else ""
    sections = (f"### {name}:\n{text}" for name, text in parts)
    return _INTRODUCTION.format(with_input) + "\n\n".join(sections)


TRAINING_TEXTS: Mapping[str, TrainingText] = {
    "wikitext2-train": TrainingText(
        Corpus(
            repo="Salesforce/wikitext",
            config="wikitext-2-raw-v1",
            split="train",
            revision="main",
            file="wikitext-2-raw-v1/train-00000-of-00001.parquet",
            column="text",
            local_files=("wikitext2-train.parquet",),
        ),
        lambda row: row["text"],
    ),
    "alpaca": TrainingText(
        Corpus(
            repo="yahma/alpaca-cleaned",
            config="default",
            split="train",
            revision="main",
            file="alpaca_data_cleaned.json",
            column="output",
            local_files=(),
        ),
        _alpaca,
    ),
}


def read_training_text(name: str, data: str | Path | None) -> str:
    """Read a text file, or a data set of `TRAINING_TEXTS`.

    Args:
        name: of the data set, or the path of a file.
        data: a directory with the data sets' files, see `eval.corpora.find_file`; None for the hub.

    Raises:
        ValueError: it is not to be had, or malformed.
        ImportError: the extra `eval` is not installed.
    """
    if name not in TRAINING_TEXTS:
        from neuronmm_ops.hf import read_text

        return read_text(name)
    text = TRAINING_TEXTS[name]
    return DOCUMENT_SEPARATOR.join(documents_of(name, text.corpus, data, text.document)[0])
