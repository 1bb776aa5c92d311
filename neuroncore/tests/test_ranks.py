"""Ranks of a launch: their memories, their schedule, and what collectives refuse."""

import numpy as np
import pytest
import torch
from instruction_runs import loaded, new, refused, stored, zeros
from samples import values
from simulated_ranks import TWO, collective, inputs, output, run

import neuroncore as nc
from neuroncore import collectives as ncc
from neuroncore import isa as nisa
from neuroncore import language as nl


def test_ranks_have_their_own_memory_and_numbers():
    shared = np.zeros((4, 3), np.float32)
    own = [np.full((4, 3), float(r), np.float32) for r in range(3)]

    def kernel(common, mine, scale):
        nisa.dma_copy(common, mine)
        tile, rank = loaded(common), new(1, 1, dtype="int32")
        nisa.register_store(rank, ncc.rank_id())
        nisa.tensor_scalar(tile, tile, nl.multiply, scale)
        nisa.dma_copy(mine, tile)
        return stored(tile), stored(rank)

    given = shared, nc.PerRank(own), nc.PerRank((2.0, 3.0, 5.0))
    done = nc.simulate(kernel, *given, target="trn2", ranks=3)
    for r, (out, found) in enumerate(done.outputs):
        assert found == r
        np.testing.assert_array_equal(out, np.full((4, 3), r * (2.0, 3.0, 5.0)[r]))
        np.testing.assert_array_equal(own[r], out)  # a rank's own argument is written in place
    assert (shared == 0).all()  # what all were given is copied for each
    given = torch.zeros(4, 3), nc.PerRank([torch.ones(4, 3)]), 2.0
    tensors = nc.simulate(kernel, *given, target="trn2", ranks=1)
    assert torch.equal(tensors.outputs[0][0], torch.full((4, 3), 2.0))


def test_two_cores_of_a_rank_exchange_with_each_other_only():
    @nc.jit
    def kernel(x):
        me = nl.program_id(0)
        mine, other, total = loaded(x[4 * me : 4 * me + 4]), new(4, 6), new(4, 6)
        for _ in range(1 + 2 * ncc.rank_id().value):  # ranks issue as many as they like
            nisa.sendrecv(mine, other, 1 - me, 1 - me, pipe_id=0)
            nisa.tensor_copy(mine, other)
        ncc.all_reduce([mine], [total], TWO, nl.add)
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

    def kernel(xt, w):
        acc, part, total = new(32, 48, buffer=nl.psum), new(32, 48), new(32, 48)
        nisa.nc_matmul(acc, loaded(xt), loaded(w))
        nisa.tensor_copy(part, acc)
        ncc.all_reduce([part], [total], TWO, nl.add)
        return output(total)

    halves = nc.PerRank([xt[:128], xt[128:]]), nc.PerRank([w[:128], w[128:]])
    done = nc.simulate(kernel, *halves, target="trn2", ranks=2)
    for y in done.outputs:
        np.testing.assert_array_equal(y, xt.T @ w)


def test_a_schedule_orders_collectives_too():
    def call(srcs, dsts):
        tile = nl.ndarray((4, 6), nl.float32)
        ncc.all_reduce(srcs, dsts, TWO, nl.add, name="sum")
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


@pytest.mark.parametrize("lnc", [1, 2])
def test_one_rank_is_traced_of_many_that_are_alike(lnc):
    group = ncc.ReplicaGroup([range(16)])
    kernel = collective(lambda s, d: ncc.all_reduce(s, d, group, nl.add), [(8, 64)])
    spec = nc.TensorSpec((8, 64), nl.float32)
    options = {"target": "trn2", "ranks": 16, "mode": "trace"}
    every, one = [
        nc.simulate(nc.Kernel(kernel.func, lnc), (spec,), **options, alike_ranks=alike)
        for alike in (False, True)
    ]
    assert one.outputs == every.outputs[:1]
    assert one.profile.time_ms == every.profile.time_ms
    assert len(one.profile.schedule.cores) == lnc


@pytest.mark.parametrize("options", [{"ranks": 2}, {"mode": "trace"}])
def test_alike_ranks_are_traced_ones(options):
    with pytest.raises(ValueError, match='alike_ranks needs mode="trace" and ranks; got'):
        nc.simulate(lambda x: x, nc.TensorSpec((8, 8), nl.float32), alike_ranks=True, **options)


def test_the_later_rank_holds_its_own_list_only():
    group = ncc.ReplicaGroup([[0, 1], [2, 3]])

    def call(srcs, dsts):
        if ncc.rank_id().value == 1:
            tile = zeros(4, 6)
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
            new(*s, dtype=d, buffer=m)
            for s, m, d in zip(shapes, memories, (nl.float32, dtype), strict=True)
        )
        if src.buffer is nl.sbuf:
            nisa.memset(src, 0)
        elif src.buffer is not nl.psum:
            nisa.dma_copy(src, zeros(*src.shape))
        getattr(ncc, name)([src] * times, [dst] * times, *given, **options)

    return body


def issue_v(name, *shape):
    """The same with metadata of a shape."""
    return lambda: issue(name, TWO, new(*shape, dtype="uint32", buffer=nl.shared_hbm))()


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
    (bare("all_reduce", t_, t_, TWO, nl.add), "srcs must be a list of tensors"),
    (bare("all_reduce", [1.0], [2.0], TWO, nl.add), "srcs must be tensors; got 1.0"),
    (bare("all_reduce", [t_], [t_], ncc.ReplicaGroup(3), nl.add), "made of lists of ranks"),
    (bare("all_reduce", [t_], [t_], ncc.ReplicaGroup([0, 1]), nl.add), "made of lists of ranks"),
    (bare("collective_permute", [t_], [t_], 3), "must be pairs of ranks; got 3"),
    (bare("collective_permute_implicit", [t_], [t_], TWO), "one tensor for each of 1 channels"),
    (bare("collective_permute_implicit", [[t_]], [[t_]], TWO, 0), "must be consecutive from 0"),
    (bare("all_gather_v", [t_], [t_], TWO, None), "metadata_tensor must be a tensor; got None"),
    (issue("all_reduce", [[0, 1]], nl.add), "replica_group must be a ReplicaGroup"),
    (issue("all_reduce", ncc.ReplicaGroup([[0, 1], [1]]), nl.add), "must not overlap"),
    (issue("all_reduce", ncc.ReplicaGroup([[0, 2]]), nl.add), "rank 2 does not exist"),
    (issue("all_reduce", ncc.ReplicaGroup([[0, "1"]]), nl.add), "rank '1' does not exist"),
    (issue("all_reduce", ncc.ReplicaGroup([[0]]), nl.add), "rank 1 is in no list"),
    (issue("all_reduce", TWO, nl.multiply), "op must be nl.add, nl.minimum or nl.maximum"),
    (issue("all_reduce", TWO, nl.add, priority=0), "priority needs NeuronCore-v4"),
    (issue("all_reduce", TWO, nl.add, shapes=((4, 6), (6, 4))), "give them matching shapes"),
    (issue("all_reduce", TWO, nl.add, dtype=nl.bfloat16), "must have one dtype"),
    (issue("all_reduce", TWO, nl.add, memories=(nl.sbuf, nl.shared_hbm)), "or all in SBUF"),
    (issue("all_reduce", TWO, nl.add, memories=(nl.psum, nl.psum)), "srcs must be in private_hbm"),
    (issue("all_reduce", TWO, nl.add, memories=sb, times=2), "coalescing needs HBM"),
    (issue("all_reduce", TWO, nl.add, times=0), "takes as many dsts as srcs"),
    (issue("all_gather", TWO, 1, shapes=((4, 6), (4, 12))), "collective_dim must be 0"),
    (issue("all_gather", TWO, 2, shapes=((4, 6), (4, 12)), memories=sb), "must be 0 or 1"),
    (issue("all_gather", TWO, 0), "(4, 6) of 2 ranks makes [8, 6]".replace("(4, 6)", "")),
    (issue("all_gather", TWO, 1, shapes=((4, 2, 3), (4, 4, 3)), memories=sb), "two dimensions"),
    (issue("reduce_scatter", TWO, 1, nl.add), "collective_dim must be 0"),
    (issue("all_to_all", TWO, 0, memories=sb), "srcs must be in private_hbm or shared_hbm"),
    (issue("all_to_all", TWO, 0, shapes=((3, 6), (3, 6))), "must divide into 2 parts"),
    (issue("collective_permute", [(0, 1)]), "pairs must form rings"),
    (issue("collective_permute", [(0, 1), (1, 0), (0, 1)]), "pairs must form rings"),
    (issue("collective_permute", [(0, 1, 1)]), "must be pairs of ranks"),
    (issue("collective_permute", [(0, 1), (1, 0)], times=2), "takes one tensor on each side"),
    (issue("collective_permute", [(0, 1), (1, 0)], shapes=((4, 6), (24,))), "have one shape"),
    (lambda: ncc.collective_permute_implicit([], [], TWO, [1]),
     "channel_ids must be consecutive from 0, 2 at most"),
    (lambda: ncc.collective_permute_implicit([[]], [[]], TWO), "one tensor for each of 1 channels"),
    (lambda: ncc.collective_permute_implicit_current_processing_rank_id(-1, TWO),
     "iteration_id must be 0 or more"),
    (issue_v("all_gather_v", 3, 2), "needs kernel[2] and lists of 4 ranks"),
    (issue_v("all_gather_v", 2, 2), "must be contiguous [3, 2]"),
    (issue_v("all_to_all_v", 3, 2), "all_to_all_v: it, within an instance, needs NeuronCore-v4"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "text"), REFUSED)
def test_collectives_refuse(body, text):
    with refused(text):
        launch(body, 2)


def test_one_rank_without_ranks():
    with refused("the launch has 1; simulate(kernel, ..., ranks=) sets how many"):
        launch(issue("all_reduce", TWO, nl.add))
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
            issue("all_reduce", TWO, nl.add)()

    def other():
        issue("all_reduce", TWO, nl.add if ncc.rank_id().value else nl.maximum)()

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
