"""What collectives cost: hops and transfers, by the documented rates and algorithms."""

import pytest
from draws import pick
from hypothesis import given
from hypothesis import strategies as st

import neuroncore as nc
from neuroncore.collectives.links import HOP_NS, RankGroup

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
