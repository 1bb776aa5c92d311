"""What ranks compute and exchange for a block's layers, in every engine. Imports none.

Of a pair `y = high(low(x))` ranks exchange `low(x) = x @ u` `[M, r]`, which is narrower than what a
dense layer's ranks do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from neuronmm_ops.engines.members import Member, Pair
from neuronmm_ops.engines.places import EngineRanks, joined
from neuronmm_ops.ops.gating import ACTIVATIONS
from neuronmm_ops.parallel.sharding import split_gathered


def lows(x: Tensor, members: Sequence[Any], ranks: EngineRanks) -> list[Tensor | None]:
    """Return `x @ u` `[..., r]` of each pair of layers with one input; None for others."""
    pairs = [member for member in members if isinstance(member, Pair)]
    low = [pair.low(x) for pair in pairs]
    if low and pairs[0].place.gathers:  # all at once
        every = ranks.gather(joined(low))
        low = split_gathered(every, [pair.u.shape[1] for pair in pairs], ranks.size)
    products = iter(low)
    return [next(products) if isinstance(member, Pair) else None for member in members]


def columns(
    x: Tensor, members: Sequence[Member], biases: Sequence[Tensor | None], ranks: EngineRanks
) -> list[Tensor]:
    """Return a rank's columns of the results of layers with one input."""
    is_gathered = any(isinstance(member, Pair) and member.place.gathers for member in members)
    inputs = lows(x, members, ranks) if is_gathered else [None] * len(members)
    return [
        member.high(low, bias)
        if isinstance(member, Pair) and low is not None
        else member.product(x, bias)
        for member, low, bias in zip(members, inputs, biases, strict=True)
    ]


def middle(
    x: Tensor,
    gate: Member,
    up: Member,
    down: Member,
    ranks: EngineRanks,
    act: str | Callable[[Tensor], Tensor],
) -> Tensor:
    """Return an MLP up to what its ranks add: `[..., r]`, or `[..., K]` of a dense down.

    In one op where its members have one precision and no biases but down's, and act is an op's.
    """
    is_one = len({member.precision for member in (gate, up, down)}) == 1
    if not is_one or not isinstance(act, str) or gate.bias is not None or up.bias is not None:
        gated, raised = columns(x, (gate, up), (gate.bias, up.bias), ranks)
        inner = (ACTIVATIONS[act] if isinstance(act, str) else act)(gated) * raised
        return first(down, inner)
    x_gate, x_up = (x if low is None else low for low in lows(x, (gate, up), ranks))
    # Dense columns multiply x itself.
    (w_gate, s_gate), (w_up, s_up), (w_down, s_down) = gate.inner, up.inner, down.inner
    both = x_up if x_up is not x_gate else None
    factors = (x_gate, w_gate, w_up, w_down, both, act)
    return gate.run("mlp", *factors, s_gate, s_up, s_down, gate.compute)


def first(member: Member, x: Tensor) -> Tensor:
    """Return what ranks add of a row layer."""
    return member.low(x) if isinstance(member, Pair) else member.product(x, None)


def gated_mlp(
    x: Tensor,
    gate: Member,
    up: Member,
    down: Member,
    ranks: EngineRanks,
    act: str | Callable[[Tensor], Tensor],
) -> Tensor:
    """Return an MLP's result of all tokens: a rank's own of these, or all."""
    members = (gate, up, down)
    if ranks.size == 1 and isinstance(act, str) and can_be_whole(members):
        return whole_mlp(x, *members, act)
    return row(down, ranks.add(middle(x, *members, ranks, act)), ranks, down.bias)


def can_be_whole(members: Sequence[Member]) -> bool:
    """Say whether `whole_mlp` computes an MLP's members, where they are not divided."""
    is_one = len({member.precision for member in members}) == 1
    return is_one and all(isinstance(each, Pair) and each.bias is None for each in members)


def whole_mlp(x: Tensor, gate: Any, up: Any, down: Any, activation: str) -> Tensor:
    """Return an MLP of three pairs, undivided, of one precision and without biases, in one op."""
    factors = [t for pair in (gate, up, down) for t in (pair.u, pair.v)]
    scales = [t for pair in (gate, up, down) for t in (pair.u_scale, pair.v_scale)]
    return gate.run("svd_mlp", x, *factors, activation, *scales, gate.compute)


def row(member: Member, total: Tensor, ranks: EngineRanks, bias: Tensor | None) -> Tensor:
    """Return a row layer's result `[..., N]` of what its ranks added.

    Where each rank has its own tokens, v is gathered, whose size does not grow with them.
    """
    if not isinstance(member, Pair):
        return total if bias is None else total + bias
    if member.place.divide == "one" or ranks.size == 1:
        return member.high(total, bias)
    if ranks.own_tokens:
        # Bytes, for gloo and older NCCL send no fp8.
        sent = member.v if member.v.itemsize > 1 else member.v.view(torch.uint8)
        v = ranks.gather(sent).view(member.v.dtype)[:, : member.width].contiguous()
        scale = member.v_scale
        scale = scale if scale is None else ranks.gather(scale)[: member.width].contiguous()
        return member.run("xw", total, v, bias, scale, member.compute)
    y = ranks.gather(member.high(total, None))[..., : member.width]
    return y if bias is None else y + bias
