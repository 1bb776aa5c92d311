"""The results of a reproduction on disk: one JSON file a cell, there completely or not at all.

A cell's key is the SHA-256 of its inputs: all that decides its result. The file holds both, so that
a cell of other inputs is never taken for it.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuroncore.files import replacing
from neuronmm_ops.output import check_parent, check_text
from neuronmm_ops.processes import locked

KEY_CHARS = 16
# What a killed process was writing, as `replacing` and `output.replacement` name it.
_UNFINISHED_FILE = re.compile(
    r"\.(results|table|report|[a-z]+-[0-9a-f]{16})\.\w{8}\.(json|md|html)"
)
_UNFINISHED_MODEL = re.compile(r"\.(compress|recover)-[0-9a-f]{16}\..+\.(tmp|old)")


@dataclass(frozen=True)
class Cell:
    """One result to have.

    Attributes:
        kind: `compress`, `recover`, `perplexity`, `task`, `modelled` or `measured`.
        label: the model that it is of, for people.
        inputs: JSON values; all that decides the result.
        subject: the text or the task.
    """

    kind: str
    label: str
    inputs: Mapping[str, Any]
    subject: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return " ".join(filter(None, (self.kind, self.label, self.subject)))

    @property
    def key(self) -> str:
        """SHA-256 of kind and inputs, in hexadecimal."""
        return key_of({"kind": self.kind, **self.inputs})

    @property
    def stem(self) -> str:
        """Name of its file, or of its model's directory: new names of methods change nothing."""
        return f"{self.kind}-{self.key[:KEY_CHARS]}"


def key_of(inputs: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values, in hexadecimal."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Store:
    """OUT: `cells/`, `models/` and the tables.

    Args:
        directory: an existing one.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cells, self.models = directory / "cells", directory / "models"

    def path(self, cell: Cell) -> Path:
        """Return the file of a cell."""
        return self.cells / f"{cell.stem}.json"

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """Return a cell's result; None where there is none, or its file is not as we wrote it."""
        try:
            document = json.loads(self.path(cell).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        is_ours = isinstance(document, dict) and document.get("key") == cell.key
        result = document.get("result") if is_ours else None
        is_whole = isinstance(result, dict) and document.get("result_sha256") == key_of(result)
        return result if is_whole else None

    def write(self, cell: Cell, result: Mapping[str, Any], seconds: float) -> None:
        """Write a cell's result."""
        document = {
            "cell": cell.name,
            "key": cell.key,
            "inputs": {"kind": cell.kind, **cell.inputs},
            "result": result,
            "result_sha256": key_of(result),
            "seconds": round(seconds, 3),
        }
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
        self.write_text(f"cells/{self.path(cell).name}", text)

    def write_text(self, name: str, text: str) -> None:
        """Write a file of OUT; it is there completely, or as it was before."""
        with replacing(self.directory / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def check_output(directory: Path) -> None:
    """Refuse an output directory that must not, or cannot, be written.

    Raises:
        OSError: it cannot be made or written, or holds something else.
        ValueError: its path is not UTF-8.
    """
    check_text(directory)
    parent = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    check_parent(directory, parent)
    if directory.is_dir() and not (directory / "cells").is_dir():
        foreign = sorted(path.name for path in directory.iterdir())
        if foreign:
            raise FileExistsError(
                f"output {directory} holds {foreign[0]} and no cells, so it is of something else; "
                "choose another"
            )


@contextmanager
def open_store(directory: Path) -> Generator[Store]:
    """Give the output directory, made where it does not exist, to this process alone.

    Raises:
        OSError: as `check_output`, or another run works in it.
    """
    check_output(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"output {directory} cannot be made: {error.strerror}") from None
    with locked(directory):
        store = Store(directory)
        for place in (store.cells, store.models):
            place.mkdir(exist_ok=True)
        for path in (*directory.iterdir(), *store.cells.iterdir()):
            if _UNFINISHED_FILE.fullmatch(path.name):
                path.unlink(missing_ok=True)
        for path in store.models.iterdir():
            if _UNFINISHED_MODEL.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        yield store
