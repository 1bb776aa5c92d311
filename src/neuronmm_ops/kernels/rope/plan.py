"""Plans of RoPE."""

from __future__ import annotations

from neuronmm_ops.hardware import (
    DEFAULT_TARGET,
    DMA_DONE_NS,
    DMA_MODELS,
    DMA_START_NS,
    PARTITIONS,
    Engine,
    Machine,
)
from neuronmm_ops.kernels.attention.plan import check_launch, check_shape
from neuronmm_ops.kernels.attention.units import Shape
from neuronmm_ops.kernels.planned import PlannedKernel, TensorShape
from neuronmm_ops.kernels.planner.instructions import evict_ns, load_ns
from neuronmm_ops.kernels.planner.problem import ITEMSIZES
from neuronmm_ops.kernels.rope.prefill import rope
from neuronmm_ops.kernels.stages.tiling import core_span, spans, tiles_in


def plan_rope(
    M: int,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    head_norm: bool,
    dtype: str = "bfloat16",
    target: str = DEFAULT_TARGET,
    lnc: int = 1,
) -> list[PlannedKernel]:
    """The launches between the product that makes qkv and attention.

    Prefill: `rope`, which takes qkv [batch * M, ...], cos and sin [M, head_dim], the two caches of
    M tokens and the weights of the norms; its first result is what `attention` takes. Decode
    (M == 1): none, for `attention_decode` does it.

    Args:
        M: tokens of each sequence.
        batch: sequences.
        heads: query heads, a multiple of kv_heads.
        kv_heads: key and value heads.
        head_dim: even, up to 128.
        head_norm: query and key heads are normalised first (Qwen3).
        dtype: of activations and caches: bfloat16, float16 or float32.
        target: trn1, trn2 or trn3.
        lnc: cores that share the launch.

    Raises:
        ValueError: sizes that are no attention.
    """
    machine = check_launch(dtype, target, lnc)
    shape = check_shape(batch, heads, kv_heads, head_dim, M)
    if M == 1:
        return []
    d, item = head_dim, ITEMSIZES[dtype]
    weight = TensorShape((d,), dtype) if head_norm else None
    operands = (
        TensorShape((batch * M, (heads + 2 * kv_heads) * d), dtype),
        TensorShape((M, d), dtype),
        TensorShape((M, d), dtype),
        TensorShape((batch, kv_heads, d, M), dtype),
        TensorShape((batch, kv_heads, M, d), dtype),
        weight,
        weight,
    )
    moved = 2 * batch * M * (heads + 2 * kv_heads) * d + 2 * M * d
    if head_norm:
        moved += 2 * lnc * min(128, M) * d
    moved *= item
    room = machine.usable_sbuf_bytes
    fitting = [b for b in BLOCKS if _sbuf_bytes(shape, b, head_norm, item) <= room]
    if not fitting:
        raise ValueError(
            f"rope of {heads} and {kv_heads} heads of {d} in {dtype} does not fit the {room} bytes "
            f"of SBUF per partition of {machine.target}; share heads among devices"
        )
    block = fitting[0]
    own = max([core_span(M, core, lnc).size for core in range(lnc)])
    times = tuple(
        [_time_ns(shape, own, block, head_norm, machine.under(m), item) / 1e6 for m in DMA_MODELS]
    )
    kernel = rope if lnc == 1 else rope[lnc]
    return [PlannedKernel("rope", kernel, operands, {"block": block}, times, moved)]


BLOCKS = (512, 256, 128)
"""Tokens that are stored together: the longer, the longer the runs."""


def _sbuf_bytes(shape: Shape, block: int, head_norm: bool, itemsize: int) -> int:
    """SBUF per partition of a block of tokens: heads as loaded, both terms and the transposes."""
    d, count = shape.head_dim, shape.heads + shape.kv_heads
    tiles = tiles_in(min(block, shape.tokens), PARTITIONS)
    loaded = tiles * (count + shape.kv_heads) * d * itemsize
    terms = 2 * tiles * count * d * itemsize
    parts = tiles_in(count, PARTITIONS // d) + 1
    normed = tiles * count * d * itemsize * 2 + count * d * 4 if head_norm else 0
    return loaded + terms + normed + parts * min(block, shape.tokens) * itemsize + 16384


def _time_ns(
    shape: Shape, tokens: int, block: int, head_norm: bool, machine: Machine, itemsize: int
) -> float:
    """Modelled time of a core: the busiest of DMA and engines, and the first and last block."""
    d, H, kv = shape.head_dim, shape.heads, shape.kv_heads
    count, each = H + kv, PARTITIONS // shape.head_dim
    total, ends = 0.0, 0.0
    for s in spans(0, tokens, block):
        rows, tiles = min(s.size, PARTITIONS), tiles_in(s.size, PARTITIONS)
        load = tiles * load_ns(machine, rows, (count + kv) * d * itemsize)
        store = tiles * load_ns(machine, rows, d * itemsize, kv)
        for heads in (H, kv):
            store += load_ns(
                machine, min(heads, each) * d, s.size * itemsize, tiles_in(heads, each)
            )
        vector = evict_ns(machine, Engine.VECTOR, count * d) * tiles
        gpsimd = evict_ns(machine, Engine.GPSIMD, count * d) * tiles
        scalar = tiles_in(count, each) * evict_ns(machine, Engine.SCALAR, s.size)
        if itemsize == 4:
            vector, gpsimd = 2 * vector, 2 * gpsimd
        if head_norm:
            scaled = tiles * count * evict_ns(machine, Engine.VECTOR, d / 2)
            scalar += tiles * evict_ns(machine, Engine.SCALAR, count * d)
            vector, gpsimd = vector + scaled, 2 * gpsimd
        if machine.shared_ports:
            vector = gpsimd = vector + gpsimd
        tables = 2 * tiles * load_ns(machine, rows, d * itemsize) / shape.batch
        queue = tiles * machine.dma.interval_ns  # one load of rows each
        busiest = max(load + store + tables, queue, vector, gpsimd, scalar)
        if s.start + s.size == tokens:
            serial = vector + gpsimd + scalar if head_norm else max(vector, gpsimd)
            ends = 2 * DMA_START_NS + DMA_DONE_NS + serial / tiles
        total += busiest
    return shape.batch * total + ends
