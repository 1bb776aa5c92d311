"""`neuronmm::attention`: a chunk of a prompt attends to itself and to a cache, which it joins."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuronmm_ops.ops.spec import Operand, OpSpec

Pair = tuple[Tensor | None, Tensor | None]


class RopeAndPlaces(NamedTuple):
    """RoPE's tables [B, M, 1, d], the tokens' places [B, M], and options."""

    cos: Tensor
    sin: Tensor
    places: Tensor
    eps: float
    window: int


def step_of(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, eps: float, window: int
) -> RopeAndPlaces:
    """What tokens x [B, M, ...] from `positions` on share, in fp32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    places = positions.unsqueeze(1) + torch.arange(x.shape[1], device=x.device)
    return RopeAndPlaces(cos.to(wide).unsqueeze(2), sin.to(wide).unsqueeze(2), places, eps, window)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
    window: int = 0,
) -> Tensor:
    """Return [B, M, heads * head_dim]; the new keys and values are written to the caches.

    Norm and RoPE are in fp32, rounded once; so are scores and their softmax, the probabilities
    rounded to the caches' dtype.
    """
    tensors = (query, key, value, cos, sin, key_cache, value_cache, positions)
    SPEC.check(*tensors, query_norm, key_norm, eps, window)
    step, d = step_of(query, cos, sin, positions, eps, window), key_cache.shape[2]
    heads = [each.unflatten(-1, (-1, d)) for each in (query, key, value)]
    return attended(heads, (query_norm, key_norm), (key_cache, value_cache), step)


def attended(
    heads: list[Tensor],
    norms: Pair,
    caches: tuple[Tensor, Tensor],
    step: RopeAndPlaces,
) -> Tensor:
    """Query, key and value heads [B, M, heads, d] to [B, M, heads d]; the caches get the tokens."""
    query, key, value = heads
    keys, values = caches
    (B, kv, d, T), M, dtype = keys.shape, query.shape[1], query.dtype
    query, key = _rotated(query, norms[0], step), _rotated(key, norms[1], step)
    sequences = torch.arange(B, device=query.device).unsqueeze(1)
    keys.permute(0, 3, 1, 2).index_put_((sequences, step.places), key)
    values.transpose(1, 2).index_put_((sequences, step.places), value)

    wide = step.cos.dtype
    grouped = query.unflatten(2, (kv, -1)).permute(0, 2, 3, 1, 4)  # [B, kv, group, M, d]
    scores = grouped.flatten(2, 3).to(wide) @ keys.to(wide) * d**-0.5
    token, last = torch.arange(T, device=query.device), step.places.unsqueeze(-1)
    hidden = token > last
    if step.window:
        hidden = hidden | (token <= last - step.window)
    scores = scores.unflatten(2, (-1, M)).masked_fill(hidden[:, None, None], -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    mixed = weights.flatten(2, 3).to(dtype).to(wide) @ values.to(wide)
    mixed = (mixed.unflatten(2, (-1, M)) / total).to(dtype)
    return mixed.permute(0, 3, 1, 2, 4).flatten(2)


def inverse_root(wide: Tensor, eps: float) -> Tensor:
    """1 / the root mean square of the last dimension."""
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _rotated(heads: Tensor, weight: Tensor | None, step: RopeAndPlaces) -> Tensor:
    """RMSNorm, if any, and RoPE of heads [B, M, heads, d], rounded once."""
    wide = heads.to(step.cos.dtype)
    if weight is not None:
        wide = wide * inverse_root(wide, step.eps) * weight.to(wide.dtype)
    first, second = wide.chunk(2, -1)
    return (wide * step.cos + torch.cat([-second, first], -1) * step.sin).to(heads.dtype)


# --- checks --------------------------------------------------------------------------------------


def rule(query: Tensor, key: Tensor, *others: Any) -> None:
    """What the sizes of operands do not say; of positions where they are on a CPU, with values.

    Raises:
        ValueError: as its message says.
    """
    _, _, _, key_cache, _, positions, *norms, _, window = others
    if query.dim() != 3:
        raise ValueError(
            f"attention: query must have shape [B, M, heads * head_dim], got {list(query.shape)}; "
            "reshape it"
        )
    (B, M, width), (_, kv, d, room) = query.shape, key_cache.shape
    why = problem_of_heads(width, kv, d, (norms[0], norms[1]))
    if not why and key.shape[-1] != kv * d:
        why = f"key must have {kv} heads of {d}, got {key.shape[-1]} features"
    why = why or problem_of_places(positions, B, M, room, window)
    if why:
        raise ValueError(f"attention: {why}")


def problem_of_heads(features: int, kv_heads: int, head_dim: int, norms: Pair) -> str:
    """What is wrong with a query's features and norms of heads; empty where nothing is."""
    if features % (kv_heads * head_dim):
        return (
            f"query heads must be a multiple of kv heads, got {features} features for {kv_heads} "
            f"kv heads of {head_dim}"
        )
    if (norms[0] is None) != (norms[1] is None):
        return "norms of query and key heads come together; pass both, or None"
    return ""


def problem_of_places(positions: Tensor, batch: int, new: int, room: int, window: int) -> str:
    """What is wrong with the places of new tokens; empty where nothing is."""
    if window < 0:
        return f"window must be 0, for all tokens, or more; got {window}"
    if len(positions) != batch:
        got = f"{len(positions)} for a batch of {batch}"
        return f"positions must have one place a sequence; got {got}"
    if room < new:
        return f"caches must have room for {new} new tokens, got T = {room}; make T larger"
    if has_values(positions):
        places = positions.tolist()
        if places and not (min(places) >= 0 and max(places) <= room - new):
            return (
                f"positions must be in 0..T - M = {room - new}, got {places}; make the caches "
                "larger"
            )
    return ""


def has_values(tensor: Tensor) -> bool:
    """Say whether a tensor's values can be read at once: on a CPU, not in a trace."""
    return tensor.is_cpu and type(tensor) is Tensor and not torch.compiler.is_compiling()


SPEC = OpSpec(
    "attention",
    operands=(
        Operand("query", "... A", "activation"),
        Operand("key", "... C", "activation"),
        Operand("value", "... C", "activation"),
        Operand("cos", "... D", "activation"),
        Operand("sin", "... D", "activation"),
        Operand("key_cache", "B kv D t", "state"),
        Operand("value_cache", "B kv t D", "state"),
        Operand("positions", "B", "integer"),
        Operand("query_norm", "D", "vector", optional=True),
        Operand("key_norm", "D", "vector", optional=True),
    ),
    reference=reference,
    choices={"eps": 1e-6, "window": 0},
    outputs=("A",),
    rule=rule,
)
