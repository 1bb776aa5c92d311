"""`nki.isa`: every instruction, by name."""

from __future__ import annotations

from neuroncore import core as _running
from neuroncore import hardware as _hardware
from neuroncore.checks.base import NkiValidationError
from neuroncore.isa import constants
from neuroncore.isa.activate2 import activate2
from neuroncore.isa.activation import activation, activation_reduce
from neuroncore.isa.dma import dma_compute, dma_copy, dma_transpose
from neuroncore.isa.exchange import core_barrier, sendrecv
from neuroncore.isa.mx import nc_matmul_mx, quantize_mx
from neuroncore.isa.tensor_engine import nc_matmul, nc_transpose
from neuroncore.isa.topk import topk
from neuroncore.timing.trace import NkiInstruction

from neuroncore.isa.elementwise import (  # isort: skip
    memset, reciprocal, scalar_tensor_tensor, tensor_copy, tensor_scalar, tensor_tensor,
)  # fmt: skip
from neuroncore.isa.enums import (  # isort: skip
    Version, dge_mode, dma_engine, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd,
)  # fmt: skip
from neuroncore.isa.gather import (  # isort: skip
    local_gather, nc_find_index8, nc_match_replace8, nc_n_gather, nc_stream_shuffle,
    nonzero_with_count, sequence_bounds,
)  # fmt: skip
from neuroncore.isa.random import (  # isort: skip
    dropout, rand2, rand_get_state, rand_set_state, rng, set_rng_seed,
)  # fmt: skip
from neuroncore.isa.reduce import (  # isort: skip
    bn_aggr, bn_stats, exponential, max8, tensor_partition_reduce, tensor_reduce,
    tensor_scalar_cumulative, tensor_scalar_reduce, tensor_tensor_scan,
)  # fmt: skip
from neuroncore.isa.register import (  # isort: skip
    VirtualRegister, register_alloc, register_load, register_move, register_store,
)  # fmt: skip
from neuroncore.isa.select import (  # isort: skip
    affine_select, iota, range_select, select_reduce, tensor_copy_predicated,
)  # fmt: skip

tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
unknown_engine = engine.unknown


def get_nc_version() -> Version:
    """Generation of the target."""
    core = _running.running()
    machine = core.machine if core else _hardware.resolve_target(None)
    return nc_version(machine.generation)


def get_nc_sub_version() -> int:
    """Silicon step of the target; the simulated cores are first silicon, 0."""
    return 0


__all__ = [
    "NkiInstruction", "NkiValidationError", "VirtualRegister", "activate2", "activation",
    "activation_reduce", "affine_select", "bn_aggr", "bn_stats", "constants", "core_barrier",
    "dge_mode", "dma_compute", "dma_copy", "dma_engine", "dma_transpose", "dropout", "engine",
    "exponential", "get_nc_sub_version", "get_nc_version", "gpsimd_engine", "iota", "local_gather",
    "matmul_perf_mode", "max8", "memset", "nc_find_index8", "nc_match_replace8", "nc_matmul",
    "nc_matmul_mx", "nc_n_gather", "nc_stream_shuffle", "nc_transpose", "nc_version",
    "nonzero_with_count", "oob_mode", "quantize_mx", "rand2", "rand_get_state", "rand_set_state",
    "range_select", "reciprocal", "reduce_cmd", "register_alloc", "register_load", "register_move",
    "register_store", "rng", "scalar_engine", "scalar_tensor_tensor", "select_reduce", "sendrecv",
    "sequence_bounds", "set_rng_seed", "tensor_copy", "tensor_copy_predicated", "tensor_engine",
    "tensor_partition_reduce", "tensor_reduce", "tensor_scalar", "tensor_scalar_cumulative",
    "tensor_scalar_reduce", "tensor_tensor", "tensor_tensor_scan", "topk", "unknown_engine",
    "vector_engine",
]  # fmt: skip
