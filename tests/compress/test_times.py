"""Modelled times of one Linear on ranks: their parts, and what they exchange."""

import pytest
import torch

from neuronmm_ops import SVDConfig
from neuronmm_ops.compress.allocate import Matrix
from neuronmm_ops.compress.budget import allocate
from neuronmm_ops.compress.times import group_of, time_us
from neuronmm_ops.plan import plan_xuv, plan_xw
from neuronmm_ops.plan.exchange import Collectives
from neuronmm_ops.plan.linear import Linear
from neuronmm_ops.rank import parameter_count

ON = (1, "bfloat16", "trn2")
K, N, TP = 1024, 2048, 4


def product_us(*sizes):
    plan = plan_xw if len(sizes) == 2 else plan_xuv
    return 1e3 * plan(1, *sizes, *ON[1:]).time_ms


def sent_us(*collectives):
    return 1e3 * sum(each.ms for each in collectives)


def test_one_rank_has_the_whole_matrix():
    for group in ("gate_up", "down"):
        assert time_us(Linear(K, N), *ON, group=group) == product_us(K, N)
        assert time_us(Linear(K, N, 256), *ON, group=group) == product_us(K, 256, N)


def test_a_rank_has_its_part_of_a_dense_matrix():
    added = Collectives("trn2", 1, TP).all_reduce(1, N)
    assert time_us(Linear(K, N), *ON, tp=TP, group="qkv") == product_us(K, N // TP)
    down = product_us(K // TP, N) + sent_us(*added)
    assert time_us(Linear(K, N), *ON, tp=TP, group="down") == pytest.approx(down)


def test_a_pair_is_divided_as_is_quickest():
    links, r = Collectives("trn2", 1, TP), 256
    first, second = product_us(K // TP, r), product_us(r // TP, N)
    by_rows = {
        "sum": product_us(K // TP, r, N) + sent_us(*links.all_reduce(1, N)),
        "both": first
        + product_us(r, N // TP)
        + sent_us(*links.all_reduce(1, r), *links.all_gather(1, N)),
        "rows": first + second + sent_us(*links.reduce_scatter(1, r), *links.all_reduce(1, N)),
    }
    found = time_us(Linear(K, N, r), *ON, tp=TP, group="o")
    assert found == pytest.approx(min(by_rows.values()))
    gathered = sent_us(*links.all_gather(1, 2 * r)) / 2  # once for gate and up
    both = product_us(K, r // TP) + product_us(r, N // TP) + gathered
    alone = product_us(K, r, N // TP)
    assert time_us(Linear(K, N, r), *ON, tp=TP) == pytest.approx(min(both, alone))


def test_int4_has_even_parts():
    for r in (128, 130, 384):
        assert time_us(Linear(K, N, r, "int4"), *ON, tp=24) > 0


def test_a_budget_of_time_counts_what_ranks_exchange():
    sizes = {"mlp.gate_proj": (2048, 4096), "mlp.down_proj": (4096, 2048)}
    matrices = {n: Matrix(*size, torch.linspace(9, 1, 2048) ** 2) for n, size in sizes.items()}
    dtypes = dict.fromkeys(sizes, torch.bfloat16)
    ranks, left = {}, {}
    for tp in (1, 4):
        config = SVDConfig(ratio=0.1, budget="time", target="trn2", tp=tp)
        ranks[tp] = allocate(config, matrices, dtypes)
        spent, dense = (
            sum(time_us(Linear(*sizes[n], r[n]), *ON, tp=tp, group=group_of(n)) for n in sizes)
            for r in (ranks[tp], dict.fromkeys(sizes))
        )
        assert spent <= 0.9 * dense
        left[tp] = sum(parameter_count(*sizes[n], r) for n, r in ranks[tp].items())
    assert left[4] < left[1]


def test_names_that_say_nothing_of_ranks_are_refused():
    assert group_of("model.layers.0.self_attn.o_proj") == "o"
    with pytest.raises(ValueError, match=r"got h\.0\.mlp\.c_fc: use tp 1"):
        group_of("h.0.mlp.c_fc")
