"""How a broken rule is reported."""

from __future__ import annotations

import os
import re
import reprlib
import sys
import warnings
from types import FrameType
from typing import NoReturn

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class NkiValidationError(Exception):
    """A kernel breaks a rule of the NKI API or of the hardware."""


class NkiWarning(UserWarning):
    """A kernel runs here, but does what the documentation refuses or leaves undefined.

    `warnings.simplefilter("error", NkiWarning)` turns each into an error.
    """


def kernel_frame() -> FrameType:
    """The innermost frame that is not of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame


def refuse(text: str) -> NoReturn:
    """Raise an NkiValidationError that ends in the kernel's file and line."""
    frame = kernel_frame()
    place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    raise NkiValidationError(f"{text} [{place}]")


def seen(value: object) -> str:
    """A value that should not be there, on one line: arrays and collections shortened."""
    return " ".join(reprlib.repr(value).split())


def note(text: str) -> None:
    """Warn of what the compiler may refuse, at the kernel's file and line."""
    frame = kernel_frame()
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        text, NkiWarning, frame.f_code.co_filename, frame.f_lineno, registry=registry
    )


def wrong_call(error: TypeError) -> None:
    """Refuse a call from the kernel that does not fit the signature of what it calls.

    Raises NkiValidationError where `error` is that, and returns where it is something else.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_filename.startswith(PACKAGE):
        return
    if re.match(r"\w+\(\) (missing|got|takes) ", str(error)):
        place = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
        raise NkiValidationError(f"{error} [{place}]") from error
