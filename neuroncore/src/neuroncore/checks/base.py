"""How a broken rule is reported."""

from __future__ import annotations

import os
import re
import reprlib
import sys
import traceback
import warnings
from types import FrameType
from typing import NoReturn

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
COMMAND = os.path.join(PACKAGE, "cli") + os.sep


class NkiValidationError(Exception):
    """A kernel breaks a rule of the NKI API or of the hardware."""


class NkiWarning(UserWarning):
    """A kernel runs here, but does what the documentation refuses or leaves undefined.

    `warnings.simplefilter("error", NkiWarning)` turns each into an error.
    """


def kernel_frame() -> FrameType:
    """The innermost frame that is not of the simulator; the command that runs it is outside."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        if frame.f_code.co_filename.startswith(COMMAND):
            break
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


noted: set[tuple[str, int, str]] = set()
"""Where a run has warned of what, without the numbers of tensors: a loop warns once."""


def note(text: str) -> None:
    """Warn of what the compiler may refuse, at the kernel's file and line; once a run."""
    frame = kernel_frame()
    key = (frame.f_code.co_filename, frame.f_lineno, re.sub(r"\d+", "", text))
    if key in noted:
        return
    noted.add(key)
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        text, NkiWarning, frame.f_code.co_filename, frame.f_lineno, registry=registry
    )


_PARTS_OF_A_TILE = ("geometry", "index", "storage")


def wrong_call(error: TypeError | AttributeError) -> None:
    """Refuse a kernel's call of a function of NKI with arguments that it does not have or take.

    Raises NkiValidationError where `error` is that, and returns where it is something else.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    outside = [f for f in frames if not f[0].f_code.co_filename.startswith(PACKAGE)]
    if not outside:
        return
    frame, line = outside[-1]
    place = f"{os.path.basename(frame.f_code.co_filename)}:{line}"
    inside = frames[-1][0] is not frame
    if isinstance(error, AttributeError):
        if inside and error.name in _PARTS_OF_A_TILE:
            problem = f"an operand must be a tensor; got {seen(error.obj)}"
            raise NkiValidationError(f"{problem} [{place}]") from error
        return
    called = re.match(r"([\w.]+)\(\) (missing|got|takes) ", str(error))
    api = [vars(sys.modules[f"neuroncore.{m}"]) for m in ("isa", "language")]
    if not inside and called and any(called[1].partition(".")[0] in names for names in api):
        raise NkiValidationError(f"{error} [{place}]") from error
