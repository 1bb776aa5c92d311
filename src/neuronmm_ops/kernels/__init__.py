"""NKI kernels of the ops, and the plans that choose their blocks.

`nki_kernel(plan)` is the kernel of a plan; `plan.arguments` are its compile-time arguments.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neuroncore import Kernel
    from neuronmm_ops.kernels.problem import Plan

__all__ = [
    "kernel_named",
    "missing_instructions",
    "nki_kernel",
    "source_fingerprint",
]


def nki_kernel(plan: Plan) -> Kernel:
    """The kernel that a plan is for, on as many cores as it says."""
    kernel = kernel_named(plan.problem.op, plan.kernel)
    return kernel if plan.problem.lnc == 1 else kernel[plan.problem.lnc]


def kernel_named(op: str, name: str) -> Kernel:
    """A kernel without a grid: `xuv_decode` is the function in `kernels/xuv/decode.py`.

    `xuv` is that in `prefill.py`.
    """
    return getattr(import_module(f"{__name__}.{op}.{phase_of(name)}"), name)


def phase_of(name: str) -> str:
    """The phase that a kernel is for, by its name."""
    return "decode" if name.endswith("_decode") else "prefill"


@cache
def source_fingerprint() -> str:
    """16 hexadecimal digits of what a compiled kernel is a result of: kernels and storages."""
    return hashlib.sha256(_source()).hexdigest()[:16]


def missing_instructions() -> list[str]:
    """What the kernels use of `nki.isa` and the one that is bound lacks. Imports it."""
    from neuronmm_ops.kernels.shim import nisa

    names = sorted(set(re.findall(r"\bnisa\.(\w+)", _source().decode())))
    return [name for name in names if not hasattr(nisa, name)]


def _source() -> bytes:
    root = Path(__file__).parent
    files = sorted([*root.rglob("*.py"), *root.with_name("storages").rglob("*.py")])
    return b"".join([file.read_bytes() for file in files])
