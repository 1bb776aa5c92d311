"""Low-rank projections to query, key and value, decode phase: three pairs in one launch."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.chunks import chunks_of
from neuronmm_ops.kernels.stages.decode import own, project, write_block
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, output_blocks
from neuronmm_ops.kernels.stages.weights import plain
from neuronmm_ops.kernels.svd_qkv.prefill import check_factors


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
    k_chunk: int = 1024,
    rank_block: int = 1536,
    fuse: bool = False,
    block: int = 1024,
    last_block: int = 1024,
    tile_bytes: int = 16384,
) -> NkiTensor:
    """out = [query(x), key(x), value(x)] for up to 128 tokens, every byte of a factor loaded once.

    Dimensions:
        M: tokens, 1 to 128. K: input features. N_q, N_k, N_v: output features. Any of at least 1.
        Any three ranks.

    Args:
        x: [M, K].
        u_query: [K, r_q], dtype of x, as all factors.
        v_query: [r_q, N_q].
        u_key: [K, r_k].
        v_key: [r_k, N_k].
        u_value: [K, r_v].
        v_value: [r_v, N_v].
        k_chunk: columns of x that are transposed together.
        rank_block: columns of a u whose sums are in PSUM together.
        fuse: x passes all three u at once.
        block: columns of a v whose sums are in PSUM together.
        last_block: columns of the last block of v_value.
        tile_bytes: bytes a partition of a weight tile, more where one row is longer.

    Returns:
        [M, N_q + N_k + N_v] in shared HBM, dtype of x.

    Notes:
        Sums are fp32 in PSUM; each x @ u is rounded once, to the dtype of x. Two cores share K and
        exchange their sums of the products with a u, then share the columns of each v.

    Pseudocode:
        q[M, r_q], k[M, r_k], v[M, r_v] = x . u_query, x . u_key, x . u_value
        out = [q . v_query, k . v_key, v . v_value]
    """
    M, K = x.shape
    assert M <= PARTITIONS, f"at most {PARTITIONS} tokens, got {M}; use svd_qkv"
    us, vs = [u_query, u_key, u_value], [v_query, v_key, v_value]
    check_factors(K, us, vs)
    out_hbm, parts_hbm = side_by_side(x, vs)
    chunks = chunks_of(x, own(K), 0, k_chunk, x.dtype)
    low = project(chunks, plain(us), rank_block, fuse, tile_bytes, M)
    weights = plain(vs)
    for i in range(len(vs)):
        ends = i + 1 == len(vs)
        blocks = output_blocks(own(vs[i].shape[1]), block, last_block if ends else 0)
        for j in range(len(blocks)):
            first, last = i + j == 0, ends and j + 1 == len(blocks)
            write_block(parts_hbm[i], low[i], weights[i], None, blocks[j], tile_bytes, first, last)
    return out_hbm
