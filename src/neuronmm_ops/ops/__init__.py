"""The ops `neuronmm::xuv`, `svd_mlp`, `decoder_layer` and their siblings. Imports torch only."""

# The launchers of devices register their kernels.
from neuronmm_ops.ops import cuda as cuda
from neuronmm_ops.ops.backends import neuron as neuron
from neuronmm_ops.ops.backends import xla as xla
from neuronmm_ops.ops.backends.simulated import last_profile, use_impl
from neuronmm_ops.ops.functional import attention, decoder_layer, mlp, svd_mlp, svd_qkv, xuv, xw
from neuronmm_ops.ops.gating import ACTIVATIONS

__all__ = [
    "ACTIVATIONS",
    "attention",
    "decoder_layer",
    "last_profile",
    "mlp",
    "svd_mlp",
    "svd_qkv",
    "use_impl",
    "xuv",
    "xw",
]
