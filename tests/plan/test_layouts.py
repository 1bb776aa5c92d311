"""Layouts of low-rank pairs on ranks: shapes, bytes and exchanges, as in `parallel`."""

from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuroncore.collectives.links import RankGroup
from neuroncore.hardware import MACHINES
from neuronmm_ops.parallel import sharding
from neuronmm_ops.plan.exchange import PUBLISHED_US, Collectives
from neuronmm_ops.plan.layouts import BY_ROWS, GROUPS, exchanged, factors, held_bytes
from neuronmm_ops.plan.linear import Linear

SIZES = st.integers(1, 300)
RANKS = st.sampled_from([1, 2, 3, 8])


def kind_of(group):
    return "row" if group in BY_ROWS else "column"


def own_of(group, K, N, r, tp, stored=""):
    """The Linear with a rank's part of what every layout cuts."""
    return (
        Linear(ceil(K / tp), N, r, stored)
        if group in BY_ROWS
        else Linear(K, ceil(N / tp), r, stored)
    )


@given(st.sampled_from(list(GROUPS)), st.sampled_from(["one", "both"]), SIZES, SIZES, SIZES, RANKS)
def test_shards_are_those_of_the_package(group, divide, K, r, N, tp):
    dims = sharding.pair_dims(kind_of(group), divide)
    wanted = tuple(
        tuple(sharding.shard(torch.empty(shape), dims[name], 0, tp, name, padded=True).shape)
        for name, shape in (("u", (K, r)), ("v", (r, N)))
    )
    assert factors(group, divide, own_of(group, K, N, r, tp), tp) == wanted


def test_bytes_on_the_wire():
    """Llama-3.1-8B's down projection, and gate and up, in bfloat16 on 8 ranks, for a token."""

    def sent(group, layout, r, N, tp=8):
        exchange = exchanged(Collectives("trn2", 1, tp), group, layout, 1, r, N)
        return sum(each.wire_bytes for each in exchange)

    K, r, inner = 4096, 2560, 14336
    reduced, gathered = 2 * 7 / 8 * 2, 7 / 8 * 2
    assert sent("down", "dense", 0, K) == sent("down", "sum", r, K) == reduced * K
    assert sent("down", "one", r, K) == reduced * r
    assert sent("down", "both", r, K) == reduced * r + gathered * K
    assert sent("down", "rows", r, K) == gathered * r + reduced * K
    assert sent("gate_up", "both", 2 * r, inner) == gathered * 2 * r
    assert sent("gate_up", "rows", 2 * r, inner) == reduced * 2 * r
    assert sent("gate_up", "one", 2 * r, inner) == sent("gate_up", "dense", 0, inner) == 0
    assert sent("down", "both", r, K, tp=1) == 0
    assert sent("gate_up", "both", 5, 8, tp=2) == 3 * 2  # 5 is padded to 6


@given(SIZES, SIZES, SIZES, RANKS)
def test_rows_are_divided_along_the_contraction(K, r, N, tp):
    column, row = (own_of(group, K, N, r, tp) for group in ("gate_up", "down"))
    assert factors("gate_up", "rows", column, tp) == ((ceil(K / tp), r), (r, ceil(N / tp)))
    assert factors("down", "rows", row, tp) == ((ceil(K / tp), r), (ceil(r / tp), N))


@pytest.mark.parametrize("stored", ["", "int8"])
def test_bytes_held_for_several_layouts(stored):
    own = own_of("gate_up", 512, 1024, 128, 4, stored)

    def held(*layouts):
        return held_bytes("gate_up", layouts, own, 4)

    size, scale = (1, 4) if stored else (2, 0)
    v = size * 128 * 256 + scale * 256
    assert held("both") == size * 512 * 32 + scale * 32 + v
    assert held("rows") == size * 128 * 128 + scale * 128 + v
    assert held("one") == held("sum") == size * 512 * 128 + scale * 128 + v
    # parts by columns and by rows lie beside each other, and a whole factor has both
    assert held("both", "rows") == held("rows", "both") == held("both") + held("rows") - v
    assert held("both", "both") == held("both")
    assert held("both", "one") == held("one", "rows") == held("one")
    assert held_bytes("down", ["dense"], Linear(256, 512, None, stored), 4) == (
        size * 256 * 512 + scale * 512
    )


def test_times_are_those_of_the_links():
    group = RankGroup("", MACHINES["trn2"], 2, tuple(range(8)))
    links = Collectives("trn2", 2, 8)
    (reduced,), (gathered,) = links.all_reduce(3, 100), links.all_gather(3, 100)
    (scattered,) = links.reduce_scatter(3, 100)
    assert reduced.ms == group.reduce_ns(2 * 3 * 100) / 1e6
    assert gathered.ms == scattered.ms == group.gather_ns(2 * 3 * 13) / 1e6
    assert (reduced.kind, gathered.kind) == ("all_reduce", "all_gather")
    assert scattered[:3] == ("reduce_scatter", 3, 100)
    assert Collectives("trn2", 2, 1).all_reduce(3, 100) == ()
    (slower,) = Collectives("trn2", 2, 8, PUBLISHED_US).all_reduce(3, 100)
    assert slower.ms == PUBLISHED_US / 1e3 > reduced.ms
    (large,) = Collectives("trn2", 2, 8, PUBLISHED_US).all_reduce(2048, 8192)
    assert large == links.all_reduce(2048, 8192)[0]
