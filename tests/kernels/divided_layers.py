"""Operands of a decoder layer as the ranks of tensor parallel have them."""

import torch

import neuroncore as nc

OUTPUT, DOWN = 3, 6
"""Linears that are cut by rows, in the order of the operands."""


def part(tensor, dim, rank, tp):
    """A rank's part of a tensor along a dimension; of None there is none."""
    return None if tensor is None else tensor.chunk(tp, dim)[rank].contiguous()


def cut_matrices(matrices, rank, tp, rows):
    """A layer's matrices; `rows`: of both factors of a pair, else the other one is whole."""
    found = []
    for n, matrix in enumerate(matrices):
        linear, is_v, dense = n // 2, n % 2, matrices[n - n % 2] is None
        by_rows = linear in (OUTPUT, DOWN)
        if by_rows:
            dim = 0 if not is_v or dense or rows else None
        else:
            dim = 1 if is_v else 0 if rows else None
        found.append(matrix if dim is None else part(matrix, dim, rank, tp))
    return tuple(found)


def cut_scales(scales, rank, tp):
    """Scales of columns: those of a v that is cut by columns."""
    return tuple([
        part(scale, 0, rank, tp) if n % 2 and n // 2 not in (OUTPUT, DOWN) else scale
        for n, scale in enumerate(scales)
    ])  # fmt: skip


def divided(operands, tp, rows):
    """The operands of the kernel for one layer, each of them a rank's where ranks differ."""
    *shared, caches, matrices, biases, scales = operands

    def every(cut):
        return nc.PerRank([cut(rank) for rank in range(tp)])

    return [
        *shared,
        every(lambda rank: tuple([part(cache, 1, rank, tp) for cache in caches])),
        every(lambda rank: cut_matrices(matrices, rank, tp, rows)),
        every(lambda rank: tuple([part(bias, 0, rank, tp) for bias in biases])),
        every(lambda rank: cut_scales(scales, rank, tp)),
    ]


def joined(outputs):
    """The outputs of all ranks as those of one: the stream is every rank's, caches are parts."""
    for rank in outputs[1:]:
        assert torch.equal(rank[0], outputs[0][0])
        assert torch.equal(rank[1], outputs[0][1])
    caches = [torch.cat([rank[n] for rank in outputs], 1) for n in (2, 3)]
    return (*outputs[0][:2], *caches)
