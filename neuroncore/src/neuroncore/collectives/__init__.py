"""`nki.collectives`: what the ranks of a launch exchange, with values and a modelled time.

A rank is one call of the kernel on its own simulated core, or pair of cores, with its own
memories: `neuroncore.simulate(kernel, ..., ranks=4)`. A collective is issued by all cores of all
ranks of a replica group, and is over for all of them at once.
"""

from neuroncore.collectives.dense import (
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from neuroncore.collectives.groups import ReplicaGroup, rank_id
from neuroncore.collectives.permute import (
    collective_permute,
    collective_permute_implicit,
    collective_permute_implicit_current_processing_rank_id,
    collective_permute_implicit_reduce,
)
from neuroncore.collectives.variable import all_gather_v, all_to_all_v

__all__ = [
    "ReplicaGroup", "all_gather", "all_gather_v", "all_reduce", "all_to_all", "all_to_all_v",
    "collective_permute", "collective_permute_implicit",
    "collective_permute_implicit_current_processing_rank_id",
    "collective_permute_implicit_reduce", "rank_id", "reduce_scatter",
]  # fmt: skip
