"""What ranks cost in parameters, bytes or modelled time, and the ranks that one budget buys."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from neuronmm_ops.compress.allocate import Matrix, Rank, greedy, zero_sum
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.measured import Losses
from neuronmm_ops.compress.methods import METHODS
from neuronmm_ops.compress.mixed import Choice, Cost, Offer, buy, choices_of
from neuronmm_ops.compress.targets import matches
from neuronmm_ops.compress.times import group_of, time_us
from neuronmm_ops.nn.dense_linear import DenseLinear
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.plan.linear import Linear
from neuronmm_ops.rank import pair_bytes
from neuronmm_ops.storages import dtype_name


def ratio_bounds(config: SVDConfig, name: str) -> tuple[float, float]:
    """Return the smallest and largest ratio of a layer; 0 and 1 where the config sets none."""
    for target, ratio in config.ratio_list:
        if matches(target, name):
            return ratio if isinstance(ratio, tuple) else (ratio, ratio)
    return 0.0, 1.0


def shares_budget(config: SVDConfig, name: str) -> bool:
    """Whether a layer's rank is bought of the common budget: it has no ratio of its own."""
    low, high = ratio_bounds(config, name)
    return config.allocation != "uniform" and low < high


def matrix_of(
    config: SVDConfig,
    name: str,
    linear: DenseLinear,
    dtype: torch.dtype,
    spectrum: Tensor,
    weight: float = 1.0,
    scores: Tensor | None = None,
) -> Matrix:
    """Return what the allocation knows of a Linear, its sizes in what the budget counts.

    Args:
        config: budget, storage and layer ratios.
        name: of the Linear.
        linear: the Linear.
        dtype: in which it is stored while it is dense.
        spectrum: as of `Matrix`.
        weight: as of `Matrix`.
        scores: as of `Matrix`.
    """
    K, N, bounds = linear.in_features, linear.out_features, ratio_bounds(config, name)
    if config.budget == "parameters":
        return Matrix(K, N, spectrum, weight, *bounds, scores=scores)
    sizes = dtype.itemsize, config.one_byte
    return Matrix(K, N, spectrum, weight, *bounds, scores, *sizes)


def allocate(
    config: SVDConfig, matrices: Mapping[str, Matrix], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Rank]:
    """Return every matrix's rank, None where it stays dense.

    Args:
        config: allocation, budget and ratio.
        matrices: by name, as `matrix_of` makes them.
        dtypes: of each matrix, dense.

    Raises:
        ValueError: the smallest ranks cost more than the budget.
    """
    if config.allocation == "uniform":
        return {n: config.rank(m.K, m.N, (m.min_ratio, m.max_ratio)) for n, m in matrices.items()}
    cost = _cost(config, matrices, dtypes)
    shared = {name: m for name, m in matrices.items() if shares_budget(config, name)}
    buy = zero_sum if METHODS[config.method].by_scores else greedy
    ranks = buy(
        shared,
        lambda name, rank: cost(name, Choice(rank, config.one_byte)),
        _budget(config, shared, cost),
        config.block,
    )
    return {n: ranks[n] if n in ranks else m.ranks(config.block)[0] for n, m in matrices.items()}


def choose(
    config: SVDConfig,
    matrices: Mapping[str, Matrix],
    dtypes: Mapping[str, torch.dtype],
    losses: Mapping[str, Losses] | None,
) -> dict[str, Choice]:
    """Return every matrix's rank and storage, for storage `auto`.

    A matrix with a ratio of its own becomes what loses least and removes no less than that.

    Args:
        config: budget and ratio.
        matrices: by name, as `matrix_of` makes them.
        dtypes: of each matrix, dense.
        losses: of each matrix, measured; None where costs alone are of interest.

    Raises:
        ValueError: the cheapest choices cost more than the budget.
    """
    cost = _cost(config, matrices, dtypes)

    def offer(name: str, choice: Choice) -> Offer:
        loss = losses[name].of(matrices[name], choice) if losses else 0.0
        return Offer(choice, cost(name, choice), loss)

    offers = {
        name: [offer(name, choice) for choice in choices_of(matrix, config.block)]
        for name, matrix in matrices.items()
    }
    shared = {name: each for name, each in offers.items() if shares_budget(config, name)}
    bought = buy(shared, _budget(config, shared, cost))
    return {
        name: bought[name] if name in bought else min(each, key=lambda o: (o.loss, o.cost)).choice
        for name, each in offers.items()
    }


def dense_costs(
    config: SVDConfig, linears: Mapping[str, DenseLinear], dtypes: Mapping[str, torch.dtype]
) -> dict[str, float]:
    """Return what each Linear costs before anything is done, in the unit of the budget.

    Linears without an entry in `dtypes` are stored as they are held.
    """
    known = {name: dtypes.get(name, linear.weight.dtype) for name, linear in linears.items()}
    matrices = {
        name: matrix_of(config, name, linear, known[name], torch.zeros(0))
        for name, linear in linears.items()
    }
    cost = _cost(config, matrices, known)
    return {name: cost(name, Choice(None, None)) for name in matrices}


def is_within(
    config: SVDConfig,
    other: SVDConfig,
    linears: Mapping[str, DenseLinear],
    dtypes: Mapping[str, torch.dtype],
) -> bool:
    """Say whether what needs no losses to be chosen costs no more than another config's budget.

    Args:
        config: with a budget.
        other: with allocation `uniform`, or with ratio 0 and a storage.
        linears: the targets, by name.
        dtypes: of each, dense.
    """
    matrices = {
        name: matrix_of(config, name, linear, dtypes[name], torch.zeros(0))
        for name, linear in linears.items()
        if shares_budget(config, name)
    }
    cost, spent = _cost(config, matrices, dtypes), 0.0
    for name, matrix in matrices.items():
        bounds = matrix.min_ratio, matrix.max_ratio
        rank = other.rank(matrix.K, matrix.N, bounds) if other.ratio else None
        spent += cost(name, Choice(rank, other.one_byte))
    return spent <= _budget(config, matrices, cost)


def _cost(
    config: SVDConfig, matrices: Mapping[str, Matrix], dtypes: Mapping[str, torch.dtype]
) -> Cost:
    """Return what a matrix, by name, costs as a choice, in the unit of the budget."""

    def time(name: str, choice: Choice) -> float:
        matrix, dtype = matrices[name], name_of(dtypes[name])
        linear = Linear(matrix.K, matrix.N, choice.rank, dtype_name(choice.storage) or "")
        on = config.target or "", config.lnc, config.tp
        group = (group_of(name),) if config.tp > 1 else ()
        return sum(
            weight * time_us(linear, tokens, dtype, *on, *group)
            for tokens, weight in config.token_weights
        )

    def size(name: str, choice: Choice) -> float:
        matrix = matrices[name]
        if config.budget == "parameters":
            return matrix.size(choice.rank)
        return pair_bytes(matrix.K, matrix.N, choice.rank, matrix.itemsize, choice.storage)

    return time if config.budget == "time" else size


def _budget(config: SVDConfig, names: Iterable[str], cost: Cost) -> float:
    """Return what matrices may cost together, a share of what they do before anything is done."""
    return (1 - config.ratio) * sum(cost(name, Choice(None, None)) for name in names)
