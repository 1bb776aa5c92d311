"""Modules that replace `nn.Linear` and gated MLPs, and the replacement itself."""

from neuronmm_ops.nn.pair import LinearPair
from neuronmm_ops.nn.svd_linear import SVDLinear
from neuronmm_ops.nn.svd_mlp import SVDMLP
from neuronmm_ops.nn.swap import shared_weights, swap_modules_

__all__ = ["SVDMLP", "LinearPair", "SVDLinear", "shared_weights", "swap_modules_"]
