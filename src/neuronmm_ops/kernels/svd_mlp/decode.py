"""Low-rank gated MLP, decode form: three pairs of factors in one launch."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, jit, nisa, nl
from neuronmm_ops.kernels.stages.chunks import Piece, pieces_of
from neuronmm_ops.kernels.stages.decode import (
    Sums,
    blocks_of,
    contract,
    matmul_columns,
    own,
    project,
    write_columns,
)
from neuronmm_ops.kernels.stages.tiling import P, Span, spans
from neuronmm_ops.kernels.svd_mlp.prefill import check_factors, function_of


@jit
def svd_mlp_decode(
    x: NkiTensor,
    u_gate: NkiTensor,
    v_gate: NkiTensor,
    u_up: NkiTensor,
    v_up: NkiTensor,
    u_down: NkiTensor,
    v_down: NkiTensor,
    bias_gate: NkiTensor | None = None,
    bias_up: NkiTensor | None = None,
    bias_down: NkiTensor | None = None,
    activation: str = "silu",
    span: int = 1024,
    ranks: int = 1536,
    together: bool = False,
    inner: int = 512,
    block: int = 1024,
    last: int = 1024,
    chunk: int = 16384,
    spill: bool = True,
) -> NkiTensor:
    """out = down(act(gate(x)) * up(x)) for up to 128 tokens, every byte of a factor loaded once.

    Dimensions:
        M: tokens, 1 to 128. K: input features. I: inner features. N: output features.
        r: rank of each pair. Any of at least 1.

    Args:
        x: [M, K].
        u_gate: [K, r_gate].
        v_gate: [r_gate, I].
        u_up: [K, r_up].
        v_up: [r_up, I].
        u_down: [I, r_down].
        v_down: [r_down, N].
        bias_gate: [I] or None.
        bias_up: [I] or None.
        bias_down: [N] or None.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        span: columns of x that are transposed together.
        ranks: columns of a u whose sums are in PSUM together.
        together: x passes u_gate and u_up at once.
        inner: columns of v_gate and of v_up whose sums are in PSUM together.
        block: columns of v_down whose sums are in PSUM together.
        last: columns of the last block.
        chunk: bytes a partition of a weight tile, more where one row is longer.
        spill: act(gate) * up goes through HBM instead of staying in SBUF.

    Returns:
        [M, N] in shared HBM, dtype of x.

    Notes:
        All of one dtype; sums are fp32 in PSUM. Each product with a u, and act(gate) * up, is
        rounded once to the dtype of x. Two cores share K, I and N, and exchange their sums of the
        products with a u.

    Pseudocode:
        g[M, r_gate], p[M, r_up] = x . u_gate, x . u_up
        for each block of columns of I:
            a = act(g . v_gate[:, block] + bias_gate)
            h[:, block] = a * (p . v_up[:, block] + bias_up)
        d[M, r_down] = h . u_down
        out = d . v_down + bias_down
    """
    M, K = x.shape
    assert M <= P, f"at most {P} tokens, got {M}; use svd_mlp"
    check_factors(K, [u_gate, v_gate, u_up, v_up, u_down, v_down])
    out = nl.ndarray((M, v_down.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    pieces = pieces_of(x, 0, own(K), span)
    low = project(pieces, [u_gate, u_up], ranks, together, chunk, M)
    part = own(v_gate.shape[1])
    factors = [v_gate, v_up]
    biases = [bias_gate, bias_up]
    h: list[Piece] = []
    if spill and part.size > 0:
        kept = nl.ndarray((M, part.size), dtype=x.dtype, buffer=nl.private_hbm)
        for columns in spans(part.start, part.size, inner):
            sums, tile = gated(low, factors, biases, columns, M, activation, chunk)
            sums.store(kept, part.start, tile)
        h = pieces_of(kept, part.start, Span(0, part.size), span)
    if not spill:
        for columns in spans(part.start, part.size, inner):
            sums, tile = gated(low, factors, biases, columns, M, activation, chunk)
            h.extend(sums.pieces(tile))
    down = project(h, [u_down], ranks, False, chunk, M)
    blocks = blocks_of(own(v_down.shape[1]), block, last)
    write_columns(out, down[0], v_down, bias_down, blocks, chunk, True)
    return out


def gated(
    low: list[list[Piece]],
    factors: list[NkiTensor],
    biases: list[NkiTensor | None],
    columns: Span,
    M: int,
    activation: str,
    chunk: int,
) -> tuple[Sums, NkiTensor]:
    """act(gate) * up of some columns of I, in SBUF, and the sums that say how it lies there."""
    gate = summed(low, factors, biases, 0, columns, M, chunk)
    acts = gate.new_tile(nl.float32)
    parts = gate.in_order()
    for part in parts:
        nisa.activation(gate.like(acts, part), function_of(activation), gate.sums(part))
    up = summed(low, factors, biases, 1, columns, M, chunk)
    tile = up.new_tile(factors[1].dtype)
    for part in parts:
        nisa.tensor_tensor(up.like(tile, part), up.like(acts, part), up.sums(part), nl.multiply)
    return up, tile


def summed(
    low: list[list[Piece]],
    factors: list[NkiTensor],
    biases: list[NkiTensor | None],
    which: int,
    columns: Span,
    M: int,
    chunk: int,
) -> Sums:
    """Sums of the gate (0) or of up (1) for some columns of I, bias included."""
    sums = Sums(factors[which], columns, M, P, matmul_columns(M))
    bias = biases[which]
    if bias != None:  # noqa: E711 - strict NKI has no `is`
        sums.add_bias(bias)
    contract(low[which], [sums], chunk, True, False)
    return sums
