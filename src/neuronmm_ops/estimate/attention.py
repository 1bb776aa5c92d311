"""The launches of attention: prefill, and decode with RoPE and the caches' writes."""

from __future__ import annotations

from neuroncore.hardware import DEFAULT_TARGET, resolve_target
from neuronmm_ops.kernels.attention.knobs import held_bytes
from neuronmm_ops.kernels.attention.units import MOST_NEW, Shape, problem_of
from neuronmm_ops.kernels.problem import ITEMSIZES
from neuronmm_ops.kernels.simulated import simulated_kernel
from neuronmm_ops.plan import MAX_INSTRUCTIONS
from neuronmm_ops.plan.launches import PlannedKernel, TensorShape
from neuronmm_ops.plan.tracing import Cost


def check_launch(dtype: str, target: str, lnc: int) -> str:
    """The name of a target. Raises ValueError for what no kernel is planned for."""
    machine = resolve_target(target)
    if dtype not in ITEMSIZES:
        raise ValueError(f"dtype must be one of {', '.join(ITEMSIZES)}; got {dtype!r}")
    machine.check_lnc(lnc)
    return machine.target


def check_shape(
    batch: int, heads: int, kv_heads: int, head_dim: int, tokens: int, new: int = 1
) -> Shape:
    """Sizes of attention. Raises ValueError where they are none."""
    problem = problem_of(batch, heads, kv_heads, head_dim, tokens, new)
    if problem:
        raise ValueError(problem)
    return Shape(batch, heads, kv_heads, head_dim, tokens, new)


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

    Prefill (M == T > 1): `attention`, after `plan_rope`'s launches. Decode (M of 1 to 8, below T):
    the one launch `attention_decode`, which takes qkv itself: RoPE, the norms of heads and the
    writes of new keys and values are in it, and `plan_rope` has none. Its operands are qkv, cos
    and sin of the positions, the two caches, the positions and the weights of the norms. It reads
    the whole cache of T tokens, a bucket's, at every position.

    Args:
        M: tokens of each sequence that are new.
        T: tokens that each cache has room for, the new ones included.
        batch: sequences.
        heads: query heads, a multiple of kv_heads.
        kv_heads: key and value heads.
        head_dim: even, up to 128.
        head_norm: decode normalises query and key heads (Qwen3); prefill's norm is in `plan_rope`.
        dtype: of activations and caches: bfloat16, float16 or float32.
        target: trn1, trn2 or trn3.
        lnc: cores that share the launch.

    Returns:
        One launch, whose first result is [batch * M, heads * head_dim]. Long prompts have more
        instructions than compilers take: the kernel then runs several times, each time on other
        key heads and their queries, with their columns of the result.

    Raises:
        ValueError: sizes that are no attention, M neither 1 to 8 nor T, or T too long for SBUF.
    """
    target = check_launch(dtype, target, lnc)
    decodes = M == 1 or M < T
    if M < 1 or (decodes and M > MOST_NEW) or M > T > 0:
        rule = f"M must be 1 to {MOST_NEW} (decode) or T (prefill)"
        raise ValueError(f"{rule}; got M {M} and T {T}")
    shape = check_shape(batch, heads, kv_heads, head_dim, T, M if decodes else 1)
    if decodes:
        planned = _decode(shape, head_norm, dtype, lnc)
        _cost(planned, shape, dtype, target)
        return [planned]
    heads = _launched_heads(shape, dtype, target, lnc)
    return [_prefill(shape, dtype, lnc, heads)] * (kv_heads // heads)


def _decode(shape: Shape, head_norm: bool, dtype: str, lnc: int) -> PlannedKernel:
    B, H, kv, d, T = shape.batch, shape.heads, shape.kv_heads, shape.head_dim, shape.tokens
    M = shape.new
    weight = TensorShape((d,), dtype) if head_norm else None
    operands = (
        TensorShape((B * M, (H + 2 * kv) * d), dtype),
        TensorShape((B * M, d), dtype),
        TensorShape((B * M, d), dtype),
        TensorShape((B, kv, d, T), dtype),
        TensorShape((B, kv, T, d), dtype),
        TensorShape((B,), "int32"),
        weight,
        weight,
    )
    kernel = simulated_kernel("attention", "attention_decode", lnc)
    return PlannedKernel(kernel, operands, {})


def _prefill(shape: Shape, dtype: str, lnc: int, kv_heads: int) -> PlannedKernel:
    """The launch of so many key heads and their queries."""
    B, d, M = shape.batch, shape.head_dim, shape.tokens
    operands = (
        TensorShape((B, kv_heads * shape.group, d, M), dtype),
        TensorShape((B, kv_heads, d, M), dtype),
        TensorShape((B, kv_heads, M, d), dtype),
    )
    kernel = simulated_kernel("attention", "attention", lnc)
    return PlannedKernel(kernel, operands, {})


def _launched_heads(shape: Shape, dtype: str, target: str, lnc: int) -> int:
    """The most key heads of one launch: each takes as many instructions as the others."""
    # this is much quicker than a trace of too many tokens
    held = held_bytes(shape.tokens, shape.head_dim, ITEMSIZES[dtype])
    if held > resolve_target(target).planned_sbuf_bytes:
        raise ValueError(_refusal(shape, dtype, target))
    one = _cost(_prefill(shape, dtype, lnc, 1), shape, dtype, target).instructions
    divisors = [n for n in range(1, shape.kv_heads + 1) if shape.kv_heads % n == 0]
    return max([n for n in divisors if n * one <= MAX_INSTRUCTIONS], default=1)


def _cost(planned: PlannedKernel, shape: Shape, dtype: str, target: str) -> Cost:
    cost = planned.cost(target)
    if cost is None:
        raise ValueError(_refusal(shape, dtype, target))
    return cost


def _refusal(shape: Shape, dtype: str, target: str) -> str:
    return (
        f"attention of T {shape.tokens} in {dtype} does not fit the SBUF of {target}; take a "
        "shorter T or 16 bits"
    )
