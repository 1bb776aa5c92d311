"""The ops `neuronmm::xuv`, `neuronmm::svd_mlp` and `neuronmm::xw`. Imports torch only."""

# The launchers of devices register their kernels.
from neuronmm_ops.ops import neuron as neuron
from neuronmm_ops.ops import xla as xla
from neuronmm_ops.ops.functional import svd_mlp, xuv, xw
from neuronmm_ops.ops.implementation import use_impl
from neuronmm_ops.ops.reference import ACTIVATIONS
from neuronmm_ops.ops.simulated import last_profile

__all__ = ["ACTIVATIONS", "last_profile", "svd_mlp", "use_impl", "xuv", "xw"]
