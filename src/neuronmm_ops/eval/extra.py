"""Packages of the extra `eval`, imported when they are needed."""

import importlib
from typing import Any


def import_extra(name: str) -> Any:
    """Return a module of an optional package.

    Raises:
        ImportError: it, or a package that it needs, is not installed; names the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name or name
        raise ImportError(
            f"{missing} is not installed; run: pip install 'neuronmm-ops[eval]'", name=missing
        ) from error
