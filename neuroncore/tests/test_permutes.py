"""Permutes and rings of ranks, and collectives whose sizes are data."""

import numpy as np
import pytest
from instruction_runs import full, refused, zeros
from samples import values
from simulated_ranks import collective, copied, inputs, output, run

import neuroncore as nc
from neuroncore import collectives as ncc
from neuroncore import isa as nisa
from neuroncore import language as nl


@pytest.mark.parametrize("lnc", [1, 2])
def test_permutes_by_pairs_leave_the_others_alone(lnc):
    xs = inputs(4, (4, 6))
    pairs = [(0, 2), (2, 3), (3, 0)]

    def body(srcs, dsts):
        ncc.collective_permute(srcs, dsts, pairs)
        if ncc.rank_id().value == 1:
            if lnc == 2:
                nisa.core_barrier(srcs[0], (0, 1))
            if nl.program_id(0) == 0:
                nisa.dma_copy(dsts[0], srcs[0])

    done = run(collective(body, [(4, 6)])[lnc], xs).outputs
    for target, source in ((2, 0), (3, 2), (0, 3), (1, 1)):
        np.testing.assert_array_equal(done[target][0], xs[source][0])


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("memory", [nl.sbuf, nl.shared_hbm])
def test_a_ring_brings_every_rank_to_every_other(lnc, memory):
    """The published all-gather by permutes: two channels, two buffers, ranks by register."""
    ranks, order = 4, (2, 0, 3, 1)
    xs = [values(r, (2, 8, 6)) for r in range(ranks)]

    @nc.jit
    def kernel(x):
        group = ncc.ReplicaGroup([order])
        out = nl.ndarray((ranks, 2, 8, 6), x.dtype, buffer=nl.shared_hbm)
        buffers = [
            [[nl.ndarray((8, 6), x.dtype, buffer=memory)] for _ in range(2)] for _ in range(2)
        ]
        mine = memory is nl.sbuf or nl.program_id(0) == 0
        for channel in range(2):
            if mine:
                nisa.dma_copy(buffers[0][channel][0], x[channel])
        for step in range(ranks):
            now, following = buffers[step % 2], buffers[1 - step % 2]
            for channel in range(2):
                rank = ncc.collective_permute_implicit_current_processing_rank_id(
                    step, group, channel
                )
                if nl.program_id(0) == 0:
                    place = out.ap([[6, 8], [1, 6]], channel * 48, scalar_offset=rank)
                    nisa.dma_copy(place, now[channel][0])
            if step < ranks - 1:
                ncc.collective_permute_implicit(now, following, group, (0, 1))
        return out

    done = nc.simulate(kernel[lnc], nc.PerRank(xs), target="trn2", ranks=ranks).outputs
    for rank in range(ranks):
        np.testing.assert_array_equal(done[rank], np.stack(xs))


def test_a_ring_that_reduces():
    group = ncc.ReplicaGroup([[0, 1, 2]])
    xs = inputs(3, (4, 6), (4, 6))

    def kernel(xs):
        a, b = (copied(x) for x in xs)
        dst = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
        ncc.collective_permute_implicit_reduce([[a]], [[b]], [[dst]], group, nl.maximum)
        return output(dst)

    done = run(kernel, xs).outputs
    for rank in range(3):
        np.testing.assert_array_equal(done[rank], np.maximum(*xs[rank - 1]))


def metadata(lnc_kernel, rows, src, dst_size, in_sbuf, target, **options):
    """Outputs (dst, metadata) of a variable collective, per rank."""
    call = ncc.all_gather_v if lnc_kernel == "gather" else ncc.all_to_all_v
    ranks = len(src)
    columns = 1 if lnc_kernel == "gather" else ranks

    @nc.jit
    def kernel(x, table):
        shape = (1, *table.shape) if in_sbuf else table.shape
        meta = nl.ndarray(shape, nl.uint32, buffer=nl.sbuf if in_sbuf else nl.private_hbm)
        used = meta[0:1, 0:2, :columns] if in_sbuf else meta[0:2, :columns]
        nisa.dma_copy(used, table[0:2, :columns])
        if options.get("has_rdispls"):
            nisa.dma_copy(meta[0:1, 3:4, :] if in_sbuf else meta[3:4], table[3:4])
        send, dst = copied(x), nl.ndarray((dst_size,), x.dtype, buffer=nl.shared_hbm)
        if nl.program_id(0) == 0:
            nisa.dma_copy(dst.reshape((1, dst_size)), full(-1, 1, dst_size))
        call([send], [dst], ncc.ReplicaGroup([list(range(ranks))]), meta, **options)
        row = meta[0:1, 2, :] if in_sbuf else meta[2:3]
        counts = nl.ndarray(row.shape, nl.uint32, buffer=nl.shared_hbm)
        if nl.program_id(0) == 0:
            known = options.get("recv_counts_known")
            nisa.dma_copy(counts, zeros(*row.shape, dtype="uint32") if known else row)
        return dst, counts

    given = [nc.PerRank(src), nc.PerRank(rows)]
    return nc.simulate(kernel[2], *given, target=target, ranks=ranks).outputs


@pytest.mark.parametrize("in_sbuf", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_all_gather_v(in_sbuf, known):
    src = [values(r, (12,)) for r in range(4)]
    sizes, places = [3, 0, 5, 1], [2, 4, 7, 0]
    rows = [np.zeros((3, 4), np.uint32) for _ in range(4)]
    for r in range(4):
        rows[r][:2, 0] = sizes[r], places[r]
    done = metadata("gather", rows, src, 24, in_sbuf, "trn2", recv_counts_known=known)
    for dst, counts in done:
        assert counts[0].tolist() == ([0] * 4 if known else sizes)
        for s in range(4):
            slot = dst[6 * s : 6 * s + 6]
            np.testing.assert_array_equal(slot[: sizes[s]], src[s][places[s] :][: sizes[s]])
            assert (slot[sizes[s] :] == -1).all()


@pytest.mark.parametrize("placed", [False, True])
def test_all_to_all_v(placed):
    ranks, rng = 8, np.random.default_rng(0)
    src = [values(r, (40,)) for r in range(ranks)]
    rows = [np.zeros((4 if placed else 3, ranks), np.uint32) for _ in range(ranks)]
    for table in rows:
        table[0] = rng.integers(0, 5, ranks)
        table[1] = np.concatenate([[0], np.cumsum(table[0])[:-1]])
    sizes = np.array([table[0] for table in rows])
    if placed:
        for me, table in enumerate(rows):
            table[3] = 3 + np.concatenate([[0], np.cumsum(sizes[:, me])[:-1]])
    done = metadata("all", rows, src, 5 * ranks, True, "trn3", has_rdispls=placed)
    for me, (dst, counts) in enumerate(done):
        expected = np.full(5 * ranks, -1.0, np.float32)
        for s in range(ranks):
            place, size = int(rows[s][1, me]), int(sizes[s, me])
            at = int(rows[me][3, s]) if placed else 5 * s
            expected[at : at + size] = src[s][place : place + size]
        np.testing.assert_array_equal(dst, expected)
        assert counts[0].tolist() == sizes[:, me].tolist()


def test_variable_chunks_stay_in_their_buffers():
    src = [values(r, (12,)) for r in range(4)]
    for size, place, text in ((7, 0, "room for 6"), (3, 10, "its src has 12")):
        rows = [np.zeros((3, 4), np.uint32) for _ in range(4)]
        rows[2][:2, 0] = size, place
        with refused(f"rank 2 sends {size} elements from {place} on.*{text}"):
            metadata("gather", rows, src, 24, False, "trn2")
