"""Processes of this machine."""

import os


def is_running(pid: int) -> bool:
    """Say whether there is a process of that number, anybody's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
