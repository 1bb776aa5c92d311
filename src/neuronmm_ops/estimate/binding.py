"""Kernels that no plan is searched for, on the simulated core where the real nki is installed, too.

As `kernels.simulated`, which knows the kernels of ops.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from types import ModuleType

from neuroncore import Kernel
from neuronmm_ops import kernels

_PACKAGES = (kernels.__name__, "nki")


@cache
def simulated(place: str, lnc: int) -> Kernel:
    """The kernel at a place below `kernels`, such as `rope.prefill.rope`, on so many cores."""
    module, _, name = f"{kernels.__name__}.{place}".rpartition(".")
    kernel = getattr(import_module(module), name)
    if not isinstance(kernel, Kernel):
        bound = _take()
        sys.modules["nki"] = None  # type: ignore[assignment]  # as if it were not installed
        try:
            kernel = getattr(import_module(module), name)
        finally:
            _take()
            sys.modules.update(bound)
            sys.modules[kernels.__name__.rpartition(".")[0]].kernels = kernels  # type: ignore[attr-defined]
    return kernel if lnc == 1 else kernel[lnc]


def _take() -> dict[str, ModuleType]:
    """Remove the packages' modules, and return them."""
    below = tuple([f"{package}." for package in _PACKAGES])
    found = [name for name in sys.modules if name in _PACKAGES or name.startswith(below)]
    return {name: sys.modules.pop(name) for name in found}
