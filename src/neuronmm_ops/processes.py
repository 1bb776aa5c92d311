"""Processes of this machine."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def is_running(pid: int) -> bool:
    """Say whether there is a process of that number, anybody's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def locked(directory: Path) -> Generator[None]:
    """Hold a directory's lock for a block; the system releases it when the process ends, too.

    Raises:
        BlockingIOError: another process holds it.
    """
    import fcntl  # not on Windows

    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another run works in {directory}; wait for it, or choose another output"
            ) from None
        yield
    finally:
        os.close(descriptor)
