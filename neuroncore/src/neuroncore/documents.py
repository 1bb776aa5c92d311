"""Documents that come from outside: regular files alone, and none that is longer than it can be.

A fifo or a device in the place of a file would otherwise be waited for, or read, for ever.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

JSON_BYTES = 64 << 20
"""The index of the largest public models takes a tenth of it."""


def check_regular(path: str | os.PathLike[str]) -> None:
    """Refuse what is no regular file, or no link to one.

    Raises:
        OSError: it is something else, or is not there.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it must be a regular file, no fifo or device", os.fspath(path))


def read_bounded(path: str | os.PathLike[str], limit_bytes: int = JSON_BYTES) -> bytes:
    """Return what a regular file holds.

    Raises:
        OSError: it is no regular file, is larger than the limit, or cannot be read.
    """
    check_regular(path)
    if os.stat(path).st_size > limit_bytes:
        problem = f"it must be at most {limit_bytes / 1e6:.0f} MB"
        raise OSError(errno.EFBIG, problem, os.fspath(path))
    with open(path, "rb") as file:
        return file.read()


def read_document(path: str | os.PathLike[str]) -> str:
    """Return a document in UTF-8, such as JSON or TOML.

    Raises:
        OSError: it is no regular file, is larger than `JSON_BYTES`, or cannot be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bounded(path).decode("utf-8")


def read_json(path: Path) -> Any:
    """Return what a JSON document holds.

    Raises:
        OSError: as `read_document`.
        ValueError: it is no JSON document; the message names the file.
    """
    try:
        return json.loads(read_document(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON document, or is cut off: {error}") from error
