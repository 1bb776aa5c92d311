"""How the ranks of tensor parallel divide low-rank pairs: shapes and bytes of a rank's factors.

A pair x [M, K] u [K, r] v [r, N] is cut by columns (each rank makes a part of N) or by rows (each
has a part of K). In every layout the factor at that side is divided; they differ in the other one,
and in what ranks exchange:

    sum     the other factor whole; by rows all-reduce of [M, N] after v, so u and v are one launch
    one     the other factor whole; by rows all-reduce of [M, r] between u and v
    both    both factors: all-gather of [M, r] after u[:, r_i], all-gather of [M, N] after v[:, N_i]
    rows    both factors by their rows: all-reduce of [M, r] after u[K_i, :], and for a pair by rows
            reduce-scatter of [M, r] and all-reduce of [M, N] after v[r_i, :]
"""

from __future__ import annotations

from collections.abc import Collection
from math import ceil
from typing import Literal, get_args

from neuronmm_ops.plan.exchange import Collective, Collectives
from neuronmm_ops.plan.linear import ITEMSIZE, MLP, QKV, Linear
from neuronmm_ops.storages import matrix_bytes

Layout = Literal["dense", "sum", "one", "both", "rows"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
DIVIDED: tuple[Layout, ...] = ("dense", "both", "rows")
"""Layouts in which no rank holds a whole factor."""
Group = Literal["qkv", "o", "gate_up", "down"]
GROUPS: dict[Group, tuple[str, ...]] = {
    "qkv": QKV,
    "o": ("o_proj",),
    "gate_up": MLP[:2],
    "down": MLP[2:],
}
"""The Linears that share a layout: their first factors share one launch and one exchange."""
BY_ROWS: tuple[Group, ...] = ("o", "down")
Shape = tuple[int, int]


def factors(group: Group, layout: Layout, own: Linear, tp: int) -> tuple[Shape, ...]:
    """Shapes of the weights of a Linear that a rank holds.

    Args:
        group: that it belongs to.
        layout: of the group.
        own: the Linear with the rank's part of K or N, at the side that every layout cuts.
        tp: ranks; parts of what they do not divide are padded.
    """
    K, N, r, _ = own
    if r is None:
        return ((K, N),)
    if group in BY_ROWS:
        second = {"both": (r, ceil(N / tp)), "rows": (ceil(r / tp), N)}
        return (K, r), second.get(layout, (r, N))
    first = {"both": (K, ceil(r / tp)), "rows": (ceil(K / tp), r)}
    return first.get(layout, (K, r)), (r, N)


def exchanged(
    links: Collectives, group: Group, layout: Layout, M: int, r: int, N: int
) -> tuple[Collective, ...]:
    """What ranks exchange for a group of Linears.

    Args:
        links: of the ranks.
        group: the Linears.
        layout: of their weights.
        M: tokens.
        r: the rank; the sum of ranks of Linears that share an exchange.
        N: columns of the result.
    """
    if group in BY_ROWS:
        after = links.all_reduce(M, N)
        return {
            "one": links.all_reduce(M, r),
            "both": links.all_reduce(M, r) + links.all_gather(M, N),
            "rows": links.reduce_scatter(M, r) + after,
        }.get(layout, after)
    return {"both": links.all_gather(M, r), "rows": links.all_reduce(M, r)}.get(layout, ())


def held_bytes(group: Group, layouts: Collection[Layout], own: Linear, tp: int) -> int:
    """Bytes of a Linear's weights and scales on a rank that computes in all of these layouts.

    A whole factor has every part in it; parts by columns and by rows are both held.
    """
    whole: list[Layout] = [layout for layout in layouts if layout not in DIVIDED]
    each = [factors(group, layout, own, tp) for layout in whole[:1] or layouts]
    shapes = [shape for same in zip(*each, strict=True) for shape in set(same)]
    return sum([matrix_bytes(shape, ITEMSIZE, own.stored) for shape in shapes])
