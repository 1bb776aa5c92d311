"""Small published kernels whose profiles show what single instructions cost."""

from __future__ import annotations

from neuroncore import isa as nisa
from neuroncore import jit
from neuroncore import language as nl
from neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.estimate.baselines.tiles import P


@jit
def exponential(x: NkiTensor) -> NkiTensor:
    """x [P, N] -> exp(x), loaded, computed and stored once (DMA overview, SDK 2.32)."""
    out_hbm = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    x_sb = nl.ndarray(x.shape, dtype=x.dtype)
    out_sb = nl.ndarray(x.shape, dtype=x.dtype)
    nisa.dma_copy(x_sb, x)
    nisa.activation(out_sb, nl.exp, x_sb)
    nisa.dma_copy(out_hbm, out_sb)
    return out_hbm


@jit
def load_rows(x: NkiTensor) -> None:
    """x [T, 128, N]: T loads of 128 rows, as in the DMA overview's plot of throughput."""
    for t in range(x.shape[0]):
        tile_sb = nl.ndarray((P, x.shape[2]), dtype=x.dtype)
        nisa.dma_copy(tile_sb, x[t])


@jit
def dependent_activations(x: NkiTensor, count: int) -> NkiTensor:
    """x [128, 1]: `count` activations, each of the result before (performance guide, Opt 5a)."""
    out_hbm = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    x_sb = nl.ndarray(x.shape, dtype=x.dtype)
    nisa.dma_copy(x_sb, x)
    for _i in range(count):
        nisa.activation(x_sb, nl.copy, x_sb)
    nisa.dma_copy(out_hbm, x_sb)
    return out_hbm
