"""Shared by the tests of collectives: kernels that issue one, and their launches."""

from samples import values

import neuroncore as nc
from neuroncore import collectives as ncc
from neuroncore import isa as nisa
from neuroncore import language as nl

TWO = ncc.ReplicaGroup([[0, 1]])


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
