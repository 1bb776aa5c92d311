"""What a rank of a whole model holds in HBM, and whether it fits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from neuroncore.hardware import resolve_target
from neuronmm_ops.estimate.decoder import Decoder
from neuronmm_ops.estimate.layer import PARTS, Part
from neuronmm_ops.plan.layouts import GROUPS, Group, Layout, held_bytes
from neuronmm_ops.plan.linear import ITEMSIZE

Taken = Mapping[tuple[int, Group], Collection[Layout]]
"""Layouts that passes take, by the number of a part of `Decoder.layers` and a group of its."""
WHOLE: Taken = MappingProxyType({})


def memory_of(decoder: Decoder, prompt: int, new: int, taken: Taken = WHOLE) -> dict[str, int]:
    """Bytes of a rank's weights, KV cache and prefill's activations, and how many there are.

    Activations are the residual before and after, the norm, and what the widest component
    holds in addition.

    Args:
        decoder: the model.
        prompt: tokens of each sequence's prompt.
        new: tokens after it.
        taken: as `weight_bytes`.
    """
    whole, shape = decoder.whole, decoder.shape
    cache = 2 * whole.layers * shape.kv_heads * shape.head_dim * decoder.batch * (prompt + new)
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    widest = max(qkv + shape.heads * shape.head_dim, 2 * shape.intermediate_size)
    tokens = decoder.batch * prompt
    machine = resolve_target(decoder.target)
    return {
        "weight_bytes": weight_bytes(decoder, taken),
        "kv_cache_bytes": ITEMSIZE * cache,
        "activation_bytes": ITEMSIZE * tokens * (3 * whole.hidden_size + widest),
        "capacity_bytes": int(machine.rank_hbm_bytes(decoder.lnc, decoder.tp)),
    }


def weight_bytes(decoder: Decoder, taken: Taken = WHOLE) -> int:
    """Of all weights on a rank, with their scales, the embedding and the norms.

    A tied output head in one byte, or of a rank, is a second copy next to the embedding.

    Args:
        decoder: the model.
        taken: layouts; whole factors where a group has none.
    """
    whole, shape = decoder.whole, decoder.shape
    H, head = whole.hidden_size, decoder.head
    total = ITEMSIZE * H * (2 * whole.layers + 1)
    if whole.head_norm:
        total += ITEMSIZE * 2 * whole.head_dim * whole.layers
    if not whole.tied or head.stored or head.r:
        total += ITEMSIZE * H * shape.vocab_size
    for number, part in enumerate(decoder.layers):
        groups = PARTS[part.component]
        each = [layer_bytes(part, group, taken.get((number, group), ())) for group in groups]
        total += part.layers * sum(each)
    return total + head._replace(N=shape.vocab_size).bytes


def everywhere(decoder: Decoder, layout: Layout) -> Taken:
    """Every group in one layout."""
    return {
        (number, group): (layout,)
        for number, part in enumerate(decoder.layers)
        for group in PARTS[part.component]
    }


def layer_bytes(part: Part, group: Group, layouts: Collection[Layout]) -> int:
    """Bytes of the weights that a rank holds of one group of a layer's Linears."""
    linears = [part.own(name) for name in GROUPS[group]]
    return sum([held_bytes(group, layouts or ("one",), each, part.on.tp) for each in linears])


def fits(memory: Mapping[str, int]) -> bool:
    """Whether a rank has room for what it holds."""
    return sum(_held(memory).values()) <= memory["capacity_bytes"]


def check_capacity(decoder: Decoder, memory: Mapping[str, int]) -> None:
    """Raise ValueError where a rank has no room for what it must hold."""
    if fits(memory):
        return
    parts = [f"{name} {size / 2**30:.1f}" for name, size in _held(memory).items()]
    raise ValueError(
        f"{decoder.whole.name} does not fit at tp {decoder.tp}: a rank of {decoder.target} with "
        f"lnc {decoder.lnc} has {memory['capacity_bytes'] / 2**30:.0f} GiB of HBM and needs "
        f"{', '.join(parts)} GiB; use a greater tp, a shorter prompt or a smaller batch"
    )


def _held(memory: Mapping[str, int]) -> dict[str, int]:
    """Bytes of what a rank holds, by its name for people."""
    held = {name: size for name, size in memory.items() if name != "capacity_bytes"}
    return {name.removesuffix("_bytes").replace("_", " "): size for name, size in held.items()}
