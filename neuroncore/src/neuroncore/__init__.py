"""A NeuronCore on the CPU: runs NKI kernels on NumPy, and says what they move and cost.

The names below are imported when they are first used, so that a submodule such as `nl.objects`
costs no more than itself. All times are modelled.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuroncore import collectives, isa, language
    from neuroncore.boundary import PerRank, TensorSpec
    from neuroncore.budget import Budget
    from neuroncore.checks.base import NkiValidationError, NkiWarning
    from neuroncore.checks.lint import LintError, lint
    from neuroncore.dropin import as_nki, install
    from neuroncore.hardware import MACHINES, Machine
    from neuroncore.kernel import Kernel, Simulation, jit, simulate
    from neuroncore.profile.profile import Profile

_HOMES = {
    "neuroncore.hardware": ("MACHINES", "Machine"),
    "neuroncore.budget": ("Budget",),
    "neuroncore.checks.base": ("NkiValidationError", "NkiWarning"),
    "neuroncore.boundary": ("PerRank", "TensorSpec"),
    "neuroncore.kernel": ("Kernel", "Simulation", "jit", "simulate"),
    "neuroncore.dropin": ("as_nki", "install"),
    "neuroncore.checks.lint": ("LintError", "lint"),
    "neuroncore.profile.profile": ("Profile",),
}
__version__ = "0.1.0"
__all__ = [
    "MACHINES", "Budget", "Kernel", "LintError", "Machine", "NkiValidationError", "NkiWarning",
    "PerRank", "Profile", "Simulation", "TensorSpec", "as_nki", "collectives", "install",
    "isa", "jit", "language", "lint", "simulate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("collectives", "isa", "language", "typing"):
        return import_module(f"{__name__}.{name}")
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def pytest_addoption(parser: Any) -> None:
    """`pytest -p neuroncore`: `import nki` finds the simulator, from the first conftest.py on."""
    from neuroncore.dropin import install
    from neuroncore.testing import add_options

    install()
    add_options(parser)


def pytest_configure(config: Any) -> None:
    """Take over the options of `assert_kernel`."""
    from neuroncore.testing import configure

    configure(config)
