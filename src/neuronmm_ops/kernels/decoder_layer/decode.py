"""Layers of a decoder in one launch, decode phase: the next weights come while a stage waits."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.attention.decode import attend, check_operands, load_table
from neuronmm_ops.kernels.attention.heads import HeadNorm, Rotation
from neuronmm_ops.kernels.attention.units import Shape
from neuronmm_ops.kernels.attention.visible import Positions
from neuronmm_ops.kernels.decoder_layer.norm import Residual
from neuronmm_ops.kernels.decoder_layer.ranks import TensorParallel, meet
from neuronmm_ops.kernels.decoder_layer.stage import Stage, StageKnobs
from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.mlp.decode import write_dense_mlp
from neuronmm_ops.kernels.shim import NkiTensor, jit, nl
from neuronmm_ops.kernels.stages.linears import MlpKnobs, write_dense
from neuronmm_ops.kernels.stages.tiling import PARTITIONS
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


class Decoding(nl.NKIObject):
    """What all layers share: positions, tables of RoPE, and compile-time options."""

    def __init__(
        self,
        positions: NkiTensor,
        rotary: tuple[NkiTensor, ...],
        activation: str,
        eps: float,
        window: int,
        ranks: TensorParallel,
    ) -> None:
        self.ranks = ranks
        self.positions_hbm = positions
        self.rotary = rotary
        self.activation = activation
        self.eps = eps
        self.window = window
        load_table()
        self.positions = Positions(positions)

    def read(self, stage: Stage, x: NkiTensor, residual: NkiTensor | None) -> Residual:
        """The stream x + residual [B M, H] as a stage contracts it."""
        streams = [x]
        if not is_none(residual):
            streams.append(residual)
        H = stage.features
        streams = self.ranks.fitted(streams, H)
        before = streams[1] if len(streams) > 1 else None
        return Residual(streams[0], before, stage.ranges(H), stage.lanes(x.shape[0]), stage.group)

    def attention(self, layer: Layer, x: NkiTensor, residual: NkiTensor | None) -> list[NkiTensor]:
        """What attention adds to the stream [B M, H], and the stream before it, of every core."""
        tokens = x.shape[0]
        qkv, output = layer.qkv, layer.output
        B, kv, d, T = layer.k_cache.shape
        shape = Shape(B, qkv.out_features // d - 2 * kv, kv, d, T, tokens // B)
        before = self.read(qkv, x, residual)
        qkv_hbm = nl.ndarray((tokens, qkv.out_features), dtype=x.dtype, buffer=nl.shared_hbm)
        check_operands(shape, qkv_hbm, self.rotary[0], layer.v_cache, self.positions_hbm)
        qkv.write_normed(qkv_hbm, before, layer.norms[0], self.eps, layer.biases)
        meet(qkv_hbm)
        stream_hbm = nl.ndarray((tokens, qkv.features), dtype=x.dtype, buffer=nl.private_hbm)
        before.store(stream_hbm)
        norms: list[HeadNorm] = []
        if not is_none(layer.norms[2]):
            norms.append(HeadNorm(layer.norms[2], layer.norms[3], shape.heads, self.eps))
        cos, sin = self.rotary[0], self.rotary[1]
        rotation = Rotation(cos, sin, min(PARTITIONS, shape.heads + kv), norms)
        mixed_hbm = nl.ndarray((tokens, shape.heads * d), dtype=x.dtype, buffer=nl.shared_hbm)
        k_cache, v_cache = layer.k_cache, layer.v_cache
        attend(mixed_hbm, qkv_hbm, k_cache, v_cache, self.positions, shape, rotation, self.window)
        load_function(self.activation)
        meet(mixed_hbm)
        added = (tokens, output.out_features)
        added_hbm = nl.ndarray(added, dtype=x.dtype, buffer=nl.shared_hbm)
        output.write(added_hbm, output.chunks(mixed_hbm), [None])
        return [self.whole(output, added_hbm), stream_hbm]

    def whole(self, stage: Stage, added_hbm: NkiTensor) -> NkiTensor:
        """What a stage adds to the stream, as the ranks have that."""
        if stage.divided:
            meet(added_hbm)
            return added_hbm
        return self.ranks.summed([added_hbm])[0]

    def mlp(self, layer: Layer, x: NkiTensor, residual: NkiTensor, last: bool) -> list[NkiTensor]:
        """As `attention`, of the MLP; of the last layer the stream is in shared HBM."""
        tokens = x.shape[0]
        mlp, own_knobs = layer.mlp, layer.mlp.knobs
        after = self.read(mlp, x, residual)
        knobs = MlpKnobs(
            own_knobs.linear,
            self.activation,
            own_knobs.inner_block,
            own_knobs.k_chunk,
            own_knobs.spill,
            own_knobs.balance,
        )
        norm = layer.norms[1]
        H = mlp.vs[2].hbm.shape[1]
        out_hbm = nl.ndarray((tokens, H), dtype=x.dtype, buffer=nl.shared_hbm)
        if mlp.by_cores:
            write_gated(out_hbm, [mlp.normed(after, norm, self.eps)], mlp.us, mlp.vs, knobs)
        elif mlp.low_rank and mlp.is_pair[2]:
            u_down = mlp.us[len(mlp.us) - 1]
            d_hbm = nl.ndarray((tokens, u_down.hbm.shape[1]), x.dtype, buffer=nl.shared_hbm)
            sides = mlp.normed_sides(after, norm, self.eps, 2)
            write_dense_mlp(d_hbm, sides, [mlp.vs[0], mlp.vs[1], u_down], knobs)
            d_hbm = self.ranks.summed([d_hbm])[0]
            write_dense([out_hbm], [mlp.chunks(d_hbm)], [mlp.vs[2]], [None], own_knobs.linear)
        elif mlp.low_rank:
            sides = mlp.normed_sides(after, norm, self.eps, 2)
            write_dense_mlp(out_hbm, sides, mlp.vs, knobs)
        else:
            write_dense_mlp(out_hbm, [[mlp.normed(after, norm, self.eps)]], mlp.vs, knobs)
        if not last or self.ranks.count > 1:
            out_hbm = self.whole(mlp, out_hbm)
        if not last:
            load_table()
        buffer = nl.shared_hbm if last else nl.private_hbm
        stream_hbm = nl.ndarray((tokens, mlp.features), dtype=x.dtype, buffer=buffer)
        if not last or nl.program_id(0) == 0:
            after.store(stream_hbm)
        return [out_hbm, stream_hbm]


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
        Query, key and value, attention's output and that of both halves of a layer pass through
        HBM; the norms are computed by every core, in the layout that TensorE takes.

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
    streams: list[Any] = [x, residual]
    outputs: list[NkiTensor] = []
    for n in range(layers):
        own, own_scales = part_of(matrices, n, layers), part_of(scales, n, layers)
        layer = Layer(
            part_of(norms, n, layers),
            part_of(caches, n, layers),
            part_of(biases, n, layers),
            Stage(own[0:6], own_scales[0:6], x.dtype, StageKnobs(qkv_knobs), ranks),
            Stage(own[6:8], own_scales[6:8], x.dtype, StageKnobs(output_knobs), ranks),
            Stage(own[8:14], own_scales[8:14], x.dtype, StageKnobs(mlp_knobs), ranks),
        )
        added = decoding.attention(layer, streams[0], streams[1])
        streams = decoding.mlp(layer, added[0], added[1], n + 1 == layers)
        outputs.extend([layer.k_cache, layer.v_cache])
    found = [streams[0], streams[1]]
    found.extend(outputs)
    return tuple(found)


def part_of(operands: tuple[Any, ...], n: int, layers: int) -> tuple[Any, ...]:
    """The n-th layer's part of the operands of all layers."""
    each = len(operands) // layers
    return operands[n * each : (n + 1) * each]
