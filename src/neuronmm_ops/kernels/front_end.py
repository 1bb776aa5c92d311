"""`is_none`: the one thing that NKI's two front ends want written in two ways.

Up to NKI 0.6 kernels are parsed: the language has `== None`, and its guide refuses `is`. From 0.7
on Python traces them: `==` is what an object makes of it, and only `is` is sure. (NKI migration
guide, 0.2 to 0.3 and 0.6 to 0.7.) `NKI_COMPILER_FRONTEND` asks for another than the line's own:
`tracer` in 0.6, `custom` or `parser` in 0.7; 0.8 has no parser any more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from neuronmm_ops.extras import version_of

if TYPE_CHECKING:
    from typing_extensions import TypeIs

FRONT_END_VARIABLE = "NKI_COMPILER_FRONTEND"


def is_parsed() -> bool:
    """Whether kernels are parsed here; without NKI Python runs them, on the simulator."""
    asked = os.environ.get(FRONT_END_VARIABLE)
    if asked:
        return asked != "tracer"
    return re.match(r"0\.[1-6](\.|$)", version_of("nki") or "") is not None


def equals_none(value: object) -> TypeIs[None]:
    """Whether a tensor, an object or a number is missing, for the parser."""
    return value == None  # noqa: E711


def is_the_none(value: object) -> TypeIs[None]:
    """Whether a tensor, an object or a number is missing, for Python."""
    return value is None


is_none: Callable[[object], TypeIs[None]] = equals_none if is_parsed() else is_the_none
