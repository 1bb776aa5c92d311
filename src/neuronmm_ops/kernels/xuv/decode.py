"""Low-rank matmul, decode phase."""

from __future__ import annotations

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.chunks import chunks_of
from neuronmm_ops.kernels.stages.decode import own
from neuronmm_ops.kernels.stages.linears import LinearKnobs, write_pairs
from neuronmm_ops.kernels.stages.outputs import ToHbm
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, check_pair
from neuronmm_ops.kernels.stages.weights import DecodeWeight, check_one_dtype, lanes_for, rows_of


@jit
def xuv_decode(
    x: NkiTensor,
    u: NkiTensor,
    v: NkiTensor,
    bias: NkiTensor | None = None,
    u_scale: NkiTensor | None = None,
    v_scale: NkiTensor | None = None,
    k_chunk: int = 1024,
    rank_block: int = 3072,
    block: int = 1024,
    last_block: int = 1024,
    tile_bytes: int = 16384,
    dma_cast: int = 0,
    stationary: bool = False,
    fingerprint: str = "",
) -> NkiTensor:
    """out = (x @ u) @ v + bias for up to 128 tokens, every byte of u and v loaded once.

    Dimensions:
        M: tokens, 1 to 128. K: input features. r: rank. N: output features. Any of at least 1.

    Args:
        x: [M, K].
        u: [K, r], dtype of x, or float8_e4m3fn of values up to 240, or int8.
        v: [r, N], dtype of u.
        bias: [N], dtype of x, or None.
        u_scale: [r], float32, a factor of each column of a u in one byte, else None.
        v_scale: [N], float32, a factor of each column of a v in one byte, else None.
        k_chunk: columns of x that are transposed together.
        rank_block: columns of u whose sums are in PSUM together.
        block: columns of v whose sums are in PSUM together.
        last_block: columns of the last block.
        tile_bytes: bytes a partition of a weight tile, more where one row is longer.
        dma_cast: of weights that are cast, the DMA casts every n-th K tile, from the first on, and
            engines the others; 0: engines cast all.
        stationary: weights are the stationary operand, which takes as long whatever column groups
            of TensorE do.
        fingerprint: of all kernels' source, for caches that know one function's alone; not read.

    Returns:
        [M, N] in shared HBM, dtype of x.

    Notes:
        Sums are fp32 in PSUM over the whole contraction; x @ u is rounded once, to the dtype of x,
        after its scale. Two cores share K and exchange their sums of x @ u, then share N.

    Pseudocode:
        for each K chunk of x:
            x^T = transpose(x[:, K chunk])
            xu[M, r] += x^T (stationary) . u[K chunk, :] (moving)
        xu^T = transpose(xu) * u_scale
        for each block of columns:
            out[:, block] = (xu^T (stationary) . v[:, block] (moving)) * v_scale + bias
    """
    M, K = x.shape
    assert M <= PARTITIONS, f"at most {PARTITIONS} tokens, got {M}; use xuv"
    check_pair(K, rows_of(u), u.shape[1], 0)
    check_pair(u.shape[1], rows_of(v), v.shape[1], bias.shape[0] if not is_none(bias) else 0)
    out_hbm = nl.ndarray((M, v.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    first_factor = DecodeWeight(u, x.dtype, u_scale, dma_cast)
    second_factor = DecodeWeight(v, x.dtype, v_scale, dma_cast)
    check_one_dtype([first_factor, second_factor])
    lanes, group = 0 if stationary else lanes_for([first_factor], M), first_factor.group
    x_chunks = chunks_of(x, own(K, group), 0, k_chunk, x.dtype, None, lanes, group)
    knobs = LinearKnobs(rank_block, False, block, last_block, tile_bytes, stationary)
    write_pairs([ToHbm(out_hbm)], x_chunks, [first_factor], [second_factor], [bias], knobs)
    return out_hbm
