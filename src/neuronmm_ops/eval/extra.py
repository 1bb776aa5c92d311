"""Packages of the extra `eval`: imported when they are needed, and kept from talking."""

import contextlib
import importlib
import logging
import warnings
from collections.abc import Generator
from typing import Any

from neuronmm_ops.errors import missing_extra

_TALKATIVE = ("datasets", "evaluate", "huggingface_hub", "lm_eval")


def import_extra(name: str) -> Any:
    """Return a module of an optional package.

    Raises:
        ImportError: it, or a package that it needs, cannot be imported; names the extra.
    """
    try:
        with quiet():
            return importlib.import_module(name)
    except ImportError as error:
        raise missing_extra(error, "eval") from error


@contextlib.contextmanager
def quiet() -> Generator[None, None, None]:
    """Keep these packages from warning and logging in a block; what matters is raised."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[None, None, None]:
    """Put a value in the place of an attribute for a block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def reason(error: BaseException) -> str:
    """Return the first line of what is at the bottom of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
