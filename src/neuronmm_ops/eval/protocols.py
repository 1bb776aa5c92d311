"""How papers take perplexities: which data set, how its documents are joined, which blocks count.

`standard` is that of GPTQ's `--new-eval` and SparseGPT (IST-DASLab/sparsegpt, datautils.py of
54c8443, and the loop of IST-DASLab/gptq, llama.py), which most work on compression follows.
`svd-llm` is SVD-LLM's (AIoT-MLSys-Lab/SVD-LLM, utils/data_utils.py `get_test_data` and
evaluater.py `ppl_eval` of 91581d3). What both share:

- the documents are joined and tokenized as one text, with the special tokens that the tokenizer
  adds by itself: one BOS before the whole text for Llama, nothing for Qwen;
- blocks of 2048 tokens that do not overlap; tokens after the last whole block are dropped;
- every block is predicted from its own start, and the mean is over predicted tokens.

GPTQ without `--new-eval` takes PTB's validation split joined by two newlines and 256 blocks drawn
at random from C4; those figures are not comparable with either. SVD-LLM's loop leaves out batches
whose logits are not finite; here they raise.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Corpus:
    """A data set on the Hugging Face hub, and the one file of it that is read.

    Attributes:
        repo: id on the hub.
        config: name of the configuration, for people.
        split: name of the split, for people.
        revision: branch on the hub.
        file: path in the repository.
        column: of the texts.
        local_files: names under which a directory given by the user may hold the split, too.
    """

    repo: str
    config: str
    split: str
    revision: str
    file: str
    column: str
    local_files: tuple[str, ...]


CORPORA: Mapping[str, Corpus] = {
    "wikitext2": Corpus(
        repo="Salesforce/wikitext",
        config="wikitext-2-raw-v1",
        split="test",
        revision="main",
        file="wikitext-2-raw-v1/test-00000-of-00001.parquet",
        column="text",
        # As `datasets` names its cache.
        local_files=("wikitext-test.arrow", "wikitext2.parquet", "wikitext2.arrow"),
    ),
    "ptb": Corpus(
        repo="ptb-text-only/ptb_text_only",
        config="penn_treebank",
        split="test",
        # The repository holds a script, which `datasets` runs no more; this branch, its result.
        revision="refs/convert/parquet",
        file="penn_treebank/test/0000.parquet",
        column="sentence",
        local_files=("ptb.test.txt", "ptb.parquet"),
    ),
    "c4": Corpus(
        repo="allenai/c4",
        config="en",
        split="validation",
        revision="main",
        file="en/c4-validation.00000-of-00008.json.gz",
        column="text",
        local_files=(
            "c4-validation.00000-of-00008.json.gz",
            "c4-validation.00000-of-00008.json",
        ),
    ),
}


@dataclass(frozen=True)
class Recipe:
    """What a protocol makes of a data set.

    Attributes:
        separator: between documents.
        documents: how many are taken, from the first; None for all.
        blocks: how many are taken, from the first; None for all.
    """

    separator: str
    documents: int | None = None
    blocks: int | None = None


PROTOCOLS: Mapping[str, Mapping[str, Recipe]] = {
    "standard": {
        "wikitext2": Recipe("\n\n"),
        "ptb": Recipe(" "),
        "c4": Recipe(" ", documents=1100, blocks=256),
    },
    "svd-llm": {
        "wikitext2": Recipe("\n\n"),
        "ptb": Recipe("\n\n"),
        "c4": Recipe("\n\n", documents=2000),
    },
}


def recipe_of(protocol: str, name: str) -> Recipe:
    """Return what a protocol makes of a data set.

    Raises:
        ValueError: either name is unknown; says which there are.
    """
    check_name("protocol", protocol, PROTOCOLS)
    check_name("data set", name, CORPORA)
    return PROTOCOLS[protocol][name]


def check_name(kind: str, name: str, known: Collection[str]) -> None:
    """Raise ValueError, with the nearest known names or a few, where a name is unknown."""
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    hint = f"nearest are {', '.join(near)}" if near else f"known are {', '.join(list(known)[:9])}"
    raise ValueError(f"unknown {kind} {name!r}; {hint}")
