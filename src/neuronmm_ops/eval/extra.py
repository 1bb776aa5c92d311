"""Packages of the extra `eval`: imported when they are needed, and kept from talking."""

import contextlib
import logging
import warnings
from collections.abc import Generator
from typing import Any

from neuronmm_ops.extras import import_extra

_TALKATIVE = ("datasets", "evaluate", "huggingface_hub", "lm_eval")


def import_quietly(name: str) -> Any:
    """Return a module that needs packages of the extra, as `import_extra` does."""
    with quiet():
        return import_extra(name, "eval")


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


def reason(error: BaseException) -> str:
    """Return the first line of what is at the bottom of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
