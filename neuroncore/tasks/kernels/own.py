"""Kernels of neuronmm-ops, with the arguments that its plans give for these shapes on trn2."""

import nki

from neuronmm_ops.kernels.mlp.prefill import mlp as dense
from neuronmm_ops.kernels.svd_mlp.prefill import svd_mlp
from neuronmm_ops.kernels.xuv.decode import xuv_decode
from neuronmm_ops.kernels.xuv.prefill import xuv

BLOCKS = {"token_block": 512, "tokens": 512, "token_tiles": 2, "layout": "dma", "engines": 2}


@nki.jit
def low_rank(x, u, v):
    if x.shape[0] <= 128:
        return xuv_decode.func(
            x, u, v, k_chunk=512, block=512, last_block=512, rank_block=256, tile_bytes=16384
        )
    return xuv.func(x, u, v, resident=8, u_block=384, v_block=1024, banks=8, v_banks=8, **BLOCKS)


@nki.jit
def mlp(x, wg, wu, wd):
    layout = "pe" if x.shape[0] <= 128 else "dma"
    few = x.shape[0] <= 128
    blocks = {**BLOCKS, "tokens": 1024, "layout": layout}
    inner, banks = (512, 6) if few else (256, 8)
    return dense.func(
        x, wg, wu, wd, resident=4, inner_block=inner, block=512, banks=banks, **blocks
    )


@nki.jit
def low_rank_mlp(x, gu, gv, uu, uv, du, dv):
    rank = gu.shape[1]
    blocks = {**BLOCKS, "tokens": 1024, "u_block": rank, "down_block": rank}
    return svd_mlp.func(
        x, gu, gv, uu, uv, du, dv, resident=4, v_block=512, out_block=512, banks=8, **blocks
    )
