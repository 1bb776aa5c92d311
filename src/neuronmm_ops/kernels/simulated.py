"""Kernels for the simulated core, also where the real `nki` is installed.

There the kernels' modules are bound to the real package, which runs nothing on a CPU. Plans are
made by tracing, so these modules are imported a second time, bound to the simulator.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from types import ModuleType

from neuroncore import Kernel
from neuronmm_ops import kernels

_PACKAGE = kernels.__name__
_importing = Lock()


def simulated_kernel(op: str, name: str, lnc: int) -> Kernel:
    """A kernel, as `kernels.kernel_named` finds it, on `lnc` cores for `neuroncore.simulate`."""
    kernel = kernels.kernel_named(op, name)
    if not isinstance(kernel, Kernel):
        with _importing:
            kernel = getattr(_modules()[f"{_PACKAGE}.{op}.{kernels.phase_of(name)}"], name)
    return kernel if lnc == 1 else kernel[lnc]


@cache
def _modules() -> dict[str, ModuleType]:
    """The modules of all kernels once more, by name, bound to the simulator."""
    bound = _take(_PACKAGE, "nki")
    sys.modules["nki"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        for phase in ("prefill", "decode"):
            for path in Path(__file__).parent.glob(f"*/{phase}.py"):
                if path.parent.name != "stages":
                    import_module(f"{_PACKAGE}.{path.parent.name}.{phase}")
    finally:
        simulated = _take(_PACKAGE, "nki")
        sys.modules.update(bound)
        sys.modules[_PACKAGE.rpartition(".")[0]].kernels = kernels  # type: ignore[attr-defined]
    return simulated


def _take(*packages: str) -> dict[str, ModuleType]:
    """Remove packages from the modules that are imported, and return what was removed."""
    prefixes = tuple([f"{package}." for package in packages])
    names = [name for name in sys.modules if name in packages or name.startswith(prefixes)]
    return {name: sys.modules.pop(name) for name in names}
