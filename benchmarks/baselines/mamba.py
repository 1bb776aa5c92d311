"""AWS's Mamba tutorial, whose VectorE does nearly all of the work.

delta and u [channels, seq], A [channels, state], B and C [state, seq] -> [channels, seq], fp32.
Written as the compiler of the measured release (SDK 2.20) must have run them: rows of B and C are
broadcast over the partitions by TensorE, so that VectorE reads them from PSUM, and where delta and
u stay for all states, delta * u is computed once (VectorE's busy time falls by a quarter there).
"""

from __future__ import annotations

from neuroncore import isa as nisa
from neuroncore import jit
from neuroncore import language as nl
from neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.estimate.baselines.tiles import COLUMNS, P


@jit
def mamba_v1(delta: NkiTensor, u: NkiTensor, A: NkiTensor, B: NkiTensor, C: NkiTensor) -> NkiTensor:
    """State by state over all channels; delta and u are loaded again for every state."""
    channels, seq = delta.shape
    out_hbm = nl.ndarray(delta.shape, dtype=delta.dtype, buffer=nl.shared_hbm)
    ones_sb = _ones(delta)
    for c in range(0, channels, P):
        sums_sb = _zeros(delta, seq)
        for state in range(A.shape[1]):
            delta_sb = _load(delta, c)
            product_sb = _product(delta_sb, _load(u, c))
            _add_state(sums_sb, ones_sb, delta_sb, product_sb, (A, B, C), c, state)
        nisa.dma_copy(out_hbm[nl.ds(c, P), :], sums_sb)
    return out_hbm


@jit
def mamba_v3(delta: NkiTensor, u: NkiTensor, A: NkiTensor, B: NkiTensor, C: NkiTensor) -> NkiTensor:
    """delta and u stay for all states. At seq = 512 it is mamba_v2."""
    channels, seq = delta.shape
    out_hbm = nl.ndarray(delta.shape, dtype=delta.dtype, buffer=nl.shared_hbm)
    ones_sb = _ones(delta)
    for c in range(0, channels, P):
        sums_sb = _zeros(delta, seq)
        delta_sb = _load(delta, c)
        product_sb = _product(delta_sb, _load(u, c))
        for state in range(A.shape[1]):
            _add_state(sums_sb, ones_sb, delta_sb, product_sb, (A, B, C), c, state)
        nisa.dma_copy(out_hbm[nl.ds(c, P), :], sums_sb)
    return out_hbm


def _add_state(
    sums_sb: NkiTensor,
    ones_sb: NkiTensor,
    delta_sb: NkiTensor,
    product_sb: NkiTensor,
    matrices: tuple[NkiTensor, NkiTensor, NkiTensor],
    channel: int,
    state: int,
) -> None:
    """Add one state's part to the sums, in tiles of the 512 steps that a bank of PSUM holds."""
    initial: float | NkiTensor = 0.0
    for start in range(0, delta_sb.shape[1], COLUMNS):
        columns = nl.ds(start, COLUMNS)
        scan_sb = _add_steps(
            sums_sb[:, columns], ones_sb, delta_sb[:, columns], product_sb[:, columns], initial,
            matrices, channel, state, start,
        )  # fmt: skip
        initial = scan_sb[:, nl.ds(COLUMNS - 1, 1)]


def _add_steps(
    sums_sb: NkiTensor,
    ones_sb: NkiTensor,
    delta_sb: NkiTensor,
    product_sb: NkiTensor,
    initial: float | NkiTensor,
    matrices: tuple[NkiTensor, NkiTensor, NkiTensor],
    channel: int,
    state: int,
    start: int,
) -> NkiTensor:
    """The same of 512 steps; returns the scan."""
    A, B, C = matrices
    a_sb = nl.ndarray((P, 1), dtype=A.dtype)
    nisa.dma_copy(a_sb, A[nl.ds(channel, P), nl.ds(state, 1)])
    decay_sb = _tile(delta_sb)
    nisa.activation(decay_sb, nl.exp, delta_sb, scale=a_sb)
    input_sb = _tile(delta_sb)
    nisa.tensor_tensor(input_sb, product_sb, _row(B, ones_sb, state, start), nl.multiply)
    scan_sb = _tile(delta_sb)
    nisa.tensor_tensor_scan(scan_sb, decay_sb, input_sb, initial, nl.multiply, nl.add)
    output_sb = _tile(delta_sb)
    nisa.tensor_tensor(output_sb, scan_sb, _row(C, ones_sb, state, start), nl.multiply)
    nisa.tensor_tensor(sums_sb, sums_sb, output_sb, nl.add)
    return scan_sb


def _row(source: NkiTensor, ones_sb: NkiTensor, state: int, start: int) -> NkiTensor:
    """512 steps of a state of B or C on every partition, in PSUM."""
    row_sb = nl.ndarray((1, COLUMNS), dtype=source.dtype)
    nisa.dma_copy(row_sb, source[nl.ds(state, 1), nl.ds(start, COLUMNS)])
    row_psum = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(row_psum, ones_sb, row_sb)
    return row_psum


def _product(delta_sb: NkiTensor, u_sb: NkiTensor) -> NkiTensor:
    product_sb = _tile(delta_sb)
    nisa.tensor_tensor(product_sb, delta_sb, u_sb, nl.multiply)
    return product_sb


def _load(source: NkiTensor, channel: int) -> NkiTensor:
    tile_sb = nl.ndarray((P, source.shape[1]), dtype=source.dtype)
    nisa.dma_copy(tile_sb, source[nl.ds(channel, P), :])
    return tile_sb


def _tile(like: NkiTensor) -> NkiTensor:
    return nl.ndarray(like.shape, dtype=like.dtype)


def _zeros(like: NkiTensor, columns: int) -> NkiTensor:
    tile_sb = nl.ndarray((P, columns), dtype=like.dtype)
    nisa.memset(tile_sb, 0.0)
    return tile_sb


def _ones(like: NkiTensor) -> NkiTensor:
    ones_sb = nl.ndarray((1, P), dtype=like.dtype)
    nisa.memset(ones_sb, 1.0)
    return ones_sb
