"""Dense matmul, decode phase: the honest baseline, and the path of layers kept dense."""

from __future__ import annotations

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.chunks import chunks_of
from neuronmm_ops.kernels.stages.linears import LinearKnobs, write_dense
from neuronmm_ops.kernels.stages.outputs import ToHbm
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, Span, check_pair
from neuronmm_ops.kernels.stages.weights import DecodeWeight, lanes_for, rows_of


@jit
def xw_decode(
    x: NkiTensor,
    w: NkiTensor,
    bias: NkiTensor | None = None,
    w_scale: NkiTensor | None = None,
    k_chunk: int = 1024,
    block: int = 1024,
    last_block: int = 1024,
    tile_bytes: int = 16384,
    resident: bool = False,
    dma_cast: int = 0,
    stationary: bool = False,
    fingerprint: str = "",
) -> NkiTensor:
    """out = x @ w + bias for up to 128 tokens, every byte of w loaded once.

    Dimensions:
        M: tokens, 1 to 128. K: input features. N: output features. Any of at least 1.

    Args:
        x: [M, K].
        w: [K, N], dtype of x, or float8_e4m3fn of values up to 240, or int8; or int4, [K / 2, N].
        bias: [N], dtype of x, or None.
        w_scale: [N], float32, a factor of each column of a w in one byte; of int4
            [ceil(K / 128), N], of each 128 rows; else None.
        k_chunk: columns of x that are transposed together.
        block: columns of w whose sums are in PSUM together.
        last_block: columns of the last block.
        tile_bytes: bytes a partition of a weight tile, more where one row is longer.
        resident: x^T stays in SBUF; else x is loaded and transposed again for each block.
        dma_cast: of weights that are cast, the DMA casts every n-th K tile, from the first on, and
            engines the others; 0: engines cast all.
        stationary: weights are the stationary operand, which takes as long whatever column groups
            of TensorE do.
        fingerprint: of all kernels' source, for caches that know one function's alone; not read.

    Returns:
        [M, N] in shared HBM, dtype of x.

    Notes:
        Sums are fp32 in PSUM over the whole contraction, then scaled, then the bias is added. Two
        cores share N.

    Pseudocode:
        for each block of columns:
            for each K chunk of x:
                x^T = transpose(x[:, K chunk])
                psum[M, block] += x^T (stationary) . w[K chunk, block] (moving)
            out[:, block] = psum * w_scale + bias
    """
    M, K = x.shape
    assert M <= PARTITIONS, f"at most {PARTITIONS} tokens, got {M}; use xw"
    check_pair(K, rows_of(w), w.shape[1], bias.shape[0] if not is_none(bias) else 0)
    out_hbm = nl.ndarray((M, w.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    weight = DecodeWeight(w, x.dtype, w_scale, dma_cast)
    lanes = 0 if stationary else lanes_for([weight], M)
    chunks = chunks_of(x, Span(0, K), 0, k_chunk, x.dtype, None, lanes, weight.group)
    knobs = LinearKnobs(0, False, block, last_block, tile_bytes, stationary)
    write_dense([ToHbm(out_hbm)], [chunks], [weight], [bias], knobs, resident)
    return out_hbm
