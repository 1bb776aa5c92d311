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
    """A kernel breaks a rule of the NKI API or of the hardware.

    Attributes:
        place: file and line of the kernel that break it; None where no line does.
    """

    place: tuple[str, int] | None = None


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
    raise placed(text, frame.f_code.co_filename, frame.f_lineno)


def placed(text: str, path: str, line: int) -> NkiValidationError:
    """An error of a line, in which it ends; of a launch as a whole where that is the command's."""
    if path.startswith(COMMAND):
        return NkiValidationError(text)
    error = NkiValidationError(f"{text} [{os.path.basename(path)}:{line}]")
    error.place = path, line
    return error


def seen(value: object) -> str:
    """A value that should not be there, on one line: arrays and collections shortened."""
    return " ".join(reprlib.repr(value).split())


noted: set[tuple[str, int, str]] = set()
"""Where a run has warned of what, without the numbers of tensors: a loop warns once."""


def note(text: str, place: tuple[str, int] | None = None) -> None:
    """Warn of what the compiler may refuse, at a line or the kernel's own; once a run."""
    frame = kernel_frame()
    path, line = place or (frame.f_code.co_filename, frame.f_lineno)
    key = (path, line, re.sub(r"\d+", "", text))
    if key in noted:
        return
    noted.add(key)
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, NkiWarning, path, line, registry=registry)


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
    path = frame.f_code.co_filename
    inside = frames[-1][0] is not frame
    if isinstance(error, AttributeError):
        if inside and error.name in _PARTS_OF_A_TILE:
            problem = f"an operand must be a tensor; got {seen(error.obj)}"
            raise placed(problem, path, line) from error
        return
    called = re.match(r"([\w.]+)\(\) (missing|got|takes) ", str(error))
    api = [vars(sys.modules[f"neuroncore.{m}"]) for m in ("isa", "language")]
    if not inside and called and any(called[1].partition(".")[0] in names for names in api):
        raise placed(str(error), path, line) from error
