"""Files that come from outside: `neuroncore.documents`, and directories of them."""

from pathlib import Path

from neuroncore.documents import JSON_BYTES, check_regular, read_bounded, read_document

__all__ = ["JSON_BYTES", "check_regular", "check_regular_files", "read_bounded", "read_document"]


def check_regular_files(directory: Path) -> None:
    """Refuse a directory in which a fifo, a device or a socket lies.

    Raises:
        OSError: there is one, or the directory cannot be read.
    """
    for path in directory.iterdir():
        if path.exists() and not path.is_dir():
            check_regular(path)
