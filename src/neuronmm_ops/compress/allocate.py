"""Ranks for all matrices under one budget.

Every matrix offers its ranks, whole blocks, and to stay dense, each with a cost and a loss. What
lies on the lower convex hull of its (cost, loss) curve is bought in the order of loss avoided per
cost, over all matrices at once (marginal analysis, Fox 1966: optimal for every budget that it
meets exactly). A smaller ratio only buys more, so it never lowers a rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from neuronmm_ops.rank import pair_bytes

Rank = int | None  # None: dense
Cost = Callable[[str, Rank], float]


@dataclass(frozen=True)
class Matrix:
    """What the allocation knows of one matrix `[K, N]`.

    Attributes:
        K: input features.
        N: output features.
        spectrum: `[R]`, the loss avoided by each rank; the sum is the loss of rank 0.
        weight: by which its losses are multiplied to be comparable with other matrices'.
        min_ratio: at least this fraction of its size is removed.
        max_ratio: at most this fraction is.
        scores: `[R]`, signed first-order changes of the model's loss, for `zero_sum`.
        itemsize: bytes of a number of the dense matrix, 1 to count parameters.
        storage: `fp8` or `int8`, of what it becomes, dense or a pair; None for `itemsize`.
    """

    K: int
    N: int
    spectrum: Tensor
    weight: float = 1.0
    min_ratio: float = 0.0
    max_ratio: float = 1.0
    scores: Tensor | None = None
    itemsize: int = 1
    storage: str | None = None

    @property
    def given(self) -> int:
        """What it takes before anything is done, dense and without a storage."""
        return self.K * self.N * self.itemsize

    def size(self, rank: Rank) -> int:
        """Return what a rank takes, in parameters or bytes as `itemsize` and `storage` say."""
        return pair_bytes(self.K, self.N, rank, self.itemsize, self.storage)

    def ranks(self, block: int) -> list[Rank]:
        """Return what it may become, ascending: multiples of `block`, then None for dense.

        Where no multiple lies within the bounds, the nearest to them does.
        """
        every = self.smaller_ranks(block)
        removed = {rank: 1 - self.size(rank) / self.given for rank in every}
        inside = [r for r in every if self.min_ratio <= removed[r] <= self.max_ratio]
        middle = (self.min_ratio + self.max_ratio) / 2
        return inside or [min(every, key=lambda rank: abs(removed[rank] - middle))]

    def smaller_ranks(self, block: int) -> list[Rank]:
        """Return the multiples of `block` that take less than the dense matrix, then None."""
        dense = self.size(None)
        ranks = range(block, min(self.K, self.N) + 1, block)
        return [*(rank for rank in ranks if self.size(rank) < dense), None]

    def loss(self, rank: Rank) -> float:
        """Return the weighted loss of a rank."""
        return 0.0 if rank is None else self.weight * float(self.spectrum[rank:].sum())


def greedy(
    matrices: Mapping[str, Matrix], cost: Cost, budget: float, block: int
) -> dict[str, Rank]:
    """Buy blocks of ranks in the order of loss avoided per cost until the budget is spent.

    The first block that does not fit ends it: what is left is less than that block's cost.

    Args:
        matrices: by name.
        cost: of a matrix, by name, at a rank; in the budget's unit.
        budget: what all may cost.
        block: ranks are multiples of it.

    Raises:
        ValueError: the cheapest ranks cost more than the budget.
    """
    options, costs = _offers(matrices, cost, budget, block)
    ranks = {name: choices[0] for name, choices in options.items()}
    spent = sum(c[0] for c in costs.values())
    steps = [
        (slope, name, index)
        for name, matrix in matrices.items()
        for slope, index in hull_steps(costs[name], [matrix.loss(rank) for rank in options[name]])
    ]
    # Stable: of equal slopes the model's first layer, and a matrix's smaller rank, come first.
    for _, name, index in sorted(steps, key=lambda step: -step[0]):
        price = costs[name][index] - costs[name][index - 1]
        if spent + price > budget * (1 + 1e-12):
            break
        ranks[name] = options[name][index]
        spent += price
    return ranks


def zero_sum(
    matrices: Mapping[str, Matrix], cost: Cost, budget: float, block: int
) -> dict[str, Rank]:
    """Drop blocks such that their first-order changes of the loss stay near zero in sum (ZS-SVD).

    Every matrix starts dense and offers its last block. While the sum is at most zero the smallest
    change that is not negative is taken, else the negative one nearest to zero.

    Args:
        matrices: by name, with scores.
        cost: of a matrix, by name, at a rank; in the budget's unit.
        budget: what all may cost.
        block: ranks are multiples of it.

    Raises:
        ValueError: the cheapest ranks cost more than the budget.
    """
    options, costs = _offers(matrices, cost, budget, block)
    position = {name: len(choices) - 1 for name, choices in options.items()}
    spent = sum(c[-1] for c in costs.values())
    changes = {name: _change(matrices[name], options[name], position[name]) for name in matrices}
    total = 0.0
    while spent > budget:
        wanted = {n: d for n, d in changes.items() if d is not None and (d >= 0) == (total <= 0)}
        known = wanted or {n: d for n, d in changes.items() if d is not None}
        name = min(known, key=lambda n: abs(known[n]))
        total += known[name]
        spent -= costs[name][position[name]] - costs[name][position[name] - 1]
        position[name] -= 1
        changes[name] = _change(matrices[name], options[name], position[name])
    return {name: options[name][position[name]] for name in matrices}


def _change(matrix: Matrix, options: list[Rank], position: int) -> float | None:
    """The change of the loss where the matrix takes the next smaller rank; None at its last."""
    if position == 0:
        return None
    scores, low, high = matrix.scores, options[position - 1], options[position]
    assert scores is not None
    return float(scores[low:high].sum())


def _offers(
    matrices: Mapping[str, Matrix], cost: Cost, budget: float, block: int
) -> tuple[dict[str, list[Rank]], dict[str, list[float]]]:
    """Return every matrix's options and their costs; raise where the cheapest exceed the budget.

    A rank is none that costs, in time, no less than a larger one or than the dense matrix.
    """
    options: dict[str, list[Rank]] = {}
    costs: dict[str, list[float]] = {}
    for name, matrix in matrices.items():
        kept: list[tuple[Rank, float]] = []
        for rank in reversed(matrix.ranks(block)):
            price = cost(name, rank)
            if not kept or price < kept[-1][1]:
                kept.append((rank, price))
        options[name] = [rank for rank, _ in reversed(kept)]
        costs[name] = [price for _, price in reversed(kept)]
    least = sum(c[0] for c in costs.values())
    if least > budget:
        raise NoAllocationError(budget, least)
    return options, costs


class NoAllocationError(ValueError):
    """A budget below the `least` that matrices can cost."""

    def __init__(self, budget: float, least: float) -> None:
        super().__init__(
            f"no allocation meets the budget of {budget:.6g}: the cheapest ranks cost {least:.6g}; "
            "use a smaller ratio, a smaller block or, of time, a smaller tp"
        )


def hull_steps(costs: list[float], losses: list[float]) -> list[tuple[float, int]]:
    """Return (loss avoided per cost, index of the option) of every option but the first.

    Between two corners of the lower convex hull each has the slope of the hull.
    """
    hull = [0]
    for index in range(1, len(costs)):
        while len(hull) > 1 and _slope(costs, losses, hull[-2], hull[-1]) <= _slope(
            costs, losses, hull[-1], index
        ):
            hull.pop()
        hull.append(index)
    return [
        (_slope(costs, losses, start, end), index)
        for start, end in pairwise(hull)
        for index in range(start + 1, end + 1)
    ]


def _slope(costs: list[float], losses: list[float], start: int, end: int) -> float:
    price = costs[end] - costs[start]
    return (losses[start] - losses[end]) / price if price > 0 else float("inf")
