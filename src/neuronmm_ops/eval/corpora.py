"""Perplexity on the papers' data sets, which the `datasets` package reads."""

import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm_ops.compress.batches import fingerprint
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.eval.extra import import_quietly, quiet, reason
from neuronmm_ops.eval.perplexity import block_length, token_perplexity
from neuronmm_ops.eval.protocols import CORPORA, Corpus, Recipe, recipe_of
from neuronmm_ops.progress import named

Document = Callable[[Mapping[str, Any]], str]
"""What a row of a data set reads like."""

# The builder of `datasets` that reads a file, by the file's suffix.
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".txt": "text", ".json": "json"}


def perplexities(
    model: nn.Module,
    tokenizer: Any,
    names: Sequence[str],
    *,
    seqlen: int | None = None,
    protocol: str = "standard",
    data: str | Path | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Measure token perplexity on data sets as papers do.

    Every data set is read and tokenized before the first is evaluated.

    Args:
        model: a causal LM, as `token_perplexity` takes it.
        tokenizer: its Transformers tokenizer.
        names: of `protocols.CORPORA`: wikitext2, ptb, c4.
        seqlen: block length in tokens; default the smaller of 2048 and the model's limit.
        protocol: of `protocols.PROTOCOLS`: standard, svd-llm.
        data: a directory with the files, see `find_file`; default the Hugging Face hub's cache, and
            the hub for what is not in it.
        progress: called with ("read NAME", 0 or 1, 1) and ("evaluate NAME", blocks done, blocks in
            all).

    Returns:
        A row for each data set: `dataset`, `protocol`, `ppl_token`, `tokens` (predicted), `seqlen`,
        `blocks`, `documents`, `bos` (whether the text begins with it), `fingerprint` (SHA-256 of
        the token ids), `file`.

    Raises:
        ValueError: a name is unknown, a file is not to be had, malformed or without texts, the
            text is shorter than a block, or the tokenizer's config says that texts begin with BOS
            and they do not.
        NonFiniteError: logits are NaN or Inf; names the data set.
        ImportError: the extra `eval` is not installed.
    """
    if not names:
        raise ValueError(f"give at least one data set of {', '.join(CORPORA)}")
    recipes = {name: recipe_of(protocol, name) for name in names}
    length = block_length(model, seqlen, least=2)
    texts: dict[str, tuple[Tensor, int, Path]] = {}
    for name, recipe in recipes.items():
        if progress:
            progress(f"read {name}", 0, 1)
        texts[name] = _encoded(tokenizer, name, recipe, data)
        if progress:
            progress(f"read {name}", 1, 1)
    blocks = {name: _whole_blocks(name, texts[name][0], length, recipes[name]) for name in texts}
    rows: list[dict[str, Any]] = []
    for name, (ids, documents, file) in texts.items():
        ids = ids[: blocks[name] * length]
        try:
            result = token_perplexity(model, ids, length, named(progress, name))
        except NonFiniteError as error:
            raise NonFiniteError(f"{name}: {error}") from None
        rows.append(
            {
                "dataset": name,
                "protocol": protocol,
                "ppl_token": result.ppl_token,
                "tokens": result.tokens,
                "seqlen": length,
                "blocks": blocks[name],
                "documents": documents,
                "bos": int(ids[0]) == tokenizer.bos_token_id,
                "fingerprint": fingerprint([ids]),
                "file": str(file),
            }
        )
    return rows


def documents_of(
    name: str,
    corpus: Corpus,
    data: str | Path | None,
    document: Document | None = None,
    count: int | None = None,
) -> tuple[list[str], Path]:
    """Read the first documents of a data set, and say from which file.

    Args:
        name: for the messages.
        corpus: the data set.
        data: see `find_file`.
        document: what a row reads like; None for the text in the corpus's column.
        count: of documents; None for all.

    Raises:
        ValueError: the file is not to be had, malformed, or without texts.
        ImportError: the extra `eval` is not installed.
    """
    load = import_quietly("datasets").load_dataset
    file = find_file(corpus, data)
    try:
        # `datasets` wants a directory for locks even where it only streams.
        with tempfile.TemporaryDirectory() as scratch, quiet():
            rows = _rows(functools.partial(load, cache_dir=scratch), file)
            texts = _column(rows, file, corpus.column) if document is None else map(document, rows)
            documents = list(itertools.islice(texts, count))
    except Exception as error:  # bad files make the readers raise anything
        raise ValueError(
            f"{name}: {file} is malformed or empty ({reason(error)}); place the "
            f"{corpus.split} split there"
        ) from error
    if not any(document.strip() for document in documents):
        raise ValueError(f"{name}: {file} has no text; place the {corpus.split} split there")
    return documents, file


def find_file(corpus: Corpus, data: str | Path | None) -> Path:
    """Return the path of a data set's file.

    Args:
        corpus: the data set.
        data: a directory that has the file under its path in the hub's repository, or under one of
            `corpus.local_files`; None for the hub's cache, and the hub for what is not in it.

    Raises:
        ValueError: it is not to be had; says which file to place where.
    """
    wanted = f"{corpus.repo} ({corpus.config}, {corpus.split})"
    if data is None:
        return _download(corpus, wanted)
    names = (corpus.file, *corpus.local_files)
    for name in names:
        if (Path(data) / name).is_file():
            return Path(data) / name
    raise ValueError(f"{data} has no file of {wanted}; place one there as {' or '.join(names)}")


def _download(corpus: Corpus, wanted: str) -> Path:
    hub = import_quietly("huggingface_hub")
    place = {"repo_type": "dataset", "revision": corpus.revision}
    try:
        with quiet():
            try:
                path = hub.hf_hub_download(corpus.repo, corpus.file, local_files_only=True, **place)
            except hub.errors.LocalEntryNotFoundError:
                path = hub.hf_hub_download(corpus.repo, corpus.file, **place)
    except Exception as error:  # networks and proxies raise anything
        raise ValueError(
            f"{wanted} is neither cached nor to be had from the hub ({reason(error)}); place "
            f"its {corpus.file} into a directory DIR as DIR/{corpus.file} and give --data-dir DIR"
        ) from error
    return Path(path)


def _rows(load: Any, file: Path) -> Iterator[Mapping[str, Any]]:
    """Return the rows of a file, which `datasets.load_dataset` reads."""
    # Streaming reads the file as it is: nothing is copied into a cache.
    return iter(load(_builder(file), data_files=str(file), split="train", streaming=True))


def _column(rows: Iterable[Mapping[str, Any]], file: Path, column: str) -> Iterator[str]:
    """Yield the texts of rows."""
    is_plain = _builder(file) == "text"
    column = "text" if is_plain else column
    for index, row in enumerate(rows):
        if not isinstance(row.get(column), str):
            raise ValueError(f"row {index} has no text in a column {column!r}")
        # A line of PTB's text begins and ends with a space, which the data set does not have.
        yield row[column].strip() if is_plain else row[column]


def _builder(file: Path) -> str:
    """What reads a file, compressed or not, in `datasets`."""
    return _BUILDERS[Path(file.name.removesuffix(".gz")).suffix]


def _encoded(
    tokenizer: Any, name: str, recipe: Recipe, data: str | Path | None
) -> tuple[Tensor, int, Path]:
    """Return the token ids `[T]` of a data set's text, the number of its documents, its file."""
    documents, file = documents_of(name, CORPORA[name], data, count=recipe.documents)
    # verbose=False: no warning where the text is longer than the model's context.
    ids = tokenizer(recipe.separator.join(documents), verbose=False)["input_ids"]
    if _declares_bos(tokenizer) and ids[:1] != [tokenizer.bos_token_id]:
        raise ValueError(
            f"{name}: the text must begin with BOS, for the tokenizer's config says add_bos_token; "
            f"got bos_token {tokenizer.bos_token} and first token id {ids[:1]}; correct its files"
        )
    return torch.tensor(ids, dtype=torch.long), len(documents), file


def _declares_bos(tokenizer: Any) -> bool:
    """Say whether the tokenizer's config asks for a BOS before texts."""
    if getattr(tokenizer, "add_bos_token", False):
        return True
    # Transformers drops what it cannot do, so its file is asked.
    path = Path(str(getattr(tokenizer, "name_or_path", ""))) / "tokenizer_config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("add_bos_token") is True
    except (OSError, ValueError, AttributeError):
        return False


def _whole_blocks(name: str, ids: Tensor, seqlen: int, recipe: Recipe) -> int:
    blocks = len(ids) // seqlen
    if blocks == 0:
        raise ValueError(
            f"{name}: the text must hold at least one block of {seqlen} tokens, got {len(ids)}; "
            "use the whole split, or a smaller seqlen"
        )
    return blocks if recipe.blocks is None else min(blocks, recipe.blocks)
