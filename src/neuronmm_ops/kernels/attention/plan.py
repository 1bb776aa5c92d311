"""Plans of attention: prefill, and decode with RoPE and the caches' writes."""

from __future__ import annotations

from neuronmm_ops.hardware import DEFAULT_TARGET, DMA_MODELS, Machine, resolve_target
from neuronmm_ops.kernels.attention.costs import Decode, prefill_ns
from neuronmm_ops.kernels.attention.decode import attention_decode
from neuronmm_ops.kernels.attention.prefill import attention
from neuronmm_ops.kernels.attention.units import Shape, decode_units, problem_of
from neuronmm_ops.kernels.planned import PlannedKernel, TensorShape
from neuronmm_ops.kernels.planner.problem import ITEMSIZES
from neuronmm_ops.kernels.stages.tiling import PARTITIONS


def check_launch(dtype: str, target: str, lnc: int) -> Machine:
    """The machine of a target. Raises ValueError for what no kernel is planned for."""
    machine = resolve_target(target)
    if dtype not in ITEMSIZES:
        raise ValueError(f"dtype must be one of {', '.join(ITEMSIZES)}; got {dtype!r}")
    if lnc not in (1, 2) or (lnc == 2 and machine.generation < 3):
        raise ValueError(f"lnc must be 1, or 2 on trn2 and trn3; got {lnc} on {machine.target}")
    return machine


def check_shape(batch: int, heads: int, kv_heads: int, head_dim: int, tokens: int) -> Shape:
    """Sizes of attention. Raises ValueError where they are none."""
    problem = problem_of(batch, heads, kv_heads, head_dim, tokens)
    if problem:
        raise ValueError(problem)
    return Shape(batch, heads, kv_heads, head_dim, tokens)


def plan_attention(
    M: int,
    T: int,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    head_norm: bool = False,
    dtype: str = "bfloat16",
    target: str = DEFAULT_TARGET,
    lnc: int = 1,
) -> list[PlannedKernel]:
    """The launches of attention, from what makes qkv (or `plan_rope`) to the output projection.

    Prefill (M == T > 1): `attention`, after `plan_rope`'s launches. Decode (M == 1): the one
    launch `attention_decode`, which takes qkv itself: RoPE, the norms of heads and the write of
    the new key and value are in it, and `plan_rope` has none. Its operands are qkv, cos and sin of
    the position, the two caches and the weights of the norms; the position is T - 1, a
    compile-time size, rounded up to a bucket as serving stacks do.

    Args:
        M: tokens of each sequence that are new.
        T: tokens of each in the cache, the new ones included.
        batch: sequences.
        heads: query heads, a multiple of kv_heads.
        kv_heads: key and value heads.
        head_dim: even, up to 128.
        head_norm: decode normalises query and key heads (Qwen3); prefill's norm is in `plan_rope`.
        dtype: of activations and caches: bfloat16, float16 or float32.
        target: trn1, trn2 or trn3.
        lnc: cores that share the launch.

    Returns:
        One launch, whose first result is [batch * M, heads * head_dim].

    Raises:
        ValueError: sizes that are no attention, or M neither 1 nor T.
    """
    machine = check_launch(dtype, target, lnc)
    shape = check_shape(batch, heads, kv_heads, head_dim, T)
    if M not in (1, T):
        raise ValueError(f"M must be 1 (decode) or T (prefill); got M {M} and T {T}")
    if M == 1:
        return [_decode(shape, head_norm, dtype, machine, lnc)]
    return [_prefill(shape, dtype, machine, lnc)]


def _decode(shape: Shape, head_norm: bool, dtype: str, machine: Machine, lnc: int) -> PlannedKernel:
    B, H, kv, d, T = shape.batch, shape.heads, shape.kv_heads, shape.head_dim, shape.tokens
    weight = TensorShape((d,), dtype) if head_norm else None
    operands = (
        TensorShape((B, (H + 2 * kv) * d), dtype),
        TensorShape((1, d), dtype),
        TensorShape((1, d), dtype),
        TensorShape((B, kv, d, T), dtype),
        TensorShape((B, kv, T, d), dtype),
        weight,
        weight,
    )
    moved = decode_bytes(shape, head_norm, ITEMSIZES[dtype], lnc)
    times: list[float] = []
    for model in DMA_MODELS:
        costs = Decode(shape, machine.under(model), ITEMSIZES[dtype], head_norm)
        times.append(max([costs.time_ns(core, lnc) for core in range(lnc)]) / 1e6)
    kernel = attention_decode if lnc == 1 else attention_decode[lnc]
    return PlannedKernel("attention_decode", kernel, operands, {}, tuple(times), moved)


def decode_bytes(shape: Shape, head_norm: bool, itemsize: int, lnc: int) -> int:
    """HBM traffic of `attention_decode`."""
    B, H, kv, T = shape.batch, shape.heads, shape.kv_heads, shape.tokens
    # a block of keys is read with what is at the new token's place, but for a block of that alone
    keys = T if T % PARTITIONS != 1 else T - 1
    # the new value is read for the sum and once more for the cache
    moved = B * kv * (keys + 1 + T - 1 + 2 + 1) + B * H
    for core in range(lnc):
        units = decode_units(shape, core, lnc)
        if units:
            moved += len({u.sequence for u in units}) * (H + kv)
            moved += 2 * min(PARTITIONS, H + kv) + head_norm * (H + kv)
    return moved * shape.head_dim * itemsize


def _prefill(shape: Shape, dtype: str, machine: Machine, lnc: int) -> PlannedKernel:
    B, H, kv, d, M = shape.batch, shape.heads, shape.kv_heads, shape.head_dim, shape.tokens
    operands = (
        TensorShape((B, H, d, M), dtype),
        TensorShape((B, kv, d, M), dtype),
        TensorShape((B, kv, M, d), dtype),
    )
    moved = 2 * B * (H + kv) * M * d * ITEMSIZES[dtype]
    cores = [prefill_ns(shape, machine, ITEMSIZES[dtype], core, lnc) for core in range(lnc)]
    time = max(cores) / 1e6
    kernel = attention if lnc == 1 else attention[lnc]
    times = (time,) * len(DMA_MODELS)
    return PlannedKernel("attention", kernel, operands, {}, times, moved)
