"""A storage and a rank for every matrix, under one budget: what `storage auto` chooses.

A matrix may stay dense, or become a pair of any rank, in the model's dtype or in any storage. Each
choice has a cost and a loss, that of the truncation and that of the rounding. As in `allocate`, the
lower convex hulls of all matrices are bought in the order of loss avoided per cost; then what is
left of the budget is spent where it avoids most.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from neuronmm_ops.compress.allocate import Matrix, NoAllocationError, Rank, hull_steps
from neuronmm_ops.storages import STORAGES

# Of its largest rank: where a pair's loss is measured. Between them it is interpolated.
PROBED = (0.25, 0.5, 1.0)


class Choice(NamedTuple):
    """What a matrix may become.

    Attributes:
        rank: of the pair; None for dense.
        storage: of `STORAGES`; None for the model's dtype.
    """

    rank: Rank
    storage: str | None


class Offer(NamedTuple):
    """A choice, its cost in the budget's unit, and its loss."""

    choice: Choice
    cost: float
    loss: float


Cost = Callable[[str, Choice], float]


def storages_of(K: int, N: int) -> list[str]:
    """Return the storages that can hold a matrix `[K, N]` and pairs of even rank."""
    fitting: list[str] = []
    for name, storage in STORAGES.items():
        try:
            storage.shapes(K, N)
        except ValueError:
            continue
        fitting.append(name)
    return fitting


def probed_ranks(limit: int, block: int) -> list[int]:
    """Return the ranks at which losses are measured, ascending; none below a block."""
    if limit < block:
        return []
    return sorted({max(block, int(share * limit) // block * block) for share in PROBED})


def choices_of(matrix: Matrix, block: int) -> dict[Choice, float]:
    """Return what a matrix may become within its bounds, and the share of its size that removes.

    Where nothing lies within the bounds, what is nearest to them.
    """
    removed = {
        Choice(rank, storage): 1 - stored.size(rank) / matrix.given
        for storage in (None, *storages_of(matrix.K, matrix.N))
        for stored in [replace(matrix, storage=storage)]
        for rank in stored.smaller_ranks(block)
    }
    low, high = matrix.min_ratio, matrix.max_ratio
    if low == high:  # a ratio of its own: what removes no less
        high = 1.0
    inside = {c: share for c, share in removed.items() if low <= share <= high}
    if inside:
        return inside
    nearest = min(removed, key=lambda c: max(low - removed[c], removed[c] - high))
    return {nearest: removed[nearest]}


def largest_rank(matrix: Matrix, block: int) -> Rank:
    """Return the largest rank to factor a matrix to; None where it can but stay as it is.

    Where it has no rank, but may be rounded, one block: its losses are found with its factors.
    """
    choices = choices_of(matrix, block)
    if set(choices) == {Choice(None, None)}:
        return None
    ranks = [choice.rank for choice in choices if choice.rank is not None]
    return max(ranks, default=min(block, matrix.K, matrix.N))


def buy(offers: Mapping[str, Sequence[Offer]], budget: float) -> dict[str, Choice]:
    """Return the choice of every matrix that a common budget buys.

    Args:
        offers: of each matrix, by name.
        budget: what all may cost.

    Raises:
        ValueError: the cheapest offers cost more than the budget.
    """
    fronts = {name: _front(each) for name, each in offers.items()}
    taken, budget = dict.fromkeys(fronts, 0), budget * (1 + 1e-12)
    left = budget - sum(front[0].cost for front in fronts.values())
    if left < 0:
        raise NoAllocationError(budget, budget - left)
    steps = [
        (slope, name, index)
        for name, front in fronts.items()
        for slope, index in hull_steps([o.cost for o in front], [o.loss for o in front])
    ]
    for _, name, index in sorted(steps, key=lambda step: -step[0]):
        price = fronts[name][index].cost - fronts[name][taken[name]].cost
        if price > left:
            break
        taken[name], left = index, left - price
    _spend(fronts, taken, left)
    return {name: front[taken[name]].choice for name, front in fronts.items()}


def _spend(fronts: Mapping[str, Sequence[Offer]], taken: dict[str, int], left: float) -> None:
    """Take, as long as one fits, the dearer offer that avoids most loss."""
    while True:
        fitting = [
            (now.loss - offer.loss, name, index, offer.cost - now.cost)
            for name, front in fronts.items()
            for now in [front[taken[name]]]
            for index, offer in enumerate(front[taken[name] + 1 :], start=taken[name] + 1)
            if offer.cost - now.cost <= left
        ]
        if not fitting:
            return
        _, name, index, price = max(fitting, key=lambda each: each[0])
        taken[name], left = index, left - price


def _front(offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers that lose less than all that cost no more, by ascending cost."""
    front: list[Offer] = []
    for offer in sorted(offers, key=lambda each: (each.cost, each.loss)):
        if not front or offer.loss < front[-1].loss:
            front.append(offer)
    return front
