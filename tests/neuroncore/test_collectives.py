"""Ranks in one process: what collectives give to whom, in HBM and SBUF, on one core and on two."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from neuroncore.harness import as_stored, bf16, refused, seeds, values, wide

from neuronmm_ops import neuroncore as nc
from neuronmm_ops.neuroncore import collectives as ncc
from neuronmm_ops.neuroncore import isa as nisa
from neuronmm_ops.neuroncore import language as nl


def copied(x: nl.NkiTensor, memory: nl.MemoryRegion = nl.shared_hbm) -> nl.NkiTensor:
    """In HBM by its first half on core 0 and its second on core 1; in SBUF whole."""
    tile = nl.ndarray(x.shape, x.dtype, buffer=memory)
    cores = nl.num_programs()
    if memory is nl.sbuf or cores == 1:
        nisa.dma_copy(tile, x)
        return tile
    half = x.shape[0] // 2
    rows = slice(0, half) if nl.program_id(0) == 0 else slice(half, x.shape[0])
    nisa.dma_copy(tile[rows], x[rows])
    return tile


def output(t: nl.NkiTensor) -> nl.NkiTensor:
    out = nl.ndarray(t.shape, t.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.dma_copy(out, t)
    return out


def collective(call, shapes, memory=nl.shared_hbm):
    """A kernel that issues call(srcs, dsts) with fresh dsts of the given shapes."""

    @nc.jit
    def kernel(xs):
        srcs = [copied(x, memory) for x in xs]
        dsts = [
            nl.ndarray(s, x.dtype, buffer=memory, name=f"dst{i}")
            for i, (s, x) in enumerate(zip(shapes, xs, strict=True))
        ]
        call(srcs, dsts)
        return tuple([output(d) for d in dsts])

    return kernel


def run(kernel, per_rank, target="trn2", **options):
    """Outputs [rank][tensor] for inputs [rank][tensor]."""
    given = nc.PerRank([tuple(arrays) for arrays in per_rank])
    return nc.simulate(kernel, given, target=target, ranks=len(per_rank), **options)


def inputs(ranks, *shapes, dtype="float32", seed=0):
    return [
        [values(seed + 10 * r + i, shape, dtype) for i, shape in enumerate(shapes)]
        for r in range(ranks)
    ]


def lists(ranks: int, size: int) -> list[tuple[int, ...]]:
    return [tuple(range(i, i + size)) for i in range(0, ranks, size)]


G = ncc.ReplicaGroup([[0, 1]])
REDUCE = {"add": np.add, "maximum": np.maximum, "minimum": np.minimum}
cases = {
    "size": st.sampled_from([1, 2, 4]),
    "count": st.sampled_from([1, 2]),
    "lnc": st.sampled_from([1, 2]),
    "dtype": st.sampled_from(["float32", "bfloat16", "int32"]),
    "coalesced": st.booleans(),
    "seed": seeds,
}


@settings(max_examples=20, deadline=None)
@given(
    op=st.sampled_from(sorted(REDUCE)),
    memory=st.sampled_from([nl.sbuf, nl.shared_hbm]),
    target=st.sampled_from(["trn1", "trn2", "trn3"]),
    **cases,
)
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


@settings(max_examples=20, deadline=None)
@given(dim=st.sampled_from([0, 1]), **cases)
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


@settings(max_examples=20, deadline=None)
@given(op=st.sampled_from(sorted(REDUCE)), **cases)
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
        ncc.all_reduce([total], [total], G, nl.add)
        return output(total)

    for y in run(in_place[lnc], xs).outputs:
        np.testing.assert_array_equal(y, xs[0][0] + xs[1][0])


def test_sums_round_once():
    xs = [[np.full((2, 2), v, bf16)] for v in (256, 1, 1, 1)]  # each partial sum rounds to 256
    group = ncc.ReplicaGroup([[0, 1, 2, 3]])
    kernel = collective(lambda s, d: ncc.all_reduce(s, d, group, nl.add), [(2, 2)])
    assert (run(kernel, xs).outputs[0][0] == bf16(260)).all()


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

    @nc.jit
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
        n = table.shape[1]
        shape = (1, *table.shape) if in_sbuf else table.shape
        meta = nl.ndarray(shape, nl.uint32, buffer=nl.sbuf if in_sbuf else nl.private_hbm)
        used = meta[0:1, 0:2, :columns] if in_sbuf else meta[0:2, :columns]
        nisa.dma_copy(used, table[0:2, :columns])
        if options.get("has_rdispls"):
            nisa.dma_copy(meta[0:1, 3:4, :] if in_sbuf else meta[3:4], table[3:4])
        send, dst = copied(x), nl.ndarray((dst_size,), x.dtype, buffer=nl.shared_hbm)
        if nl.program_id(0) == 0:
            fill = nl.ndarray((1, dst_size), x.dtype)
            nisa.memset(fill, -1)
            nisa.dma_copy(dst.reshape((1, dst_size)), fill)
        call([send], [dst], ncc.ReplicaGroup([list(range(ranks))]), meta, **options)
        row = meta[0:1, 2, :] if in_sbuf else meta[2:3]
        counts = nl.ndarray((1, n), nl.uint32, buffer=nl.shared_hbm)
        if nl.program_id(0) == 0 and not options.get("recv_counts_known"):
            nisa.dma_copy(counts, row)
        elif nl.program_id(0) == 0:
            zeros = nl.ndarray((1, n), nl.uint32)
            nisa.memset(zeros, 0)
            nisa.dma_copy(counts, zeros)
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
    src, rows = [values(r, (12,)) for r in range(4)], [np.zeros((3, 4), np.uint32)] * 4
    for size, place, text in ((7, 0, "room for 6"), (3, 10, "its src has 12")):
        rows = [np.zeros((3, 4), np.uint32) for _ in range(4)]
        rows[2][:2, 0] = size, place
        with refused(f"rank 2 sends {size} elements from {place} on.*{text}"):
            metadata("gather", rows, src, 24, False, "trn2")


def test_ranks_have_their_own_memory_and_numbers():
    shared = np.zeros((4, 3), np.float32)
    own = [np.full((4, 3), float(r), np.float32) for r in range(3)]

    @nc.jit
    def kernel(common, mine, scale):
        nisa.dma_copy(common, mine)
        out = nl.ndarray((4, 3), nl.float32, buffer=nl.shared_hbm)
        tile, rank = nl.ndarray((4, 3), nl.float32), nl.ndarray((1, 1), nl.int32)
        nisa.register_store(rank, ncc.rank_id())
        nisa.dma_copy(tile, common)
        nisa.tensor_scalar(tile, tile, nl.multiply, scale)
        nisa.dma_copy(out, tile)
        nisa.dma_copy(mine, tile)
        found = nl.ndarray((1, 1), nl.int32, buffer=nl.shared_hbm)
        nisa.dma_copy(found, rank)
        return out, found

    done = nc.simulate(
        kernel, shared, nc.PerRank(own), nc.PerRank((2.0, 3.0, 5.0)), target="trn2", ranks=3
    )
    for r, (out, found) in enumerate(done.outputs):
        assert found == r
        np.testing.assert_array_equal(out, np.full((4, 3), r * (2.0, 3.0, 5.0)[r]))
        np.testing.assert_array_equal(own[r], out)  # a rank's own argument is written in place
    assert (shared == 0).all()  # what all were given is copied for each
    tensors = nc.simulate(
        kernel, torch.zeros(4, 3), nc.PerRank([torch.ones(4, 3)]), 2.0, target="trn2", ranks=1
    )
    assert torch.equal(tensors.outputs[0][0], torch.full((4, 3), 2.0))


def test_two_cores_of_a_rank_exchange_with_each_other_only():
    @nc.jit
    def kernel(x):
        me = nl.program_id(0)
        mine, other = nl.ndarray((4, 6), x.dtype), nl.ndarray((4, 6), x.dtype)
        nisa.dma_copy(mine, x[4 * me : 4 * me + 4])
        for _ in range(1 + 2 * ncc.rank_id().value):  # ranks issue as many as they like
            nisa.sendrecv(mine, other, 1 - me, 1 - me, pipe_id=0)
            nisa.tensor_copy(mine, other)
        total = nl.ndarray((4, 6), x.dtype)
        ncc.all_reduce([mine], [total], G, nl.add)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out[4 * me : 4 * me + 4], total)
        return out

    xs = [values(r, (8, 6)) for r in range(2)]
    done = nc.simulate(kernel[2], nc.PerRank(xs), target="trn2", ranks=2).outputs
    swapped = xs[0] + xs[1]
    for y in done:
        np.testing.assert_array_equal(y, np.concatenate([swapped[4:], swapped[:4]]))


def test_tensor_parallel_matmul_is_the_matmul():
    """Megatron's pair: w cut by rows, partial products summed over the ranks."""
    rng = np.random.default_rng(0)
    xt, w = (rng.integers(-4, 4, s).astype(np.float32) for s in ((256, 32), (256, 48)))
    group = ncc.ReplicaGroup([[0, 1]])

    @nc.jit
    def kernel(xt, w):
        a, b = nl.ndarray(xt.shape, xt.dtype), nl.ndarray(w.shape, w.dtype)
        nisa.dma_copy(a, xt)
        nisa.dma_copy(b, w)
        acc = nl.ndarray((32, 48), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(acc, a, b)
        part, total = (nl.ndarray((32, 48), nl.float32) for _ in range(2))
        nisa.tensor_copy(part, acc)
        ncc.all_reduce([part], [total], group, nl.add)
        return output(total)

    halves = nc.PerRank([xt[:128], xt[128:]]), nc.PerRank([w[:128], w[128:]])
    done = nc.simulate(kernel, *halves, target="trn2", ranks=2)
    for y in done.outputs:
        np.testing.assert_array_equal(y, xt.T @ w)


def test_a_schedule_orders_collectives_too():
    def call(srcs, dsts):
        tile = nl.ndarray((4, 6), nl.float32)
        ncc.all_reduce(srcs, dsts, G, nl.add, name="sum")
        nisa.memset(tile, 0, name="after")

    kernel = collective(call, [(4, 6)])
    for scheduled in (kernel, kernel.with_schedule([("after", "sum")])):
        for core in run(scheduled, inputs(2, (4, 6))).profile.schedule.cores:
            (late,), (done,) = core.trace.names["after"], core.trace.names["sum"]
            assert (core.start[late] >= core.end[done]) == bool(scheduled.schedule)


def test_trace_mode_takes_as_long():
    group = ncc.ReplicaGroup([[0, 1], [2, 3]])
    kernel = collective(lambda s, d: ncc.all_gather(s, d, group, 0), [(8, 64)])
    ran = run(kernel[2], inputs(4, (4, 64)))
    spec = nc.TensorSpec((4, 64), nl.float32)
    traced = nc.simulate(kernel[2], (spec,), target="trn2", ranks=4, mode="trace")
    assert traced.outputs == ((nc.TensorSpec((8, 64), nl.float32),),) * 4
    assert traced.profile.time_ms == ran.profile.time_ms


def test_the_later_rank_holds_its_own_list_only():
    group = ncc.ReplicaGroup([[0, 1], [2, 3]])

    def call(srcs, dsts):
        if ncc.rank_id().value == 1:
            tile = nl.ndarray((4, 6), nl.float32)
            nisa.memset(tile, 0)
            for _ in range(400):
                nisa.tensor_scalar(tile, tile, nl.add, 1.0)
            nisa.dma_copy(srcs[0], tile)
        ncc.all_reduce(srcs, dsts, group, nl.add)

    profile = run(collective(call, [(4, 6)]), inputs(4, (4, 6))).profile
    ends = []
    for core in profile.schedule.cores:
        (i,) = core.trace.barriers
        ends.append(core.end[i])
        assert core.end[i] - core.start[i] >= 1500
    assert ends[0] == ends[1] > 2 * ends[2]
    assert ends[2] == ends[3]
    assert profile.lnc == 4
    path = profile.critical_path
    assert sum(line.time_ms for line in path) == pytest.approx(profile.time_ms)
    assert {line.core for line in path} <= {0, 1}
    assert "all_reduce" in {line.opcode for line in path}


def launch(body, ranks=None, target="trn2"):
    return nc.simulate(nc.jit(lambda: body()), target=target, ranks=ranks)()


def issue(name, *given, shapes=((4, 6), (4, 6)), memories=(nl.shared_hbm,) * 2, dtype=nl.float32,
          times=1, **options):  # fmt: skip
    """A body that issues one collective on fresh tensors of these shapes and memories."""

    def body():
        src, dst = (
            nl.ndarray(s, d, buffer=m)
            for s, m, d in zip(shapes, memories, (nl.float32, dtype), strict=True)
        )
        if src.buffer is not nl.psum:
            zeros = src if src.buffer is nl.sbuf else nl.ndarray(src.shape, src.dtype)
            nisa.memset(zeros, 0)
            if src is not zeros:
                nisa.dma_copy(src, zeros)
        getattr(ncc, name)([src] * times, [dst] * times, *given, **options)

    return body


sb = (nl.sbuf, nl.sbuf)


def bare(name, *given, **options):
    """A body that passes tensors where lists belong, or nonsense."""

    def body():
        t = nl.ndarray((4, 6), nl.float32, buffer=nl.shared_hbm)

        def real(g):
            return t if g is t_ else [real(each) for each in g] if isinstance(g, list) else g

        getattr(ncc, name)(*[real(g) for g in given], **options)

    return body


t_ = object()
REFUSED = [
    (bare("all_reduce", t_, t_, G, nl.add), "srcs must be a list of tensors"),
    (bare("all_reduce", [1.0], [2.0], G, nl.add), "srcs must be tensors; got 1.0"),
    (bare("all_reduce", [t_], [t_], ncc.ReplicaGroup(3), nl.add), "made of lists of ranks"),
    (bare("all_reduce", [t_], [t_], ncc.ReplicaGroup([0, 1]), nl.add), "made of lists of ranks"),
    (bare("collective_permute", [t_], [t_], 3), "must be pairs of ranks; got 3"),
    (bare("collective_permute_implicit", [t_], [t_], G), "one tensor for each of 1 channels"),
    (bare("collective_permute_implicit", [[t_]], [[t_]], G, 0), "must be consecutive from 0"),
    (bare("all_gather_v", [t_], [t_], G, None), "metadata_tensor must be a tensor; got None"),
    (issue("all_reduce", [[0, 1]], nl.add), "replica_group must be a ReplicaGroup"),
    (issue("all_reduce", ncc.ReplicaGroup([[0, 1], [1]]), nl.add), "must not overlap"),
    (issue("all_reduce", ncc.ReplicaGroup([[0, 2]]), nl.add), "rank 2 does not exist"),
    (issue("all_reduce", ncc.ReplicaGroup([[0, "1"]]), nl.add), "rank '1' does not exist"),
    (issue("all_reduce", ncc.ReplicaGroup([[0]]), nl.add), "rank 1 is in no list"),
    (issue("all_reduce", G, nl.multiply), "op must be nl.add, nl.minimum or nl.maximum"),
    (issue("all_reduce", G, nl.add, priority=0), "priority needs NeuronCore-v4"),
    (issue("all_reduce", G, nl.add, shapes=((4, 6), (6, 4))), "give them matching shapes"),
    (issue("all_reduce", G, nl.add, dtype=nl.bfloat16), "must have one dtype"),
    (issue("all_reduce", G, nl.add, memories=(nl.sbuf, nl.shared_hbm)), "or all in SBUF"),
    (issue("all_reduce", G, nl.add, memories=(nl.psum, nl.psum)), "srcs must be in private_hbm"),
    (issue("all_reduce", G, nl.add, memories=sb, times=2), "coalescing needs HBM"),
    (issue("all_reduce", G, nl.add, times=0), "takes as many dsts as srcs"),
    (issue("all_gather", G, 1, shapes=((4, 6), (4, 12))), "collective_dim must be 0"),
    (issue("all_gather", G, 2, shapes=((4, 6), (4, 12)), memories=sb), "must be 0 or 1"),
    (issue("all_gather", G, 0), "(4, 6) of 2 ranks makes [8, 6]".replace("(4, 6)", "")),
    (
        issue("all_gather", G, 1, shapes=((4, 2, 3), (4, 4, 3)), memories=sb),
        "tiles in SBUF must have two dimensions",
    ),
    (issue("reduce_scatter", G, 1, nl.add), "collective_dim must be 0"),
    (issue("all_to_all", G, 0, memories=sb), "srcs must be in private_hbm or shared_hbm"),
    (issue("all_to_all", G, 0, shapes=((3, 6), (3, 6))), "must divide into 2 parts"),
    (issue("collective_permute", [(0, 1)]), "pairs must form rings"),
    (issue("collective_permute", [(0, 1), (1, 0), (0, 1)]), "pairs must form rings"),
    (issue("collective_permute", [(0, 1, 1)]), "must be pairs of ranks"),
    (issue("collective_permute", [(0, 1), (1, 0)], times=2), "takes one tensor on each side"),
    (issue("collective_permute", [(0, 1), (1, 0)], shapes=((4, 6), (24,))), "have one shape"),
    (
        lambda: ncc.collective_permute_implicit([], [], G, [1]),
        "channel_ids must be consecutive from 0, 2 at most",
    ),
    (lambda: ncc.collective_permute_implicit([[]], [[]], G), "one tensor for each of 1 channels"),
    (
        lambda: ncc.collective_permute_implicit_current_processing_rank_id(-1, G),
        "iteration_id must be 0 or more",
    ),
    (
        lambda: issue("all_gather_v", G, nl.ndarray((3, 2), nl.uint32, buffer=nl.shared_hbm))(),
        "needs kernel[2] and lists of 4 ranks",
    ),
    (
        lambda: issue("all_gather_v", G, nl.ndarray((2, 2), nl.uint32, buffer=nl.shared_hbm))(),
        "must be contiguous [3, 2]",
    ),
    (
        lambda: issue("all_to_all_v", G, nl.ndarray((3, 2), nl.uint32, buffer=nl.shared_hbm))(),
        "all_to_all_v: it, within an instance, needs NeuronCore-v4",
    ),
]


@pytest.mark.parametrize(("body", "text"), REFUSED)
def test_collectives_refuse(body, text):
    with refused(text):
        launch(body, 2)


def test_one_rank_without_ranks():
    with refused("the launch has 1; simulate(kernel, ..., ranks=) sets how many"):
        launch(issue("all_reduce", G, nl.add))
    alone = ncc.ReplicaGroup([[0]])
    x = values(0, (4, 6))
    for call in (
        lambda s, d: ncc.all_reduce(s, d, alone, nl.add),
        lambda s, d: ncc.all_gather(s, d, alone, 0),
        lambda s, d: ncc.all_to_all(s, d, alone, 0),
    ):
        kernel = collective(call, [(4, 6)])
        np.testing.assert_array_equal(nc.simulate(kernel, (x,), target="trn2").outputs[0], x)


def test_ranks_must_take_the_same_branches():
    def absent():
        if ncc.rank_id().value == 0:
            issue("all_reduce", G, nl.add)()

    def other():
        issue("all_reduce", G, nl.add if ncc.rank_id().value else nl.maximum)()

    def crossed():
        rank = ncc.rank_id().value
        first = [[0, 1], [2]] if rank != 2 else [[1, 2], [0]]
        issue("all_reduce", ncc.ReplicaGroup(first if rank else [[0, 2], [1]]), nl.add)()

    with refused("core 0 waits but core 1 has ended"):
        launch(absent, 2)
    with refused("all cores must issue the same exchanges in one order"):
        launch(other, 2)
    with refused("waits elsewhere"):
        launch(crossed, 3)


@pytest.mark.parametrize(
    ("options", "given", "text"),
    [
        ({"ranks": 0}, (), "ranks must be a positive number"),
        ({"ranks": 2.0}, (), "ranks must be a positive number"),
        ({"follow": "nobody"}, (), "follow must be one of documentation, kernels"),
        ({"ranks": 3}, (nc.PerRank([1, 2]),), "argument x is a PerRank of 2 values; there are 3"),
        ({}, (nc.PerRank([1, 2]),), "argument x is a PerRank of 2 values; set ranks="),
    ],
)
def test_bad_arguments(options, given, text):
    with pytest.raises(ValueError, match=text):
        nc.simulate(nc.jit(lambda x=0: None), *given, target="trn2", **options)()


def test_no_more_ranks_than_links_connect():
    group = ncc.ReplicaGroup([list(range(33))])
    with refused("trn1 connects 32 ranks by NeuronLink, rank 32 is beyond"):
        launch(issue("all_reduce", group, nl.add, memories=sb), 33, "trn1")


def test_published_kernels_import_it():
    with nc.as_nki():
        import nki.collectives
        from nki.collectives import ReplicaGroup

        assert nki.collectives.all_gather is ncc.all_gather
        assert ReplicaGroup([[0]]).groups == [[0]]
