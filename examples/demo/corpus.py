"""The demo's text: the documentation inside every Python installation, so nothing is downloaded.

Two sources: the language reference that `help()` shows (`pydoc_data.topics`) and the signatures
and docstrings of the standard library, read by parsing its source files, never by importing them.
"""

import ast
import hashlib
import inspect
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

# Tests, generated tables and bundled third-party trees: no prose, or not the library's own.
SKIPPED_DIRS = frozenset(
    (
        "__phello__",
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idle_test",
        "idlelib",
        "lib-dynload",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    )
)
# A shorter piece is a stub ("Return x."); most of these repeat across modules.
MIN_CHARS = 40
HELD_OUT_PERCENT = 8


@dataclass(frozen=True)
class Corpus:
    """Documents, split so that no held-out document is ever trained or calibrated on."""

    train: tuple[str, ...]
    calibration: tuple[str, ...]
    """A part of `train`: calibration must not see what the evaluation reads."""
    held_out: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """A hash of all the text, to tell a cached model trained on other text from this one's."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            for document in part:
                digest.update(document.encode() + b"\0")
            digest.update(b"\1")
        return digest.hexdigest()[:16]


def load_corpus(max_modules: int | None = None) -> Corpus:
    """Read and split the documentation: the same text in the same order on every run.

    Args:
        max_modules: read the first so many modules only, to save time; default all.
    """
    train: list[str] = []
    held_out: list[str] = []
    for document in _documents(max_modules):
        digest = hashlib.sha256(document.encode()).digest()
        bucket = int.from_bytes(digest[:4], "big") % 100
        (held_out if bucket < HELD_OUT_PERCENT else train).append(document)
    # By hash, so that neither the alphabet nor the source groups documents in a training batch.
    train.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    held_out.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    calibration = random.Random(0).sample(train, k=max(1, len(train) // 4))  # noqa: S311
    return Corpus(tuple(train), tuple(calibration), tuple(held_out))


def _documents(max_modules: int | None) -> Iterator[str]:
    """One document per help topic and per module; no piece of text occurs twice."""
    seen: set[str] = set()
    # By paragraph, because topics quote whole sections of one another.
    sources = [text.split("\n\n") for _, text in sorted(topics.items())]
    sources += [module_pieces(path) for path in _module_files()[:max_modules]]
    for pieces in sources:
        kept = []
        for piece in pieces:
            piece = piece.expandtabs().strip("\n").rstrip()
            # The key ignores the signature line: inherited docstrings are copied under new names.
            key = piece.split("\n", 1)[-1]
            if key in seen or _is_junk(piece):
                continue
            seen.add(key)
            kept.append(piece)
        if kept:
            yield "\n\n".join(kept)


def _is_junk(piece: str) -> bool:
    """Too short, not plain text, or mostly tables and rules."""
    if len(piece) < MIN_CHARS:
        return True
    foreign = sum(not char.isascii() for char in piece)
    wordlike = sum(char.isalpha() or char.isspace() for char in piece)
    return foreign > 0.02 * len(piece) or wordlike < 0.6 * len(piece)


def _module_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not SKIPPED_DIRS & set(path.relative_to(root).parts[:-1])
        and not path.name.startswith("_sysconfigdata")
    ]


def module_pieces(path: Path) -> list[str]:
    """The module's docstring, then `signature + docstring` of its classes and functions."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a template, or source in a rare encoding
        return []
    pieces = [ast.get_docstring(tree) or ""]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                pieces.append(f"{_signature(node)}\n    {_indented(text)}")
    return pieces


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    return f"{node.name}({ast.unparse(node.args)})"


def _indented(text: str) -> str:
    lines = inspect.cleandoc(text).splitlines()
    return "\n    ".join(line.rstrip() for line in lines)
