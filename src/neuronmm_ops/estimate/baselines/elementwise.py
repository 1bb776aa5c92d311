"""Launches of their own, through HBM, of what a fused kernel has for nothing."""

from __future__ import annotations

from neuroncore import isa as nisa
from neuroncore import jit
from neuroncore import language as nl
from neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.estimate.baselines.tiles import P

BLOCK = 4096
"""Columns of a tile."""


@jit
def gated_product(gate: NkiTensor, up: NkiTensor) -> NkiTensor:
    """gate [M, I], up [M, I] -> silu(gate) * up [M, I].

    Elements lie on partitions in order, whatever the shape; two cores share the columns.
    """
    elements = gate.shape[0] * gate.shape[1]
    rows = _partitions(elements)
    columns = elements // rows
    out_hbm = nl.ndarray(gate.shape, dtype=gate.dtype, buffer=nl.shared_hbm)
    gate_hbm = gate.reshape((rows, columns))
    up_hbm = up.reshape((rows, columns))
    result_hbm = out_hbm.reshape((rows, columns))
    each = (columns + nl.num_programs(0) - 1) // nl.num_programs(0)
    first = each * nl.program_id(0)
    count = min(each, columns - first)
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        span = nl.ds(first + start, size)
        gate_sb = nl.ndarray((rows, size), dtype=gate.dtype)
        up_sb = nl.ndarray((rows, size), dtype=up.dtype)
        nisa.dma_copy(gate_sb, gate_hbm[:, span])
        nisa.dma_copy(up_sb, up_hbm[:, span])
        nisa.activation(gate_sb, nl.silu, gate_sb)
        nisa.tensor_tensor(gate_sb, gate_sb, up_sb, nl.multiply)
        nisa.dma_copy(result_hbm[:, span], gate_sb)
    return out_hbm


@jit
def own_columns(x: NkiTensor, parts: int) -> NkiTensor:
    """x [M, K] -> a rank's part of its columns [M, ceil(K / parts)]; two cores share the rows.

    Which part it is moves the addresses alone, so the first stands for all.
    """
    rows, columns = x.shape[0], (x.shape[1] + parts - 1) // parts
    out_hbm = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    each = (rows + nl.num_programs(0) - 1) // nl.num_programs(0)
    first = each * nl.program_id(0)
    count = min(each, rows - first)
    if count > 0:
        span = nl.ds(first, count)
        nisa.dma_copy(out_hbm[span, :], x[span, 0:columns])
    return out_hbm


def _partitions(elements: int) -> int:
    """The most partitions that divide the elements."""
    for rows in range(P, 1, -1):
        if elements % rows == 0:
            return rows
    return 1
