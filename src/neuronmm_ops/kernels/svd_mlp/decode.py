"""Low-rank gated MLP, decode phase: three pairs of factors in one launch."""

from __future__ import annotations

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, jit, nisa, nl
from neuronmm_ops.kernels.stages.chunks import Chunk, chunks_of
from neuronmm_ops.kernels.stages.decode import (
    ahead,
    contract,
    own,
    project,
)
from neuronmm_ops.kernels.stages.decode_tiling import Loads, output_blocks, turned_tiles
from neuronmm_ops.kernels.stages.linears import LinearKnobs, MlpKnobs
from neuronmm_ops.kernels.stages.outputs import Kept, ToHbm, write_product, write_turned
from neuronmm_ops.kernels.stages.stationary import (
    Turned,
    TurnedSums,
    contract_turned,
    project_turned,
    scaled,
    turned,
)
from neuronmm_ops.kernels.stages.sums import Sums
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, Span, spans
from neuronmm_ops.kernels.stages.weights import DecodeWeight, check_one_dtype, lanes_for
from neuronmm_ops.kernels.svd_mlp.prefill import check_factors, function_of, load_table


@jit
def svd_mlp_decode(
    x: NkiTensor,
    u_gate: NkiTensor,
    v_gate: NkiTensor,
    u_up: NkiTensor,
    v_up: NkiTensor,
    u_down: NkiTensor,
    v_down: NkiTensor,
    u_gate_scale: NkiTensor | None = None,
    v_gate_scale: NkiTensor | None = None,
    u_up_scale: NkiTensor | None = None,
    v_up_scale: NkiTensor | None = None,
    u_down_scale: NkiTensor | None = None,
    v_down_scale: NkiTensor | None = None,
    activation: str = "silu",
    k_chunk: int = 1024,
    rank_block: int = 1536,
    fuse_gate_up: bool = False,
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
        u_gate_scale: [r_gate], float32, a factor of each column of u_gate in one byte, else None.
        v_gate_scale: [I], as u_gate_scale, as the others.
        u_up_scale: [r_up].
        v_up_scale: [I].
        u_down_scale: [r_down].
        v_down_scale: [N].
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        k_chunk: columns of x that are transposed together.
        rank_block: columns of a u whose sums are in PSUM together.
        fuse_gate_up: x passes u_gate and u_up at once.
        inner_block: columns of v_gate and of v_up whose sums are in PSUM together.
        block: columns of v_down whose sums are in PSUM together.
        last_block: columns of the last block.
        tile_bytes: bytes a partition of a weight tile, more where one row is longer.
        spill: act(gate) * up goes through HBM instead of staying in SBUF.
        dma_cast: of weights that are cast, the DMA casts every n-th K tile, from the first on, and
            engines the others; 0: engines cast all.
        stationary: weights are the stationary operand, which takes as long whatever column groups
            of TensorE do.
        balance: of two cores, each loads as many weights, not as many columns of the last one.
        fingerprint: of all kernels' source, for caches that know one function's alone; not read.

    Returns:
        [M, N] in shared HBM, dtype of x.

    Notes:
        All of the dtype of x, or all factors float8_e4m3fn of values up to 240 or int8; sums are
        fp32 in PSUM. Each product with a u, and act(gate) * up, is rounded once to the dtype of x,
        after its scale. Two cores share K, I and N, and exchange their sums of the products with a
        u.

    Pseudocode:
        g[M, r_gate], p[M, r_up] = x . u_gate, x . u_up
        for each block of columns of I:
            a = act(g . v_gate[:, block])
            h[:, block] = a * (p . v_up[:, block])
        d[M, r_down] = h . u_down
        out = d . v_down
    """
    M, K = x.shape
    assert M <= PARTITIONS, f"at most {PARTITIONS} tokens, got {M}; use svd_mlp"
    check_factors(K, [u_gate, v_gate, u_up, v_up, u_down, v_down])
    out_hbm = nl.ndarray((M, v_down.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    load_table(activation)
    us: list[DecodeWeight] = []
    vs: list[DecodeWeight] = []
    tensors = [u_gate, v_gate, u_up, v_up, u_down, v_down]
    scales = [u_gate_scale, v_gate_scale, u_up_scale, v_up_scale, u_down_scale, v_down_scale]
    for n in range(3):
        us.append(DecodeWeight(tensors[2 * n], x.dtype, scales[2 * n], dma_cast))
        vs.append(DecodeWeight(tensors[2 * n + 1], x.dtype, scales[2 * n + 1], dma_cast))
    check_one_dtype([us[0], vs[0], us[1], vs[1], us[2], vs[2]])
    lanes = 0 if stationary else lanes_for(us, M)
    group = us[0].group
    x_chunks = chunks_of(x, own(K, group), 0, k_chunk, x.dtype, None, lanes, group)
    linear = LinearKnobs(rank_block, fuse_gate_up, block, last_block, tile_bytes, stationary)
    knobs = MlpKnobs(linear, activation, inner_block, k_chunk, spill, balance)
    write_gated(ToHbm(out_hbm), x_chunks, us, vs, knobs)
    return out_hbm


def write_gated(
    out: ToHbm | Kept,
    x_chunks: list[Chunk],
    us: list[DecodeWeight],
    vs: list[DecodeWeight],
    knobs: MlpKnobs,
) -> None:
    """out = down(act(gate(x)) * up(x)); both cores have a part of x, of I, then of the columns.

    Args:
        out: [M, N].
        x_chunks: this core's part of x.
        us: u_gate, u_up, u_down.
        vs: v_gate, v_up, v_down.
        knobs: of all products.
    """
    M, dtype, linear = out.tokens, vs[0].dtype, knobs.linear
    rank_block, loads = linear.rank_block, linear.loads
    group, up_scale = us[0].group, vs[1].scale
    inner = own(vs[0].hbm.shape[1], group)
    before = 0
    if knobs.balance:
        sides, down = us[0].hbm.shape[1] + us[1].hbm.shape[1], us[2].hbm.shape[1]
        before = ahead(us[0].rows, group, sides, down)
        before += ahead(vs[0].hbm.shape[1], group, sides + down, down)
    blocks = output_blocks(out.columns(before), linear.block, linear.last_block)
    if linear.stationary:
        turned_low = project_turned(turned(x_chunks), us[0:2], rank_block, loads, M)
        h: list[Turned] = []
        for columns in spans(inner.start, inner.size, knobs.inner_block):
            h.extend(gated_turned(turned_low, vs, columns, M, knobs.activation, loads))
        d = project_turned(h, [us[2]], rank_block, loads, M)[0]
        write_turned(out, d, vs[2], None, blocks, loads)
        return
    low = project(x_chunks, us[0:2], rank_block, linear.fuse, loads, M)
    h_chunks: list[Chunk] = []
    spills = knobs.spill and inner.size > 0
    h_hbm: list[NkiTensor] = []
    if spills:
        h_dtype = dtype if is_none(up_scale) else nl.float32
        h_hbm.append(nl.ndarray((M, inner.size), dtype=h_dtype, buffer=nl.private_hbm))
    for columns in spans(inner.start, inner.size, knobs.inner_block):
        up, h_sb = gated(low, vs, columns, M, knobs.activation, loads)
        if spills:
            up.store(h_hbm[0], inner.start, h_sb)
        else:
            h_chunks.extend(up.chunks(h_sb))
    if spills:
        lanes = lanes_for(us, M)
        h_chunks = chunks_of(
            h_hbm[0],
            Span(0, inner.size),
            inner.start,
            knobs.k_chunk,
            dtype,
            up_scale,
            lanes,
            group,
        )
    d_chunks = project(h_chunks, [us[2]], rank_block, False, loads, M)[0]
    write_product(out, d_chunks, vs[2], blocks, loads)


def gated(
    low: list[list[Chunk]],
    vs: list[DecodeWeight],
    columns: Span,
    M: int,
    activation: str,
    loads: Loads,
) -> tuple[Sums, NkiTensor]:
    """act(gate) * up of some columns of I, in SBUF, and the sums that say how it lies there.

    `low` are the products with u_gate and with u_up, `vs` v_gate and v_up. The result has yet to be
    multiplied by the scale of v_up, if any, and rounded.
    """
    gate = Sums(vs[0], columns, M)
    scaled = not is_none(vs[0].scale)
    if scaled:
        gate.load_rows(None)
    contract(low[0], [gate], loads, True, False)
    acts_sb = gate.new_tile(nl.float32)
    for part in gate.parts:
        acts = gate.like(acts_sb, part)
        if scaled:
            gate.evict(acts, part, 0)
        of = acts if scaled else gate.psum(part, M)
        nisa.activation(acts, function_of(activation), of)
    up = Sums(vs[1], columns, M)
    contract(low[1], [up], loads, True, False)
    h_sb = up.new_tile(nl.float32 if scaled else vs[1].dtype)
    for part in up.parts:
        sums_psum = up.psum(part, up.lanes_in(part))
        nisa.tensor_tensor(up.like(h_sb, part), up.like(acts_sb, part), sums_psum, nl.multiply)
    return up, h_sb


def gated_turned(
    low: list[list[Turned]],
    vs: list[DecodeWeight],
    columns: Span,
    M: int,
    activation: str,
    loads: Loads,
) -> list[Turned]:
    """act(gate) * up of some columns of I, as `gated`, but transposed and rounded."""
    tiles = turned_tiles(columns, M)
    gate = TurnedSums(vs[0], tiles, M)
    contract_turned(low[0], gate, loads, True, False)
    acts: list[NkiTensor] = []
    for i in range(len(tiles)):
        acts_sb = nl.ndarray((tiles[i].rows, tiles[i].count, M), dtype=nl.float32)
        scaled(acts_sb, gate.psum(tiles[i]), gate.factors(i), i)
        nisa.activation(acts_sb, function_of(activation), acts_sb)
        acts.append(acts_sb)
    up = TurnedSums(vs[1], tiles, M)
    contract_turned(low[1], up, loads, True, False)
    hidden: list[Turned] = []
    for i in range(len(tiles)):
        h_sb = nl.ndarray((tiles[i].rows, tiles[i].count, M), dtype=vs[1].dtype)
        factors_sb = up.factors(i)
        if not is_none(factors_sb):
            nisa.tensor_tensor(acts[i], acts[i], factors_sb, nl.multiply)
        nisa.tensor_tensor(h_sb, up.psum(tiles[i]), acts[i], nl.multiply)
        hidden.append(Turned(tiles[i].start, h_sb))
    return hidden
