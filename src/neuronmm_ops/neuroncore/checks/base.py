"""How a broken rule is reported."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import NoReturn

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class NkiValidationError(Exception):
    """A kernel breaks a rule of the NKI API or of the hardware."""


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
