"""Files that come from outside: regular ones alone, and none that is longer than it can be.

A fifo or a device in the place of a file would otherwise be waited for, or read, for ever.
"""

import errno
import os
import stat
from pathlib import Path

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


def check_regular_files(directory: Path) -> None:
    """Refuse a directory in which a fifo, a device or a socket lies.

    Raises:
        OSError: there is one, or the directory cannot be read.
    """
    for path in directory.iterdir():
        if path.exists() and not path.is_dir():
            check_regular(path)


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
