"""A NeuronCore on the CPU: runs NKI kernels on NumPy, and says what they move and cost.

The names below are imported when they are first used, so that a submodule such as `nl.objects`
costs no more than itself. All times are modelled.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuronmm_ops.hardware import MACHINES, Machine
    from neuronmm_ops.neuroncore import collectives, isa, language
    from neuronmm_ops.neuroncore.boundary import PerRank, TensorSpec
    from neuronmm_ops.neuroncore.budget import Budget
    from neuronmm_ops.neuroncore.checks.base import NkiValidationError, NkiWarning
    from neuronmm_ops.neuroncore.checks.lint import LintError, lint
    from neuronmm_ops.neuroncore.kernel import Kernel, Simulation, as_nki, jit, simulate
    from neuronmm_ops.neuroncore.profile.profile import Profile

_HOMES = {
    "neuronmm_ops.hardware": ("MACHINES", "Machine"),
    "neuronmm_ops.neuroncore.budget": ("Budget",),
    "neuronmm_ops.neuroncore.checks.base": ("NkiValidationError", "NkiWarning"),
    "neuronmm_ops.neuroncore.boundary": ("PerRank", "TensorSpec"),
    "neuronmm_ops.neuroncore.kernel": ("Kernel", "Simulation", "as_nki", "jit", "simulate"),
    "neuronmm_ops.neuroncore.checks.lint": ("LintError", "lint"),
    "neuronmm_ops.neuroncore.profile.profile": ("Profile",),
}
__all__ = [
    "MACHINES", "Budget", "Kernel", "LintError", "Machine", "NkiValidationError", "NkiWarning",
    "PerRank", "Profile", "Simulation", "TensorSpec", "as_nki", "collectives", "isa", "jit",
    "language", "lint", "simulate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("collectives", "isa", "language", "typing"):
        return import_module(f"{__name__}.{name}")
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value
