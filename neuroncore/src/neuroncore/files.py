"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Generator[Path]:
    """Yield a temporary file next to `path` that becomes `path` when the block ends without error.

    The temporary name keeps the suffix, by which writers choose their format.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(path.suffix, f".{path.stem}.", path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # as of a full disk
            error.filename = os.fspath(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
