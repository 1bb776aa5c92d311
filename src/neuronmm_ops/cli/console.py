"""What this package's commands add to `neuroncore.cli.console`: own warnings and errors."""

import contextlib
import logging
import traceback
import warnings
from collections.abc import Generator
from pathlib import Path
from time import monotonic

from neuroncore.cli import console
from neuroncore.cli.console import KernelError, one_line, show_warning, stderr
from neuronmm_ops.errors import (
    CalibrationWarning,
    CompressionWarning,
    NkiVersionError,
    WorkerLostError,
)
from neuronmm_ops.progress import SECONDS_BETWEEN_LINES

_PACKAGE = Path(__file__).parents[1]


@contextlib.contextmanager
def our_warnings() -> Generator[None, None, None]:
    """Show the package's own warnings, a line each, and no others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", CalibrationWarning)
        warnings.simplefilter("always", CompressionWarning)
        warnings.showwarning = show_warning
        yield


@contextlib.contextmanager
def searches_told() -> Generator[None]:
    """Say once that plans are searched, if that takes seconds: nothing else would move."""
    log, handler = logging.getLogger("neuronmm_ops.plan"), _Searches()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _Searches(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seconds = monotonic()
        self.is_told = False

    def emit(self, record: logging.LogRecord) -> None:
        """Tell of the first search that begins some seconds after the command."""
        if self.is_told or monotonic() < self.seconds + SECONDS_BETWEEN_LINES:
            return
        self.is_told = True
        stderr.print("searching plans of new shapes: seconds each, kept for the next time")


def explain(error: BaseException) -> tuple[str, int]:
    """Return one line for the user and the exit code."""
    if isinstance(error, KernelError):
        return console.explain(error)
    if _is_out_of_memory(error):
        return (
            "out of memory; use fewer or shorter --samples, --targets with fewer layers, "
            "or a machine with more memory",
            2,
        )
    if _lacks_threads(error):
        return (
            "the system starts no further thread or process; raise the limit (ulimit -u), or end "
            "other processes",
            2,
        )
    if isinstance(error, WorkerLostError):
        return one_line(error), 1
    if isinstance(error, NkiVersionError):
        return one_line(error), 2
    if type(error).__name__ == "PanicException":
        return f"a native library gave up ({one_line(error)}); copy the tokenizer's files again", 2
    if _is_of_the_model(error):
        return (
            f"the model's own code fails ({type(error).__name__}: {one_line(error)}); check that "
            "its config.json fits its weights and this version of Transformers",
            2,
        )
    return console.explain(error)


def _is_out_of_memory(error: BaseException) -> bool:
    # By its text too: loading wraps what torch raises.
    text = str(error)
    is_told = "out of memory" in text or "can't allocate memory" in text
    return is_told or isinstance(error, MemoryError)


def _lacks_threads(error: BaseException) -> bool:
    texts = ("can't start new thread", "Resource temporarily unavailable", "ThreadPoolBuildError")
    return any(text in str(error) for text in texts)


def _is_of_the_model(error: BaseException) -> bool:
    """Say whether it came out of a model's code in Transformers, by no further call of ours."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(_PACKAGE):
            return False
        if "transformers/models/" in Path(frame.filename).as_posix():
            return True
    return False
