"""One budget for all matrices: optimal, monotone, met within one block."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuronmm_ops import SVDConfig
from neuronmm_ops.compress.allocate import Matrix, greedy, zero_sum
from neuronmm_ops.compress.budget import allocate
from neuronmm_ops.compress.times import time_us
from neuronmm_ops.plan.linear import Linear
from neuronmm_ops.rank import parameter_count

BLOCK = 8


def spectrum(size: int, seed: int, decay: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(size, generator=generator).double() + 0.1
    return (noise * torch.arange(1, size + 1).double() ** -decay).sort(descending=True).values


sizes = st.sampled_from([24, 32, 40, 64])
problems = st.lists(
    st.builds(
        lambda K, N, seed, decay, weight: Matrix(
            K,
            N,
            spectrum(min(K, N), seed, decay),
            weight,
            scores=torch.randn(min(K, N), generator=torch.Generator().manual_seed(seed)),
        ),
        sizes,
        sizes,
        st.integers(0, 99),
        st.floats(0, 3),
        st.floats(0.01, 100),
    ),
    min_size=1,
    max_size=4,
).map(lambda matrices: {f"layer{i}": matrix for i, matrix in enumerate(matrices)})


def parameters_of(matrices):
    return lambda name, rank: parameter_count(matrices[name].K, matrices[name].N, rank)


def ranks_at(keep, matrices, buy=greedy):
    """The ranks of matrices of 64 x 64 that a share of their parameters buys."""
    budget = keep * len(matrices) * 64 * 64
    return buy(matrices, parameters_of(matrices), budget, BLOCK)


def total(matrices, ranks, cost):
    return sum(cost(name, ranks[name]) for name in matrices)


@pytest.mark.parametrize("buy", [greedy, zero_sum])
@given(problems, st.floats(0.05, 0.8))
@settings(max_examples=60)
def test_the_budget_is_met_within_one_block(buy, matrices, ratio):
    cost = parameters_of(matrices)
    dense = sum(cost(name, None) for name in matrices)
    budget = (1 - ratio) * dense
    least = sum(cost(name, m.ranks(BLOCK)[0]) for name, m in matrices.items())
    if least > budget:
        with pytest.raises(ValueError, match="no allocation meets the budget of"):
            buy(matrices, cost, budget, BLOCK)
        return
    ranks = buy(matrices, cost, budget, BLOCK)
    spent = total(matrices, ranks, cost)
    assert spent <= budget * (1 + 1e-9)
    steps = []
    for name, matrix in matrices.items():
        choices = matrix.ranks(BLOCK)
        position = choices.index(ranks[name])
        if position + 1 < len(choices):
            steps.append(cost(name, choices[position + 1]) - cost(name, choices[position]))
    assert not steps or budget - spent < max(BLOCK * (m.K + m.N) for m in matrices.values())


@given(problems, st.floats(0.05, 0.8), st.floats(0.05, 0.8))
@settings(max_examples=60)
def test_a_smaller_ratio_never_lowers_a_rank(matrices, a, b):
    cost = parameters_of(matrices)
    dense = sum(cost(name, None) for name in matrices)
    try:
        few, many = (greedy(matrices, cost, (1 - r) * dense, BLOCK) for r in (max(a, b), min(a, b)))
    except ValueError:
        return
    for name in matrices:
        assert many[name] is None or (few[name] is not None and few[name] <= many[name])


def is_corner(matrix, cost, name, rank):
    """Say whether no chord between a smaller and a larger option runs below this one."""
    options = [(cost(name, r), matrix.loss(r)) for r in matrix.ranks(BLOCK)]
    x, y = cost(name, rank), matrix.loss(rank)
    return all(
        y <= low + (high - low) * (x - left) / (right - left) + 1e-12
        for (left, low), (right, high) in product(options, options)
        if left < x < right
    )


@given(problems, st.floats(0.3, 0.95))
@settings(max_examples=60, deadline=None)
def test_no_other_ranks_of_that_cost_lose_less(matrices, keep):
    """Wherever the greedy order stops at corners of the hulls, by trying all ranks."""
    matrices = dict(list(matrices.items())[:3])
    cost = parameters_of(matrices)
    try:
        found = greedy(matrices, cost, keep * sum(cost(n, None) for n in matrices), BLOCK)
    except ValueError:
        return
    if not all(is_corner(m, cost, n, found[n]) for n, m in matrices.items()):
        return
    spent = total(matrices, found, cost)

    def loss(ranks):
        return sum(m.loss(ranks[name]) for name, m in matrices.items())

    choices = product(*(matrix.ranks(BLOCK) for matrix in matrices.values()))
    every = (dict(zip(matrices, ranks, strict=True)) for ranks in choices)
    within = [ranks for ranks in every if total(matrices, ranks, cost) <= spent]
    assert loss(found) == pytest.approx(min(map(loss, within)), rel=1e-9, abs=1e-9)


def test_ranks_go_where_they_avoid_most_loss():
    steep = Matrix(64, 64, spectrum(64, 0, 0.0), weight=10.0)
    flat = Matrix(64, 64, spectrum(64, 0, 0.0), weight=0.1)
    ranks = ranks_at(0.75, {"steep": steep, "flat": flat})
    assert ranks["flat"] is not None
    assert ranks["steep"] is None or ranks["steep"] > ranks["flat"]


def test_dense_is_bought_as_one_more_step():
    # A flat spectrum: to stay dense avoids all loss for little more than the last rank costs.
    flat, few = Matrix(64, 64, torch.ones(64).double()), Matrix(64, 64, spectrum(64, 0, 6.0))
    assert ranks_at(0.75, {"flat": flat, "few": few}) == {"flat": None, "few": 16}


def test_bounds_hold():
    low = Matrix(64, 64, spectrum(64, 1, 0.0), 100.0, min_ratio=0.5, max_ratio=0.9)
    high = Matrix(64, 64, spectrum(64, 2, 0.0), 0.01, min_ratio=0.0, max_ratio=0.3)
    ranks = ranks_at(0.65, {"low": low, "high": high})
    removed = {n: 1 - parameter_count(64, 64, r) / 64**2 for n, r in ranks.items()}
    assert removed["low"] >= 0.5
    assert removed["high"] <= 0.3


def test_zero_sum_keeps_the_sum_of_changes_near_zero():
    scores = {"a": [1.0] * 32 + [0.5] * 32, "b": [-1.0] * 32 + [-0.4] * 32}
    matrices = {
        name: Matrix(64, 64, torch.ones(64).double(), scores=torch.tensor(values))
        for name, values in scores.items()
    }
    ranks = ranks_at(0.6, matrices, zero_sum)
    dropped = [
        float(matrices[n].scores[r:].sum()) if r is not None else 0.0 for n, r in ranks.items()
    ]
    assert dropped[0] > 0 > dropped[1]
    assert abs(sum(dropped)) < 16 * max(map(abs, dropped)) / 10


def test_a_rank_that_is_dearer_than_dense_is_not_bought():
    """In time: launches and exchanges of a pair. Dense cost what the dearest pair does."""
    matrices = {name: Matrix(64, 64, torch.ones(64).double()) for name in "ab"}
    costs = {8: 4.0, 16: 3.0, 24: 7.0, None: 6.0}
    found = greedy(matrices, lambda _, rank: costs[rank], 9.0, 8)
    assert sorted(found.values(), key=str) == [16, None]
    with pytest.raises(ValueError, match=r"budget of 5: the cheapest ranks cost 6; .* smaller tp"):
        greedy(matrices, lambda _, rank: costs[rank], 5.0, 8)


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
@pytest.mark.slow
def test_a_time_budget_is_met_in_modelled_time(target):
    config = SVDConfig(ratio=0.3, budget="time", target=target, method="swift")
    matrices = {
        "gate": Matrix(1024, 2048, spectrum(1024, 0, 1.0)),
        "down": Matrix(2048, 1024, spectrum(1024, 1, 0.5)),
    }
    ranks = allocate(config, matrices, dict.fromkeys(matrices, torch.bfloat16))
    spent, dense = (
        sum(time_us(Linear(m.K, m.N, r[n]), 1, "bfloat16", target) for n, m in matrices.items())
        for r in (ranks, dict.fromkeys(matrices))
    )
    assert 0.6 * dense < spent <= 0.7 * dense


def test_a_byte_budget_counts_what_elements_take():
    config = SVDConfig(ratio=0.5, block=8, budget="bytes", method="swift")
    dtypes = {"narrow": torch.bfloat16, "wide": torch.float32}
    matrices = {
        name: Matrix(64, 64, spectrum(64, 0, 0.0), itemsize=dtype.itemsize)
        for name, dtype in dtypes.items()
    }
    ranks = allocate(config, matrices, dtypes)
    counts = {n: parameter_count(64, 64, r) for n, r in ranks.items()}
    assert 2 * counts["narrow"] + 4 * counts["wide"] <= 3 * 64 * 64
    assert counts["narrow"] > counts["wide"]
