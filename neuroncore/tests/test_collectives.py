"""Collectives: who gets what, on one core and on two, and what hops and transfers cost."""

import numpy as np
import pytest
from draws import either, few, pick, seeds
from hypothesis import given
from hypothesis import strategies as st
from samples import as_stored, bf16, wide
from simulated_ranks import TWO, collective, copied, inputs, lists, output, run

import neuroncore as nc
from neuroncore import collectives as ncc
from neuroncore import language as nl
from neuroncore.collectives.links import HOP_NS, RankGroup

REDUCE = {"add": np.add, "maximum": np.maximum, "minimum": np.minimum}
cases = {
    "size": pick([1, 2, 4]),
    "count": pick([1, 2]),
    "lnc": pick([1, 2]),
    "dtype": pick(["float32", "bfloat16", "int32"]),
    "coalesced": either,
    "seed": seeds,
}


@few
@given(
    op=pick(sorted(REDUCE)), memory=pick([nl.sbuf, nl.shared_hbm]),
    target=pick(["trn1", "trn2", "trn3"]), **cases,
)  # fmt: skip
def test_all_reduce(op, memory, target, size, count, lnc, dtype, coalesced, seed):
    shapes = [(4, 6), (2, 3)] if coalesced and memory is not nl.sbuf else [(4, 6)]
    ranks, groups = size * count, lists(size * count, size)
    xs = inputs(ranks, *shapes, dtype=dtype, seed=seed)
    group = ncc.ReplicaGroup(groups)
    kernel = collective(lambda s, d: ncc.all_reduce(s, d, group, getattr(nl, op)), shapes, memory)
    done = run(kernel[lnc], xs, target).outputs
    for rank in range(ranks):
        for t in range(len(shapes)):
            parts = [wide(xs[r][t]) for r in groups[rank // size]]
            expected = as_stored(REDUCE[op].reduce(parts), dtype)
            np.testing.assert_array_equal(done[rank][t], expected)


@few
@given(dim=pick([0, 1]), **cases)
def test_all_gather(dim, size, count, lnc, dtype, coalesced, seed):
    """Dimension 1 and one tensor in SBUF, dimension 0 and maybe two in HBM."""
    memory = nl.sbuf if dim else nl.shared_hbm
    parts = [(4, 6), (2, 3)] if coalesced and not dim else [(4, 6)]
    shapes = [(p * size, f) if dim == 0 else (p, f * size) for p, f in parts]
    ranks, groups = size * count, lists(size * count, size)
    xs = inputs(ranks, *parts, dtype=dtype, seed=seed)
    group = ncc.ReplicaGroup(groups)
    kernel = collective(
        lambda s, d: ncc.all_gather(s, d, group, collective_dim=dim), shapes, memory
    )
    done = run(kernel[lnc], xs).outputs
    for rank in range(ranks):
        for t in range(len(parts)):
            expected = np.concatenate([xs[r][t] for r in groups[rank // size]], dim)
            np.testing.assert_array_equal(done[rank][t], expected)


@few
@given(op=pick(sorted(REDUCE)), **cases)
def test_reduce_scatter_and_all_to_all(op, size, count, lnc, dtype, coalesced, seed):
    wholes = [(4 * size, 6), (2 * size, 3)] if coalesced else [(4 * size, 6)]
    ranks, groups = size * count, lists(size * count, size)
    xs = inputs(ranks, *wholes, dtype=dtype, seed=seed)
    group = ncc.ReplicaGroup(groups)
    scatter = collective(
        lambda s, d: ncc.reduce_scatter(s, d, group, 0, getattr(nl, op)),
        [(p // size, f) for p, f in wholes],
    )
    scattered = run(scatter[lnc], xs).outputs
    swapped = run(collective(lambda s, d: ncc.all_to_all(s, d, group, 0), wholes)[lnc], xs).outputs
    for rank in range(ranks):
        me, members = rank % size, groups[rank // size]
        for t in range(len(wholes)):
            total = as_stored(REDUCE[op].reduce([wide(xs[r][t]) for r in members]), dtype)
            np.testing.assert_array_equal(scattered[rank][t], np.split(total, size)[me])
            expected = np.concatenate([np.split(xs[r][t], size)[me] for r in members])
            np.testing.assert_array_equal(swapped[rank][t], expected)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    group = ncc.ReplicaGroup([[0, 1, 2, 3]])
    xs = inputs(4, (8, 4))

    def both(srcs, dsts):
        part = nl.ndarray((2, 4), nl.float32, buffer=nl.shared_hbm)
        ncc.reduce_scatter(srcs, [part], group, 0, nl.add)
        ncc.all_gather([part], dsts, group, 0)

    whole = lambda s, d: ncc.all_reduce(s, d, group, nl.add)  # noqa: E731
    two, one = (run(collective(call, [(8, 4)]), xs) for call in (both, whole))
    np.testing.assert_array_equal(np.array(two.outputs), np.array(one.outputs))
    assert one.profile.time_ms < two.profile.time_ms


@pytest.mark.parametrize("lnc", [1, 2])
def test_a_collective_may_write_what_it_reads(lnc):
    xs = inputs(2, (4, 6))

    @nc.jit
    def in_place(xs):
        total = copied(xs[0])
        ncc.all_reduce([total], [total], TWO, nl.add)
        return output(total)

    for y in run(in_place[lnc], xs).outputs:
        np.testing.assert_array_equal(y, xs[0][0] + xs[1][0])


def test_sums_round_once():
    xs = [[np.full((2, 2), v, bf16)] for v in (256, 1, 1, 1)]  # each partial sum rounds to 256
    group = ncc.ReplicaGroup([[0, 1, 2, 3]])
    kernel = collective(lambda s, d: ncc.all_reduce(s, d, group, nl.add), [(2, 2)])
    assert (run(kernel, xs).outputs[0][0] == bf16(260)).all()


MB = 1e6


def group(ranks, target="trn2", lnc=2):
    return RankGroup("all_gather", nc.MACHINES[target], lnc, tuple(ranks))


def test_ranks_lie_on_chips_in_order():
    whole = group(range(64))
    assert (whole.chip_ranks, whole.chips, whole.fullest, whole.even) == (4, 16, 4, True)
    assert group(range(64), lnc=1).chips == 8
    one_each = group(range(0, 64, 4))
    assert (one_each.chips, one_each.fullest) == (16, 1)
    uneven = group([0, 1, 4])
    assert (uneven.chips, uneven.fullest, uneven.even) == (2, 2, False)


@pytest.mark.parametrize(
    ("ranks", "size", "steps"),
    [
        (range(4), 1.0, 1),  # one chip: all connected
        (range(4), 100 * MB, 1),
        (range(64), 0.5 * MB, 2),  # mesh: between chips, then within
        (range(0, 64, 4), 0.5 * MB, 1),  # one rank a chip
        (range(64), 10 * MB, 5),  # RDH: log2(16), then within
        (range(0, 64, 4), 10 * MB, 4),
        (range(12), 10 * MB, 6),  # 3 chips are no power of two: KangaRing, 12 / 2
        (range(64), 100 * MB, 32),
        (range(0, 64, 4), 100 * MB, 15),  # Ring: 16 - 1
        ([0, 1, 4], 100 * MB, 2),
        ([7], 1.0, 0),
    ],
)
def test_hops_are_those_of_the_documented_algorithm(ranks, size, steps):
    assert group(ranks).steps(size) == steps


def test_within_a_chip_dma_binds():
    dma = 2 * nc.MACHINES["trn2"].dma_peak_gbps
    chunk = 8 * MB
    four = group(range(4))
    assert four.gather_ns(chunk) == pytest.approx(HOP_NS + 3 * chunk / dma)
    assert four.exchange_ns(4 * chunk) == pytest.approx(HOP_NS + 3 * chunk / dma)
    assert four.shift_ns(chunk) == pytest.approx(HOP_NS + chunk / dma)
    # a large sum is scattered and gathered, a small one sent whole to all
    assert four.reduce_ns(4 * chunk) == pytest.approx(2 * (HOP_NS + 3 * chunk / dma))
    assert four.reduce_ns(1e3) == pytest.approx(HOP_NS + 3e3 / dma)


def test_between_chips_links_bind():
    chunk, into_chip = 8 * MB, nc.MACHINES["trn2"].links.chip_gbps / 2
    node = group(range(64))
    # 60 chunks come into a chip from the others, 63 into the memory of a rank, which is quicker
    assert node.gather_ns(chunk) == pytest.approx(32 * HOP_NS + 60 * chunk / into_chip)
    pairs = group([0, 4])
    assert pairs.shift_ns(chunk) == pytest.approx(HOP_NS + chunk / (into_chip / 4))
    assert pairs.shift_ns(2 * chunk, channels=2) == pytest.approx(HOP_NS + chunk / (into_chip / 4))
    # all four ranks of a chip send at once
    full = group(range(8))
    sent = 4 * 4 * chunk / 8
    assert full.exchange_ns(chunk) == pytest.approx(2 * HOP_NS + sent / into_chip)


def test_a_rank_alone_takes_no_time():
    alone = group([3])
    assert alone.reduce_ns(MB) == alone.exchange_ns(MB) == alone.gather_ns(MB) == 0


@given(
    target=pick(["trn1", "trn2", "trn3"]), ranks=st.sets(st.integers(0, 15), min_size=2),
    size=st.floats(1.0, 1e9),
)  # fmt: skip
def test_more_bytes_take_longer_and_no_collective_beats_its_parts(target, ranks, size):
    g = group(sorted(ranks), target, lnc=1)
    moved = g.gather_ns(size) - g.steps(size * g.size) * HOP_NS
    assert g.gather_ns(2 * size) - g.steps(2 * size * g.size) * HOP_NS == pytest.approx(2 * moved)
    assert g.reduce_ns(size) <= 2 * g.gather_ns(size / g.size) * 1.000001
    assert g.reduce_ns(size) >= HOP_NS
    assert g.exchange_ns(size) >= HOP_NS
