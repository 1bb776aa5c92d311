"""A NeuronCore on the CPU: runs NKI kernels on NumPy, and says what they move and cost.

Imports numpy and ml_dtypes only. All times are modelled.
"""

from neuronmm_ops.hardware import MACHINES, Machine
from neuronmm_ops.neuroncore import isa, language
from neuronmm_ops.neuroncore.kernel import Kernel, Simulation, TensorSpec, as_nki, jit, simulate
from neuronmm_ops.neuroncore.lint import LintError, lint
from neuronmm_ops.neuroncore.profile import Profile
from neuronmm_ops.neuroncore.rules import NkiValidationError

__all__ = [
    "MACHINES",
    "Kernel",
    "LintError",
    "Machine",
    "NkiValidationError",
    "Profile",
    "Simulation",
    "TensorSpec",
    "as_nki",
    "isa",
    "jit",
    "language",
    "lint",
    "simulate",
]
