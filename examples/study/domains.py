"""The study's text, in three domains: documentation, other packages' documentation, and code.

Nothing is downloaded: it is the demo's text, the docstrings of installed libraries, and source.
Held-out documents are held out of calibration; of training only within their own domain: the
library's source holds its docstrings too.
"""

import hashlib
import importlib.util
import random
import sysconfig
from pathlib import Path
from typing import NamedTuple

from corpus import HELD_OUT_PERCENT, Corpus, load_corpus, module_pieces

# What `pip install neuronmm-ops[hf,eval]` brings along.
PACKAGES = ("numpy", "scipy", "sympy", "torch", "transformers", "matplotlib", "networkx")
MIN_CHARS = 400


class Domain(NamedTuple):
    """Documents to train on, and documents that nothing but the evaluation reads."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def load_domains(max_modules: int | None = None) -> tuple[Corpus, dict[str, Domain]]:
    """Return the corpus to train on, and its domains; `docs` is the one to calibrate on.

    Args:
        max_modules: read so many modules of each package only, to save time; default all.
    """
    docs = load_corpus(max_modules)
    domains = {
        "docs": Domain(docs.train, docs.held_out),
        "packages": _split(_package_documents(max_modules)),
        "code": _split(_sources(max_modules)),
    }
    train = [document for domain in domains.values() for document in domain.train]
    held_out = [document for domain in domains.values() for document in domain.held_out]
    random.Random(0).shuffle(train)  # noqa: S311
    return Corpus(tuple(train), docs.calibration, tuple(held_out)), domains


def _split(documents: list[str]) -> Domain:
    train: list[str] = []
    held_out: list[str] = []
    for document in documents:
        digest = hashlib.sha256(document.encode()).digest()
        bucket = int.from_bytes(digest[:4], "big") % 100
        (held_out if bucket < HELD_OUT_PERCENT else train).append(document)
    held_out.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    return Domain(tuple(train), tuple(held_out))


def _package_documents(max_modules: int | None) -> list[str]:
    """One document a module, no piece of text twice."""
    seen: set[str] = set()
    documents = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        for path in sorted(Path(spec.origin).parent.rglob("*.py"))[:max_modules]:
            if "test" in path.name or "tests" in path.parts:
                continue
            pieces = [piece for piece in module_pieces(path) if piece not in seen]
            seen.update(pieces)
            text = "\n\n".join(pieces)
            if len(text) >= MIN_CHARS and text.isascii():
                documents.append(text)
    return documents


def _sources(max_modules: int | None) -> list[str]:
    """The standard library's top-level modules, as they are."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:max_modules]
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in paths)
    return [text for text in texts if len(text) >= MIN_CHARS and text.isascii()]
