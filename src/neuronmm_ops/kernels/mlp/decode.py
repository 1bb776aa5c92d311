"""Dense gated MLP, decode phase: three products in one launch."""

from __future__ import annotations

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.mlp.prefill import check_matrices
from neuronmm_ops.kernels.shim import NkiTensor, jit, nisa, nl
from neuronmm_ops.kernels.stages.chunks import Chunk, chunks_of
from neuronmm_ops.kernels.stages.decode import ahead, own
from neuronmm_ops.kernels.stages.decode_tiling import Loads, output_blocks, turned_tiles
from neuronmm_ops.kernels.stages.linears import LinearKnobs, MlpKnobs
from neuronmm_ops.kernels.stages.outputs import Kept, ToHbm, write_product, write_turned
from neuronmm_ops.kernels.stages.stationary import Turned, turned
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, Span, core_span, spans
from neuronmm_ops.kernels.stages.weights import DecodeWeight, check_one_dtype, lanes_for
from neuronmm_ops.kernels.svd_mlp.decode import gated, gated_turned
from neuronmm_ops.kernels.svd_mlp.prefill import load_table


@jit
def mlp_decode(
    x: NkiTensor,
    w_gate: NkiTensor,
    w_up: NkiTensor,
    w_down: NkiTensor,
    x_up: NkiTensor | None = None,
    w_gate_scale: NkiTensor | None = None,
    w_up_scale: NkiTensor | None = None,
    w_down_scale: NkiTensor | None = None,
    activation: str = "silu",
    k_chunk: int = 1024,
    inner_block: int = 512,
    block: int = 1024,
    last_block: int = 1024,
    tile_bytes: int = 16384,
    spill: bool = True,
    dma_cast: int = 0,
    stationary: bool = False,
    balance: bool = False,
    fingerprint: str = "",
) -> NkiTensor:
    """out = (act(x @ w_gate) * (x_up @ w_up)) @ w_down, x_up by default x, for up to 128 tokens.

    Dimensions:
        M: tokens, 1 to 128. K: input features, K_up those of up. I: inner features. N: output
        features. Any of at least 1.

    Args:
        x: [M, K].
        w_gate: [K, I], dtype of x, float8_e4m3fn of values up to 240, or int8, as all weights.
        w_up: [K_up, I].
        w_down: [I, N].
        x_up: [M, K_up], dtype of x, or None: x.
        w_gate_scale: [I], float32, a factor of each column of w_gate in one byte, else None.
        w_up_scale: [I].
        w_down_scale: [N].
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        k_chunk: columns of x, and of x_up, that are transposed together.
        inner_block: columns of w_gate and of w_up whose sums are in PSUM together.
        block: columns of w_down whose sums are in PSUM together.
        last_block: columns of the last block.
        tile_bytes: bytes a partition of a weight tile, more where one row is longer.
        spill: act(gate) * up goes through HBM instead of staying in SBUF; of one core only.
        dma_cast: of weights that are cast, the DMA casts every n-th K tile, from the first on, and
            engines the others; 0: engines cast all.
        stationary: weights are the stationary operand, which takes as long whatever column groups
            of TensorE do; of one core, act(gate) * up stays in SBUF.
        balance: of two cores, each loads as many weights, not as many columns of the last one.
        fingerprint: of all kernels' source, for caches that know one function's alone; not read.

    Returns:
        [M, N] in shared HBM, dtype of x.

    Notes:
        Weights are loaded once. Sums are fp32 in PSUM over the whole contraction. act(gate) * up is
        rounded once to the dtype of x, after its scale. Two cores share I, then N: each multiplies
        the features that it has made while those of the other come through HBM.

    Pseudocode:
        for each block of columns of I:
            a = act(x . w_gate[:, block])
            h[:, block] = a * (x_up . w_up[:, block])
        out = h . w_down
    """
    M, K = x.shape
    assert M <= PARTITIONS, f"at most {PARTITIONS} tokens, got {M}; use mlp"
    check_matrices(x, x_up, [w_gate, w_up, w_down])
    out_hbm = nl.ndarray((M, w_down.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    load_table(activation)
    weights: list[DecodeWeight] = []
    tensors = [w_gate, w_up, w_down]
    scales = [w_gate_scale, w_up_scale, w_down_scale]
    for n in range(3):
        weights.append(DecodeWeight(tensors[n], x.dtype, scales[n], dma_cast))
    check_one_dtype(weights)
    lanes = 0 if stationary else lanes_for(weights, M)
    group = weights[0].group
    x_chunks = chunks_of(x, Span(0, K), 0, k_chunk, x.dtype, None, lanes, group)
    sides = [x_chunks]
    if not is_none(x_up):
        up_part = Span(0, x_up.shape[1])
        sides.append(chunks_of(x_up, up_part, 0, k_chunk, x.dtype, None, lanes, group))
    linear = LinearKnobs(0, False, block, last_block, tile_bytes, stationary)
    knobs = MlpKnobs(linear, activation, inner_block, k_chunk, spill, balance)
    write_dense_mlp(ToHbm(out_hbm), sides, weights, knobs)
    return out_hbm


def write_dense_mlp(
    out: ToHbm | Kept, sides: list[list[Chunk]], weights: list[DecodeWeight], knobs: MlpKnobs
) -> None:
    """out = down(act(gate(x)) * up(x_up)); both cores have columns of I, then of the result.

    Args:
        out: [M, N].
        sides: x and x_up, all of both; x alone where they are the same.
        weights: of gate, up and down.
        knobs: of all products.
    """
    M, linear, activation = out.tokens, knobs.linear, knobs.activation
    I, dtype, group = weights[2].rows, weights[0].dtype, weights[0].group  # noqa: E741
    before = ahead(I, group, weights[0].rows + weights[1].rows, I) if knobs.balance else 0
    blocks = output_blocks(out.columns(before), linear.block, linear.last_block)
    if linear.stationary:
        both: list[list[Turned]] = [turned(sides[0])]
        both.append(both[0] if len(sides) == 1 else turned(sides[1]))
        h = hidden_turned(both, weights, knobs.inner_block, M, activation, linear.loads)
        write_turned(out, h, weights[2], None, blocks, linear.loads)
        return
    two = nl.num_programs(0) > 1
    up_scale = weights[1].scale
    h_dtype = dtype if is_none(up_scale) else nl.float32
    h_hbm: list[NkiTensor] = []
    if two:
        h_hbm.append(nl.ndarray((M, I), dtype=h_dtype, buffer=nl.shared_hbm))
    elif knobs.spill:
        h_hbm.append(nl.ndarray((M, I), dtype=h_dtype, buffer=nl.private_hbm))
    h_chunks: list[Chunk] = []
    inner = own(I, group)
    for columns in spans(inner.start, inner.size, knobs.inner_block):
        both_chunks = [sides[0], sides[len(sides) - 1]]
        up, h_sb = gated(both_chunks, weights, columns, M, activation, linear.loads)
        if len(h_hbm) > 0:
            up.store(h_hbm[0], 0, h_sb)
        if two or len(h_hbm) == 0:
            h_chunks.extend(up.chunks(h_sb))
    if two:
        nisa.core_barrier(h_hbm[0], (0, 1))
    if len(h_hbm) > 0:
        part = core_span(I, 1 - nl.program_id(0), 2, group) if two else Span(0, I)
        lanes, width = lanes_for(weights, M), knobs.k_chunk
        h_chunks.extend(chunks_of(h_hbm[0], part, 0, width, dtype, up_scale, lanes, group))
    write_product(out, h_chunks, weights[2], blocks, linear.loads)


def hidden_turned(
    sides: list[list[Turned]],
    weights: list[DecodeWeight],
    inner_block: int,
    M: int,
    activation: str,
    loads: Loads,
) -> list[Turned]:
    """act(gate) * up, transposed; two cores exchange what they have made through HBM, [I, M]."""
    I = weights[0].hbm.shape[1]  # noqa: E741 - the shape letter
    inner = own(I)
    hidden: list[Turned] = []
    for columns in spans(inner.start, inner.size, inner_block):
        hidden.extend(gated_turned(sides, weights, columns, M, activation, loads))
    if nl.num_programs(0) == 1:
        return hidden
    h_hbm = nl.ndarray((I, M), dtype=weights[0].dtype, buffer=nl.shared_hbm)
    for own_part in hidden:
        rows, count, _ = own_part.sb.shape
        part_hbm = h_hbm[nl.ds(own_part.start, rows * count), :].reshape_dim(0, (rows, count))
        nisa.dma_copy(part_hbm, own_part.sb, dge_mode=nisa.dge_mode.none)
    nisa.core_barrier(h_hbm, (0, 1))
    other = core_span(I, 1 - nl.program_id(0), 2)
    for tile in turned_tiles(other, M):
        tile_sb = nl.ndarray((tile.rows, tile.count, M), dtype=weights[0].dtype)
        tile_hbm = h_hbm[nl.ds(tile.start, tile.rows * tile.count), :]
        tile_hbm = tile_hbm.reshape_dim(0, (tile.rows, tile.count))
        nisa.dma_copy(tile_sb, tile_hbm, dge_mode=nisa.dge_mode.none)
        hidden.append(Turned(tile.start, tile_sb))
    return hidden
