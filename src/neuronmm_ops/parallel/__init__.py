"""Tensor parallelism of compressed layers: each rank of a group holds a part of the matrices.

Importing it lets the ops take DTensors.
"""

from neuronmm_ops.parallel import distributed_ops as distributed_ops  # registers the shardings
from neuronmm_ops.parallel.layers import ShardedLinear, ShardedMLP, ShardedStored
from neuronmm_ops.parallel.state import full_state_dict
from neuronmm_ops.parallel.styles import SVDColumnwise, SVDMLPParallel, SVDRowwise

__all__ = [
    "SVDColumnwise",
    "SVDMLPParallel",
    "SVDRowwise",
    "ShardedLinear",
    "ShardedMLP",
    "ShardedStored",
    "full_state_dict",
]
