"""What ranks cost in parameters, bytes or modelled time, and the ranks that one budget buys."""

from collections.abc import Mapping

from neuronmm_ops.compress.allocate import Matrix, Rank, greedy, zero_sum
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.rank import parameter_count
from neuronmm_ops.compress.targets import matches
from neuronmm_ops.kernels import plan_xuv, plan_xw


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


def allocate(
    config: SVDConfig, matrices: Mapping[str, Matrix], dtypes: Mapping[str, tuple[str, int]]
) -> dict[str, Rank]:
    """Return every matrix's rank, None where it stays dense.

    Args:
        config: allocation, budget and ratio.
        matrices: by name, within the bounds of `ratio_bounds`.
        dtypes: of each matrix the name of its dtype, and bytes per element.

    Raises:
        ValueError: the smallest ranks cost more than the budget.
    """
    if config.allocation == "uniform":
        return {n: config.rank(m.K, m.N, (m.min_ratio, m.max_ratio)) for n, m in matrices.items()}

    def cost(name: str, rank: Rank) -> float:
        matrix, (dtype, itemsize) = matrices[name], dtypes[name]
        if config.budget == "time":
            return time_us(matrix.K, matrix.N, rank, config.tokens, dtype, config.target)
        count = parameter_count(matrix.K, matrix.N, rank)
        return count * itemsize if config.budget == "bytes" else count

    shared = {name: m for name, m in matrices.items() if shares_budget(config, name)}
    budget = (1 - config.ratio) * sum(cost(name, None) for name in shared)
    buy = zero_sum if config.method == "zero-sum" else greedy
    ranks = buy(shared, cost, budget, config.block)
    return {n: ranks[n] if n in ranks else m.ranks(config.block)[0] for n, m in matrices.items()}


def time_us(K: int, N: int, rank: Rank, M: int, dtype: str, target: str | None) -> float:
    """Return the modelled microseconds of `xuv` at a rank, or of the dense `xw` for None."""
    if rank is None:
        return 1e3 * plan_xw(M, K, N, dtype, target).time_ms
    return 1e3 * plan_xuv(M, K, rank, N, dtype, target).time_ms
