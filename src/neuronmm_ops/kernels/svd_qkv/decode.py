"""Low-rank projections to query, key and value, decode phase: three pairs in one launch."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.chunks import chunks_of
from neuronmm_ops.kernels.stages.decode import own
from neuronmm_ops.kernels.stages.linears import LinearKnobs, write_pairs
from neuronmm_ops.kernels.stages.outputs import each_to_hbm
from neuronmm_ops.kernels.stages.tiling import PARTITIONS
from neuronmm_ops.kernels.stages.weights import DecodeWeight, check_one_dtype, lanes_for
from neuronmm_ops.kernels.svd_qkv.prefill import check_biases, check_factors


def side_by_side(x: NkiTensor, vs: list[NkiTensor]) -> tuple[NkiTensor, list[NkiTensor]]:
    """The result [M, N_q + N_k + N_v] in HBM, and the columns of it that each v makes."""
    ends: list[int] = [0]
    for v in vs:
        ends.append(ends[len(ends) - 1] + v.shape[1])
    out_hbm = nl.ndarray((x.shape[0], ends[len(vs)]), dtype=x.dtype, buffer=nl.shared_hbm)
    parts_hbm: list[NkiTensor] = []
    for i in range(len(vs)):
        parts_hbm.append(out_hbm[:, nl.ds(ends[i], vs[i].shape[1])])
    return out_hbm, parts_hbm


@jit
def svd_qkv_decode(
    x: NkiTensor,
    u_query: NkiTensor,
    v_query: NkiTensor,
    u_key: NkiTensor,
    v_key: NkiTensor,
    u_value: NkiTensor,
    v_value: NkiTensor,
    bias_query: NkiTensor | None = None,
    bias_key: NkiTensor | None = None,
    bias_value: NkiTensor | None = None,
    u_query_scale: NkiTensor | None = None,
    v_query_scale: NkiTensor | None = None,
    u_key_scale: NkiTensor | None = None,
    v_key_scale: NkiTensor | None = None,
    u_value_scale: NkiTensor | None = None,
    v_value_scale: NkiTensor | None = None,
    k_chunk: int = 1024,
    rank_block: int = 1536,
    fuse: bool = False,
    block: int = 1024,
    last_block: int = 1024,
    tile_bytes: int = 16384,
    dma_cast: int = 0,
    stationary: bool = False,
    fingerprint: str = "",
) -> NkiTensor:
    """out = [query(x), key(x), value(x)] for up to 128 tokens, every byte of a factor loaded once.

    Dimensions:
        M: tokens, 1 to 128. K: input features. N_q, N_k, N_v: output features. Any of at least 1.
        Any three ranks.

    Args:
        x: [M, K].
        u_query: [K, r_q], dtype of x, float8_e4m3fn of values up to 240, or int8, as all factors.
        v_query: [r_q, N_q].
        u_key: [K, r_k].
        v_key: [r_k, N_k].
        u_value: [K, r_v].
        v_value: [r_v, N_v].
        bias_query: [N_q], dtype of x, or None, as the other biases.
        bias_key: [N_k].
        bias_value: [N_v].
        u_query_scale: [r_q], fp32, of u_query's columns where factors have one byte; else None.
        v_query_scale: [N_q], the same of v_query, and so on.
        u_key_scale: [r_k].
        v_key_scale: [N_k].
        u_value_scale: [r_v].
        v_value_scale: [N_v].
        k_chunk: columns of x that are transposed together.
        rank_block: columns of a u whose sums are in PSUM together.
        fuse: x passes all three u at once.
        block: columns of a v whose sums are in PSUM together.
        last_block: columns of the last block of v_value.
        tile_bytes: bytes a partition of a weight tile, more where one row is longer.
        dma_cast: of weights that are cast, the DMA casts every n-th K tile, from the first on, and
            engines the others; 0: engines cast all.
        stationary: weights are the stationary operand, which takes as long whatever column groups
            of TensorE do.
        fingerprint: of all kernels' source, for caches that know one function's alone; not read.

    Returns:
        [M, N_q + N_k + N_v] in shared HBM, dtype of x.

    Notes:
        Sums are fp32 in PSUM; each x @ u is rounded once, to the dtype of x, after its scale. Two
        cores share K and exchange their sums of the products with a u, then share the columns of
        each v.

    Pseudocode:
        q[M, r_q], k[M, r_k], v[M, r_v] = x . u_query, x . u_key, x . u_value
        out = [q . v_query + bias_query, k . v_key + bias_key, v . v_value + bias_value]
    """
    M, K = x.shape
    assert M <= PARTITIONS, f"at most {PARTITIONS} tokens, got {M}; use svd_qkv"
    us, vs = [u_query, u_key, u_value], [v_query, v_key, v_value]
    biases = [bias_query, bias_key, bias_value]
    check_factors(K, us, vs)
    check_biases(vs, biases)
    out_hbm, parts_hbm = side_by_side(x, vs)
    u_scales = [u_query_scale, u_key_scale, u_value_scale]
    v_scales = [v_query_scale, v_key_scale, v_value_scale]
    first_factors: list[DecodeWeight] = []
    second_factors: list[DecodeWeight] = []
    for n in range(3):
        first_factors.append(DecodeWeight(us[n], x.dtype, u_scales[n], dma_cast))
        second_factors.append(DecodeWeight(vs[n], x.dtype, v_scales[n], dma_cast))
    check_one_dtype(first_factors)
    check_one_dtype(second_factors)
    check_one_dtype([first_factors[0], second_factors[0]])
    lanes = 0 if stationary else lanes_for(first_factors, M)
    group = first_factors[0].group
    chunks = chunks_of(x, own(K, group), 0, k_chunk, x.dtype, None, lanes, group)
    knobs = LinearKnobs(rank_block, fuse, block, last_block, tile_bytes, stationary)
    write_pairs(each_to_hbm(parts_hbm), chunks, first_factors, second_factors, biases, knobs)
    return out_hbm
