"""Low-rank matmul, prefill form: (x @ u) @ v in one launch, the intermediate never in HBM."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.strip import Operand, held, own_tokens, project, write_rows
from neuronmm_ops.kernels.tiles import spans


@jit
def xuv(
    x: NkiTensor,
    u: NkiTensor,
    v: NkiTensor,
    bias: NkiTensor | None = None,
    strip: int = 512,
    layout: str = "dma",
    keep: int = 1024,
    u_block: int = 1024,
    tokens: int = 512,
    banks: int = 8,
    v_block: int = 1024,
    rows: int = 2,
    engines: int = 1,
    k_block: int = 0,
    rounds: bool = False,
) -> NkiTensor:
    """out = (x @ u) @ v + bias."""
    K, r = u.shape
    N = v.shape[1]
    M = x.shape[1] if layout == "rows" else x.shape[0]
    out = nl.ndarray((M, N), dtype=x.dtype, buffer=nl.shared_hbm)
    start, size = own_tokens(M)
    for s in spans(start, size, strip):
        xt = Operand(x, K, s[0], s[1], keep, layout)
        xu = held(project(xt, u, u_block, tokens, banks, engines, k_block, rounds), r)
        write_rows(out, xu, v, bias, s[0], v_block, rows, banks, engines)
    return out
