"""Layers of a decoder in one launch, decode phase: the next weights come while a stage waits."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.attention.decode import (
    Attending,
    attend,
    check_operands,
    load_table,
)
from neuronmm_ops.kernels.attention.heads import HeadNorm, Rotation, RowHeads
from neuronmm_ops.kernels.attention.outputs import HeadsKept, HeadsToHbm, Spreads, may_keep
from neuronmm_ops.kernels.attention.turned import TurnedHeads, TurnedRotation, may_turn
from neuronmm_ops.kernels.attention.units import Shape
from neuronmm_ops.kernels.attention.visible import Positions
from neuronmm_ops.kernels.decoder_layer.norm import Residual
from neuronmm_ops.kernels.decoder_layer.ranks import TensorParallel, meet
from neuronmm_ops.kernels.decoder_layer.stage import Stage, StageKnobs, side_by_side
from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.mlp.decode import write_dense_mlp
from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.chunks import Chunk
from neuronmm_ops.kernels.stages.linears import MlpKnobs, write_dense
from neuronmm_ops.kernels.stages.outputs import Kept, ToHbm, each_to_hbm
from neuronmm_ops.kernels.stages.tiling import BANK_COLUMNS, PARTITIONS, Span, core_span
from neuronmm_ops.kernels.svd_mlp.decode import write_gated
from neuronmm_ops.kernels.svd_mlp.prefill import load_table as load_function

LINEARS = ("query", "key", "value", "output", "gate", "up", "down")
"""Order of the Linears among the operands."""


class Layer(nl.NKIObject):
    """A layer's operands: norms, caches, biases, and the stages of its Linears."""

    def __init__(
        self,
        norms: tuple[Any, ...],
        caches: tuple[NkiTensor, ...],
        biases: tuple[NkiTensor | None, ...],
        qkv: Stage,
        output: Stage,
        mlp: Stage,
    ) -> None:
        self.norms = norms
        self.k_cache = caches[0]
        self.v_cache = caches[1]
        self.qkv = qkv
        self.output = output
        self.mlp = mlp
        self.biases: list[NkiTensor | None] = [None, None, None]
        for n in range(len(biases)):
            self.biases[n] = biases[n]


class Between(nl.NKIObject):
    """What halves of layers hand on: the stream, and what has yet to be added to it.

    Attributes:
        added: [B M, H] in HBM, where ranks sum, or at either end of a launch.
        stream: [B M, H] in HBM, or None, if that is all of it.
        before: the stream in SBUF, if no way leads through HBM.
        kept: what is added to that.
    """

    def __init__(
        self,
        added: NkiTensor | None,
        stream: NkiTensor | None,
        before: Residual | None = None,
        kept: Kept | None = None,
    ) -> None:
        self.added: Any = added
        self.stream = stream
        self.before: Any = before
        self.kept: Any = kept


class Decoding(nl.NKIObject):
    """What all layers share: positions, tables of RoPE, compile-time options, ranges of cores."""

    def __init__(
        self,
        positions: NkiTensor,
        rotary: tuple[NkiTensor, ...],
        activation: str,
        eps: float,
        window: int,
        ranks: TensorParallel,
    ) -> None:
        # of the stream in SBUF, one of each core; none where it goes through HBM
        self.ranges: list[Span] = []
        self.group = 0
        self.ranks = ranks
        self.positions_hbm = positions
        self.rotary = rotary
        self.activation = activation
        self.eps = eps
        self.window = window
        load_table()
        self.positions = Positions(positions)
        # from the first layer on
        self.attending: list[Attending] = []
        # for transposed heads, from the first layer on that has such
        self.rotations: list[TurnedRotation] = []
        # for attention's output, from the first layer on where it stays in SBUF
        self.spreads: list[Spreads] = []

    def divide(self, tokens: int, H: int, stages: list[Stage]) -> None:
        """Keep the stream in SBUF, of equal ranges of cores, where ranks have no sums of it."""
        cores = nl.num_programs(0)
        if self.ranks.count > 1 or (cores > 1 and H % (cores * PARTITIONS) > 0):
            return
        if H // cores * tokens > BANK_COLUMNS * PARTITIONS:  # sums of stationary weights
            return
        for stage in stages:
            self.group = max(self.group, stage.group)
        for core in range(cores):
            self.ranges.append(core_span(H, core, cores, self.group))

    def read(self, stage: Stage, between: Between) -> Residual:
        """The stream as a stage contracts it."""
        if not is_none(between.kept):
            return between.before.plus(between.kept)
        streams = [between.added]
        if not is_none(between.stream):
            streams.append(between.stream)
        H, ranges, group = stage.features, self.ranges, self.group
        if len(ranges) == 0:
            ranges, group = stage.ranges(H), stage.group
            streams = self.ranks.fitted(streams, H)
        residual = Residual(streams[0], ranges, group)
        residual.load(streams[1] if len(streams) > 1 else None)
        return residual

    def keep(self, before: Residual) -> Kept:
        """What a half of a layer adds to the stream, in SBUF."""
        own = self.ranges[nl.program_id(0)]
        return Kept(before.tokens, own, self.group, before.dtype)

    def attention(self, layer: Layer, between: Between) -> Between:
        """The stream, and what attention adds to it, of every core."""
        qkv, output = layer.qkv, layer.output
        before = self.read(qkv, between)
        tokens, dtype = before.tokens, before.dtype
        B, kv, d, T = layer.k_cache.shape
        shape = Shape(B, qkv.out_features // d - 2 * kv, kv, d, T, tokens // B)
        size = (tokens, qkv.out_features)
        check_operands(shape, size, self.rotary[0], layer.v_cache, self.positions_hbm)
        heads = self.heads(layer, before, shape)
        keeps = len(self.ranges) > 0
        stream: list[NkiTensor] = []
        if not keeps:
            size = (tokens, qkv.features)
            stream.append(nl.ndarray(size, dtype=dtype, buffer=nl.private_hbm))
            before.store(stream[0])
        mixed = self.mixed(layer, heads, shape)
        if keeps:
            kept = self.keep(before)
            output.write([kept], mixed, [None])
            return Between(None, None, before, kept)
        added = (tokens, output.out_features)
        added_hbm = nl.ndarray(added, dtype=dtype, buffer=nl.shared_hbm)
        output.write([ToHbm(added_hbm)], mixed, [None])
        return Between(self.whole(output, added_hbm), stream[0])

    def mixed(self, layer: Layer, heads: RowHeads | TurnedHeads, shape: Shape) -> list[Chunk]:
        """Attention's output as the output projection contracts it: by way of HBM if need be."""
        output, k_cache, v_cache = layer.output, layer.k_cache, layer.v_cache
        if len(self.attending) == 0:
            self.attending.append(Attending(self.positions, shape, self.window, True))
        K = shape.heads * shape.head_dim
        own = output.ranges(K)[output.own()]
        if may_keep(shape, own):
            if len(self.spreads) == 0:
                self.spreads.append(Spreads(heads.dtype, shape.head_dim))
            kept = HeadsKept(shape, own, output.lanes(shape.batch), self.spreads[0])
            attend(kept, heads, k_cache, v_cache, self.attending[0])
            load_function(self.activation)
            return [kept.finish()]
        size = (shape.batch * shape.new, K)
        mixed_hbm = nl.ndarray(size, dtype=heads.dtype, buffer=nl.shared_hbm)
        out = HeadsToHbm(mixed_hbm)
        attend(out, heads, k_cache, v_cache, self.attending[0])
        load_function(self.activation)
        meet(mixed_hbm)
        return output.chunks(mixed_hbm)

    def heads(self, layer: Layer, stream: Residual, shape: Shape) -> RowHeads | TurnedHeads:
        """Query, key and value of a stream's norm: transposed as sums lie so, or rows in HBM."""
        qkv = layer.qkv
        tokens, dtype = stream.tokens, stream.dtype
        cos, sin = self.rotary[0], self.rotary[1]
        norms: list[HeadNorm] = []
        if not is_none(layer.norms[2]):
            norms.append(HeadNorm(layer.norms[2], layer.norms[3], shape.heads, self.eps))
        if qkv.knobs.linear.stationary and may_turn(shape):
            if len(self.rotations) == 0:
                self.rotations.append(TurnedRotation(cos, sin))
            turned = TurnedHeads(shape, dtype, self.window)
            qkv.write_normed(turned.outs, stream, layer.norms[0], self.eps, layer.biases)
            turned.finish(self.rotations[0], norms)
            return turned
        qkv_hbm = nl.ndarray((tokens, qkv.out_features), dtype=dtype, buffer=nl.shared_hbm)
        outs = each_to_hbm(side_by_side(qkv_hbm, qkv.vs))
        qkv.write_normed(outs, stream, layer.norms[0], self.eps, layer.biases)
        meet(qkv_hbm)
        rotation = Rotation(cos, sin, min(PARTITIONS, shape.heads + shape.kv_heads), norms)
        return RowHeads(qkv_hbm, shape, rotation)

    def whole(self, stage: Stage, added_hbm: NkiTensor) -> NkiTensor:
        """What a stage adds to the stream, as the ranks have that."""
        if stage.divided:
            meet(added_hbm)
            return added_hbm
        return self.ranks.summed([added_hbm])[0]

    def mlp(self, layer: Layer, between: Between, last: bool) -> Between:
        """As `attention`, of the MLP; of the last layer both are in shared HBM."""
        mlp = layer.mlp
        after = self.read(mlp, between)
        if len(self.ranges) > 0 and not last:
            kept = self.keep(after)
            self.write_mlp(kept, mlp, after, layer.norms[1])
            load_table()
            return Between(None, None, after, kept)
        tokens, dtype = after.tokens, after.dtype
        size = (tokens, mlp.vs[2].hbm.shape[1])
        out_hbm = nl.ndarray(size, dtype=dtype, buffer=nl.shared_hbm)
        self.write_mlp(ToHbm(out_hbm), mlp, after, layer.norms[1])
        if not last or self.ranks.count > 1:
            out_hbm = self.whole(mlp, out_hbm)
        if not last:
            load_table()
        buffer = nl.shared_hbm if last else nl.private_hbm
        stream_hbm = nl.ndarray((tokens, mlp.features), dtype=dtype, buffer=buffer)
        if not last or nl.program_id(0) == 0:
            after.store(stream_hbm)
        return Between(out_hbm, stream_hbm)

    def write_mlp(
        self, out: ToHbm | Kept, mlp: Stage, stream: Residual, norm_hbm: NkiTensor
    ) -> None:
        """Write the MLP of a stream's norm [B M, H]."""
        own = mlp.knobs
        knobs = MlpKnobs(
            own.linear, self.activation, own.inner_block, own.k_chunk, own.spill, own.balance
        )
        if mlp.by_cores:
            write_gated(out, mlp.normed(stream, norm_hbm, self.eps), mlp.us, mlp.vs, knobs)
            return
        if not mlp.low_rank:
            write_dense_mlp(out, [mlp.normed(stream, norm_hbm, self.eps)], mlp.vs, knobs)
            return
        sides = mlp.normed_sides(stream, norm_hbm, self.eps, 2)
        if not mlp.is_pair[2]:
            write_dense_mlp(out, sides, mlp.vs, knobs)
            return
        u_down = mlp.us[len(mlp.us) - 1]
        size = (stream.tokens, u_down.hbm.shape[1])
        d_hbm = nl.ndarray(size, dtype=stream.dtype, buffer=nl.shared_hbm)
        write_dense_mlp(ToHbm(d_hbm), sides, [mlp.vs[0], mlp.vs[1], u_down], knobs)
        d_hbm = self.ranks.summed([d_hbm])[0]
        write_dense([out], [mlp.chunks(d_hbm)], [mlp.vs[2]], [None], own.linear)


@jit
def decoder_layer_decode(
    x: NkiTensor,
    residual: NkiTensor | None,
    cos: NkiTensor,
    sin: NkiTensor,
    positions: NkiTensor,
    norms: tuple[NkiTensor | None, ...],
    caches: tuple[NkiTensor, ...],
    matrices: tuple[NkiTensor | None, ...],
    biases: tuple[NkiTensor | None, ...] = (),
    scales: tuple[NkiTensor | None, ...] = (),
    activation: str = "silu",
    eps: float = 1e-6,
    window: int = 0,
    tp: int = 1,
    qkv_knobs: tuple[int, ...] = (2048, 0, 0, 0, 1024, 1, 1024, 1024, 16384, 0, 0),
    output_knobs: tuple[int, ...] = (1024, 0, 0, 0, 1024, 0, 1024, 1024, 16384, 0, 0),
    mlp_knobs: tuple[int, ...] = (512, 0, 2048, 0, 1280, 1, 1024, 2048, 16384, 0, 0),
    fingerprint: str = "",
) -> tuple[Any, ...]:
    """Pre-norm layers of M new tokens a sequence; every byte of weights and caches loaded once.

    Tuples have what one layer has after what the layer before it has.

    Dimensions:
        B: sequences. M: new tokens of each, 1 to 8; B M up to 128. H: features of the stream.
        T: tokens that the caches have room for.

    Args:
        x: [B M, H], what the layer before adds to the stream.
        residual: [B M, H], the stream before that, or None where x is all of it.
        cos: of RoPE, [B M, head_dim] of the tokens' positions.
        sin: as cos.
        positions: int32 [B], where the first new token of a sequence is written.
        norms: of a layer [H] before attention, [H] before the MLP, and [head_dim] of query and of
            key heads, or None.
        caches: of a layer keys [B, kv_heads, head_dim, T] and values [B, kv_heads, T, head_dim],
            finite.
        matrices: of a layer u and v of each Linear in the order of `LINEARS`, of a dense one None
            and the weight. Quickest are query, key and value, and gate, up and down, of one kind.
        biases: of a layer those of query, key and value, dtype of x, or None; or none at all.
        scales: float32, of each of `matrices` in one byte as in the kernels of ops; or none at all.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        eps: of all norms.
        window: tokens that a query sees, its own included; 0 for all.
        tp: ranks of tensor parallel, 0 to tp - 1 of the launch, which have a part of the heads and
            of the inner features each. Dense, they sum what output and down make. A pair is cut to
            rows of u and columns of v, and ranks sum products with u: a stage of pairs reads 1 / tp
            of the stream, and of its norm's weight, and makes as much. `x` and `residual` may be
            either; what leaves is as the MLP's Linears make it.
        qkv_knobs: `KNOBS` of query, key and value. What a norm makes is one chunk.
        output_knobs: of the output projection.
        mlp_knobs: of the MLP.
        fingerprint: of all kernels' source, for caches that know one function's alone; not read.

    Returns:
        What the last MLP adds to the stream [B M, H] and the stream before that, as `x` and
        `residual` of the next layer, in shared HBM; and the caches, keys and values of each layer.

    Notes:
        Rounding is that of the ops' kernels: the stream, normed tokens, query, key and value,
        attention's output, low-rank features and act(gate) * up are rounded to the dtype of x.
        The norms are computed by every core, in the layout that TensorE takes. Without ranks the
        stream stays in SBUF, and cores exchange what a half of a layer adds to it; with ranks, or
        more tokens than PSUM holds sums of, it passes through HBM. So do values; queries and keys,
        but for heads of 64 or 128 features made by stationary weights; and attention's output,
        but for one new token a sequence, where a core contracts what it has made.

    Pseudocode:
        for each layer:
            s = x + residual;  q, k, v = norm(s) . pairs
            a = attention(rope(q), rope(k), v), which writes k and v to the caches
            residual = s + a . pair;  x = mlp(norm(residual))
    """
    tokens, count = x.shape[0], 2 * len(LINEARS)
    assert tokens <= PARTITIONS, f"at most {PARTITIONS} tokens, got {tokens}"
    assert len(matrices) % count == 0, f"a layer has {count} matrices, got {len(matrices)} in all"
    layers = len(matrices) // count
    ranks = TensorParallel(tp)
    decoding = Decoding(positions, (cos, sin), activation, eps, window, ranks)
    every: list[Layer] = []
    first: list[Stage] = []
    for n in range(layers):
        own, own_scales = part_of(matrices, n, layers), part_of(scales, n, layers)
        opening, closing = (
            StageKnobs(qkv_knobs, n == 0),
            StageKnobs(mlp_knobs, False, n + 1 == layers),
        )
        qkv = Stage(own[0:6], own_scales[0:6], x.dtype, opening, ranks)
        output = Stage(own[6:8], own_scales[6:8], x.dtype, StageKnobs(output_knobs), ranks)
        mlp = Stage(own[8:14], own_scales[8:14], x.dtype, closing, ranks)
        own_norms, own_caches = part_of(norms, n, layers), part_of(caches, n, layers)
        own_biases = part_of(biases, n, layers)
        every.append(Layer(own_norms, own_caches, own_biases, qkv, output, mlp))
        first.extend([qkv, mlp])
    decoding.divide(tokens, x.shape[1], first)
    between = Between(x, residual)
    outputs: list[NkiTensor] = []
    for n in range(layers):
        between = decoding.attention(every[n], between)
        between = decoding.mlp(every[n], between, n + 1 == layers)
        outputs.extend([every[n].k_cache, every[n].v_cache])
    results = [between.added, between.stream]
    results.extend(outputs)
    return tuple(results)


def part_of(operands: tuple[Any, ...], n: int, layers: int) -> tuple[Any, ...]:
    """The n-th layer's part of the operands of all layers."""
    each = len(operands) // layers
    return operands[n * each : (n + 1) * each]
